"""What an error proposes works: who takes each proposal in turn comes to a run that obeys all rules."""

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from trainledger.answers.load import load
from trainledger.spec.problem import InvalidInput
from trainledger.web.field import paths_of_run

MODELS = ("gpt2", "llama-3-8b", "mixtral-8x7b", "deepseek-v2-lite", "gemma-2-9b", "mpt-7b", "gpt-oss-20b")
FIELDS: dict[str, tuple[Any, ...]] = {
    "layout.tensor": (2, 3, 5, 6, 8, 16), "layout.pipeline": (2, 3, 5, 8), "layout.shard": (2, 3, 7, 16),
    "layout.replicate": (2, 3), "layout.context": (2, 3, 8), "layout.expert": (2, 3, 8), "layout.zero": (1, 2),
    "layout.sequence_parallel": (True,), "layout.sequence_gather": ("again",), "layout.virtual_stages": (2, 3),
    "layout.schedule": ("gpipe", "interleaved", "zero-bubble"), "layout.context_kind": ("all-to-all",),
    "layout.expert_send": ("nodes",), "layout.split_sends": (True,),
    "layout.overlap": ([], ["parameters"], ["tensor"], ["gradients", "experts"], ["input-gradients"]),
    "recipe.precision": ("fp32", "bf16", "bf16-sharded", "fp16-mixed", "fp8-tensorwise", "fp8-rowwise-sharded"),
    "recipe.attention": ("math", "flash", "efficient", "cudnn"), "recipe.compile": (True,),
    "recipe.activation_checkpointing": ("full", "segments", "selective", "attention", "offload"),
    "recipe.loss": ("chunked", "fused", "compiled"), "recipe.loss.chunks": (3,),
    "recipe.precision.master_weights": (True,),
    "recipe.precision.gradient_dtype": ("fp32",), "recipe.precision.moment_dtype": ("bf16",),
    "recipe.precision.weight_caching": (True,),
    "recipe.lora.rank": (8,), "recipe.lora.base_format": ("nf4", "int8"), "recipe.optimizer": ("sgd", "adafactor",
    "muon"),
    "recipe.micro_batch": (1, 3, 7), "recipe.global_batch": (1, 7, 64), "recipe.seq_len": (100, 341, 2048),
    "cluster.count": (1, 2, 24),
}  # fmt: skip
MOST = 16  # proposals that are taken, more than any draw has needed


@st.composite
def written(draw: st.DrawFn) -> dict[str, dict[str, Any]]:
    """A run file of which two to six fields are drawn, whether they go together or not."""
    table: dict[str, dict[str, Any]] = {
        "model": {"preset": draw(st.sampled_from(MODELS))},
        "recipe": {"seq_len": 1024, "global_batch": 16, "steps": 10, "precision": "bf16-mixed"},
        "cluster": {"device": "h100-sxm", "count": 8},
    }
    for field in draw(st.lists(st.sampled_from(sorted(FIELDS)), min_size=2, max_size=6, unique=True)):
        section, _, name = field.partition(".")
        table.setdefault(section, {})[name] = draw(st.sampled_from(FIELDS[field]))
    return table


@settings(
    max_examples=300, deadline=None, suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)  # fmt: skip
@given(written())
def test_proposals_lead_to_a_run_that_obeys_all_rules(table: dict[str, dict[str, Any]]) -> None:
    follow_proposals(table)


# What no field takes, or only some do: beyond both limits, not a number, of another type.
ODD = (0, -1, 10**9, 10**15, 1.5, "x", True, [], float("nan"), "1e400", "-5", "", {})


@settings(
    max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), phases=(Phase.explicit, Phase.generate)
)
@example("recipe.activation_checkpointing.offload", "x")  # its nearest is an empty list
@given(st.sampled_from(paths_of_run(())), st.sampled_from(ODD))
def test_odd_values_of_any_field_do_too(path: str, value: Any) -> None:
    section, _, name = path.partition(".")
    table: dict[str, dict[str, Any]] = {
        "model": {"preset": "llama-3-8b"},
        "recipe": {"seq_len": 1024, "global_batch": 16, "steps": 10, "precision": "bf16-mixed"},
        "cluster": {"device": "h100-sxm", "count": 8},
    }
    table.setdefault(section, {})[name] = value
    follow_proposals(table)


def follow_proposals(table: dict[str, dict[str, Any]]) -> None:
    """Take each proposal in turn until a run obeys all rules, or a sentence has no value but says what to change."""
    shown = []
    for _ in range(MOST):
        try:
            load(table, search=False)
            return
        except InvalidInput as error:
            shown.append(str(error))
            found = [each for each in error.problems if each.nearest is not None]
        if not found:
            return  # a sentence says what else there is to change
        field, nearest = found[0].field, found[0].nearest
        whole = " = " not in str(nearest)
        if not whole:  # another kind of a part, which has the field
            field, _, nearest = str(nearest).partition(" = ")
        section, _, name = field.partition(".")
        left = {path: each for path, each in table.get(section, {}).items() if not whole or f"{name}." not in path}
        left[name] = list(nearest) if isinstance(nearest, tuple) else nearest
        table[section] = {path: each for path, each in left.items() if (path, each) != (name, "none")}
    pytest.fail("\n".join(shown))


@pytest.mark.parametrize(
    ("model", "given", "sentence"),
    [
        ("deepseek-v2-lite", {"layout": {"tensor": 16, "sequence_parallel": True}, "recipe": {"seq_len": 100}},
         "layout.tensor = 16: sequence parallelism splits the 100 tokens of a rank, so it must divide them; nearest "
         "that works: 4"),
        ("deepseek-v2-lite", {"layout": {"tensor": 8}, "recipe": {"precision": "fp8-tensorwise"}},
         "layout.tensor = 8: 8-bit matmuls need multiples of 16, and each tensor rank has 1368 of d_ff = 10944; "
         "nearest that works: 4"),
        ("llama-3-8b", {"layout": {"tensor": 4, "shard": 2, "overlap": ["gradients", "tensor"]}},
         "layout.overlap = ['gradients', 'tensor']: tensor: only what sequence-parallel ranks gather and scatter is "
         "cut into parts; set layout.sequence_parallel; nearest that works: ['gradients']"),
        ("gpt2", {"layout": {"shard": 8, "overlap": []}},
         'layout.overlap = []: must name at least one, or be "none"; nearest that works: none'),
        ("llama-13b", {"layout": {"tensor": 7}},
         "layout.tensor = 7: must divide model.attention.n_heads = 40; nearest that works: 8"),
        ("mixtral-8x7b", {"layout": {"tensor": 2, "shard": 4, "expert_tensor": 0}},
         "layout.expert_tensor = 0: must be at least 1; nearest that works: 2"),
        ("mixtral-8x7b", {"layout": {"pipeline": 5000}},
         "layout.pipeline = 5000: must be at most 1024; nearest that works: 32"),
        ("gpt2", {"recipe": {"loss": "in-place", "precision": "bf16-sharded"}, "layout": {"shard": 8}},
         "recipe.loss = 'in-place': is a kernel of Transformer Engine, for recipe.framework = megatron-core only; "
         "nearest that works: full"),
        ("gpt2", {"recipe": {"precision": "fp8-rowwise", "seq_len": 100, "micro_batch": 2}},
         "recipe.seq_len = 100: 8-bit matmuls need multiples of 16, and a micro-batch has 200 tokens; nearest "
         "that works: 96"),
    ],
)  # fmt: skip
def test_a_proposal_obeys_the_other_rules_too(model: str, given: dict[str, Any], sentence: str) -> None:
    recipe = {"seq_len": 1024, "global_batch": 16, "steps": 10, "precision": "bf16-mixed", **given.get("recipe", {})}
    table = {"model": {"preset": model}, "recipe": recipe, "layout": given.get("layout", {})}
    with pytest.raises(InvalidInput) as found:
        load({**table, "cluster": {"device": "h100-sxm", "count": 8}}, search=False)
    assert str(found.value) == sentence


@pytest.mark.parametrize(
    ("section", "given", "sentence"),
    [
        ("recipe", {"checkpoints": "x"},
         "recipe.checkpoints = 'x': must be a table of fields: every, asynchronous, keep_last, keep_every"),
        ("recipe", {"guard": {"kind": "y"}},
         "recipe.guard.kind = 'y': unknown field of [recipe.guard], which has skips, window, beyond"),
        ("recipe", {"ema": 5}, "recipe.ema = 5: must be a table of fields: decay; nearest that works: none"),
        ("model", {"feed_forward.router.bias": True},
         "model.feed_forward.router.bias = true: belongs to experts, and model.feed_forward is dense; nearest that "
         "works: model.feed_forward = experts"),
    ],
)  # fmt: skip
def test_a_part_of_one_kind_is_a_table_and_what_is_inside_of_another_kind_is_found(section, given, sentence):
    table: dict[str, Any] = {
        "model": {"preset": "llama-3-8b"},
        "recipe": {"seq_len": 1024, "global_batch": 16, "steps": 10},
    }
    table[section] |= given
    with pytest.raises(InvalidInput) as found:
        load(table, search=False)
    assert str(found.value) == sentence


def test_of_thousands_of_unknown_names_some_get_a_sentence_and_the_rest_their_number() -> None:
    sections = {f"a{at}": {} for at in range(2_000)}
    with pytest.raises(InvalidInput) as raised:
        load({"model": {"preset": "gpt2"}, **sections}, {"recipe.steps": 1})
    sentences = [str(each) for each in raised.value.problems]
    assert sentences[19].startswith("a19 = a table: unknown section")
    assert sentences[20] == "run: has 1,980 more unknown sections"
    with pytest.raises(InvalidInput) as raised:
        load({"model": {"preset": "gpt2"}, "recipe": {f"a{at}": 1 for at in range(300)}})
    assert "recipe: has 280 more unknown fields" in [str(each) for each in raised.value.problems]
