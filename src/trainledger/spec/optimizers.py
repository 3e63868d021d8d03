"""Optimizers: each with the numbers that it has, and how it may run."""

from __future__ import annotations

from typing import Any, ClassVar

from trainledger.spec.frozen import frozen
from trainledger.spec.setting import setting


def _implementation(*choices: str) -> Any:
    """Implementations of an optimizer, the default first.

    One kernel for everything (fused), a kernel per line of the rule over lists of tensors (foreach), or tensor by
    tensor (loop). Torch has no fused RMSProp and no fused Adafactor, whose default there is the loop; Lion and 8-bit
    Adam are the engine's own.
    """
    return setting(
        "one kernel for all tensors (fused), one for each line of the rule (foreach), or tensor by tensor (loop)",
        quantity="text",
        default=choices[0],
        choices=choices,
    )


def _decay_rate(doc: str, default: float) -> Any:
    return setting(doc, quantity="number", default=default, at_least=0, at_most=0.9999999)


_FIRST, _SECOND, _EPSILON = (
    "decay of the first moment",
    "decay of the second moment",
    "added to the root of the second moment",
)


class _Options:
    # Fields of the optimizers that have the choice.
    amsgrad: bool = False
    centered: bool = False
    momentum: float = 0.0


@frozen(kw_only=True)
class Optimizer(_Options):
    """Fields of every optimizer."""

    kind: ClassVar[str]

    weight_decay: float = setting("decay of matrices (norms and biases have none)", 0.1, at_least=0)
    implementation: str = _implementation("fused", "foreach", "loop")


@frozen(kw_only=True)
class Adam(Optimizer):
    """Adam (Kingma and Ba 2015, arXiv 1412.6980), its weight decay an L2 penalty."""

    kind = "adam"

    beta1: float = _decay_rate(_FIRST, 0.9)
    beta2: float = _decay_rate(_SECOND, 0.95)
    epsilon: float = setting(_EPSILON, 1e-8, above=0)
    amsgrad: bool = setting("divide by the largest second moment so far", False)


@frozen(kw_only=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv 1711.05101)."""

    kind = "adamw"


@frozen(kw_only=True)
class Adam8bit(Optimizer):
    """Adam with moments in blocks of 8 bits (Dettmers et al. 2022, arXiv 2110.02861)."""

    kind = "adam-8bit"

    implementation: str = _implementation("loop", "fused")
    beta1: float = _decay_rate(_FIRST, 0.9)
    beta2: float = _decay_rate(_SECOND, 0.95)
    epsilon: float = setting(_EPSILON, 1e-8, above=0)


@frozen(kw_only=True)
class AdamW8bit(Adam8bit):
    """AdamW with moments in blocks of 8 bits (Dettmers et al. 2022, arXiv 2110.02861)."""

    kind = "adamw-8bit"


@frozen(kw_only=True)
class SGD(Optimizer):
    """Stochastic gradient descent without momentum (Robbins and Monro 1951)."""

    kind = "sgd"


@frozen(kw_only=True)
class Momentum(Optimizer):
    """Stochastic gradient descent with momentum (Polyak 1964); without it that is sgd."""

    kind = "momentum"

    momentum: float = setting("share of the last update", 0.9, above=0, at_most=0.9999999)


@frozen(kw_only=True)
class Nesterov(Momentum):
    """Momentum that looks ahead (Sutskever et al. 2013)."""

    kind = "nesterov"


@frozen(kw_only=True)
class Adagrad(Optimizer):
    """A learning rate that falls with the sum of squared gradients (Duchi et al. 2011)."""

    kind = "adagrad"

    epsilon: float = setting("added to the root of the sum", 1e-8, above=0)


@frozen(kw_only=True)
class RMSProp(Optimizer):
    """The gradient over the root of its mean square (Tieleman and Hinton 2012)."""

    kind = "rmsprop"

    implementation: str = _implementation("foreach", "loop")
    beta2: float = _decay_rate("decay of the mean square", 0.95)
    epsilon: float = setting("added to the root of the mean square", 1e-8, above=0)
    momentum: float = _decay_rate("momentum of the updates; 0 = none", 0.0)
    centered: bool = setting("divide by the standard deviation instead of the root mean square", False)


@frozen(kw_only=True)
class Adafactor(Optimizer):
    """A second moment of rows and columns (Shazeer and Stern 2018), with torch's own decay and epsilons."""

    kind = "adafactor"

    implementation: str = _implementation("loop", "foreach")


@frozen(kw_only=True)
class Lion(Optimizer):
    """The sign of a momentum (Chen et al. 2023, arXiv 2302.06675)."""

    kind = "lion"

    implementation: str = _implementation("foreach", "loop")
    beta1: float = _decay_rate("share of the momentum in the sign", 0.9)
    beta2: float = _decay_rate("decay of the momentum", 0.95)


@frozen(kw_only=True)
class Muon(Optimizer):
    """Orthogonalized momentum of matrices (Jordan et al. 2024; Liu et al. 2025, arXiv 2502.16982); AdamW for the rest.

    ``implementation`` is AdamW's.
    """

    kind = "muon"

    momentum: float = _decay_rate("momentum of the matrices", 0.95)
    beta1: float = _decay_rate("AdamW: decay of the first moment", 0.9)
    beta2: float = _decay_rate("AdamW: decay of the second moment", 0.95)
    epsilon: float = setting(f"AdamW: {_EPSILON}", 1e-8, above=0)


OPTIMIZERS: dict[str, type[Optimizer]] = {
    cls.kind: cls
    for cls in (AdamW, Adam, SGD, Momentum, Nesterov, Adagrad, RMSProp, Adafactor, Lion, Muon, AdamW8bit, Adam8bit)
}

# How each may run, the default first.
IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {
    name: kind.__dataclass_fields__["implementation"].metadata["choices"] for name, kind in OPTIMIZERS.items()
}
# Whose step size does not depend on that of the gradient: muP's rule for Adam holds for them.
STEPS_OF_OWN_SIZE = ("adamw", "adam", "adamw-8bit", "adam-8bit", "lion")
# Accounted for as bitsandbytes runs it, whose kernel this engine does not have.
ACCOUNTED_ONLY = (("adamw-8bit", "fused"), ("adam-8bit", "fused"))
