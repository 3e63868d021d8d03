"""Update rules, each written once as lines, and the three ways to run them.

``fused`` updates all tensors in one kernel without scratch; ``foreach`` runs each line over lists of all tensors of a
group, with temporaries as large; ``loop`` runs all lines for one tensor after the other, with temporaries as large as
one, which live on until the next tensor's take their names. Each line is as torch.optim runs it (2.13; the same in
2.11 but for fused Adagrad, which was for CPUs only until it came to CUDA), Lion's as the engine does.

To add an optimizer of this kind, add it to optimizers.toml: its states, its lines, its formulas and its FLOPs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from trainledger.ledger.core.graph import Array, Leaf, ModelLeaves, Parameters
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import Int
from trainledger.spec.frozen import frozen
from trainledger.spec.plain import table_beside
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
    """Matrices with decay, vectors without, as the engine groups them; Muon's matrices before both, and with muP
    embeddings between them. None is empty."""
    rest, rule, decay = leaves.trained(), recipe.optimizer.kind, recipe.optimizer.weight_decay
    groups = []
    if rule == "muon":
        groups = [Group(rest.among(for_muon).runs, rule, decay)]
        rest, rule = rest.among(lambda leaf: not for_muon(leaf)), "adamw"
    apart = recipe.mup is not None  # embeddings have a separate learning rate
    groups += [
        Group(rest.among(lambda leaf: leaf.decayed and not (apart and _is_looked_up(leaf))).runs, rule, decay),
        Group(rest.among(lambda leaf: leaf.decayed and apart and _is_looked_up(leaf)).runs, rule, decay),
        Group(rest.among(lambda leaf: not leaf.decayed).runs, rule, 0.0),
    ]
    return tuple(group for group in groups if not group.empty)


def _is_looked_up(leaf: Leaf) -> bool:
    return not {"embed_tokens", "embed_positions"}.isdisjoint(leaf.path.split("."))


def weight_gradient_moment(tape: Tape, elements: Int) -> tuple[Array, Array, Array]:
    """What an update reads and changes, each in its format: weights, gradients, and one moment for all."""
    precision = tape.precision
    formats = (precision.updated, precision.updating, precision.moments)
    weight, gradient, moment = (Array(elements, dtype, None) for dtype in formats)
    return weight, gradient, moment


def widest(*arrays: Array) -> str:
    """The format of a temporary: fp32 where one of the arrays has it, else that of the first."""
    return max((array.dtype for array in arrays), key=lambda each: each == "fp32")


def norms(tape: Tape, x: Array, elements: Int) -> Array:
    """So many L2 norms of parts of x."""
    return tape.make("linalg_vector_norm", "reduction", x, elements=elements, flops=x.elements)


def count_step(tape: Tape) -> None:
    """A step counter is raised by one."""
    tape.change("add_", Array(1, "fp32", None))


def count_steps(tape: Tape, tensors: Int) -> None:
    """All step counters of a group are raised by one, which becomes a tensor first."""
    # torch/optim/adam.py (2.13): step counters on a CPU are raised by a tensor, since a Python number would be wrapped
    # into one for each of them.
    one = tape.make("lift_fresh", "copy", elements=1, dtype="fp32")
    tape.change("_foreach_add_", Array(tensors, "fp32", None), one)


def read_number(tape: Tape, dtype: str = "fp32") -> None:
    """The host reads one number: a step counter or a norm."""
    tape.emit("_local_scalar_dense", "transfer", reads=[Array(1, dtype, None)])


def read_steps(tape: Tape, count: Int) -> None:
    """The host reads step counters one by one."""
    with tape.loop("tensors", count):
        read_number(tape)


@frozen
class Rule:
    """How an optimizer updates a parameter.

    ``flops`` are elementary operations per parameter in its own definition, one for each addition, multiplication,
    division, root, comparison or sign; what depends on the step alone is one number and counts nothing, and weight
    decay is left out (2 more). ``moments`` are the states of parameter size; ``counts_steps``: each parameter has a
    counter, one fp32 number. ``decoupled`` weight decay scales the weights, other is added to the gradients.

    ``lines`` name w weights, g gradients, m moments (one array for all) and temporaries. ``x = op a b`` makes an array,
    ``op_ x a`` changes x in place (``op! x a`` under a name without underscore), ``decay`` is weight decay, ``read n``
    lets the host read n numbers of each tensor. A line may begin with conditions, joined by spaces and ended by a
    colon: a way to run, an option of the recipe, or ``decayed``; ``not-`` denies one. ``formulas`` are those of
    `ledger.optimizers.formulas`.
    """

    flops: int
    lines: str
    formulas: str
    moments: Sequence[str] = ()
    counts_steps: bool = False
    decoupled: bool = False
    kernel: str = ""  # of another rule, that fused updates run


# A table: its lines are a language of their own, and what a paper writes stands beside what torch runs, so that a test
# executes the one and counts the other.
_WRITTEN: dict[str, dict[str, Any]] = table_beside(__file__, "optimizers.toml")


def _whole(row: dict[str, Any]) -> Rule:
    """The rule of a row, with what it does not say of the one that it is like."""
    # Only what differs is written: Adam's lines stand once for its four kinds.
    if "like" in row:
        return replace(_whole(_WRITTEN[row["like"]]), **{key: value for key, value in row.items() if key != "like"})
    return Rule(**row)


RULES = {name: _whole(row) for name, row in _WRITTEN.items()}
_AMSGRAD = 14  # adam, and the larger of v and the largest so far
# An option and no optimizer, but a trace finds the kernels of Adam with it (`trace.operators.table`).
UPDATE_FLOPS_PER_PARAMETER = {name: rule.flops for name, rule in RULES.items()} | {"amsgrad": _AMSGRAD}


def moments_of(rule: str, recipe: Recipe) -> tuple[str, ...]:
    """The states of parameter size that an optimizer of torch.optim's kind keeps."""
    names = tuple(RULES[rule].moments)
    if recipe.optimizer.amsgrad:
        names += ("max_exp_avg_sq",)
    # torch.optim.RMSprop makes these two where its options ask for them, in this order (torch/optim/rmsprop.py, 2.13).
    if rule == "rmsprop":
        names += ("momentum_buffer",) if recipe.optimizer.momentum else ()
        names += ("grad_avg",) if recipe.optimizer.centered else ()
    return names


def fused(tape: Tape, group: Group, recipe: Recipe) -> None:
    """One kernel over all tensors of a group; Adagrad's counts its steps itself."""
    rule, n = RULES[group.rule], group.elements
    steps = Array(group.tensors, "fp32", None)
    moments = moments_of(group.rule, recipe)
    w, g, m = weight_gradient_moment(tape, n)
    changed, read = [w, *(m for _ in moments)], [g]
    if rule.counts_steps:
        tape.change("_foreach_add_", steps)
        (changed if group.rule == "adagrad" else read).append(steps)
    flops = (_AMSGRAD if "max_exp_avg_sq" in moments else rule.flops) * n
    kernel = f"_fused_{rule.kernel or group.rule}_"
    tape.emit(kernel, "update", reads=read, changes=changed, flops=flops, basis="assumed")


def foreach(tape: Tape, group: Group, recipe: Recipe) -> None:
    """One kernel for each line, over lists of all tensors; two lists may be temporaries."""
    if RULES[group.rule].counts_steps:
        count_steps(tape, group.tensors)
    w, g, m = weight_gradient_moment(tape, group.elements)
    run_lines(tape, group, recipe, "foreach", {"w": w, "g": g, "m": m})


def loop(tape: Tape, group: Group, recipe: Recipe) -> None:
    """Tensor by tensor; a temporary lives until the next tensor's takes its name."""
    arrays: dict[str, Array] = {}
    for leaf in tape.each_parameter(group):
        arrays["w"], arrays["g"], arrays["m"] = weight_gradient_moment(tape, leaf.elements)
        if RULES[group.rule].counts_steps:
            count_step(tape)
        run_lines(tape, group, recipe, "loop", arrays)
        del arrays["g"]


def run_lines(tape: Tape, group: Group, recipe: Recipe, way: str, arrays: dict[str, Array]) -> None:
    """The lines of a group's rule on arrays by name, those under other conditions left out."""
    rule, prefix = RULES[group.rule], "_foreach_" if way == "foreach" else ""

    def made(name: str, *reads: Array) -> Array:
        return tape.pointwise(prefix + name, *reads, dtype=widest(*reads))

    options = {
        "decayed": group.decay,
        "amsgrad": recipe.optimizer.amsgrad,
        "momentum": recipe.optimizer.momentum,
        "centered": recipe.optimizer.centered,
    }
    for words in _words(rule.lines, frozenset((way, *(name for name, has in options.items() if has)))):
        name, *rest = words
        if name == "decay":
            if group.decay and rule.decoupled:
                tape.change(f"{prefix}mul_", arrays["w"])
            elif group.decay:
                arrays["g"] = made("add", arrays["g"], arrays["w"])
        elif name == "read" and way == "loop":
            read_number(tape)
        elif name == "read":
            read_steps(tape, int(rest[0]) * group.tensors)
        elif name == "del":
            del arrays[rest[0]]
        elif rest[0] == "=":
            read = [arrays[each] for each in rest[2:]]
            arrays[name] = made(rest[1], *read) if read else arrays[rest[1]]
            del read
        else:
            target, *read = (arrays[each] for each in rest)
            tape.change(prefix + name.removesuffix("!"), target, *read)
            del target, read


@cache
def _words(lines: str, holds: frozenset[str]) -> tuple[list[str], ...]:
    """The lines whose conditions hold, as words."""
    found = []
    for line in filter(None, map(str.strip, lines.splitlines())):
        conditions, colon, what = line.partition(": ")
        if not colon:
            conditions, what = "", line
        if all((part.removeprefix("not-") in holds) != part.startswith("not-") for part in conditions.split()):
            found.append(what.split())
    return tuple(found)
