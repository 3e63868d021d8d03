"""muP: activations and their changes keep their size as the width grows (the coordinate check of Yang et al. 2022,
arXiv 2203.03466, appendix D.1), without it they do not."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runs import StopAfter
from safetensors.torch import load_file
from test_guard import assert_same_bits
from tiny_run import CountingFeed, tiny_run

from models import sizes as model_fields
from trainledger.engine.nn.init import initialize
from trainledger.engine.nn.transformer import Transformer
from trainledger.engine.train.engine import train
from trainledger.engine.train.observer import Observer, StepRecord, TrainingState
from trainledger.engine.train.optimizer import build_optimizer, set_learning_rate
from trainledger.engine.train.precision import build_model
from trainledger.engine.train.stop import Interrupted
from trainledger.spec.initialization import start_of
from trainledger.spec.problem import InvalidInput
from trainledger.spec.run import Run
from trainledger.spec.runfile import digest, parse, resolved

BASE = 64
WIDTHS = (64, 128, 256, 512)
STEPS = 8


def of_width(width: int, *, mup: bool, **fields: Any) -> Run:
    """The tiny run in another width: more heads of 16, and a hidden layer in proportion."""
    model = model_fields(D=width, H=width // 16, KV=width // 32, F=2 * width)
    usual = {
        "steps": STEPS,
        "schedule": "constant",
        "grad_clip": None,
        "evaluation.every": None,
        "checkpoints.every": None,
    }
    return tiny_run(model, **usual, **({"mup.base_width": BASE} if mup else {}), **fields)


class Activations(Observer):
    """The mean size of what blocks and head give on the same tokens, and of how it has changed since the start."""

    def on_start(self, state: TrainingState) -> None:
        self.model = state.model
        self.ids_BT = torch.arange(64).view(4, 16)
        self.first = self._coordinates()
        self.sizes: list[dict[str, float]] = []
        self.changes: list[dict[str, float]] = []

    def on_step_end(self, record: StepRecord) -> None:
        now = self._coordinates()
        self.sizes.append({name: float(each.abs().mean()) for name, each in now.items()})
        self.changes.append({name: float((each - self.first[name]).abs().mean()) for name, each in now.items()})

    def _coordinates(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        modules = {
            name: each for name, each in self.model.named_modules() if name.startswith("layers.") or name == "lm_head"
        }
        kept = {name: each for name, each in modules.items() if name.count(".") == 1 or name == "lm_head"}
        hooks = [
            each.register_forward_hook(lambda _, __, out, name=name: found.update({name: out.detach()}))
            for name, each in kept.items()
        ]
        with torch.no_grad():
            self.model(self.ids_BT)
        for each in hooks:
            each.remove()
        return found


@cache
def watched(width: int, mup: bool, directory: Path) -> Activations:
    watch = Activations()
    run = of_width(width, mup=mup, learning_rate=1e-2)
    train(run, directory / f"{width}-{mup}", open_feed=CountingFeed, observers=[watch])
    return watch


def growth(directory: Path, name: str, *, mup: bool) -> float:
    """How much a change is larger in the widest model than in the narrowest, after as few steps as in the paper: later
    logits hardly change any more where the loss is low already, whatever the width."""
    narrow, wide = (watched(width, mup, directory).changes[2][name] for width in (WIDTHS[0], WIDTHS[-1]))
    return wide / narrow


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("widths")


@pytest.mark.parametrize("name", ["layers.0", "layers.1", "lm_head"])
def test_coordinates_do_not_grow_with_the_width(directory: Path, name: str) -> None:
    for step in range(STEPS):
        sizes = [watched(width, True, directory).sizes[step][name] for width in WIDTHS]
        assert max(sizes) < 1.25 * sizes[0], (step, sizes)
    # Logits of a wide model begin smaller by design: the narrow one's are those of its start for a good part.
    assert 0.4 < growth(directory, name, mup=True) < 1.25
    assert growth(directory, name, mup=False) > 2.5, "without muP eight times the width makes larger changes"


def test_only_rates_of_matrices_that_are_no_tables_follow_the_width() -> None:
    run = of_width(256, mup=True)
    model = build_model(run.model, run.recipe)
    optimizer = build_optimizer(model, run.recipe, width_factor=run.width_factor)
    assert run.width_factor == 4
    set_learning_rate(optimizer, 0.5)
    rates = {each: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for each in group["params"]}
    for name, each in model.named_parameters():
        rate = 0.5 if each.ndim == 1 or name == "embed_tokens.weight" else 0.125
        assert rates[each] == (rate, 0.0 if each.ndim == 1 else 0.1), name


def test_only_the_head_starts_smaller() -> None:
    run = of_width(256, mup=True)
    plain, scaled = (build_model(run.model, run.recipe) for _ in range(2))
    initialize(plain, seed=3)
    initialize(scaled, seed=3, width_factor=4)
    assert isinstance(scaled, Transformer)
    for (name, a), (_, b) in zip(plain.named_parameters(), scaled.named_parameters(), strict=True):
        torch.testing.assert_close(b, a / 2 if name == "lm_head.weight" else a, msg=name)
    assert start_of("lm_head.weight", plain.lm_head.weight.shape[-1], run.model)[1] == 0.5 / 16


def test_at_the_base_width_it_is_the_same_training(tmp_path: Path) -> None:
    a = train(of_width(BASE, mup=True), tmp_path / "a", open_feed=CountingFeed)
    b = train(of_width(BASE, mup=False), tmp_path / "b", open_feed=CountingFeed)
    ours, theirs = (load_file(each.checkpoint / "model.safetensors") for each in (a, b))
    assert all(torch.equal(each, theirs[name]) for name, each in ours.items())
    assert digest(of_width(BASE, mup=True)) != digest(of_width(BASE, mup=False))


def test_a_resumed_run_keeps_the_rates(tmp_path: Path) -> None:
    run = of_width(128, mup=True, **{"precision": "bf16", "precision.master_weights": True})
    whole = train(run, tmp_path / "whole", open_feed=CountingFeed)
    with pytest.raises(Interrupted):
        train(run, tmp_path / "parts", open_feed=CountingFeed, observers=[StopAfter(3)])
    assert_same_bits(train(run, tmp_path / "parts", open_feed=CountingFeed, resume=True).checkpoint, whole.checkpoint)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"recipe.optimizer": "sgd"},
            r"recipe\.mup\.base_width = 64: scales learning rates for optimizers with normalized steps",
        ),
        ({"recipe.optimizer": "muon"}, r"and recipe\.optimizer is muon; nearest that works: recipe\.optimizer = adamw"),
        ({"model.tie_embeddings": True}, r"model\.tie_embeddings = true: needs an untied head"),
        ({"recipe.lora.rank": 4}, r"has no rule here for adapters"),
    ],
)
def test_what_it_has_no_rule_for_is_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        parse(resolved(of_width(128, mup=True)), fields)
