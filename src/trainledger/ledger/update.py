"""What follows the gradients: joint clipping, and the optimizer's update in each of torch's three ways.

``fused`` updates all tensors in one kernel without scratch; ``foreach`` makes lists of temporaries as large
as all parameters of a group; ``loop`` goes tensor by tensor with temporaries as large as one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from trainledger.frozen import frozen
from trainledger.ledger import operations as op
from trainledger.ledger import rules
from trainledger.ledger.array import Array, Leaf
from trainledger.ledger.entry import Int
from trainledger.ledger.parameters import ModelLeaves
from trainledger.ledger.tape import Tape
from trainledger.spec.recipe import Recipe

# State tensors of parameter size, and whether each parameter has a step counter (one fp32 scalar).
STATES = {
    "sgd": (0, False),
    "momentum": (1, False),
    "adagrad": (1, True),
    "rmsprop": (1, True),
    "adam": (2, True),
    "adamw": (2, True),
}


def state_nbytes(leaves: ModelLeaves, recipe: Recipe) -> Int:
    """Bytes of the optimizer's state: moments in fp32, and 4 bytes per tensor that counts its steps."""
    moments, counts = STATES[recipe.optimizer]
    return 4 * moments * leaves.elements() + (4 * leaves.tensors() if counts else 0)


@frozen
class Group:
    """The parameters of one torch parameter group: how many elements in how many tensors.

    ``segments`` are runs of layers: the group's parameters of a pattern of blocks, and how often it comes.
    """

    decay: float
    before: tuple[Leaf, ...]
    segments: tuple[tuple[tuple[Leaf, ...], Int], ...]
    after: tuple[Leaf, ...]

    @property
    def elements(self) -> Int:
        outside = sum(each.elements for each in (*self.before, *self.after))
        return outside + sum(count * sum(each.elements for each in pattern) for pattern, count in self.segments)

    @property
    def tensors(self) -> Int:
        return len(self.before) + len(self.after) + sum(count * len(pattern) for pattern, count in self.segments)


def groups_of(leaves: ModelLeaves, weight_decay: float) -> tuple[Group, ...]:
    """Matrices with decay, vectors without, as the engine groups them."""
    return _group(leaves, weight_decay, decayed=True), _group(leaves, 0.0, decayed=False)


def whole_of(leaves: ModelLeaves) -> Group:
    """All parameters as one group."""
    return _group(leaves, 0.0, decayed=None)


def _group(leaves: ModelLeaves, decay: float, *, decayed: bool | None) -> Group:
    def chosen(all_of_them: Iterable[Leaf]) -> tuple[Leaf, ...]:
        return tuple(each for each in all_of_them if decayed is None or each.decayed == decayed)

    return Group(
        decay,
        chosen(leaves.before.values()),
        tuple((chosen(each.all()), each.count) for each in leaves.segments),
        chosen(leaves.after.values()),
    )


def each_parameter(tape: Tape, group: Group) -> Iterator[Leaf]:
    """Every parameter in torch's order inside the loops that repeat it.

    The first round of a pattern stands alone: what it finds left over from the parameter before it is not what
    the others find.
    """
    yield from group.before
    for pattern, count in group.segments:
        yield from pattern
        if not op.is_one(count):
            with tape.loop("layers", count - 1):
                yield from pattern
    yield from group.after


def clip(tape: Tape, leaves: ModelLeaves, *, foreach: bool) -> list[Array]:
    """The joint L2 norm of all gradients, and all gradients scaled by it (Pascanu et al. 2013)."""
    group = whole_of(leaves)
    elements, tensors = group.elements, group.tensors
    everything = Array(elements, "fp32", None)
    norms: list[Array] = []
    if foreach:
        norms += tape.emit("_foreach_norm", "reduction", reads=[everything], makes=[(tensors, "fp32")], flops=elements)
    else:
        for leaf in each_parameter(tape, group):
            gradient = Array(leaf.elements, "fp32", None)
            makes = [(1, "fp32")]
            made = tape.emit("linalg_vector_norm", "reduction", reads=[gradient], makes=makes, flops=leaf.elements)
            memory = made[0].memory
            assert memory is not None
            memory.record.cached = True
            norms += made
            del made, memory
    stacked = tape.emit("stack", "copy", reads=[Array(tensors, "fp32", None)], makes=[(tensors, "fp32")])
    total = tape.emit("linalg_vector_norm", "reduction", reads=stacked, makes=[(1, "fp32")], flops=tensors)
    norms.clear()
    del stacked
    shifted = tape.emit("add", "elementwise", reads=total, makes=[(1, "fp32")], flops=1)
    inverse = tape.emit("reciprocal", "elementwise", reads=shifted, makes=[(1, "fp32")], flops=1)
    scale = tape.emit("mul", "elementwise", reads=inverse, makes=[(1, "fp32")], flops=1)
    del shifted, inverse
    clamped = tape.emit("clamp", "elementwise", reads=scale, makes=[(1, "fp32")], flops=1)
    if foreach:
        tape.emit("_foreach_mul_", "elementwise", reads=clamped, changes=[everything], flops=elements)
    else:
        for leaf in each_parameter(tape, group):
            gradient = Array(leaf.elements, "fp32", None)
            tape.emit("mul_", "elementwise", reads=clamped, changes=[gradient], flops=leaf.elements)
    return total


def update(tape: Tape, leaves: ModelLeaves, recipe: Recipe) -> None:
    """The optimizer's step over both groups."""
    way = {"fused": _fused, "foreach": _foreach, "loop": _loop}[recipe.optimizer_implementation]
    for group in groups_of(leaves, recipe.weight_decay):
        way(tape, group, recipe.optimizer)


def _fused(tape: Tape, group: Group, optimizer: str) -> None:
    """One kernel over all tensors; Adagrad's counts its steps itself."""
    moments, counts = STATES[optimizer]
    n, steps = group.elements, Array(group.tensors, "fp32", None)
    if counts:
        tape.emit("_foreach_add_", "elementwise", changes=[steps], flops=steps.elements)
    changed = [Array(n, "fp32", None) for _ in range(1 + moments)]
    read = [Array(n, "fp32", None)]
    if counts:
        (changed if optimizer == "adagrad" else read).append(steps)
    kernel = "sgd" if optimizer == "momentum" else optimizer
    flops = rules.UPDATE_FLOPS_PER_PARAMETER[optimizer] * n
    tape.emit(f"_fused_{kernel}_", "update", reads=read, changes=changed, flops=flops, basis="assumed")


def _foreach(tape: Tape, group: Group, optimizer: str) -> None:
    """Each line of the rule as one kernel over lists of tensors; two of them may be temporaries at once."""
    n = group.elements
    everything = Array(n, "fp32", None)

    def made(name: str, *reads: Array) -> Array:
        return tape.emit(f"_foreach_{name}", "elementwise", reads=reads, makes=[(n, "fp32")], flops=n)[0]

    def changed(name: str, target: Array, *reads: Array) -> None:
        tape.emit(f"_foreach_{name}_", "elementwise", reads=reads, changes=[target], flops=n)

    moments, counts = STATES[optimizer]
    if counts:
        _count_steps(tape, group.tensors)
    gradient = everything
    if optimizer == "adamw" and group.decay:
        changed("mul", everything)
    elif group.decay:
        gradient = made("add", everything, everything)
    if optimizer in ("adam", "adamw"):
        changed("lerp", everything, gradient)
        changed("mul", everything)
        changed("addcmul", everything, gradient, gradient)
        del gradient
        _read_steps(tape, 2 * group.tensors)  # once for each of the two bias corrections
        root = made("sqrt", everything)
        changed("div", root)
        changed("add", root)
        changed("addcdiv", everything, everything, root)
    elif optimizer == "adagrad":
        _read_steps(tape, group.tensors)
        changed("addcmul", everything, gradient, gradient)
        root = made("sqrt", everything)
        changed("add", root)
        if gradient is everything:
            gradient = made("mul", everything)
        else:
            changed("mul", gradient)
        changed("addcdiv", everything, gradient, root)
    elif optimizer == "rmsprop":
        changed("mul", everything)
        changed("addcmul", everything, gradient, gradient)
        root = made("sqrt", everything)
        changed("add", root)
        changed("addcdiv", everything, gradient, root)
    else:
        if moments:
            changed("mul", everything)
            changed("add", everything, gradient)
            gradient = everything
        changed("add", everything, gradient)


def _count_steps(tape: Tape, tensors: Int) -> None:
    one = tape.emit("lift_fresh", "copy", makes=[(1, "fp32")])
    tape.emit("_foreach_add_", "elementwise", reads=one, changes=[Array(tensors, "fp32", None)], flops=tensors)


def _read_steps(tape: Tape, count: Int) -> None:
    """The host reads step counters one by one."""
    with tape.loop("tensors", count):
        _read_step(tape)


def _read_step(tape: Tape) -> None:
    tape.emit("_local_scalar_dense", "transfer", reads=[Array(1, "fp32", None)])


def _loop(tape: Tape, group: Group, optimizer: str) -> None:
    """The rule tensor by tensor; a temporary lives on until the next tensor's takes its name."""
    moments, counts = STATES[optimizer]
    root: Array | None = None
    for leaf in each_parameter(tape, group):
        whole = Array(leaf.elements, "fp32", None)

        def made(name: str, *reads: Array) -> Array:
            n = reads[0].elements
            return tape.emit(name, "elementwise", reads=reads, makes=[(n, "fp32")], flops=n)[0]

        def changed(name: str, target: Array, *reads: Array) -> None:
            tape.emit(f"{name}_", "elementwise", reads=reads, changes=[target], flops=target.elements)

        if counts:
            changed("add", Array(1, "fp32", None))
        if optimizer == "adagrad":
            _read_step(tape)
        gradient = whole
        if optimizer == "adamw" and group.decay:
            changed("mul", whole)
        elif group.decay:
            gradient = made("add", whole, whole)
        if optimizer in ("adam", "adamw"):
            changed("lerp", whole, gradient)
            changed("mul", whole)
            changed("addcmul", whole, gradient, gradient)
            _read_step(tape)
            fresh = made("div", made("sqrt", whole))
            changed("add", fresh)
            root = fresh
            changed("addcdiv", whole, whole, root)
        elif optimizer in ("adagrad", "rmsprop"):
            if optimizer == "rmsprop":
                changed("mul", whole)
            changed("addcmul", whole, gradient, gradient)
            fresh = made("sqrt", whole)
            if optimizer == "rmsprop":  # it names the root before it adds epsilon
                root = fresh
            changed("add", fresh)
            root = fresh
            changed("addcdiv", whole, gradient, root)
        else:
            if moments:
                changed("mul", whole)
                changed("add", whole, gradient)
                gradient = whole
            changed("add", whole, gradient)
        del gradient
