"""Formulas of an update as lines of Python over one parameter: what a paper writes, in the order torch computes it.

w are weights, g the gradient, t the step (from 1), lr its learning rate; states begin at zero; other names are fields
of the optimizer. Functions are torch's (``sqrt``, ``sign``, ``maximum``, ``clip``, ``norm``, ``mean``, ``numel``) and
Python's; ``read``, ``store`` and ``bf16`` are explained by `MEANINGS`. ``tests/ledger/test_optimizer_formulas.py``
executes them beside the optimizers of the engine and counts their operations.
"""

from __future__ import annotations

from trainledger.ledger.optimizers.update_rules import RULES
from trainledger.spec.optimizers import Optimizer

_OPTIONS = ("amsgrad", "centered", "momentum")
MORE_FLOPS = {"amsgrad": 1, "centered": 5, "momentum": 2}  # of an option of Adam or RMSProp, beside `RULES`

MEANINGS = {
    "read": "value[code] x scale, by blocks of 256 elements (a table of 256 values)",
    "store": "scale: the largest |value| of a block; code: the place of the nearest value to value / scale",
    "bf16": "rounded to bf16, in which the five matmuls of the loop run; a tall matrix is transposed for it",
    "eps": "machine epsilon of the weights' format, 1.19e-07 in fp32",
    "norm": "the L2 norm of the whole tensor",
    "t": "the step, from 1",
}
# States as torch.optim names them.
SYMBOLS = {
    "step": "t", "exp_avg": "m", "exp_avg_sq": "v", "max_exp_avg_sq": "v_max", "momentum_buffer": "b", "sum": "s",
    "square_avg": "v", "grad_avg": "a", "row_var": "r", "col_var": "c", "variance": "v", "ema": "",
}  # fmt: skip


def formulas_of(optimizer: Optimizer, *, matrix: bool = True) -> tuple[str, ...]:
    """The lines of an update of a matrix, or of a vector, which has no decay.

    >>> from trainledger.spec.optimizers import AdamW, Momentum
    >>> formulas_of(Momentum())
    ('g = g + weight_decay * w', 'b = momentum * b + g', 'w = w - lr * b')
    >>> formulas_of(AdamW(), matrix=False)[0]
    'm = beta1 * m + (1 - beta1) * g'
    """
    # Muon is of matrices; the engine gives vectors to AdamW (`groups_of`).
    kind = optimizer.kind if matrix or optimizer.kind != "muon" else "adamw"
    holds = {name for name in _OPTIONS if getattr(optimizer, name)} | {"matrix" if matrix else "vector"}
    lines = []
    for line in filter(None, map(str.strip, RULES[kind].formulas.splitlines())):
        # A loop of Python has a colon that ends no condition.
        condition, _, text = line.rpartition(": ") if line[:4] != "for " else ("", "", line)
        if condition and (condition.removeprefix("not-") in holds) == condition.startswith("not-"):
            continue
        if text != "decay":
            lines.append(text)
        elif optimizer.weight_decay and matrix:
            lines.append("w = (1 - lr * weight_decay) * w" if RULES[kind].decoupled else "g = g + weight_decay * w")
    return tuple(lines)


def flops_per_parameter(optimizer: Optimizer) -> int:
    """Elementary operations of an update for each element of a large matrix, weight decay left out (`Rule.flops`)."""
    options = ("amsgrad", "centered", "momentum") if optimizer.kind == "rmsprop" else ("amsgrad",)
    return RULES[optimizer.kind].flops + sum(MORE_FLOPS[name] for name in options if getattr(optimizer, name))
