"""The printed formulas of each optimizer, executed beside the optimizer itself, and their operations counted."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainledger as tl
from trainledger.cli import main
from trainledger.engine.train.optimizer import build_optimizer
from trainledger.engine.train.update_rules import _like, _moment, _store, _tables
from trainledger.ledger.optimizers.formulas import SYMBOLS, flops_per_parameter, formulas_of
from trainledger.ledger.optimizers.update_rules import UPDATE_FLOPS_PER_PARAMETER
from trainledger.spec.optimizers import OPTIMIZERS
from trainledger.spec.parts import from_fields
from trainledger.spec.recipe import Recipe

pytestmark = pytest.mark.torch
RATE, STEPS = 1e-3, 50
SHAPES = {"matrix": (96, 64), "vector": (64,)}  # more elements than 8-bit Adam keeps in fp32; Muon's loop transposes it
STATES = {"m", "v", "v_max", "b", "s", "a", "r", "c"}
OPTIONS: list[dict[str, Any]] = [
    *({"optimizer": kind} for kind in OPTIMIZERS),
    {"optimizer": "adamw", "optimizer.amsgrad": True},
    {"optimizer": "rmsprop", "optimizer.momentum": 0.9},
    {"optimizer": "rmsprop", "optimizer.centered": True},
    {"optimizer": "rmsprop", "optimizer.momentum": 0.9, "optimizer.centered": True},
]
TORCH_FUNCTIONS = ("sqrt", "sign", "maximum", "clip", "norm", "mean", "numel")
FUNCTIONS: dict[str, Any] = {name: getattr(torch, name) for name in TORCH_FUNCTIONS}


def recipe_of(**fields: Any) -> Recipe:
    return from_fields(
        Recipe, {"seq_len": 8, "global_batch": 1, "steps": 1, "learning_rate": RATE, "precision": "fp32", **fields}
    )


def label(fields: dict[str, Any]) -> str:
    return " ".join(map(str, fields.values()))


class Written:
    """A parameter that the printed lines update."""

    def __init__(self, weights: Tensor, lines: list[str], constants: dict[str, float]) -> None:
        zero = torch.zeros_like(weights)
        self.names: dict[str, Any] = dict.fromkeys(STATES, zero) | constants | FUNCTIONS
        self.names |= {"w": weights.clone(), "lr": RATE, "eps": torch.finfo(weights.dtype).eps}
        self.names |= {"bf16": Tensor.bfloat16, "read": self.read, "store": self.store, "r": 0 * weights[..., :1]}
        self.names["c"] = zero if "sign" in " ".join(lines) else 0 * weights[:1]
        self.lines, self.t = lines, 0
        self.tables = _tables(weights.device)
        blocks = -(-weights.numel() // 256)
        for name, (values, _) in zip(("m8", "v8"), self.tables, strict=True):
            codes = torch.full((blocks, 256), int(values.eq(0).nonzero()), dtype=torch.uint8)
            self.names[name] = (name, codes, torch.zeros(blocks, 1))

    def read(self, stored: tuple[str, Tensor, Tensor]) -> Tensor:
        return _like(_moment(*stored[1:], self.tables[stored[0] == "v8"][0]), self.names["w"])

    def store(self, moment: Tensor) -> tuple[str, Tensor, Tensor]:
        name = "m8" if moment is self.names["m"] else "v8"
        codes, scales = self.names[name][1:]
        _store(moment.reshape(-1, 256).clone(), codes, scales, self.tables[name == "v8"][1])
        return name, codes, scales

    def update(self, gradient: Tensor) -> Tensor:
        self.t += 1
        self.names |= {"g": gradient, "t": self.t}
        for line in self.lines:
            exec(line, self.names)
        weights: Tensor = self.names["w"]
        return weights


def furthest(fields: dict[str, Any], dtype: torch.dtype) -> float:
    """The largest difference of a weight in 50 steps, the formulas those that the command prints."""
    recipe = recipe_of(**fields, **{"optimizer.implementation": "loop"})
    data: Any = tl.explain("optimizer", {"model": {"preset": "teach-1m"}, "recipe": recipe_fields(fields)})
    data = data.document().data()
    generator = torch.Generator().manual_seed(3)
    module = nn.Module()
    for name, shape in SHAPES.items():
        module.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)))
    lines = {"matrix": data["formulas"], "vector": data["formulas_of_vectors"]}
    written = {
        name: Written(each.detach(), in_fp32(lines[name], each), data["constants"])
        for name, each in module.named_parameters()
    }
    optimizer, most = build_optimizer(module, recipe), 0.0
    for _ in range(STEPS):
        for each in module.parameters():
            # From 1e-5 to 1, so that weights stay below 8, where fp32 has steps of 4.8e-7.
            scale = 10 ** (5 * torch.rand(each.shape, generator=generator, dtype=dtype) - 5)
            each.grad = torch.randn(each.shape, generator=generator, dtype=dtype) * scale
        optimizer.step()
        for name, each in module.named_parameters():
            assert each.grad is not None
            most = max(most, float((written[name].update(each.grad) - each.detach()).abs().max()))
    return most


def in_fp32(lines: list[str], weights: Tensor) -> list[str]:
    """The lines of a tensor: one with few elements keeps its moments in fp32."""
    return [each for each in lines if weights.numel() >= 4096 or not ("read(" in each or "store(" in each)]


def recipe_fields(fields: dict[str, Any]) -> dict[str, Any]:
    own = {name.partition(".")[2]: value for name, value in fields.items() if "." in name}
    recipe = {"seq_len": 8, "global_batch": 1, "steps": 1, "precision": "fp32"}
    return recipe | {"optimizer": {"kind": fields["optimizer"], **own}}


@pytest.mark.parametrize("fields", OPTIONS, ids=label)
def test_the_formulas_do_what_the_optimizer_does(fields: dict[str, Any]) -> None:
    # Muon's matmuls round to bf16 (2**-8) at each of five iterations, in another order: 50 updates of root mean square
    # 0.2 x RATE, each some 1 % off, are at most 50 x 4 x 0.2 x RATE x 0.05 apart in an element of four deviations.
    # 8 bits: a moment that lies between two codes is rounded to either, some 1 % of it, in a few of 50 updates of RATE.
    bounds = {"muon": 50 * 4 * 0.2 * RATE * 0.05, "adam-8bit": 0.1 * RATE, "adamw-8bit": 0.1 * RATE}
    # Momentum 0.9 adds up ten updates.
    bound = 2e-6 if fields["optimizer"] == "rmsprop" and "optimizer.momentum" in fields else 5e-7
    assert furthest(fields, torch.float32) <= bounds.get(fields["optimizer"], bound)


IN_ONE_FORMAT = [each for each in OPTIONS if each["optimizer"] not in ("muon", "adam-8bit", "adamw-8bit")]


@pytest.mark.parametrize("fields", IN_ONE_FORMAT, ids=label)
def test_in_double_precision_they_are_the_same_to_rounding(fields: dict[str, Any]) -> None:
    assert furthest(fields, torch.float64) <= 1e-13


def test_another_formula_is_told_apart() -> None:
    data: Any = tl.explain("optimizer", "adamw").document().data()
    weights, gradient = torch.ones(8, 8), torch.full((8, 8), 0.5)
    right = Written(weights, data["formulas"], data["constants"]).update(gradient)
    swapped = [line.replace("1 - beta1**t", "1 - beta2**t", 1) for line in data["formulas"]]
    assert swapped != data["formulas"]
    assert (Written(weights, swapped, data["constants"]).update(gradient) - right).abs().max() > 5e-7


class Counted:
    """An array of which only the size is known; each operation adds the elements of its result to ``done``."""

    done = 0

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    def made(self, *others: Any, times: int = 1, shape: tuple[int, ...] | None = None) -> "Counted":
        shapes = [each.shape for each in (self, *others) if isinstance(each, Counted)]
        whole = shape or tuple(map(max, zip(*shapes, strict=True)))
        Counted.done += times * whole[0] * whole[1]
        return Counted(*whole)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = made

    def reduced(self, *shape: int, times: int = 1) -> "Counted":
        self.made(times=times)
        return Counted(*shape)

    def __gt__(self, other: object) -> bool:  # of a norm and a number: one operation of a step
        return True


def operations(lines: tuple[str, ...]) -> int:
    """Elementary operations of the lines for each element of a matrix so large that its sides count nothing."""
    side, Counted.done = 10**6, 0

    def mean(x: Counted, dim: int, keep: bool) -> Counted:
        return x.reduced(*((x.shape[0], 1) if dim == -1 else (1, x.shape[1])))

    names: dict[str, Any] = dict.fromkeys(STATES | {"w", "g"}, Counted(side, side))
    names |= {"r": Counted(side, 1), "c": Counted(1, side)} if any("mean(" in each for each in lines) else {}
    for name in ("sqrt", "sign", "maximum", "clip"):
        names[name] = Counted.made
    # Of a stored moment: a product to read it; its magnitude, the largest, a division and 8 comparisons to store it.
    names |= {"read": Counted.made, "store": lambda x: x.made(times=11), "mean": mean, "numel": lambda x: side**2}
    names |= {"norm": lambda x: x.reduced(1, 1, times=2), "bf16": lambda x: x}
    names |= dict.fromkeys(("m8", "v8"), Counted(side, side))
    constants = ("lr", "t", "beta1", "beta2", "epsilon", "eps", "momentum")
    for line in lines:
        if not line.startswith("for "):  # matmuls are counted apart
            exec(line, namespace := {**dict.fromkeys(constants, 0.5), **names})
            names = {name: namespace[name] for name in namespace if name not in constants}
    return round(Counted.done / side**2)


@pytest.mark.parametrize("fields", OPTIONS, ids=label)
def test_their_operations_are_the_flops_of_the_ledger(fields: dict[str, Any]) -> None:
    recipe = recipe_of(**fields, **{"optimizer.weight_decay": 0})
    assert operations(formulas_of(recipe.optimizer)) == flops_per_parameter(recipe.optimizer)
    kind = "amsgrad" if recipe.optimizer.amsgrad else recipe.optimizer.kind
    if recipe.optimizer.kind != "rmsprop" or len(fields) == 1:
        assert flops_per_parameter(recipe.optimizer) == UPDATE_FLOPS_PER_PARAMETER[kind]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_kind_is_explained_in_a_screen(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "optimizer", kind]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{kind}: ")
    data: Any = tl.explain("optimizer", kind).document().data()
    assert all(line in printed for line in data["formulas"])
    assert "(" in data["source"]
    used = " ".join(data["formulas"])
    for state in data["states"]:  # each state is in a formula
        if state["name"] != "step" and not state["name"].endswith("_scale"):
            assert SYMBOLS[state["name"]] in used
    assert max(map(len, printed.splitlines())) <= 88


def test_what_is_no_option_of_an_optimizer_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "optimizer", "adam", "--stage", "1"]) == 2
    assert capsys.readouterr().err == "--stage = 1: is no option of optimizer\n"
    assert main(["explain", "optimizer", "adam", "--set", "recipe.steps=1"]) == 2
    assert capsys.readouterr().err.startswith("--set: goes with a run: ")
