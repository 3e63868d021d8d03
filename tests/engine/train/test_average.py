"""The moving average of the weights: against one that is added up here, kept through a resume, and taken afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runs import StopAfter
from safetensors.torch import load_file
from test_guard import assert_same_bits, guarded
from tiny_run import CountingFeed, Poisoned, poisoned, tiny_run

from trainledger.cli import main
from trainledger.engine.train.engine import train
from trainledger.engine.train.observer import Observer, StepRecord, TrainingState
from trainledger.engine.train.precision import stepped
from trainledger.engine.train.stop import Interrupted
from trainledger.engine.train.trained import load_trained
from trainledger.spec.problem import InvalidInput
from trainledger.spec.runfile import parse, resolved

DECAY = 0.8


class Averaging(Observer):
    """An average in fp64 of what the optimizer updates, by name, from what it holds after each step that was taken."""

    def __init__(self) -> None:
        self.average: dict[str, torch.Tensor] = {}

    def on_start(self, state: TrainingState) -> None:
        self.state = state

    def on_step_end(self, record: StepRecord) -> None:
        if record.skipped:
            return
        names = [name for name, each in self.state.model.named_parameters() if each.requires_grad]
        now = [each for each in stepped(self.state.model, self.state.optimizer) if each.requires_grad]
        for name, each in zip(names, now, strict=True):
            value = each.detach().double()
            before = self.average.get(name, value)
            self.average[name] = DECAY * before + (1 - DECAY) * value


def kept(path: Path) -> dict[str, torch.Tensor]:
    stored = load_file(path / "optimizer.safetensors")
    return {name.removeprefix("ema/"): each for name, each in stored.items() if name.startswith("ema/")}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"optimizer": "sgd"},
        {"optimizer": "muon"},
        {"optimizer": "adafactor"},
        {"optimizer": "lion", "optimizer.implementation": "loop"},
        {"optimizer": "adamw-8bit"},
        {"precision": "bf16", "precision.master_weights": True},
        {"lora.rank": 4},
    ],
    ids=str,
)
def test_it_is_the_average_of_what_is_updated(tmp_path: Path, fields: dict[str, Any]) -> None:
    watch = Averaging()
    finished = train(tiny_run(**fields, **{"ema.decay": DECAY}), tmp_path, open_feed=CountingFeed, observers=[watch])
    found = kept(finished.checkpoint)
    assert found.keys() == watch.average.keys()
    for name, each in found.items():
        assert each.dtype == torch.float32
        torch.testing.assert_close(each.double(), watch.average[name], rtol=1e-5, atol=1e-7)


def test_a_step_that_is_left_out_moves_no_average(tmp_path: Path) -> None:
    watch = Averaging()
    run = guarded(**{"ema.decay": DECAY})
    finished = train(run, tmp_path, open_feed=poisoned([0, 4, 9]), observers=[Poisoned(), watch])
    for name, each in kept(finished.checkpoint).items():
        torch.testing.assert_close(each.double(), watch.average[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "fields", [{}, {"optimizer": "sgd"}, {"precision": "bf16", "precision.master_weights": True}], ids=str
)
def test_a_resumed_run_ends_with_the_same_average(tmp_path: Path, fields: dict[str, Any]) -> None:
    run = tiny_run(**fields, **{"ema.decay": DECAY})
    whole = train(run, tmp_path / "whole", open_feed=CountingFeed)
    with pytest.raises(Interrupted):
        train(run, tmp_path / "parts", open_feed=CountingFeed, observers=[StopAfter(3)])
    parts = train(run, tmp_path / "parts", open_feed=CountingFeed, resume=True)
    assert_same_bits(whole.checkpoint, parts.checkpoint)


def test_training_is_the_same_with_an_average_beside_it(tmp_path: Path) -> None:
    beside = train(tiny_run(**{"ema.decay": DECAY}), tmp_path / "a", open_feed=CountingFeed)
    without = train(tiny_run(), tmp_path / "b", open_feed=CountingFeed)
    ours, theirs = (load_file(each.checkpoint / "model.safetensors") for each in (beside, without))
    assert all(torch.equal(each, theirs[name]) for name, each in ours.items())


def test_it_is_loaded_in_the_place_of_the_weights(tmp_path: Path) -> None:
    finished = train(tiny_run(**{"ema.decay": DECAY}), tmp_path / "run", open_feed=CountingFeed)
    average = kept(finished.checkpoint)
    tokenizer_less = load_trained_weights(finished.checkpoint, averaged=True)
    assert tokenizer_less.keys() == average.keys()
    assert all(torch.equal(tokenizer_less[name], each) for name, each in average.items())
    last = load_trained_weights(finished.checkpoint, averaged=False)
    assert not all(torch.equal(last[name], each) for name, each in average.items())


def load_trained_weights(path: Path, *, averaged: bool) -> dict[str, torch.Tensor]:
    return dict(load_trained(path, print, averaged=averaged).model.named_parameters())


def test_of_adapters_the_average_is_merged(tmp_path: Path) -> None:
    run = tiny_run(**{"ema.decay": DECAY, "lora.rank": 4})
    finished = train(run, tmp_path / "run", open_feed=CountingFeed)
    merged, last = (load_trained_weights(finished.checkpoint, averaged=each) for each in (True, False))
    changed = [name for name, each in merged.items() if not torch.equal(each, last[name])]
    assert changed
    assert "embed_tokens.weight" not in changed


def test_export_takes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished = train(tiny_run(**{"ema.decay": DECAY}), tmp_path / "run", open_feed=CountingFeed)
    for name, words in (("average", ["--ema"]), ("weights", [])):
        assert main(["export", str(tmp_path / "run"), str(tmp_path / name), *words]) == 0
    exported = [load_file(tmp_path / name / "model.safetensors") for name in ("average", "weights")]
    ours = kept(finished.checkpoint)["embed_tokens.weight"]
    assert torch.equal(exported[0]["model.embed_tokens.weight"], ours)
    assert not torch.equal(exported[1]["model.embed_tokens.weight"], ours)


def test_without_one_there_is_a_sentence(tmp_path: Path) -> None:
    finished = train(tiny_run(), tmp_path / "run", open_feed=CountingFeed)
    with pytest.raises(InvalidInput, match=r"has no average of its weights: recipe\.ema was absent"):
        load_trained(finished.checkpoint, print, averaged=True)
    with pytest.raises(InvalidInput, match=r"recipe\.ema = 0\.9.*: would not change in bf16"):
        parse(resolved(tiny_run()), {"recipe.ema.decay": 0.9, "recipe.precision": "bf16"})
