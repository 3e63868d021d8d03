"""No run that the preflight lets begin is ended by its memory limit: run files around limits of their own process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from trainledger.answers.closed_loop import needs_of
from trainledger.engine.train.preflight import KEPT_SHARE, LEAN_SHARE
from trainledger.engine.train.ranks import Ranks
from trainledger.spec.run import Run
from trainledger.spec.runfile import parse, to_toml

pytestmark = pytest.mark.process

Change = dict[str, Any]
# Of many sizes: states weigh most, then activations, then logits; and each way to spend or save memory.
RUNS: dict[str, tuple[tuple[int, int, int], Change]] = {
    "wide": ((512, 4, 2000), {}),
    "logits": ((128, 2, 16000), {"recipe.global_batch": 8}),
    "activations": ((256, 6, 1000), {"recipe.global_batch": 16}),
    "small": ((64, 2, 300), {}),
    "deep": ((192, 16, 1000), {}),
    "large vocabulary": ((256, 2, 32000), {}),
    "tied": ((256, 4, 12000), {"model.tie_embeddings": True}),
    "recomputed": ((256, 6, 1000), {"recipe.global_batch": 16, "recipe.activation_checkpointing": "full"}),
    "chunked loss": ((128, 2, 16000), {"recipe.global_batch": 8, "recipe.loss": "chunked"}),
    "accumulated": ((256, 4, 4000), {"recipe.micro_batch": 1}),
    "background checkpoints": (
        (384, 4, 4000),
        {"recipe.checkpoints.asynchronous": True, "recipe.checkpoints.every": 2},
    ),
    "bf16": ((384, 4, 4000), {"recipe.precision": "bf16-mixed"}),
    "bf16 weights": ((384, 4, 4000), {"recipe.precision": "bf16"}),
    "sgd": ((384, 4, 4000), {"recipe.optimizer": "sgd"}),
    "foreach": ((384, 4, 4000), {"recipe.optimizer.implementation": "foreach"}),
    "lion": ((384, 4, 4000), {"recipe.optimizer": "lion"}),
    "muon": ((384, 4, 4000), {"recipe.optimizer": "muon"}),
    "adafactor": ((384, 4, 4000), {"recipe.optimizer": "adafactor"}),
    "written-out attention": ((256, 4, 1000), {"recipe.attention": "math", "recipe.global_batch": 8}),
    "dropout": ((256, 4, 1000), {"recipe.dropout": 0.1, "recipe.global_batch": 8}),
    "adapters": ((384, 4, 4000), {"recipe.lora.rank": 8}),
}
SHORT = ("wide", "activations", "background checkpoints")
LIMITS = ("RLIMIT_DATA", "RLIMIT_AS")


def run_of(name: str, directory: Path) -> Run:
    (width, layers, vocabulary), changes = RUNS[name]
    text = directory / "text"
    text.mkdir(exist_ok=True)
    for number in range(30):
        (text / f"{number}.txt").write_text(f"{number} the quick brown fox jumps over the lazy dog " * 60)
    table = {
        "model": {
            "name": "m", "max_seq_len": 128, "attention": {"n_heads": 8}, "d_model": width, "n_layers": layers,
            "vocab_size": vocabulary, "feed_forward": {"d_ff": 4 * width},
        },
        "recipe": {"seq_len": 128, "global_batch": 4, "steps": 6},
        "data": {"path": [str(text)], "cache": str(directory / "cache"), "validation_fraction": 0.2},
    }  # fmt: skip
    return parse(table, changes)


def under(limit: str, nbytes: int, run: Run, directory: Path, number: int) -> tuple[int, str]:
    """How a run ends with so many bytes beside what the process has."""
    file = directory / f"{number}.toml"
    file.write_text(to_toml(run))
    words = [sys.executable, str(Path(__file__).with_name("limited_run.py")), str(file), str(directory / f"{number}")]
    done = subprocess.run([*words, limit, str(nbytes)], capture_output=True, text=True, timeout=300)
    return done.returncode, done.stderr


def around(name: str, directory: Path, shares: Sequence[float], limits: Sequence[str] = LIMITS) -> None:
    """A run with some bytes less and more than it is said to need, of each kind of limit."""
    run = run_of(name, directory)
    needs = needs_of(run, Ranks(device=torch.device("cpu")))
    needed = needs.host(run.recipe, LEAN_SHARE)
    least = {"RLIMIT_DATA": needed, "RLIMIT_AS": needed + 192 * 2**20}
    let_begin = 0
    for number, (limit, share) in enumerate((limit, share) for limit in limits for share in shares):
        code, said = under(limit, round(share * least[limit]), run, directory, number)
        refused = "--no-preflight" in said
        let_begin += not refused
        assert code == (6 if refused else 0), (name, limit, share, said[-600:])
        if share < 0.9:
            assert refused, (name, limit, share)
    assert let_begin, "some are said to fit, or nothing was tried"


@pytest.mark.parametrize("name", SHORT)
def test_what_is_said_to_fit_fits(name: str, tmp_path: Path) -> None:
    around(name, tmp_path, (0.85, 1.1), LIMITS[SHORT.index(name) % 2 :][:1])


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_what_is_said_to_fit_fits_closely(name: str, tmp_path: Path) -> None:
    """Also where there is not quite the room to keep what is freed, and just so."""
    run = run_of(name, tmp_path)
    needs = needs_of(run, Ranks(device=torch.device("cpu")))
    kept = needs.host(run.recipe, KEPT_SHARE) / needs.host(run.recipe, LEAN_SHARE)
    around(name, tmp_path, (0.98, 1.03, 1.02 * kept))
