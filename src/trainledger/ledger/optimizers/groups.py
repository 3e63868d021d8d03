"""What an update runs over, and the lines that its rule is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from trainledger.frozen import frozen
from trainledger.ledger.core.array import Array, Leaf
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import Int
from trainledger.ledger.model.parameters import ModelLeaves
from trainledger.ledger.ops import operations as op
from trainledger.ledger.optimizers.states import for_muon
from trainledger.spec.recipe import Recipe


@frozen
class Group:
    """The parameters of one torch parameter group: runs of a pattern of parameters, and how often each comes."""

    rule: str
    decay: float
    runs: tuple[tuple[tuple[Leaf, ...], Int], ...]

    @property
    def elements(self) -> Int:
        return self.total(lambda leaf: leaf.elements)

    @property
    def tensors(self) -> Int:
        return self.total(lambda leaf: 1)

    @property
    def empty(self) -> bool:
        return not any(pattern for pattern, _ in self.runs)

    def total(self, amount: Callable[[Leaf], Int]) -> Int:
        """An amount of each parameter, added up."""
        return sum(count * sum(amount(leaf) for leaf in pattern) for pattern, count in self.runs)

    def among(self, chosen: Callable[[Leaf], bool]) -> Group:
        """The same group with the parameters that ``chosen`` accepts."""
        runs = tuple((tuple(leaf for leaf in pattern if chosen(leaf)), count) for pattern, count in self.runs)
        return Group(self.rule, self.decay, runs)

    def first(self) -> Leaf:
        """The first parameter of a group that is not empty."""
        return next(leaf for pattern, _ in self.runs for leaf in pattern)


def whole_of(leaves: ModelLeaves) -> Group:
    """All trained parameters as one group."""
    return Group("", 0.0, tuple(leaves.in_order())).among(lambda leaf: leaf.trained)


def groups_of(leaves: ModelLeaves, recipe: Recipe) -> tuple[Group, ...]:
    """Matrices with decay, vectors without, as the engine groups them; Muon's matrices before both. None is empty."""
    whole = whole_of(leaves)
    rule = "adamw" if recipe.optimizer == "muon" else recipe.optimizer
    rest = whole.among(lambda leaf: not for_muon(leaf)) if recipe.optimizer == "muon" else whole
    groups = [
        Group(rule, recipe.weight_decay, rest.among(lambda leaf: leaf.decayed).runs),
        Group(rule, 0.0, rest.among(lambda leaf: not leaf.decayed).runs),
    ]
    if recipe.optimizer == "muon":
        groups.insert(0, Group("muon", recipe.weight_decay, whole.among(for_muon).runs))
    return tuple(each for each in groups if not each.empty)


def each_parameter(tape: Tape, group: Group) -> Iterator[Leaf]:
    """Every parameter in torch's order inside the loops that repeat it.

    The first round of a pattern stands alone: what it finds left over from the parameter before it is not what
    the others find.
    """
    for pattern, count in group.runs:
        yield from pattern
        if pattern and not op.is_one(count):
            with tape.loop("layers", count - 1):
                yield from pattern


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

    def changed(self, name: str, target: Array, *reads: Array) -> None:
        """A line that changes its target in place."""
        name = f"{self.prefix}{name}_"
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
