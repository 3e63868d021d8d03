"""Which linear layers a recipe freezes and adapts (Hu et al. 2021, LoRA)."""

from __future__ import annotations

from trainledger.spec.frozen import frozen
from trainledger.spec.setting import setting

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
TARGETS = ("linear", "attention", "mlp", *ATTENTION, *MLP)  # what people name: all, a half, or one
BASE_FORMATS = ("bf16", "int8", "nf4")
ONE_DEVICE = "adapters (recipe.lora) are accounted for on one device only"
BLOCKS_OF = {"int8": "int8", "nf4": "nf4-double"}  # their names among the block formats of `dtypes`


@frozen(kw_only=True)
class Lora:
    """Adapters that are trained while the weights are frozen (Hu et al. 2021, arXiv 2106.09685)."""

    rank: int = setting("rank of the adapters", at_least=1, at_most=10**6)
    alpha: float = setting("the adapters' output is multiplied by alpha / rank", quantity="number", default=16.0)
    targets: tuple[str, ...] = setting(
        "linear layers with adapters: linear (all in the blocks), attention, mlp, or names such as q_proj",
        quantity="texts", default=("linear",),
    )  # fmt: skip
    dropout: float = setting(
        "probability on the input of an adapter", quantity="number", default=0.0, at_least=0, at_most=0.99
    )
    base_format: str | None = setting(
        "format of the frozen linear layers: bf16, int8 or nf4 in blocks with scales; absent = as other parameters",
        quantity="text", default=None, choices=BASE_FORMATS,
    )  # fmt: skip


def is_linear(name: str) -> bool:
    """Whether a parameter of this name is one of a block's linear layers.

    >>> is_linear("self_attn.q_proj.weight"), is_linear("lm_head.weight"), is_linear("mlp.experts.down_proj")
    (True, False, False)
    """
    module, _, what = name.rpartition(".")
    return module.rpartition(".")[2] in (*ATTENTION, *MLP) and what in ("weight", "bias")


def is_target(name: str, targets: tuple[str, ...]) -> bool:
    """Whether the layer of this parameter gets an adapter, where these TARGETS do."""
    module = name.rpartition(".")[0].rpartition(".")[2]
    named = {"linear": (*ATTENTION, *MLP), "attention": ATTENTION, "mlp": MLP}
    return any(module in named.get(each, (each,)) for each in targets)
