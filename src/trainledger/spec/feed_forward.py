"""The MLP of a block: dense, or a mixture of experts."""

from __future__ import annotations

from typing import ClassVar

from trainledger.spec.frozen import frozen
from trainledger.spec.parts import part
from trainledger.spec.setting import setting

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swish")
ROUTER_SCORES = ("softmax", "sigmoid", "softmax-of-chosen")


@frozen(kw_only=True)
class Dense:
    """One MLP for all tokens."""

    kind: ClassVar[str] = "dense"

    d_ff: int = setting("inner size of the MLP", at_least=1, at_most=10**8)
    activation: str = setting("nonlinearity of the MLP", quantity="text", default="silu", choices=ACTIVATIONS)
    gated: bool = setting("the MLP is gated (SwiGLU, GEGLU)", quantity="flag", default=True)
    bias: bool = setting("biases in the MLP", quantity="flag", default=False)


@frozen(kw_only=True)
class Router:
    """How experts and their weights are chosen for a token."""

    scores: str = setting(
        "scores of the experts: softmax over all, sigmoid, or softmax over the chosen",
        quantity="text", default="softmax", choices=ROUTER_SCORES,
    )  # fmt: skip
    bias: bool = setting("the router has a bias", quantity="flag", default=False)
    normalize: bool = setting("the chosen scores are divided by their sum", quantity="flag", default=True)
    scale: float = setting("factor of the chosen scores", quantity="number", default=1.0, above=0)
    correction: bool = setting(
        "a bias without gradient balances the load (DeepSeek-V3)", quantity="flag", default=False
    )
    groups: int = setting(
        "groups of experts; the best groups are chosen before experts", default=1, at_least=1, at_most=10**5
    )
    top_groups: int = setting("chosen groups", default=1, at_least=1, at_most=10**5)


@frozen(kw_only=True)
class Experts(Dense):
    """Mixtures of experts in all layers or some; the others have the dense MLP."""

    kind: ClassVar[str] = "experts"

    n_experts: int = setting("experts of a layer", at_least=2, at_most=10**5)
    per_token: int = setting("experts for each token (top k)", default=2, at_least=1, at_most=10**5)
    expert_d_ff: int | None = setting("inner size of an expert; absent = d_ff", default=None, at_least=1, at_most=10**8)
    n_shared: int = setting("shared experts, which every token uses, as one MLP", default=0, at_least=0, at_most=10**4)
    shared_d_ff: int | None = setting(
        "inner size of all shared experts together; absent = n_shared times that of one expert", default=None,
        at_least=1, at_most=10**8,
    )  # fmt: skip
    shared_gate: bool = setting("the shared expert's output is gated by a sigmoid", quantity="flag", default=False)
    n_dense_layers: int = setting("leading layers with a dense MLP", default=0, at_least=0, at_most=10**5)
    every: int = setting("every n-th layer has experts", default=1, at_least=1, at_most=10**5)
    router: Router = part("how experts are chosen for a token", Router, default=Router())

    @property
    def width(self) -> int:
        """Inner size of one expert."""
        return self.d_ff if self.expert_d_ff is None else self.expert_d_ff

    @property
    def shared_width(self) -> int:
        """Inner size of all shared experts together; 0 without any."""
        if not self.n_shared or self.shared_d_ff is None:
            return self.n_shared * self.width
        return self.shared_d_ff
