"""Models found again on disk, in a run, a checkpoint or an import; and the verbs export, import and sample."""

import json
import os
import resource
import shutil
from contextlib import ExitStack
from dataclasses import replace

from models import sizes

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_run import CountingFeed, tiny_run
from tokenizers import Tokenizer

from trainledger.cli import main
from trainledger.engine.data.tokenizer import ByteTokenizer, byte_level
from trainledger.engine.nn import weights
from trainledger.engine.nn.init import initialize
from trainledger.engine.nn.transformer import Transformer
from trainledger.engine.train import run_directory, saving
from trainledger.engine.train.engine import train
from trainledger.engine.train.records import read_lines as read_metrics
from trainledger.engine.train.trained import load_trained, write_start
from trainledger.spec.durable import held, text_sha256
from trainledger.spec.parts import with_fields
from trainledger.spec.problem import InvalidInput
from trainledger.spec.runfile import digest, parse, to_toml

RUN = parse(
    {"model": sizes(V=260, D=16, L=2, H=4, KV=2, F=24, T=32), "recipe": {"seq_len": 16, "global_batch": 2, "steps": 4}}
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved") / "tiny"
    directory.mkdir()
    (directory / "run.toml").write_text(to_toml(RUN))
    for step in (2, 4):
        saving.save(directory, step, model_of(step), torch.optim.SGD(model_of(step).parameters(), lr=1.0), {})
    return directory


@pytest.fixture
def run_dir(saved, tmp_path):
    """A run with two checkpoints, of different weights."""
    return shutil.copytree(saved, tmp_path / "runs" / "tiny")


def model_of(seed, spec=RUN.model):
    model = Transformer(spec).eval()
    initialize(model, seed=seed)
    return model


def same_weights(one, other):
    return all(torch.equal(each, other.state_dict()[name]) for name, each in one.state_dict().items())


def hush(sentence):
    raise AssertionError(sentence)


def test_a_run_is_its_newest_checkpoint_and_a_checkpoint_is_itself(run_dir):
    newest = load_trained(run_dir, hush)
    assert same_weights(newest.model, model_of(4))
    assert newest.tokenizer == ByteTokenizer()
    assert newest.weights == run_dir / "checkpoints/step-00000004/model.safetensors"
    older = load_trained(run_dir / "checkpoints/step-00000002", hush)
    assert same_weights(older.model, model_of(2))


def test_a_damaged_checkpoint_is_passed_over_or_refused(run_dir):
    damaged = run_dir / "checkpoints/step-00000004"
    with (damaged / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    said = []
    assert same_weights(load_trained(run_dir, said.append).model, model_of(2))
    assert "step-00000004" in said[0]
    with pytest.raises(InvalidInput, match=r"step-00000004: has 1000 bytes in model\.safetensors"):
        load_trained(damaged, hush)


def test_what_holds_no_model_is_said(run_dir, tmp_path):
    with pytest.raises(InvalidInput, match=r"is no run directory \(run\.toml\), checkpoint, import \(model\.toml\)"):
        load_trained(tmp_path, hush)
    with pytest.raises(InvalidInput, match="gone: is not a directory"):
        load_trained(tmp_path / "gone", hush)
    for each in run_directory.all_checkpoints(run_dir):
        (each / "manifest.json").unlink()
    with pytest.raises(InvalidInput, match="tiny: has no valid checkpoint"):
        load_trained(run_dir, print)


@pytest.mark.parametrize("field", ["positions.theta = 1e5", "norm.eps = 1e-3", "attention.n_heads = 2"])
def test_a_run_file_that_was_changed_by_hand_is_not_that_of_the_checkpoints(field, run_dir):
    facts = {"digest": digest(RUN)}
    saving.save(run_dir, 6, model_of(6), torch.optim.SGD(model_of(6).parameters(), lr=1.0), facts)
    assert load_trained(run_dir, hush).weights.parent.name == "step-00000006"
    name, _, value = field.partition(" = ")
    (run_dir / "run.toml").write_text(to_toml(replace(RUN, model=with_fields(RUN.model, {name: json.loads(value)}))))
    said = []
    for each in run_directory.all_checkpoints(run_dir)[:-1]:  # they know of no run
        shutil.rmtree(each)
    with pytest.raises(InvalidInput, match="has no valid checkpoint"):
        load_trained(run_dir, said.append)
    assert "step-00000006 is a checkpoint of run" in said[0]
    with pytest.raises(InvalidInput, match=r"is a checkpoint of run .*, not of"):
        load_trained(run_dir / "checkpoints" / "step-00000006", hush)


def test_a_tokenizer_with_two_tokens_exchanged_is_refused(run_dir):
    definition = byte_level(ByteTokenizer())
    (run_dir / "tokenizer.json").write_text(definition)
    facts = {"digest": digest(RUN), "tokenizer": text_sha256(definition)}
    saving.save(run_dir, 6, model_of(6), torch.optim.SGD(model_of(6).parameters(), lr=1.0), facts)
    assert load_trained(run_dir, hush).tokenizer is not None
    content = json.loads(definition)
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (run_dir / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(InvalidInput, match="is not the tokenizer that the run was trained with"):
        load_trained(run_dir, hush)


@pytest.mark.parametrize("tied", [False, True])
def test_a_start_holds_the_spec_and_the_weights(tied, tmp_path):
    model = model_of(
        3, with_fields(RUN.model, {"tie_embeddings": tied, "positions.scaling.factor": 2.0, "norm.eps": 1e-6})
    )
    write_start(model, tmp_path / "start")
    found = load_trained(tmp_path / "start", hush)
    assert found.model.spec == model.spec
    assert same_weights(found.model, model)
    assert found.tokenizer is None


def test_weights_of_another_model_are_refused_by_name(tmp_path):
    write_start(model_of(3), tmp_path / "start")
    told = (tmp_path / "start/model.toml").read_text()
    (tmp_path / "start/model.toml").write_text(told.replace("d_ff = 24", "d_ff = 32"))
    with pytest.raises(
        InvalidInput, match=r"layers\.0\.mlp\.gate_proj\.weight: has shape \[24, 16\]; the model needs \[32, 16\]"
    ):
        load_trained(tmp_path / "start", hush)
    (tmp_path / "start/model.toml").write_text(told.replace("n_layers = 2", "n_layers = 90000"))
    with pytest.raises(InvalidInput, match=r"model\.n_layers = 90000: the file holds only 21 tensors"):
        load_trained(tmp_path / "start", hush)


@given(text=st.text())
def test_bytes_as_a_tokenizer_json_are_the_same_tokens(text):
    engine = Tokenizer.from_str(byte_level(ByteTokenizer()))
    ids = ByteTokenizer().encode([text.replace("<|endoftext|>", "")])[0].tolist()
    assert engine.encode(text.replace("<|endoftext|>", "")).ids == ids
    assert engine.decode(ids) == text.replace("<|endoftext|>", "")
    assert engine.encode("<|endoftext|>").ids == [256]


def test_exported_from_the_command_line_transformers_opens_it_all(run_dir, tmp_path, capsys):
    assert main(["export", str(run_dir), str(tmp_path / "hf"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["model_type"], told["dtype"], told["tokenizer"]) == ("llama", "fp32", True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", local_files_only=True).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf", local_files_only=True)
    ids = tokenizer("déf f(x):", return_tensors="pt").input_ids
    assert ids.tolist() == [list("déf f(x):".encode())]
    assert tokenizer.decode(ids[0]) == "déf f(x):"
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, model_of(4)(ids), atol=1e-5, rtol=0)
    assert theirs.generation_config.eos_token_id == 256

    assert main(["export", str(run_dir), str(tmp_path / "hf")]) == 2
    assert "exists and is not empty; --force replaces it" in capsys.readouterr().err
    assert main(["export", str(run_dir / "checkpoints/step-00000002"), str(tmp_path / "hf"), "--force"]) == 0
    assert "AutoModelForCausalLM.from_pretrained(" in capsys.readouterr().out


def test_what_a_killed_export_left_is_replaced(run_dir, tmp_path, capsys):
    out, partial, former = (tmp_path / each for each in ("out", ".out.partial", ".out.former"))
    assert main(["export", str(run_dir), str(out)]) == 0
    out.rename(former)  # killed between the two renames of --force
    partial.mkdir()
    (partial / "model.safetensors").write_bytes(b"half of it")
    assert main(["export", str(run_dir), str(out)]) == 2, "the earlier one is back"
    assert "exists and is not empty; --force replaces it" in capsys.readouterr().err
    assert main(["export", str(run_dir), str(out), "--force"]) == 0
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out", "runs"]
    with held(out, wait=False):
        out.rename(partial)
        assert main(["export", str(run_dir), str(out)]) == 2
    assert "is being written by another process" in capsys.readouterr().err


def test_what_is_put_in_place_leaves_the_next_process_its_files(tmp_path, monkeypatch):
    out, others = tmp_path / "out", []

    def sync(path):
        if path == tmp_path and not others:  # the first has its name: the next process may begin
            others.append(ExitStack())
            (others[0].enter_context(weights.whole_directory(out, force=True, ours={"a"})) / "a").write_text("next")

    monkeypatch.setattr(weights, "sync", sync)
    with weights.whole_directory(out) as partial:
        (partial / "a").write_text("first")
    assert (out / "a").read_text() == "first"
    others[0].close()
    assert (out / "a").read_text() == "next"


@pytest.mark.parametrize("verb", ["export", "import"])
def test_a_full_disk_under_what_is_written_is_a_sentence(verb, run_dir, tmp_path, capsys):
    assert main(["export", str(run_dir), str(tmp_path / "hf")]) == 0
    source, limits = run_dir if verb == "export" else tmp_path / "hf", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        assert main([verb, str(source), str(tmp_path / "out")]) == 4
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "the disk is full: " in capsys.readouterr().err
    assert sorted(each.name for each in tmp_path.iterdir()) == ["hf", "runs"]


def test_imported_from_the_command_line_it_is_a_start(run_dir, tmp_path, capsys):
    main(["export", str(run_dir), str(tmp_path / "hf"), "--dtype", "fp32"])
    config = json.loads((tmp_path / "hf/config.json").read_text()) | {"attention_dropout": 0.1}
    (tmp_path / "hf/config.json").write_text(json.dumps(config))
    capsys.readouterr()
    assert main(["import", str(tmp_path / "hf"), str(tmp_path / "start"), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["notes"] == [err.strip()]
    assert "attention_dropout = 0.1 is left out" in err
    start = load_trained(tmp_path / "start", hush)
    assert same_weights(start.model, model_of(4))
    assert start.model.spec == replace(RUN.model, name="hf")
    assert start.tokenizer is not None
    assert start.tokenizer.encode(["é"])[0].tolist() == [195, 169]
    assert main(["import", str(tmp_path), str(tmp_path / "other")]) == 2
    assert "config.json: is not a file" in capsys.readouterr().err


def test_samples_from_the_command_line_are_a_function_of_the_seed(run_dir, capsys):
    def sampled(*words):
        assert main(["sample", str(run_dir), "--prompt", "def ", "--tokens", "40", *words]) == 0
        return capsys.readouterr().out

    plain = sampled("--seed", "1")
    assert plain.startswith("def ")
    assert sampled("--seed", "1") == plain != sampled("--seed", "2")
    assert all(each.isprintable() or each in "\n\t" for each in plain)
    told = json.loads(sampled("--seed", "1", "--json"))
    assert told["text"].startswith("def ")
    assert (told["tokens"], told["seed"], told["temperature"]) == (40, 1, 0.8)
    counted = json.loads(sampled("--tokens", "4e1", "--seed", "1e0", "--json"))
    assert (counted["text"], counted["tokens"]) == (told["text"], 40)


def test_a_sample_needs_no_prompt(run_dir, capsys):
    assert main(["sample", str(run_dir), "--tokens", "5", "--json"]) == 0
    assert "<|endoftext|>" not in json.loads(capsys.readouterr().out)["text"][:13]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--tokens", "-3"], "--tokens = '-3': must be between 0 and"),
        (["--temperature", "nan"], "--temperature = 'nan': is not a number"),
        (["--top-k", "0"], "--top-k = '0': must be at least 1"),
        (["--tokens", "many"], "--tokens = 'many': is not a count"),
        (["--prompt", "\udc80"], "is not UTF-8 text"),
    ],
)
def test_wrong_arguments_are_sentences(words, sentence, run_dir, capsys):
    assert main(["sample", str(run_dir), *words]) == 2
    assert sentence in capsys.readouterr().err


def test_an_export_beside_a_run_file_is_no_checkpoint(run_dir, tmp_path, capsys):
    """runs/hf/tiny stands two levels below runs/../run.toml as a checkpoint does below its run's."""
    (tmp_path / "run.toml").write_text(to_toml(RUN))
    export = tmp_path / "models" / "tiny"
    assert main(["export", str(run_dir), str(export)]) == 0
    assert main(["import", str(export), str(tmp_path / "models" / "start")]) == 0
    for each in (export, tmp_path / "models" / "start"):
        assert same_weights(load_trained(each, hush).model, model_of(4))
        assert main(["sample", str(each), "--tokens", "3"]) == 0


def test_exports_and_imports_are_as_readable_as_the_umask_leaves_them(run_dir, tmp_path):
    before = os.umask(0o027)
    try:
        main(["export", str(run_dir), str(tmp_path / "hf")])
        main(["import", str(tmp_path / "hf"), str(tmp_path / "start")])
    finally:
        os.umask(before)
    files = [*(tmp_path / "hf").iterdir(), *(tmp_path / "start").iterdir()]
    assert {(each.name, oct(each.stat().st_mode & 0o777)) for each in files} == {(each.name, "0o640") for each in files}


@pytest.fixture
def imported(tmp_path):
    """A tiny Llama of transformers, imported; and a run that goes on from it."""
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, max_position_embeddings=16, rms_norm_eps=1e-5, tie_word_embeddings=False,
        initializer_range=0.4,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path / "hf")
    assert main(["import", str(tmp_path / "hf"), str(tmp_path / "start")]) == 0
    return theirs, tmp_path / "start"


def losses(run_dir):
    return [each["loss"] for each in read_metrics(run_dir / "metrics.jsonl") if "loss" in each]


def test_training_starts_from_imported_weights(imported, tmp_path):
    theirs, start = imported
    run = tiny_run(initial_weights=str(start), steps=2, **{"schedule.warmup_steps": 0})
    finished = train(run, tmp_path / "run", open_feed=CountingFeed, say=hush)
    (inputs_BT, targets_BT), *_ = next(CountingFeed(run, torch.device("cpu")).batches(0))
    with torch.no_grad():
        logits_BTV = theirs(inputs_BT).logits
    expected = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten()).item()
    assert losses(tmp_path / "run")[0] == pytest.approx(expected, abs=1e-5)
    plain = train(tiny_run(steps=2, **{"schedule.warmup_steps": 0}), tmp_path / "plain", open_feed=CountingFeed)
    assert abs(losses(plain.run_dir)[0] - expected) > 0.1
    # A checkpoint and a run are starts as well.
    for number, source in enumerate((finished.checkpoint, finished.run_dir)):
        again = tiny_run(initial_weights=str(source), steps=1, learning_rate=1e-12, **{"schedule.warmup_steps": 0})
        said = []
        train(again, tmp_path / f"again-{number}", open_feed=CountingFeed, say=said.append)
        assert ["weights alone; optimizer state is new" in each for each in said] == [True]
        weights = load_trained(tmp_path / f"again-{number}", hush).model
        assert torch.allclose(weights.lm_head.weight, load_trained(finished.checkpoint, hush).model.lm_head.weight)


def test_weights_that_do_not_fit_a_run_are_sentences(imported, tmp_path):
    _, start = imported
    with pytest.raises(
        InvalidInput, match=r"does not fit the run's model:\n.*mlp\.gate_proj\.weight: has shape"
    ) as caught:
        train(tiny_run({"feed_forward.d_ff": 64}, initial_weights=str(start)), tmp_path / "a", open_feed=CountingFeed)
    assert "recipe.initial_weights" in str(caught.value)
    for wrong, rule in ((tmp_path / "absent", "is not a directory"), (tmp_path / "hf", "trainledger import")):
        with pytest.raises(InvalidInput, match=f"initial_weights:\n.*{rule}"):
            train(tiny_run(initial_weights=str(wrong)), tmp_path / "b", open_feed=CountingFeed)
    said = []
    train(tiny_run({"positions.theta": 500.0}, initial_weights=str(start)), tmp_path / "c", open_feed=CountingFeed,
          say=said.append)  # fmt: skip
    assert said == [f"{start / 'model.safetensors'}: made with model.positions.theta = 10000.0, goes on with 500.0"]


def test_a_begun_run_is_not_resumed_on_other_initial_weights(imported, tmp_path):
    _, start = imported
    run = tiny_run(initial_weights=str(start))
    train(run, tmp_path / "run", open_feed=CountingFeed)
    file = start / "model.safetensors"
    weights = load_file(file)
    save_file({name: each + 1 for name, each in weights.items()}, file)
    with pytest.raises(InvalidInput, match="holds other weights than"):
        train(run, tmp_path / "run", open_feed=CountingFeed, resume=True)
    file.unlink()  # the checkpoints do not need it
    assert train(run, tmp_path / "run", open_feed=CountingFeed, resume=True).step == 6
