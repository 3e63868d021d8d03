"""Formulas of an update as lines of Python over one parameter: what a paper writes, in the order torch computes it.

w are weights, g the gradient, t the step (from 1), lr its learning rate; states begin at zero; other names are fields
of the optimizer. Functions are torch's (``sqrt``, ``sign``, ``maximum``, ``clip``, ``norm``, ``mean``, ``numel``) and
Python's; ``read``, ``store`` and ``bf16`` are explained by `MEANINGS`. ``tests/ledger/test_optimizer_formulas.py``
executes them beside the optimizers of the engine and counts their operations.
"""

from __future__ import annotations

from trainledger.ledger.optimizers.update_rules import RULES
from trainledger.spec.optimizers import Optimizer

# Algorithm 1 of Kingma and Ba 2015: epsilon is added to the corrected root (TensorFlow adds it before the correction).
_ADAM = """
    decay
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    amsgrad: v_max = maximum(v_max, v)
    not-amsgrad: w = w - lr / (1 - beta1**t) * m / (sqrt(v) / (1 - beta2**t)**0.5 + epsilon)
    amsgrad: w = w - lr / (1 - beta1**t) * m / (sqrt(v_max) / (1 - beta2**t)**0.5 + epsilon)
"""
# A tensor of fewer than 4,096 elements keeps its moments in fp32: nothing is read or stored then.
_ADAM_8BIT = f"m, v = read(m8), read(v8)\n{_ADAM}\nm8, v8 = store(m), store(v)"
_FORMULAS = {
    "sgd": "decay\nw = w - lr * g",
    # torch/optim/sgd.py (2.13): the first step puts the gradient into the buffer, as a buffer of zero does.
    "momentum": "decay\nb = momentum * b + g\nw = w - lr * b",
    "nesterov": "decay\nb = momentum * b + g\nw = w - lr * (g + momentum * b)",
    "adagrad": "decay\ns = s + g * g\nw = w - lr * g / (sqrt(s) + epsilon)",
    # torch/optim/rmsprop.py (2.13) adds epsilon to the root; TensorFlow adds it within.
    "rmsprop": """
        decay
        v = beta2 * v + (1 - beta2) * g * g
        centered: a = beta2 * a + (1 - beta2) * g
        not-centered: d = sqrt(v) + epsilon
        centered: d = sqrt(v - a * a) + epsilon
        not-momentum: w = w - lr * g / d
        momentum: b = momentum * b + g / d
        momentum: w = w - lr * b
    """,
    "adam": _ADAM,
    "adamw": _ADAM,
    "adam-8bit": _ADAM_8BIT,
    "adamw-8bit": _ADAM_8BIT,
    # torch/optim/_adafactor.py (2.13): the first epsilon is the machine epsilon of the weights' format, the second 1e-3
    "adafactor": """
        size = max(1e-3, norm(w) / numel(w)**0.5)
        decay
        matrix: r = r + t**-0.8 * (mean(g * g, -1, True) - r)
        matrix: c = c + t**-0.8 * (mean(g * g, -2, True) - c)
        matrix: v = r * c / clip(mean(r, -2, True), eps)
        vector: v = v + t**-0.8 * (g * g - v)
        u = g / sqrt(clip(v, eps**2))
        w = w - size * min(lr, t**-0.5) / max(1, norm(u) / numel(u)**0.5) * u
    """,
    # Program 1 of Chen et al. 2023: the sign is of an interpolation by beta1, the momentum kept is by beta2.
    "lion": """
        decay
        c = beta1 * m + (1 - beta1) * g
        w = w - lr * sign(c)
        m = beta2 * m + (1 - beta2) * g
    """,
    # torch/optim/_muon.py (2.13): coefficients and steps of Jordan et al. 2024; 0.2 is of Liu et al. 2025, section 2.2.
    "muon": """
        decay
        b = momentum * b + (1 - momentum) * g
        x = bf16((1 - momentum) * g + momentum * b)
        x = x / clip(norm(x), 1e-7)
        for _ in range(5): x = 3.4445 * x + (2.0315 * x @ x.T @ x @ x.T - 4.775 * x @ x.T) @ x
        w = w - 0.2 * max(w.shape)**0.5 * lr * x
    """,
}
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
    kind = optimizer.kind if matrix or optimizer.kind != "muon" else "adamw"
    holds = {name for name in _OPTIONS if getattr(optimizer, name)} | {"matrix" if matrix else "vector"}
    lines = []
    for line in filter(None, map(str.strip, _FORMULAS[kind].splitlines())):
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
