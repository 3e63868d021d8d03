"""Where each of our tensors stands in the files of a model type of transformers: names and layouts, as data.

Shapes: H query heads, G key-value heads, K head width, E experts, F their inner width, D d_model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from trainledger.spec.model import ModelSpec

Tensors = list[Tensor]


@dataclass(frozen=True)
class Form:
    """How some tensors of ours become some of theirs, and the other way."""

    theirs: Callable[[Tensors], Tensors]
    ours: Callable[[Tensors], Tensors]


@dataclass(frozen=True)
class Piece:
    """Tensors of theirs that hold the same numbers as tensors of ours."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    form: Form


@dataclass(frozen=True)
class Experts:
    """How the experts of a layer are stored: a module for each (their names of gate, up and down), or stacked.

    ``interleaved`` stacks are gpt-oss's: transposed, and gate and up alternate.
    """

    at: str = "mlp.experts"
    each: tuple[str, str, str] | None = ("gate_proj", "up_proj", "down_proj")
    interleaved: bool = False


@dataclass(frozen=True)
class Names:
    """What a model type calls the parts of a model. ``top`` and ``block`` rename modules; the longest name wins.

    ``qkv`` is one matrix of queries, keys and values: one after the other, or ``grouped``, where each key-value
    head stands behind the query heads that share it. ``gate_up`` is one matrix of gate and up. ``turned`` matrices
    of blocks are stored transposed.
    """

    prefix: str = "model."
    layers: str = "layers"
    head: str = "lm_head"
    other_head: str | None = None  # what it is called in newer or older files
    top: Mapping[str, str] = field(default_factory=dict)
    block: Mapping[str, str] = field(default_factory=dict)
    qkv: str | None = None
    grouped: bool = False
    gate_up: str | None = None
    turned: bool = False
    experts: Experts = Experts()


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_GPT2_BLOCK = {
    "input_layernorm": "ln_1", "self_attn": "attn", "self_attn.o_proj": "attn.c_proj",
    "post_attention_layernorm": "ln_2", "mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj",
}  # fmt: skip
_GPT2_TOP = {"embed_tokens": "wte", "embed_positions": "wpe", "norm": "ln_f"}
_FOUR = {"mlp.up_proj": "mlp.dense_h_to_4h", "mlp.down_proj": "mlp.dense_4h_to_h"}
_BLOOM = Names(
    prefix="transformer.",
    layers="h",
    top={"embed_tokens": "word_embeddings", "embed_norm": "word_embeddings_layernorm", "norm": "ln_f"},
    block={"self_attn.o_proj": "self_attention.dense"} | _FOUR,
    qkv="self_attention.query_key_value",
    grouped=True,
)
_FALCON_TWO = replace(
    _BLOOM, block={**_BLOOM.block, "input_layernorm": "ln_attn", "post_attention_layernorm": "ln_mlp"}
)
_OPT_BLOCK = {
    "self_attn.o_proj": "self_attn.out_proj", "input_layernorm": "self_attn_layer_norm",
    "post_attention_layernorm": "final_layer_norm", "mlp.up_proj": "fc1", "mlp.down_proj": "fc2",
}  # fmt: skip
_OPT = Names(prefix="model.decoder.", top={"norm": "final_layer_norm"}, block=_OPT_BLOCK)
_OPT_AFTER = replace(
    _OPT,
    block=_OPT_BLOCK
    | {"post_attention_layernorm": "self_attn_layer_norm", "post_feedforward_layernorm": "final_layer_norm"},
)
_GATE = {"mlp.router": "mlp.gate"}
_LLAMA = Names()
_SPARSE = Names(block=_GATE)
_GLM4 = {
    "post_attention_layernorm": "post_self_attn_layernorm", "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}  # fmt: skip
NAMES: dict[str, Names] = {
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "olmo", "olmo2", "olmo3", "smollm3",
         "arcee", "seed_oss", "cohere", "cohere2", "stablelm"), _LLAMA,
    ),
    "phi3": Names(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj"),
    "glm": Names(gate_up="mlp.gate_up_proj"),
    "glm4": Names(gate_up="mlp.gate_up_proj", block=_GLM4),
    "starcoder2": Names(block={"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}),
    "phi": Names(
        top={"norm": "final_layernorm"},
        block={
            "self_attn.o_proj": "self_attn.dense", "self_attn.q_norm": "self_attn.q_layernorm",
            "self_attn.k_norm": "self_attn.k_layernorm", "mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2",
        },
    ),
    "gpt2": Names("transformer.", "h", top=_GPT2_TOP, block=_GPT2_BLOCK, qkv="attn.c_attn", turned=True),
    "gptj": Names(
        "transformer.", "h", top=_GPT2_TOP,
        block=_GPT2_BLOCK
        | {"self_attn.o_proj": "attn.out_proj", "mlp.up_proj": "mlp.fc_in", "mlp.down_proj": "mlp.fc_out"},
    ),
    "gpt_neox": Names(
        "gpt_neox.", head="embed_out", other_head="lm_head",
        top={"embed_tokens": "embed_in", "norm": "final_layer_norm"},
        block={"self_attn.o_proj": "attention.dense"} | _FOUR, qkv="attention.query_key_value", grouped=True,
    ),
    "opt": _OPT,
    "bloom": _BLOOM,
    "falcon": _BLOOM,
    "mpt": Names(
        "transformer.", "blocks", top={"embed_tokens": "wte", "embed_positions": "wpe", "norm": "norm_f"},
        block={
            "input_layernorm": "norm_1", "post_attention_layernorm": "norm_2", "self_attn.o_proj": "attn.out_proj",
            "mlp": "ffn",
        },
        qkv="attn.Wqkv",
    ),
    "mixtral": Names(
        block={"mlp.router": "block_sparse_moe.gate"}, experts=Experts("block_sparse_moe.experts", ("w1", "w3", "w2"))
    ),
    "qwen2_moe": Names(block=_GATE | {"mlp.shared_experts": "mlp.shared_expert"}),
    **dict.fromkeys(("qwen3_moe", "olmoe", "deepseek_v2"), _SPARSE),
    **dict.fromkeys(
        ("deepseek_v3", "kimi_k2"),
        Names(block=_GATE | {"mlp.router.correction": "mlp.gate.e_score_correction_bias"}),
    ),
    "gpt_oss": Names(experts=Experts(each=None, interleaved=True)),
}  # fmt: skip


def names_of(spec: ModelSpec, model_type: str) -> Names:
    """The names of a model type, which for two of them depend on where the norms stand."""
    if model_type == "opt" and spec.norm_place == "after-add":
        return _OPT_AFTER
    if model_type == "falcon" and spec.block == "parallel-two-norms":
        return _FALCON_TWO
    return NAMES[model_type]


def as_modules(names: Names) -> Names:
    """The same where the experts are stacked, as the modules of transformers 5 have them; files rarely do."""
    block = {our: their.replace("block_sparse_moe", "mlp") for our, their in names.block.items()}
    return replace(names, block=block, experts=Experts(each=None, interleaved=names.experts.interleaved))


def pieces(names: Names, spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Piece]:
    """Every tensor of ours (by name, with its shape), once; their names without the prefix."""
    done: set[str] = set()
    for name in shapes:
        if name in done:
            continue
        piece = _piece(names, spec, name, shapes)
        done.update(piece.ours)
        yield piece


def shapes_in_files(piece: Piece, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The shapes of their tensors of a piece, from those of ours."""
    found = piece.form.theirs([torch.empty(shapes[name], device="meta") for name in piece.ours])
    return {name: tuple(each.shape) for name, each in zip(piece.theirs, found, strict=True)}


def _piece(names: Names, spec: ModelSpec, name: str, shapes: Mapping[str, tuple[int, ...]]) -> Piece:
    if not name.startswith("layers."):
        module, _, kind = name.rpartition(".")
        if module == "lm_head":
            return Piece((f"{names.head}.{kind}",), (name,), SAME)
        return Piece((f"{names.top.get(module, module)}.{kind}",), (name,), SAME)
    _, layer, inner = name.split(".", 2)
    before, module, kind = f"{names.layers}.{layer}.", *inner.rpartition(".")[::2]
    if module in _QKV and names.qkv is not None:
        ours = tuple(f"layers.{layer}.{each}.{kind}" for each in _QKV)
        if names.grouped:
            return Piece((f"{before}{names.qkv}.{kind}",), ours, grouped(spec.kv_heads, spec.head_size))
        form = joined([shapes[each][0] for each in ours], names.turned)
        return Piece((f"{before}{names.qkv}.{kind}",), ours, form)
    if module in _GATE_UP and names.gate_up is not None:
        ours = tuple(f"layers.{layer}.{each}.{kind}" for each in _GATE_UP)
        return Piece((f"{before}{names.gate_up}.{kind}",), ours, joined([shapes[each][0] for each in ours]))
    if module == "mlp.experts":
        return _experts(names.experts, before, name, kind, shapes[name][0])
    turned = names.turned and kind == "weight" and module.endswith("_proj")
    return Piece((before + _renamed(names.block, inner),), (name,), TURNED if turned else SAME)


def _experts(experts: Experts, before: str, name: str, kind: str, n_experts: int) -> Piece:
    if experts.each is None:
        form = SAME
        if experts.interleaved:
            form = ALTERNATING if kind.startswith("gate_up") else SAME if kind.endswith("bias") else TURNED
        return Piece((f"{before}{experts.at}.{kind}",), (name,), form)
    gate, up, down = experts.each
    parts = (gate, up) if kind == "gate_up_proj" else (up,) if kind == "up_proj" else (down,)
    theirs = tuple(f"{before}{experts.at}.{e}.{part}.weight" for e in range(n_experts) for part in parts)
    return Piece(theirs, (name,), per_expert(n_experts, len(parts)))


def _renamed(table: Mapping[str, str], inner: str) -> str:
    """A name with its longest part that the table knows replaced."""
    known = [each for each in table if inner == each or inner.startswith(f"{each}.")]
    if not known:
        return inner
    longest = max(known, key=len)
    return table[longest] + inner[len(longest) :]


SAME = Form(lambda ours: ours, lambda theirs: theirs)
TURNED = Form(lambda ours: [ours[0].mT], lambda theirs: [theirs[0].mT])


def _alternate(ours: Tensors) -> Tensors:
    """[E, 2 F, D], gate first, to [E, D, 2 F] with gate and up in turn; biases have no D."""
    stack = ours[0]
    mixed = stack.reshape(stack.shape[0], 2, -1, *stack.shape[2:]).transpose(1, 2).flatten(1, 2)
    return [mixed.mT if mixed.ndim == 3 else mixed]


def _apart(theirs: Tensors) -> Tensors:
    mixed = theirs[0].mT if theirs[0].ndim == 3 else theirs[0]
    return [mixed.reshape(mixed.shape[0], -1, 2, *mixed.shape[2:]).transpose(1, 2).flatten(1, 2)]


ALTERNATING = Form(_alternate, _apart)


def joined(sizes: list[int], turned: bool = False) -> Form:
    """One after the other along the rows; ``turned``: along the columns of transposed matrices."""

    def theirs(ours: Tensors) -> Tensors:
        whole = torch.cat(ours)
        return [whole.mT if turned and whole.ndim == 2 else whole]

    def ours(theirs: Tensors) -> Tensors:
        whole = theirs[0].mT if turned and theirs[0].ndim == 2 else theirs[0]
        return list(whole.split_with_sizes(sizes))

    return Form(theirs, ours)


def grouped(groups: int, width: int) -> Form:
    """Queries [H K, ...], keys and values [G K, ...] to [G, H / G + 2, K, ...]: each group's queries, key and value."""

    def theirs(ours: Tensors) -> Tensors:
        return [torch.cat([each.reshape(groups, -1, width, *each.shape[1:]) for each in ours], dim=1).flatten(0, 2)]

    def ours(theirs: Tensors) -> Tensors:
        whole = theirs[0].reshape(groups, -1, width, *theirs[0].shape[1:])
        parts = whole.split_with_sizes([whole.shape[1] - 2, 1, 1], dim=1)
        return [each.flatten(0, 2) for each in parts]

    return Form(theirs, ours)


def per_expert(n_experts: int, parts: int) -> Form:
    """A stack [E, parts F, ...] to E x parts matrices."""

    def theirs(ours: Tensors) -> Tensors:
        return [part for each in ours[0].unbind() for part in each.chunk(parts)]

    def ours(theirs: Tensors) -> Tensors:
        each = [torch.cat(theirs[first : first + parts]) for first in range(0, len(theirs), parts)]
        assert len(each) == n_experts
        return [torch.stack(each)]

    return Form(theirs, ours)
