"""The run file: what it says is what is run, and what is wrong with it is said in sentences, all at once."""

import dataclasses
import os
import string
import tomllib

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from refusals import refusals

from models import sizes
from trainledger.spec.block import ACTIVATIONS
from trainledger.spec.model import ModelSpec
from trainledger.spec.optimizers import OPTIMIZERS
from trainledger.spec.parts import from_fields, kinds_of
from trainledger.spec.precision import PRECISIONS
from trainledger.spec.problem import InvalidInput
from trainledger.spec.reading import field_of, paths, value_of
from trainledger.spec.recipe import Recipe
from trainledger.spec.rules.model import nearest_divisor
from trainledger.spec.run import DataSpec, Run
from trainledger.spec.run_text import commented, differences, overrides
from trainledger.spec.runfile import (
    SECTIONS,
    digest,
    parse,
    parse_toml,
    read,
    resolved,
    run_name,
    section_of,
    to_toml,
    validated,
    vocabulary_problem,
)
from trainledger.spec.schedule import SCHEDULES
from trainledger.spec.setting import quantity_of, rule_of

MODEL = sizes(V=256, D=64, L=2, H=4, F=256, T=128)
RECIPE = {"seq_len": 128, "global_batch": 8, "steps": 10}


def table(model=None, recipe=None, **sections):
    return {"model": {**MODEL, **(model or {})}, "recipe": {**RECIPE, **(recipe or {})}, **sections}


def refusal(source, overrides=(), **resolvers):
    with pytest.raises(InvalidInput) as caught:
        parse(source, overrides, **resolvers)
    return [str(each) for each in caught.value.problems]


# What is read


def test_a_run_is_what_its_table_says():
    run = parse(table({"norm": "layernorm"}, {"learning_rate": 1}, data={"path": "a/*.txt"}))
    assert run.model == from_fields(ModelSpec, {**MODEL, "norm": "layernorm"})
    assert run.recipe == from_fields(Recipe, {**RECIPE, "learning_rate": 1.0})
    assert isinstance(run.recipe.learning_rate, float)
    assert run.data == DataSpec(path=("a/*.txt",))


def test_quantities_are_read_from_text_and_from_whole_floats():
    run = parse(table({"vocab_size": 1e3}, {"steps": "none", "tokens": "15T", "dropout": "10%", "grad_clip": "none"}))
    assert (run.model.vocab_size, run.recipe.tokens, run.recipe.steps) == (1000, 15 * 10**12, None)
    assert isinstance(run.model.vocab_size, int)
    assert (run.recipe.dropout, run.recipe.grad_clip) == (0.1, None)


def test_a_part_may_be_given_as_the_dataclass_itself():
    assert parse({"model": from_fields(ModelSpec, MODEL), "recipe": from_fields(Recipe, RECIPE)}) == parse(table())


def test_overrides_win_and_an_empty_one_takes_the_field_out():
    changes = ["recipe.micro_batch=2", "recipe.steps=", "recipe.tokens=1M", "model.name=7", 'data.path=["a", "b"]',
               "data.tokenizer=bpe", "recipe.compile=true", "recipe.learning_rate=3e-4"]  # fmt: skip
    run = parse(table(), changes)
    assert (run.recipe.micro_batch, run.recipe.steps, run.recipe.tokens) == (2, None, 10**6)
    assert (run.model.name, run.data.path, run.data.tokenizer) == ("7", ("a", "b"), "bpe")
    assert (run.recipe.compile, run.recipe.learning_rate) == (True, 3e-4)
    assert parse(table(), {"recipe.micro_batch": 2, "recipe.steps": None, "recipe.tokens": 5}).recipe.tokens == 5


@pytest.mark.parametrize("written", ['["a", "b c"]', "[a, b c]", "['a','b c']", "[ a,b c, ]", '[a, "b c"]'])
def test_words_in_a_list_need_no_quotes(written):
    assert parse(table(), [f"data.path={written}"]).data.path == ("a", "b c")


def test_counts_in_a_list_take_their_letters():
    written = parse(table(), ["layout.pipeline=2", "layout.stage_layers=[1, 1e0]", "cluster.count=2"])
    assert written.layout.stage_layers == (1, 1)
    assert refusal(table(), ["layout.stage_layers=[1k, x]"])[0].startswith(
        "layout.stage_layers = ['1k', 'x']: each of them is not a count"
    )


def test_a_preset_stands_for_fields_and_fields_beside_it_win():
    presets = {"small": {**MODEL, "name": "small"}}.__getitem__
    run = parse({"model": {"preset": "small", "n_layers": 7}, "recipe": RECIPE}, presets=presets)
    assert (run.model.name, run.model.n_layers, run.model.d_model) == ("small", 7, 64)


def test_a_hugging_face_config_is_asked_of_its_resolver():
    run = parse(
        {"model": {"config": "config.json"}, "recipe": RECIPE}, from_config=lambda path: {**MODEL, "name": path}
    )
    assert run.model.name == "config.json"


# What is refused


@pytest.mark.parametrize(("fields", "sentence"), refusals("run"))
def test_a_wrong_field_is_one_sentence_with_the_nearest_value_that_works(fields, sentence):
    sections = {"model": {}, "recipe": {}}
    for field in fields:
        path, _, text = field.partition("=")
        section, _, name = path.partition(".")
        sections[section][name] = value_of(None, text)
    assert refusal(table(**sections)) == [sentence]


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("n_layers", 10**5000, "= a number of about 5000 digits: must be at most 100000; nearest that works: 100000"),
        ("norm.eps", 10**400, "= a number of about 400 digits: must be a finite number"),
        ("name", "\udc80", "= '\\udc80': must be Unicode text"),
    ],
    ids=["digits", "infinite", "surrogate"],
)
def test_a_value_that_no_file_can_hold_is_one_sentence(field, value, sentence):
    assert refusal(table({field: value})) == [f"model.{field} {sentence}"]


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ({**table(), "modle": {}}, "modle = a table: unknown section; "
         "a run file has model, recipe, layout, cluster, data, teacher"
         "; nearest that works: model"),
        ({**table(), "seq_len": 5}, "seq_len = 5: unknown section; a run file has model, recipe, layout, cluster, data"
         ", teacher"
         "; nearest that works: recipe.seq_len"),
        ({**table(), "layout": "best"}, "layout = 'best': must be a section: [layout] and its fields below, "
         'or the text "auto"; nearest that works: auto'),
        ({**table(), "data": "fast"}, "data = 'fast': must be a section: [data] and its fields below"),
        ({**table(), 5: 5}, "5 = 5: unknown section; a run file has model, recipe, layout, cluster, data, teacher"),
        (table(layout={"shard": 8}), "cluster.count = 1: the layout (shard 8) takes 8; nearest that works: 8"),
        (table(data={"path": []}), "data.path = []: must be a text or a list of texts"),
        (table(data={"path": ["a", 5]}), "data.path = ['a', 5]: must be a text in quotes"),
        (table(data={"validation_fraction": "60%"}), "data.validation_fraction = '60%': must be at most 0.5"
         "; nearest that works: 0.5"),
        (table(cluster={"count": 10**18}), f"cluster.count = {10**18}: must be at most 10000000"
         "; nearest that works: 10000000"),
        (table(cluster={"price_per_device_hour": 1e299}), "cluster.price_per_device_hour = 1e+299: "
         "must be at most 1000000000; nearest that works: 1000000000"),
        (table(cluster={"backend": "gpu"}), "cluster.backend = 'gpu': must be one of auto, cpu, cuda, mps"
         "; nearest that works: cpu"),
        ({**table(), "a\nb": 1}, "'a\\nb' = 1: unknown section; a run file has model, recipe, layout, cluster, data, "
         "teacher"),
    ],
)  # fmt: skip
def test_a_wrong_section_is_one_sentence(source, sentence):
    assert refusal(source) == [sentence]


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("recipe.seed", "recipe.seed: an override is written section.field=value"),
        ("recipe=3", "recipe = 3: an override names section.field, such as recipe.micro_batch=2"),
        ("micro_batch=2", "micro_batch = 2: an override names section.field, such as recipe.micro_batch=2"
         "; nearest that works: recipe.micro_batch"),
        ("layout=fast", "layout = 'fast': must be \"auto\", or is set field by field, such as layout.tensor=8"
         "; nearest that works: auto"),
        ("recipe.lr=1", "recipe.lr = 1: unknown field of [recipe]; nearest that works: recipe.learning_rate"),
        ("recipe.learningrate=1", "recipe.learningrate = 1: unknown field of [recipe]"
         "; nearest that works: recipe.learning_rate"),
        ("recipe.seed=1.5", "recipe.seed = 1.5: must be a whole number; nearest that works: 2"),
        ("recipe.seed=1\nrecipe.steps=5", "recipe.seed = '1\\nrecipe.steps=5': is not a count"),
        ("recipe.seed=" + "[" * 5000, "recipe.seed = '[[["),
        ("recipe.seed=0x10", "recipe.seed = '0x10': is not a count"),
    ],
)  # fmt: skip
def test_a_wrong_override_is_one_sentence(override, sentence):
    (only,) = refusal(table(), [override])
    assert only.startswith(sentence)


def test_missing_fields_say_what_they_mean():
    assert refusal({"recipe": RECIPE, "model": {**MODEL, "attention.n_heads": "none"}}) == [
        'model.attention.n_heads = \'none\': is not a count; write it like 4096, "1e9" or "15T"'
    ]
    missing = refusal({})
    assert "model.d_model: is missing (hidden size)" in missing
    assert "recipe.seq_len: is missing (tokens in a sequence)" in missing
    assert len(missing) == 9  # six fields of the model, two of the recipe, and neither tokens nor steps


def test_all_problems_of_a_file_come_in_one_go():
    source = table(
        {"attention.n_heads": 7, "norm": 1}, {"global_batch": 7, "micro_batch": 2, "lr": 1}, data={"path": 5}, extra=1
    )
    found = refusal(source, ["recipe.seed=-1"])
    fields = [each.partition(" ")[0] for each in found]
    assert sorted(fields) == [
        "data.path",
        "extra",
        "model.attention.n_heads",
        "model.norm",
        "recipe.global_batch",
        "recipe.lr",
        "recipe.seed",
    ]
    # What fields say against each other is found while others are wrong, but not of those that are wrong themselves.
    assert len(refusal(table({"attention.n_heads": 7}, {"global_batch": 7, "micro_batch": 2, "seed": True}))) == 3
    assert len(refusal(table({"attention.n_heads": 7}, {"global_batch": 7, "micro_batch": -2, "seed": True}))) == 3


def test_an_unknown_preset_brings_its_own_problem_and_no_missing_fields():
    def presets(name):
        from trainledger.spec.problem import Problem

        raise InvalidInput([Problem("model.preset", name, "is not in the catalog", "gpt2")])

    found = refusal({"model": {"preset": "gtp2", "n_layers": -1}, "recipe": RECIPE}, presets=presets)
    assert found == [
        "model.preset = 'gtp2': is not in the catalog; nearest that works: gpt2",
        "model.n_layers = -1: must be at least 1; nearest that works: 1",
    ]


def test_a_problem_in_another_file_names_that_file():
    from trainledger.spec.problem import Problem

    def from_config(path):
        raise InvalidInput([Problem("n_head", 7, "must divide n_embd = 64", 8)], path)

    found = refusal({"model": {"config": "dir/config.json"}, "recipe": RECIPE}, from_config=from_config)
    assert found == ["dir/config.json: n_head = 7: must divide n_embd = 64; nearest that works: 8"]


def test_the_sentence_for_a_vocabulary_that_is_too_small():
    assert vocabulary_problem(256, 256, "bytes") is None
    assert str(vocabulary_problem(100, 257, "the tokenizer bytes")) == (
        "model.vocab_size = 100: is smaller than the 257 tokens of the tokenizer bytes; nearest that works: 257"
    )


@given(st.integers(1, 3000), st.integers(1, 5000))
def test_the_nearest_divisor_is_a_divisor_and_none_is_nearer(whole, wanted):
    found = nearest_divisor(whole, wanted)
    divisors = [each for each in range(1, whole + 1) if whole % each == 0]
    assert found in divisors
    assert abs(found - wanted) == min(abs(each - wanted) for each in divisors)


@given(
    st.integers(1, 200), st.integers(1, 40), st.integers(1, 12), st.sampled_from(["rope", "learned"]),
    st.integers(1, 50), st.integers(1, 50),
)  # fmt: skip
def test_taking_the_nearest_values_mends_a_file(d_model, n_heads, n_kv_heads, positions, global_batch, micro_batch):
    sections = table(
        {"d_model": d_model, "attention.n_heads": n_heads, "attention.n_kv_heads": n_kv_heads, "positions": positions},
        {"global_batch": global_batch, "micro_batch": micro_batch},
    )
    for _ in range(3):
        try:
            parse(sections)
        except InvalidInput as error:
            for problem in error.problems:
                if problem.nearest is None:
                    assert d_model % 2  # no number of heads gives an odd width an even head
                    return
                section, _, field = problem.field.partition(".")
                sections[section][field] = problem.nearest
        else:
            return
    parse(sections)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["model.n_heads=8"], "model.n_heads = 8: unknown field of [model]; nearest that works: "
         "model.attention.n_heads"),
        (["model.rope_theta=5"], "model.rope_theta = 5: unknown field of [model]; nearest that works: "
         "model.positions.theta"),
        (["model.attention_bias=true"], "model.attention_bias = true: unknown field of [model]; nearest that works: "
         "model.attention.bias"),
        (["model.attention.windw=5"], "model.attention.windw = 5: unknown field of [model.attention]; nearest that "
         "works: model.attention.window"),
        (["model.positions=alibi", "model.positions.theta=5"], "model.positions.theta = 5: belongs to rope, and "
         "model.positions is alibi; nearest that works: model.positions = rope"),
        (["model.positions=ropes"], "model.positions = 'ropes': must be one of rope, learned, alibi, none; nearest "
         "that works: rope"),
        (["model.attention=3"], "model.attention = 3: must be a table of fields, or one of multi-head, latent"),
        (["model.feed_forward=experts"], "model.feed_forward.n_experts: is missing (experts of a layer)"),
        (["recipe.precision=fp8"], "recipe.precision = 'fp8': is several things: fp8-tensorwise, fp8-rowwise, "
         "fp8-block, fp8-tensorwise-sharded, fp8-rowwise-sharded, fp8-block-sharded; nearest that works: "
         "fp8-tensorwise"),
    ],
)  # fmt: skip
def test_a_wrong_path_of_a_part_is_one_sentence(overrides, sentence):
    assert refusal(table(), overrides) == [sentence]


def test_another_kind_keeps_what_it_shares():
    wide = table({"feed_forward.d_ff": 96, "feed_forward.bias": True, "feed_forward.activation": "gelu"})
    run = parse(wide, ["model.feed_forward=experts", "model.feed_forward.n_experts=4", "model.norm=layernorm"])
    mlp = run.model.feed_forward
    assert (mlp.kind, mlp.d_ff, mlp.bias, mlp.activation, mlp.n_experts) == ("experts", 96, True, "gelu", 4)
    assert parse(resolved(run), ["model.feed_forward=dense"]).model.feed_forward.d_ff == 96
    assert parse(resolved(run), ["model.feed_forward.router.scores=sigmoid"]).model.experts.router.scores == "sigmoid"


def test_a_part_is_written_short_or_as_a_table_beside_a_preset():
    preset = {"attention": {"n_heads": 4, "n_kv_heads": 2}, "feed_forward": {"d_ff": 64}, "name": "p"}
    presets = {"p": {**{name: MODEL[name] for name in ("vocab_size", "d_model", "n_layers", "max_seq_len")}, **preset}}
    text = '[model]\npreset = "p"\npositions = "alibi"\nattention.qk_norm = "head"\n[model.feed_forward]\nbias = true\n'
    run = parse({**parse_toml(text), "recipe": RECIPE}, presets=presets.__getitem__)
    assert (run.model.positions.kind, run.model.attention.n_kv_heads) == ("alibi", 2)
    assert (run.model.attention.qk_norm, run.model.feed_forward.d_ff, run.model.feed_forward.bias) == ("head", 64, True)
    without = parse({**parse_toml(text), "recipe": RECIPE}, ["model.attention.n_kv_heads=none"], presets=presets.get)
    assert without.model.attention.n_kv_heads is None


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"zero_optimization": {"stage": 2}, "train_batch_size": 32, "bf16": {"enabled": True}},
         "run file: is a config of DeepSpeed, not a run file; nearest that works: --set layout.zero=2 "
         "--set recipe.global_batch=32 --set recipe.precision=bf16 --set recipe.precision.master_weights=true"),
        ({"job": {}, "model": {"flavor": "8B"}, "training": {"seq_len": 8192}, "parallelism":
          {"tensor_parallel_degree": 8}}, "run file: is a config of torchtitan, not a run file; nearest that works: "
         "--set recipe.seq_len=8192 --set layout.tensor=8"),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device":
          "none"}}, "train_batch_size": 4}, "run file: is a config of DeepSpeed, not a run file; its offloading "
         "(offload_optimizer) is recipe.offload here; nearest that works: --set layout.zero=3 "
         "--set recipe.global_batch=4"),
        ({"zero_optimization": 5, "train_batch_size": "x"}, "run file: is a config of DeepSpeed, not a run file; "
         "nearest that works: trainledger init"),
    ],
)  # fmt: skip
def test_a_config_of_another_program_is_recognized(content, sentence):
    assert refusal(content) == [sentence]


# Files


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path, monkeypatch):
    def wrong(path):
        with pytest.raises(InvalidInput) as caught:
            read(path)
        assert len(caught.value.problems) == 1
        return str(caught.value)

    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    (tmp_path / "run.toml").write_text(to_toml(parse(table())))
    assert "cannot be read: No such file or directory; nearest that works:" in wrong(tmp_path / "rnu.toml")
    assert wrong(tmp_path).endswith("cannot be read: Is a directory; nearest that works: " + str(tmp_path / "run.toml"))
    assert wrong(tmp_path / "empty").endswith("cannot be read: Is a directory")
    for name, content in (("bin.toml", b"\xff\xfe\0"), ("ruff.toml", b"line-length = 120\n"), ("rut.toml", b"a = [")):
        (tmp_path / "empty" / name).write_bytes(content)
    assert "is no path" in wrong("a\0b")
    none_here = wrong("run.toml")
    assert none_here.endswith("such as gpt2), or write one: trainledger init"), none_here
    assert "trainledger init writes one, --preset takes a model's name" in wrong("teach-1m")
    assert "or the path of its config.json" in wrong("teach/config.json")
    assert "path of the model's config.json, which is at https://huggingface.co/zai-org/GLM-4.6/" in wrong(
        "zai-org/GLM-4.6"
    )
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b'[model]\nname = "caf\xe9"\n')
    assert wrong(latin) == f"{latin}:\n  line 2: is not UTF-8 text"
    huge = tmp_path / "huge.toml"
    huge.write_bytes(b"#" * (2**20 + 1))
    assert "is longer than 1048576 bytes" in wrong(huge)
    if os.path.exists("/dev/zero"):
        assert "it is not a regular file but a device" in wrong("/dev/zero")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[model]\nd_model 64\n", "line 2, column 9: is not TOML: Expected '=' after a key in a key/value pair"),
        ("a = 1\na = 2\n", "line 2, column 6: is not TOML: Cannot overwrite a value"),
        ('a = "', "the last line: is not TOML: "),
        ("a = " + "[" * 100_000, "run file: is nested too deeply"),
        ("a = " + "9" * 5000, "run file: is not TOML: Exceeds the limit"),
    ],
)
def test_broken_toml_names_the_line(text, sentence):
    with pytest.raises(InvalidInput) as caught:
        parse_toml(text)
    (problem,) = caught.value.problems
    assert str(problem).startswith(sentence)


def test_a_byte_order_mark_and_windows_lines_are_no_error(tmp_path):
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbf" + to_toml(parse(table())).replace("\n", "\r\n").encode())
    assert read(path) == parse(table())


def test_the_file_is_named_before_its_problems(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[model]\nd_model = -1\n")
    with pytest.raises(InvalidInput) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}:\n  model.d_model = -1: must be at least 1")


# There and back

TEXTS = st.text(st.characters(exclude_categories=["C", "Z"], include_characters=" "), min_size=1).filter(
    lambda text: text.strip() and text.isprintable()
)
FLOATS = st.floats(1e-30, 1e30)


@st.composite
def runs(draw):
    heads = draw(st.integers(1, 8))
    kv = draw(st.sampled_from([each for each in range(1, heads + 1) if heads % each == 0]))
    model = from_fields(
        ModelSpec,
        {
            **sizes(
                V=draw(st.integers(1, 10**6)),
                D=draw(st.integers(1, 99)),
                L=draw(st.integers(1, 99)),
                H=heads,
                KV=draw(st.sampled_from([kv, None])),
                K=2 * draw(st.integers(1, 64)),
                F=draw(st.integers(1, 999)),
                T=1000,
            ),
            "name": draw(TEXTS),
            "norm": "layernorm",
            "norm.eps": draw(FLOATS),
            "norm.bias": draw(st.booleans()),
            "feed_forward.activation": draw(st.sampled_from([each for each in ACTIVATIONS if each != "clamped_swish"])),
            "feed_forward.gated": draw(st.booleans()),
            "positions.theta": draw(FLOATS),
            "attention.bias": draw(st.booleans()),
            "feed_forward.bias": draw(st.booleans()),
            "tie_embeddings": draw(st.booleans()),
        },
    )
    micro = draw(st.integers(1, 9))
    steps = draw(st.none() | st.integers(1, 10**9))
    recipe = from_fields(Recipe, {
        "seq_len": draw(st.integers(1, 1000)), "global_batch": micro * draw(st.integers(1, 9)), "micro_batch": micro,
        "steps": steps, "tokens": draw(st.integers(1, 10**18)) if steps is None else None,
        "precision": draw(st.sampled_from([each for each in PRECISIONS if PRECISIONS[each].scaled is None])),
        "precision.moment_dtype": draw(st.sampled_from([None, "fp32", "bf16"])),
        "optimizer": draw(st.sampled_from([*OPTIMIZERS])), "learning_rate": draw(FLOATS),
        "grad_clip": draw(st.none() | FLOATS), "schedule": draw(st.sampled_from([*SCHEDULES])),
        "dropout": draw(st.floats(0, 0.99)), "seed": draw(st.integers(0, 10**18)),
        "evaluation.every": draw(st.none() | st.integers(1, 10**6)), "compile": draw(st.booleans()),
    })  # fmt: skip
    data = DataSpec(path=tuple(draw(st.lists(TEXTS, min_size=1, max_size=3))), tokenizer=draw(TEXTS), cache=draw(TEXTS))
    return Run(model=model, recipe=recipe, data=data)


@given(runs())
def test_a_run_written_and_read_back_is_equal_in_content_and_name(run):
    text = to_toml(run)
    back = parse(tomllib.loads(text))
    assert back == run
    assert to_toml(back) == text
    assert (digest(back), run_name(back)) == (digest(run), run_name(run))
    assert validated(run) == run


def test_the_resolved_file_names_every_field():
    content = resolved(parse(table()))
    assert list(content) == list(SECTIONS)[:-1]  # a teacher is of distillation alone
    for section, cls in list(SECTIONS.items())[:-1]:
        absent = {field.name for field in dataclasses.fields(cls) if field.default is None}
        assert set(content[section]) | absent == {field.name for field in dataclasses.fields(cls)}


def test_the_digest_sees_what_is_computed_and_not_where():
    run = parse(table())
    assert len(digest(run)) == 64
    assert digest(parse(table(data={"cache": "elsewhere"}))) == digest(run)
    for section, field, value in [
        ("recipe", "seed", 1), ("recipe", "learning_rate", 0.1), ("model", "n_layers", 3), ("data", "path", ["x"]),
        ("recipe", "seq_len", 64), ("model", "name", "other"),
    ]:  # fmt: skip
        assert digest(parse(table(), {f"{section}.{field}": value})) != digest(run), field
    for elsewhere in (
        {"cluster.count": 2, "layout.shard": 2},
        {"cluster.device": "a100-sxm-80gb"},
        {"recipe.micro_batch": 1},
    ):
        assert digest(parse(table(), elsewhere)) == digest(run), elsewhere
    for schedule in ("constant", "cosine"):
        longer = digest(parse(table(), {"recipe.schedule": schedule, "recipe.steps": 1234}))
        assert (longer == digest(parse(table(), {"recipe.schedule": schedule}))) == (schedule == "constant")
    assert digest(parse(table({"vocab_size": "256"}, {"dropout": -0.0}))) == digest(run)


@given(TEXTS)
def test_a_run_name_is_one_plain_directory_name(name):
    made = run_name(parse(table({"name": name})))
    assert set(made) <= set(string.ascii_letters + string.digits + "-_.")
    assert not made.startswith(".")
    assert len(made) <= 70


def test_an_unchecked_run_is_checked():
    run = Run(model=from_fields(ModelSpec, {**MODEL, "attention.n_heads": 7}), recipe=from_fields(Recipe, RECIPE))
    with pytest.raises(InvalidInput, match="must divide d_model"):
        validated(run)


def test_the_commented_file_shows_every_field_and_reads_as_the_same_run():
    given_fields = {"model": {"preset": "p"}, "recipe": RECIPE}
    text = commented(given_fields, {**MODEL, "name": "p"}, every=True)
    presets = {"p": {**MODEL, "name": "p"}}.__getitem__
    assert parse(tomllib.loads(text), presets=presets) == parse(given_fields, presets=presets)
    assert max(len(line) for line in text.splitlines()) <= 80
    for cls in SECTIONS.values():
        for field in dataclasses.fields(cls):
            is_table = kinds_of(field) and field.default is not None
            assert f"{field.name}{'.' if is_table else ' = '}" in text
            assert is_table or rule_of(field)["doc"].split()[0] in text  # a table shows its fields alone
    short = commented(given_fields, {**MODEL, "name": "p"})
    assert parse(tomllib.loads(short), presets=presets) == parse(given_fields, presets=presets)
    assert len(short.splitlines()) < 20


def test_the_commented_defaults_are_the_defaults():
    """Every line that shows a default may be switched on without changing the run."""
    text = commented({"model": MODEL, "recipe": RECIPE}, every=True)
    switched = "\n".join(
        line[2:] if line.startswith("# ") and " = " in line[:30] else line for line in text.splitlines()
    )
    assert parse(tomllib.loads(switched)) == parse(table())


# Junk


def attempt(function, *args):
    """What a function gives, or the problems it finds; any other error is the test's failure."""
    try:
        return function(*args), ()
    except InvalidInput as error:
        return None, error.problems


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
FIELDS = {section: [field.name for field in dataclasses.fields(cls)] for section, cls in SECTIONS.items()}


@st.composite
def junk_tables(draw):
    """Tables of the right shape with a wrong thing here and there, or of no shape at all."""
    made = table()
    for _ in range(draw(st.integers(0, 4))):
        section = draw(st.sampled_from(list(SECTIONS)))
        field = draw(st.sampled_from(FIELDS[section]) | st.text() | st.sampled_from(["preset", "config"]))
        content = made.setdefault(section, {})
        if isinstance(content, dict):
            content[field] = draw(JUNK)
        if draw(st.integers(0, 9)) == 0:
            made[draw(st.sampled_from(list(SECTIONS)) | st.text())] = draw(JUNK)
    return made


@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow])
@given(junk_tables() | JUNK, st.lists(st.text(), max_size=2))
@example({"model": None}, ["="])
@example([], ["model.="])
@example({"model": "\n"}, [])
@example({"model": {"name": float("nan")}}, ["model.name=\n=\n"])
def test_junk_is_a_run_or_sentences_and_never_another_error(source, overrides):
    run, problems = attempt(parse, source, overrides)
    assert (run is None) == bool(problems)
    assert all(str(each).isprintable() and len(str(each)) < 1500 for each in problems)
    if run is not None:
        assert parse(resolved(run)) == run


@settings(max_examples=200)
@given(
    st.text()
    | st.lists(st.sampled_from(["[", "]", "model", "=", ".", '"', "\n", "{", "1", "'''", "a", "#"])).map("".join)
)
def test_any_text_is_toml_or_a_sentence(text):
    made, problems = attempt(parse_toml, text)
    assert len(problems) == (0 if isinstance(made, dict) else 1)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_any_bytes_are_a_run_file_or_sentences(tmp_path, content):
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    with pytest.raises(InvalidInput):
        read(path)


def test_a_layout_that_is_a_text_and_a_section_is_distinguished(tmp_path):
    both = tmp_path / "both.toml"
    both.write_text('layout = "auto"\n[model]\npreset = "gpt2"\n[layout]\nshard = 2\n')
    with pytest.raises(InvalidInput, match="excludes a section \\[layout\\]: write auto = true in it instead"):
        read(both)
    below = tmp_path / "below.toml"
    below.write_text('[recipe]\nseq_len = 8\nglobal_batch = 1\nsteps = 1\nlayout = "auto"\n')
    with pytest.raises(InvalidInput) as caught:
        read(below)
    (problem,) = [each for each in caught.value.problems if each.field == "recipe.layout"]
    assert str(problem).endswith("belongs above all sections; nearest that works: auto = true in [layout]")


def test_a_model_name_that_is_taken_for_a_file_gets_a_hint_of_how_models_are_named(tmp_path):
    with pytest.raises(
        InvalidInput, match=r"cannot be read: .*; a model is a name of .* or the path of its config.json"
    ):
        read(tmp_path / "meta-llama" / "Llama-3-8B")
    with pytest.raises(InvalidInput) as caught:
        read(tmp_path / "run.toml")
    assert "a model is a name" not in str(caught.value)


# Several texts


MIXTURE = {
    "prose": {"path": ["b/*.txt", "c.txt"], "weight": 0.7, "text_field": "content"},
    "code": {"path": "a/*.py", "weight": 0.3},
}


def mixed(**data):
    return table(data={"mixture": MIXTURE, **data})


def test_sources_of_a_mixture_are_in_the_order_of_their_names_and_come_back_from_toml():
    run = parse(mixed())
    assert [(name, each.weight) for name, each in run.data.mixture] == [("code", 0.3), ("prose", 0.7)]
    assert run == parse(table(data={"mixture": dict(reversed(MIXTURE.items()))}))
    for text in (to_toml(run), commented(mixed()), commented(mixed(), every=True)):
        assert parse(tomllib.loads(text)) == run
    assert "path" not in resolved(run)["data"]
    assert digest(run) != digest(parse(mixed(), ["data.mixture.code.weight=0.4"])) != digest(parse(table()))
    assert run.data.sources[1][1].text_field == "content"
    assert [each.mixture for _, each in run.data.sources] == [None, None]
    assert run.data.paths == ("a/*.py", "b/*.txt", "c.txt")


@pytest.mark.parametrize(
    "change",
    [
        "data.mixture.code.weight=2",
        'data.mixture.web={path="w", weight=1}',
        "data.mixture.prose.text_field=none",
        "data.mixture=none",
        'data.mixture={one={path=["x","y"],weight=1}}',
    ],
)
def test_a_changed_mixture_is_reported_and_made_by_overrides(change):
    usual, other = parse(mixed()), parse(mixed(), [change])
    assert other != usual
    found = [each.field for each in differences(usual, other)]
    assert found
    assert all(each.startswith("data.mixture") for each in found)
    assert changed_by(usual, overrides(usual, other)) == other
    assert changed_by(other, overrides(other, usual)) == usual


def changed_by(run, changes):
    return parse(resolved(run), changes)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["data.path=x.txt"], "data.path = ['x.txt']: give either path, or mixture with a path for each"),
        (["data.mixture.code.weight=0"], "data.mixture.code.weight = 0: must be above 0"),
        (["data.mixture.code.weight=-1"], "data.mixture.code.weight = -1: must be above 0"),
        (["data.mixture.code.weight="], "data.mixture.code.weight: is missing"),
        (["data.mixture.code.weigth=1"], "nearest that works: data.mixture.code.weight"),
        (["data.mixture.a b.weight=1"], "data.mixture.a b: is not a name"),
        (["data.mixture.code=3"], "data.mixture.code = 3: must be a table of fields"),
        (["data.mixture=a.txt"], "data.mixture = 'a.txt': must be tables by name"),
        (["data.mixture={}"], "data.mixture = a table: must be tables by name"),
        (
            ["data.mixture.code.weight=0.0003"],
            "gives it none of 1,000 sequences, since all weights together are 0.7003",
        ),
    ],
)
def test_a_wrong_mixture_is_a_sentence(changes, sentence):
    assert any(sentence in each for each in refusal(mixed(), changes))


def test_the_nearest_weight_that_is_named_works():
    for weight in (1e-9, 0.0003, 1e-4):
        with pytest.raises(InvalidInput) as caught:
            parse(mixed(), {"data.mixture.code.weight": weight})
        (problem,) = caught.value.problems
        parse(mixed(), {"data.mixture.code.weight": problem.nearest})


def test_a_name_twice_names_the_line():
    with pytest.raises(
        InvalidInput, match=r"line 3, column 16: is not TOML: Cannot declare \('data', 'mixture', 'a'\) twice"
    ):
        parse_toml("[data.mixture.a]\nweight = 1\n[data.mixture.a]\nweight = 2\n")


def test_a_section_by_itself_is_read_by_the_same_rules():
    assert section_of("cluster", ["cluster.count=8"]) == section_of("cluster", {"cluster.count": 8})
    assert section_of("cluster", ()).count == 1
    with pytest.raises(InvalidInput, match=r"cluster\.count"):
        section_of("cluster", {"cluster.count": 0})


LISTS_OF_NAMES = {
    "recipe.lora.targets": (["q_proj", "v_proj"], {"recipe.lora.rank": 8}),
    "recipe.lora.whole": (["embed_tokens", "lm_head"], {"recipe.lora.rank": 8}),
    "recipe.activation_checkpointing.keep": (
        ["matmuls", "attention"],
        {"recipe.activation_checkpointing": "selective"},
    ),
    "recipe.activation_checkpointing.offload": (
        ["matmuls", "attention"],
        {"recipe.framework": "jax", "recipe.activation_checkpointing": "selective"},
    ),
    "layout.overlap": (["gradients", "parameters"], {"layout.shard": 2, "layout.zero": 1, "cluster.count": 2}),
}


@pytest.mark.parametrize("path", LISTS_OF_NAMES)
@pytest.mark.parametrize("written", ["{},{}", "{}, {}", " {} ,{},", "[{},{}]", '["{}", "{}"]'])
def test_names_between_commas_are_a_list_of_them(path, written):
    names, base = LISTS_OF_NAMES[path]
    run = {"model": MODEL, "recipe": RECIPE}
    given = {**base, path: names}
    text = [f"{field}={value}" for field, value in base.items()] + [f"{path}={written.format(*names)}"]
    assert parse(run, text) == parse(run, given)
    with pytest.raises(InvalidInput, match=rf"{path} = 'q_prj': must be (of|among) .*{names[0]}"):
        parse(run, [*text[:-1], f"{path}={names[0]},q_prj"])


def test_every_list_of_texts_is_of_names_or_of_paths():
    found = {path for path in paths(SECTIONS) if quantity_of(field_of(SECTIONS, path)) == "texts"}
    assert found == set(LISTS_OF_NAMES)
    assert parse({"model": MODEL, "recipe": RECIPE}, ["data.path=a,b.txt"]).data.path == ("a,b.txt",)
