"""`trainledger evaluate`: the loss of a newest checkpoint on what its run held out or on other text, and refusals."""

import json
import math

import pytest
import torch

from trainledger.cli import main
from trainledger.engine.nn.init import initialize
from trainledger.engine.nn.transformer import Transformer
from trainledger.engine.train import saving
from trainledger.spec.runfile import parse, to_toml


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run of a byte model that was saved once, and texts of which it held some out."""
    folder = tmp_path_factory.mktemp("evaluated")
    (folder / "texts").mkdir()
    for at in range(30):
        (folder / "texts" / f"{at:02}.txt").write_text(f"Text {at} and {'more of it, ' * at}an end.\n")
    run = parse(
        {
            "model": {
                "vocab_size": 260, "d_model": 16, "n_layers": 2, "attention.n_heads": 4, "feed_forward.d_ff": 24,
                "max_seq_len": 64,
            },
            "recipe": {"seq_len": 32, "global_batch": 2, "steps": 4},
            "data": {"path": [str(folder / "texts")], "cache": str(folder / "cache"), "validation_fraction": 0.4},
        }
    )  # fmt: skip
    directory = folder / "runs" / "tiny"
    directory.mkdir(parents=True)
    (directory / "run.toml").write_text(to_toml(run))
    model = Transformer(run.model)
    initialize(model, seed=0)
    saving.save(directory, 4, model, torch.optim.SGD(model.parameters(), lr=1.0), {})
    return directory


def evaluated(capsys, *words):
    assert main(["evaluate", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_is_evaluated_on_what_it_held_out(run_dir, capsys):
    result = evaluated(capsys, run_dir)
    assert 3 < len(result["documents"]) < 27
    assert result["tokens"] == sum(each["tokens"] for each in result["documents"])
    assert result["tokens"] == result["text_nbytes"] + len(result["documents"])  # a token is a byte, and the ends
    assert result["nats_per_token"] == pytest.approx(math.log(260), rel=0.1)  # it is not trained
    assert result["context"] == result["stride"] == 32
    assert main(["evaluate", str(run_dir)]) == 0
    shown = capsys.readouterr().out
    assert f"{result['nats_per_token']:.4f} nats per token (standard error {result['standard_error']:.4f}" in shown
    assert "Documents with the highest loss per token" in shown


def test_other_text_and_other_windows(run_dir, capsys):
    text = run_dir.parent.parent / "texts" / "20.txt"
    one = evaluated(capsys, run_dir, "--text", text, "--context", 64, "--stride", 16)
    assert [each["place"] for each in one["documents"]] == [f"{text} byte 0"]
    assert one["text_nbytes"] == text.stat().st_size
    assert one["standard_error"] is None
    every = evaluated(capsys, run_dir, "--text", text.parent, "--documents", 7)
    assert len(every["documents"]) == 7
    halved = evaluated(capsys, run_dir / "checkpoints" / "step-00000004", "--text", text, "--dtype", "bf16")
    assert halved["nats_per_token"] == pytest.approx(one["nats_per_token"], rel=0.05)
    assert halved["nats_per_token"] != one["nats_per_token"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--context", "65"], "--context = 65: the model takes at most 64 tokens; nearest that works: 64"),
        (["--context", "8", "--stride", "9"], "--stride = 9: must be at most the context of 8; nearest that works: 8"),
        (["--text", "nothing-here"], "nothing-here"),
        (["--backend", "abacus"], "abacus"),
    ],
)
def test_what_cannot_be_evaluated_is_said(run_dir, capsys, words, said):
    assert main(["evaluate", str(run_dir), *words]) == 2
    assert said in capsys.readouterr().err


def test_a_model_that_no_run_trained_needs_text(run_dir, tmp_path, capsys):
    assert main(["export", str(run_dir), str(tmp_path / "out")]) == 0
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "out")]) == 2
    assert "is not a run with held-out text; name files, directories or globs" in capsys.readouterr().err
    text = run_dir.parent.parent / "texts"
    ours, theirs = (
        evaluated(capsys, run_dir, "--text", text, "--context", 64),
        evaluated(capsys, tmp_path / "out", "--text", text),
    )
    assert theirs["nats_per_token"] == pytest.approx(ours["nats_per_token"], rel=1e-6)
