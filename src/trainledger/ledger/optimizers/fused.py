"""Updates in one kernel over all tensors of a group, without scratch."""

from __future__ import annotations

from trainledger.ledger import rules
from trainledger.ledger.core.graph import Array
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.optimizers.groups import Group, weight_gradient_moment
from trainledger.ledger.optimizers.states import counts_steps, moments_of
from trainledger.spec.recipe import Recipe

_KERNELS = {"momentum": "sgd", "nesterov": "sgd"}


def fused(tape: Tape, group: Group, recipe: Recipe) -> None:
    """torch's fused SGD, Adam, AdamW and Adagrad; Adagrad's kernel counts its steps itself."""
    rule, n = group.rule, group.elements
    steps = Array(group.tensors, "fp32", None)
    moments = moments_of(rule, recipe)
    w, g, m = weight_gradient_moment(tape, n)
    changed, read = [w, *(m for _ in moments)], [g]
    if counts_steps(rule):
        tape.emit("_foreach_add_", "elementwise", changes=[steps], flops=steps.elements)
        (changed if rule == "adagrad" else read).append(steps)
    counted = "amsgrad" if "max_exp_avg_sq" in moments else rule
    flops = rules.UPDATE_FLOPS_PER_PARAMETER[counted] * n
    kernel = f"_fused_{_KERNELS.get(rule, rule)}_"
    tape.emit(kernel, "update", reads=read, changes=changed, flops=flops, basis="assumed")
