"""What an update runs over, and the lines that its rule is made of."""

from __future__ import annotations

from trainledger.frozen import frozen
from trainledger.ledger.core.graph import Array, Leaf
from trainledger.ledger.core.leaves import ModelLeaves, Parameters
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import Int
from trainledger.spec.recipe import Recipe

_MUON_LEAVES_OUT = ("embed_tokens", "embed_positions", "lm_head")


@frozen
class Group(Parameters):
    """The parameters of one torch parameter group, and the rule that updates them."""

    rule: str
    decay: float


def for_muon(leaf: Leaf) -> bool:
    """Whether Muon takes a parameter: a hidden matrix. torch.optim.Muon takes no stack of them (three dims)."""
    named = leaf.path.split(".")
    return len(leaf.shape) == 2 and leaf.decayed and not any(each in named for each in _MUON_LEAVES_OUT)


def groups_of(leaves: ModelLeaves, recipe: Recipe) -> tuple[Group, ...]:
    """Matrices with decay, vectors without, as the engine groups them; Muon's matrices before both. None is empty."""
    whole = leaves.trained()
    rule = "adamw" if recipe.optimizer == "muon" else recipe.optimizer
    rest = whole.among(lambda leaf: not for_muon(leaf)) if recipe.optimizer == "muon" else whole
    groups = [
        Group(rest.among(lambda leaf: leaf.decayed).runs, rule, recipe.weight_decay),
        Group(rest.among(lambda leaf: not leaf.decayed).runs, rule, 0.0),
    ]
    if recipe.optimizer == "muon":
        groups.insert(0, Group(whole.among(for_muon).runs, "muon", recipe.weight_decay))
    return tuple(each for each in groups if not each.empty)


def weight_gradient_moment(tape: Tape, elements: Int) -> tuple[Array, Array, Array]:
    """What an update reads and changes, each in its format: weights, gradients, and one moment for all."""
    precision = tape.precision
    formats = (precision.updated, precision.updating, precision.moments)
    weight, gradient, moment = (Array(elements, dtype, None) for dtype in formats)
    return weight, gradient, moment


class Lines:
    """One line of a rule after another, on one tensor or (``foreach``) on all tensors of a group."""

    def __init__(self, tape: Tape, *, foreach: bool = False) -> None:
        self.tape = tape
        self.prefix = "_foreach_" if foreach else ""

    def made(self, name: str, *reads: Array) -> Array:
        """A line that makes a new array, as large as the first that it reads and as wide as the widest."""
        n = reads[0].elements
        dtype = max((each.dtype for each in reads), key=lambda each: each == "fp32")
        return self.tape.emit(self.prefix + name, "elementwise", reads=reads, makes=[(n, dtype)], flops=n)[0]

    def changed(self, name: str, target: Array, *reads: Array, suffix: str = "_") -> None:
        """A line that changes its target in place."""
        name = self.prefix + name + suffix
        self.tape.emit(name, "elementwise", reads=reads, changes=[target], flops=target.elements)


def count_step(tape: Tape) -> None:
    """A step counter is raised by one."""
    tape.emit("add_", "elementwise", changes=[Array(1, "fp32", None)], flops=1)


def count_steps(tape: Tape, tensors: Int) -> None:
    """All step counters of a group are raised by one, which becomes a tensor first."""
    one = tape.emit("lift_fresh", "copy", makes=[(1, "fp32")])
    tape.emit("_foreach_add_", "elementwise", reads=one, changes=[Array(tensors, "fp32", None)], flops=tensors)


def read_number(tape: Tape, dtype: str = "fp32") -> None:
    """The host reads one number: a step counter or a norm."""
    tape.emit("_local_scalar_dense", "transfer", reads=[Array(1, dtype, None)])


def read_steps(tape: Tape, count: Int) -> None:
    """The host reads step counters one by one."""
    with tape.loop("tensors", count):
        read_number(tape)


def remains(array: Array) -> Array:
    """Say of an array that a loop makes that each round's stays until the list that holds them is gone."""
    assert array.memory is not None
    array.memory.record.cached = True
    return array
