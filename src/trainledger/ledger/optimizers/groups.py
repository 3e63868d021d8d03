"""What an update runs over, and the small operations that rules share."""

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


def widest(*arrays: Array) -> str:
    """The format of a temporary: fp32 where one of the arrays has it, else that of the first."""
    return max((each.dtype for each in arrays), key=lambda each: each == "fp32")


def norms(tape: Tape, x: Array, elements: Int) -> Array:
    """So many L2 norms of parts of x."""
    return tape.make("linalg_vector_norm", "reduction", x, elements=elements, flops=x.elements)


def count_step(tape: Tape) -> None:
    """A step counter is raised by one."""
    tape.change("add_", Array(1, "fp32", None))


def count_steps(tape: Tape, tensors: Int) -> None:
    """All step counters of a group are raised by one, which becomes a tensor first."""
    one = tape.make("lift_fresh", "copy", elements=1, dtype="fp32")
    tape.change("_foreach_add_", Array(tensors, "fp32", None), one)


def read_number(tape: Tape, dtype: str = "fp32") -> None:
    """The host reads one number: a step counter or a norm."""
    tape.emit("_local_scalar_dense", "transfer", reads=[Array(1, dtype, None)])


def read_steps(tape: Tape, count: Int) -> None:
    """The host reads step counters one by one."""
    with tape.loop("tensors", count):
        read_number(tape)
