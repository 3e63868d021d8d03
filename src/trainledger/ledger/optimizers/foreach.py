"""Updates as one kernel for each line of the rule, over lists of all tensors; two lists may be temporaries."""

from __future__ import annotations

from trainledger.ledger.core.graph import Array
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.optimizers.groups import Group, Lines, count_steps, read_steps, weight_gradient_moment
from trainledger.ledger.optimizers.states import counts_steps
from trainledger.spec.recipe import Recipe


def foreach(tape: Tape, group: Group, recipe: Recipe) -> None:
    """torch's foreach SGD, Adam, AdamW, Adagrad and RMSProp, and the engine's Lion."""
    rule = group.rule
    w, g, m = weight_gradient_moment(tape, group.elements)
    lines = Lines(tape, foreach=True)
    if counts_steps(rule):
        count_steps(tape, group.tensors)
    if rule in ("adamw", "lion"):
        if group.decay:
            lines.changed("mul", w)
    elif group.decay:
        g = lines.made("add", g, w)
    if rule in ("adam", "adamw"):
        lines.changed("lerp", m, g)
        lines.changed("mul", m)
        lines.changed("addcmul", m, g, g)
        del g
        read_steps(tape, 2 * group.tensors)  # once for each of the two bias corrections
        _adam_by_root(lines, w, m, recipe)
    elif rule == "adagrad":
        read_steps(tape, group.tensors)
        _adagrad(lines, w, g, m, fresh=bool(group.decay))
    elif rule == "rmsprop":
        _rmsprop(lines, w, g, m, recipe)
    elif rule == "lion":
        signs = lines.made("lerp", m, g)
        lines.changed("sign", signs)
        lines.changed("add", w, signs)
        del signs
        lines.changed("lerp", m, g)
    else:
        if rule != "sgd":
            lines.changed("mul", m)
            lines.changed("add", m, g)
        if rule == "nesterov":
            lines.changed("add", g, m)
        if rule == "momentum":
            g = m  # the decayed gradient is let go
        lines.changed("add", w, g)


def _adam_by_root(lines: Lines, w: Array, m: Array, recipe: Recipe) -> None:
    if recipe.amsgrad:
        lines.changed("maximum", m, m)
    root = lines.made("sqrt", m)
    lines.changed("div", root)
    lines.changed("add", root)
    lines.changed("addcdiv", w, m, root)


def _adagrad(lines: Lines, w: Array, g: Array, m: Array, *, fresh: bool) -> None:
    lines.changed("addcmul", m, g, g)
    root = lines.made("sqrt", m)
    lines.changed("add", root)
    if fresh:  # the decayed gradients are a temporary already
        lines.changed("mul", g)
    else:
        g = lines.made("mul", g)
    lines.changed("addcdiv", w, g, root)


def _rmsprop(lines: Lines, w: Array, g: Array, m: Array, recipe: Recipe) -> None:
    lines.changed("mul", m)
    lines.changed("addcmul", m, g, g)
    if recipe.rmsprop_centred:
        lines.changed("lerp", m, g)
        root = lines.made("addcmul", m, m, m)
        lines.changed("sqrt", root)
    else:
        root = lines.made("sqrt", m)
    lines.changed("add", root)
    if recipe.rmsprop_momentum:
        lines.changed("mul", m)
        lines.changed("addcdiv", m, g, root)
        lines.changed("add", w, m)
    else:
        lines.changed("addcdiv", w, g, root)
