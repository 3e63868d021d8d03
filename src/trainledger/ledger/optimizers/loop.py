"""Updates tensor by tensor; in torch's a temporary lives on until the next tensor's takes its name."""

from __future__ import annotations

from trainledger.ledger.core.graph import Array
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.optimizers.groups import (
    Group,
    Lines,
    count_step,
    read_number,
    weight_gradient_moment,
)
from trainledger.ledger.optimizers.states import counts_steps
from trainledger.spec.recipe import Recipe


def loop(tape: Tape, group: Group, recipe: Recipe) -> None:
    """torch's single-tensor SGD, Adam, AdamW, Adagrad and RMSProp, and the engine's Lion."""
    rule = group.rule
    lines = Lines(tape)
    root: Array | None = None
    for leaf in tape.each_parameter(group):
        w, g, m = weight_gradient_moment(tape, leaf.elements)
        if counts_steps(rule):
            count_step(tape)
        if rule == "adagrad":
            read_number(tape)
        if rule in ("adamw", "lion"):
            if group.decay:
                lines.changed("mul", w)
        elif group.decay:
            g = lines.made("add", g, w)
        if rule in ("adam", "adamw"):
            lines.changed("lerp", m, g)
            lines.changed("mul", m)
            lines.changed("addcmul", m, g, g)
            read_number(tape)
            if recipe.amsgrad:
                tape.emit("maximum", "elementwise", reads=[m], changes=[m], flops=leaf.elements)
            fresh = lines.made("div", lines.made("sqrt", m))
            lines.changed("add", fresh)
            root = fresh
            lines.changed("addcdiv", w, m, root)
        elif rule == "adagrad":
            lines.changed("addcmul", m, g, g)
            fresh = lines.made("sqrt", m)
            lines.changed("add", fresh)
            root = fresh
            lines.changed("addcdiv", w, g, root)
        elif rule == "rmsprop":
            lines.changed("mul", m)
            lines.changed("addcmul", m, g, g)
            if recipe.rmsprop_centred:
                lines.changed("lerp", m, g)
                fresh = lines.made("addcmul", m, m, m)
                lines.changed("sqrt", fresh)
            else:
                fresh = lines.made("sqrt", m)
            root = fresh  # it has its name before epsilon is added
            lines.changed("add", fresh)
            if recipe.rmsprop_momentum:
                lines.changed("mul", m)
                lines.changed("addcdiv", m, g, root)
                lines.changed("add", w, m)
            else:
                lines.changed("addcdiv", w, g, root)
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
                g = lines.made("add", g, m)
            if rule == "momentum":
                g = m  # the decayed gradient is let go
            lines.changed("add", w, g)
        del g
