"""The core of attention and its masks on a tape: the same expressions as in `engine.nn.attention` and `positions`.

Sizes: B sequences, T tokens, H query heads, G key-value heads, K query and key width, W value width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from trainledger.ledger import rules
from trainledger.ledger.core.graph import Array, BlockLeaves, Gradients, Leaf
from trainledger.ledger.core.sizes import Sizes, is_one
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import Int
from trainledger.ledger.memory.checkpointing import checkpointed
from trainledger.ledger.ops import operations as op
from trainledger.ledger.parallel.context import attend_over_ranks
from trainledger.spec.device import cudnn_takes
from trainledger.spec.device import fused_attention as fused_kernels
from trainledger.spec.layers_of_backward import kinds_again
from trainledger.spec.model import ModelSpec
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.recipe import Recipe
from trainledger.spec.units import round_up

# Rows of the logsumexp of the memory-efficient kernel are padded to a multiple of this (PyTorch,
# aten/src/ATen/native/transformers/cuda/mem_eff_attention/kernel_forward.h, kAlignLSE).
EFFICIENT_ROWS = 32
# Numbers of 8 bytes that a kernel keeps of the random generator's state, with dropout or without.
GENERATOR_STATE = {"flash_attention": 3, "efficient_attention": 2, "cudnn_attention": 2}
WIDEST = 256  # heads of FlashAttention and cuDNN's kernel
KERNELS = {"flash": "flash_attention", "efficient": "efficient_attention", "cudnn": "cudnn_attention"}
_LACKS = {
    "cpu": "is a kernel of accelerators, not of a CPU",
    "sm70": "needs compute capability 8.0 (in fp16 and fp32 efficient does not), and the device has less",
    "other": "is NVIDIA's, and the device is not",
}


def refusals(sizes: Sizes, dtype: str) -> Iterator[Problem]:
    """What the recipe's attention cannot do for this model with this backend in ``dtype``, with a kernel that can."""
    spec, given = sizes.spec, sizes.attention
    wide = spec.attention.in_global is not None and spec.of_layers(None).head_size > WIDEST
    unfused = spec.attention.custom_scores or (sizes.of_megatron and sizes.backend == "sm70")
    if given in KERNELS and given not in fused_kernels(sizes.backend, dtype):
        yield Problem("recipe.attention", given, _LACKS[sizes.backend], "math" if unfused else "sdpa")
    elif given == "math" and sizes.backend == "sm70" and not is_one(sizes.layout.context):
        rule = "combines fused attention from parts, which a device before compute capability 8.0 does not have here"
        yield Problem("layout.context", sizes.layout.context, rule, 1)
    elif given in ("flash", "cudnn") and dtype == "fp32":
        rule = "is a kernel for 16 bits, and attention computes in fp32 here"
        yield Problem("recipe.attention", given, rule, "math" if spec.attention.custom_scores else "efficient")
    elif wide and given in ("flash", "cudnn") and sizes.cache is None:  # vLLM's Triton kernels have such heads
        rule = f"has heads of at most {WIDEST}, and global layers have {spec.of_layers(None).head_size}"
        yield Problem("recipe.attention", given, rule, "math" if spec.attention.custom_scores else "sdpa")
    elif given in ("sdpa", "efficient", "cudnn") and spec.attention.custom_scores:
        rule = f"PyTorch has no such kernel with {spec.attention.custom_scores}"
        other = "math" if sizes.backend == "cpu" or dtype == "fp32" else "flash"
        yield Problem("recipe.attention", given, rule, other)


def written_out_here(sizes: Sizes) -> bool:
    """Whether attention is unfused: by choice, or on a CPU with dropout, as no fused kernel there has it."""
    return sizes.attention == "math" or (sizes.attention_dropout > 0 and sizes.backend == "cpu")


def kernel_of(sizes: Sizes, dtype: str, masked: bool) -> str:
    """The fused kernel that runs: for ``sdpa`` the one that PyTorch selects."""
    # Its flash kernel for accelerators has neither masks nor fp32, and values are as wide as keys (torch documentation
    # of scaled_dot_product_attention; aten/src/ATen/native/transformers/cuda/sdp_utils.cpp). Of devices that prefer
    # cuDNN's kernel see `kernels_of_capability`.
    if sizes.attention in KERNELS:
        return KERNELS[sizes.attention]
    if sizes.backend == "cpu":
        return "flash_attention_for_cpu"
    head, value = sizes.spec.head_size, sizes.spec.value_size
    if sizes.of_megatron:
        return _transformer_engines(sizes)
    if cudnn_takes(sizes.backend, dtype, head, value, deterministic=sizes.deterministic):
        return "cudnn_attention"
    wide = isinstance(head, int) and head > WIDEST  # check_head_dim_size_flash
    flash = not (masked or wide) and head == value and dtype != "fp32" and "flash" in fused_kernels(sizes.backend)
    return "flash_attention" if flash else "efficient_attention"


def _transformer_engines(sizes: Sizes) -> str:
    """The kernel that Transformer Engine selects: cuDNN's from Hopper on, FlashAttention before."""
    # On Blackwell cuDNN has no backward with dropout that gives the same bits each time
    # (transformer_engine/pytorch/attention/dot_product_attention/utils.py, and cuDNN's support matrix).
    same_bits = sizes.backend == "sm100" and sizes.deterministic and sizes.attention_dropout > 0
    return "cudnn_attention" if sizes.backend in ("sm90", "sm100") and not same_bits else "flash_attention"


def parameters_of_scores(spec: ModelSpec) -> Iterator[tuple[str, tuple[Int, ...]]]:
    """The parameters of attention other than its projections."""
    if spec.attention.sinks:
        yield "sinks", (spec.attention.n_heads,)


def attend(tape: Tape, sizes: Sizes, leaves: BlockLeaves, q: Array, k: Array, v: Array, mask: Array | None) -> Array:
    """The attention of each query over the values it may see."""
    core = partial(_core, tape, leaves, mask)
    if sizes.cached_tokens is not None:  # one new query against all that is in the cache
        return core(sizes, q, k, v, rules.keys_seen(sizes.cached_tokens, leaves.kind.window))
    if not is_one(sizes.layout.context):
        return attend_over_ranks(tape, sizes, q, k, v, core)
    if sizes.attention_again:
        return checkpointed(tape, partial(core, sizes), q, k, v)
    return core(sizes, q, k, v)


def _core(
    tape: Tape, leaves: BlockLeaves, mask: Array | None, sizes: Sizes, q: Array, k: Array, v: Array,
    tokens: Int | None = None,
) -> Array:  # fmt: skip
    """The attention of one rank; ``tokens`` are all that there are, where other ranks have some of them."""
    window, sinks = leaves.kind.window, leaves.get("self_attn.sinks")
    if sizes.spec.indexer is not None:
        assert mask is not None
        return attend_to_chosen(tape, sizes, q, k, v, mask)
    if written_out_here(sizes):
        return written_out(tape, sizes, q, k, v, mask, sinks, tokens)
    spec, B, T, H = sizes.spec, sizes.B, sizes.T, sizes.spec.attention.n_heads
    K, W = spec.head_size, spec.value_size
    repeats = H // spec.kv_heads
    if sizes.backend == "cpu":
        wide, G = max(K, W), spec.kv_heads
        q, k = padded(tape, q, sizes.rows * H, K, wide), padded(tape, k, sizes.rows * G, K, wide)
        v = padded(tape, v, sizes.rows * G, W, wide)
        K = W = wide
    kernel = kernel_of(sizes, tape.compute_dtype, mask is not None)
    without_shared_heads = kernel == "efficient_attention" or (kernel == "cudnn_attention" and mask is not None)
    if without_shared_heads and not is_one(repeats):  # as `engine.nn.attention` does for any mask
        # The summed gradients have heads before tokens, which a projection's output has not.
        turned_back = not (is_one(spec.kv_heads) or is_one(T))
        made_anew = leaves.kind.rotary or spec.attention.qk_norm == "head"
        k = op.contiguous(tape, k, forward=False, backward=turned_back and not made_anew)
        v = op.contiguous(tape, v, forward=False, backward=turned_back)
        k, v = op.repeat(tape, k, repeats), op.repeat(tape, v, repeats)
    keys = T if tokens is None else tokens
    keys = rules.keys_seen(keys, window) if sizes.attention == "flash" else keys
    given = () if mask is None else (mask,)
    # Megatron-LM has tokens before sequences, and FlashAttention sequences first: they are copied on the way.
    turned = sizes.of_megatron and kernel == "flash_attention" and not is_one(B)
    if turned:
        q, k, v = (op.contiguous(tape, array, forward=True, backward=True) for array in (q, k, v))
    y = fused_attention(tape, q, k, v, (B, H, T, keys, K, W), kernel=kernel, given=given, learned=sinks)
    if turned:
        del q, k, v
        y = op.contiguous(tape, y, forward=True, backward=True)
    if spec.value_size == W:
        return y
    y = op.leading(tape, y, sizes.rows * H * spec.value_size)
    return op.contiguous(tape, y, forward=True, backward=False)


def attend_to_chosen(tape: Tape, sizes: Sizes, q: Array, k: Array, v: Array, chosen: Array) -> Array:
    """Attention of each query to the keys that its indexer chose, in one kernel as in `engine.nn.sparse`."""
    spec, part = sizes.spec, sizes.spec.indexer
    assert part is not None
    keys = rules.keys_seen(sizes.T, part.top_k)
    shape = (sizes.B, spec.attention.n_heads, sizes.T, keys, spec.head_size, spec.value_size)
    return fused_attention(tape, q, k, v, shape, kernel="sparse_attention", given=(chosen,))


def written_out(
    tape: Tape, sizes: Sizes, q: Array, k: Array, v: Array, mask: Array | None, sinks: Leaf | None,
    tokens: Int | None = None,
) -> Array:  # fmt: skip
    """Attention one operation after the other; a query that sees all ``tokens`` has no mask."""
    spec, B, T = sizes.spec, sizes.B, sizes.T
    S = T if tokens is None else tokens
    H, K, W = spec.attention.n_heads, spec.head_size, spec.value_size
    repeats = H // spec.kv_heads
    queries, keys = heads_first(tape, q, 1), heads_first(tape, k, repeats)
    scores = op.times_number(tape, op.batched_matmul(tape, queries, keys, B * H, T, S, K))
    if spec.attention.softcap is not None:
        scores = op.times_number(tape, op.tanh(tape, scores))
    if mask is not None:
        scores = op.add(tape, scores, mask)
    if sinks is None:
        weights = probabilities(tape, sizes, scores)
    else:
        sink = op.cast(tape, sinks.array(), scores.dtype)
        scores = op.concatenate(tape, (scores, broadcast(tape, sink, B * H * T, same=False)))
        del sink
        weights = op.leading(tape, probabilities(tape, sizes, scores), B * H * T * S)
    del scores
    weights = op.dropout(tape, weights, sizes.attention_dropout)
    values = heads_first(tape, v, repeats)
    low = op.cast(tape, weights, tape.compute_dtype)
    y = op.batched_matmul(tape, low, values, B * H, T, W, S)
    del low, values
    y = op.contiguous(tape, y, forward=False, backward=True)
    return op.contiguous(tape, y, forward=True, backward=False)


def probabilities(tape: Tape, sizes: Sizes, scores: Array) -> Array:
    """Softmax of the scores, which CUDA's autocast takes in fp32 (torch documentation, Automatic Mixed Precision)."""
    # Its kernel reads fp16 and writes fp32 (aten/src/ATen/native/cuda/SoftMax.cu, half_to_float); bf16 is copied
    # before.
    wide = sizes.backend != "cpu" and tape.precision.copies == "autocast"
    if wide and scores.dtype == "fp16":
        return op.softmax(tape, scores, "_softmax", wide=True)
    return op.softmax(tape, op.cast(tape, scores, "fp32") if wide else scores, "_softmax")


def heads_first(tape: Tape, x: Array, repeats: Int) -> Array:
    """A copy with heads before tokens, a shared head once for each query's; its gradient is copied back."""
    x = op.contiguous(tape, x, forward=False, backward=True)
    return op.contiguous(tape, x, forward=True, backward=False) if is_one(repeats) else op.repeat(tape, x, repeats)


def padded(tape: Tape, x: Array, rows: Int, width: Int, wide: Int) -> Array:
    """Rows of a width with zeros up to another, or x itself where they are one."""
    if width == wide:
        return x
    dtype = x.dtype

    def pad(x: Array, width: Int) -> Array:
        return tape.make("constant_pad_nd", "copy", x, elements=rows * width, dtype=dtype)

    y = pad(x, wide)
    y.node = tape.node([x.node], (), lambda g: [pad(g, width)])
    return y


def broadcast(tape: Tape, x: Array, elements: Int, *, same: bool) -> Array:
    """x as if there were ``elements``, read once; their gradients are summed, but for the ``same`` size."""
    own = x.elements
    return Broadcast(elements, x, tape.node([x.node], (), lambda g: [g if same else tape.sum(g, own)]))


class Broadcast(Array):
    """Broadcast elements: a copy has all of them, reading moves only the stored ones."""

    __slots__ = ("own",)

    def __init__(self, elements: Int, x: Array, node: object) -> None:
        super().__init__(elements, x.dtype, x.memory, node)  # type: ignore[arg-type]
        self.own = x.nbytes

    @property
    def nbytes(self) -> Int:
        return self.own


def fused_attention(
    tape: Tape, q: Array, k: Array, v: Array, sizes: tuple[Int, Int, Int, Int, Int, Int], *, kernel: str,
    given: Sequence[Array] = (), learned: Leaf | None = None,
) -> Array:  # fmt: skip
    """Attention in one kernel: keeps q, k, v, its output and a logsumexp per query in fp32 (Dao et al. 2022).

    ``sizes`` are those of `rules.attention_flops`. ``given`` is a mask that both directions read, ``learned`` the
    sinks, which have a gradient. A kernel of accelerators also keeps its generator's state, of which its backward makes
    the mask of dropout again.
    """
    batch, heads, queries, keys, head_dim, width = sizes
    rows = batch * heads * queries
    padded = rows
    if kernel == "efficient_attention":
        padded = batch * heads * round_up(queries, EFFICIENT_ROWS)
    name = f"_scaled_dot_product_{kernel}"
    flops = rules.attention_flops(*sizes)
    shape = (batch * heads, queries, keys, head_dim, width, 0 if given else 1)
    sinks = [] if learned is None else [learned.array()]
    state = [(GENERATOR_STATE[kernel], "int64")] if kernel in GENERATOR_STATE else []
    y, *beside = tape.emit(
        name,
        "attention",
        reads=[q, k, v, *given, *sinks],
        makes=[(rows * width, q.dtype), (padded, "fp32"), *state],
        flops=flops,
        model_flops=flops,
        shape=shape,
    )

    def backward(g: Array, q: Array, k: Array, v: Array, y: Array, *rest: Array) -> Gradients:
        return list(
            tape.emit(
                f"{name}_backward",
                "attention",
                reads=[g, q, k, v, y, *rest, *sinks],
                makes=[(sink.elements, sink.dtype) for sink in (q, k, v, *sinks)],
                flops=rules.attention_backward_flops(*sizes),
                model_flops=rules.attention_backward_model_flops(*sizes),
                shape=shape,
            )
        )

    targets = [q.node, k.node, v.node, *(sink.node for sink in sinks)]
    y.node = tape.node(targets, (q, k, v, y.view(), *beside, *given), backward)
    return y


Masks = dict[int | None, Array | None]


def masks(tape: Tape, sizes: Sizes, windows: Iterable[int | None], ids: Array | None = None) -> Masks:
    """The masks that the layers need, by window; None where a kernel needs no mask.

    Those that stop at documents are made of token ``ids``.

    FlashAttention has windows and ALiBi (the package of Dao 2023), PyTorch's kernels only causal attention.
    `InvalidInput` where the recipe's attention cannot do what the model needs.
    """
    _refuse(tape, sizes)
    if sizes.attention == "flash":
        return dict.fromkeys(windows)
    always = written_out_here(sizes) or sizes.spec.positions.kind == "alibi" or sizes.documents
    made: Masks = {}
    arrays: Masks = {}
    with tape.at("masks"):
        others = _of_other_documents(tape, sizes, ids) if sizes.documents else None
        for window in windows:
            narrow = None if window is None or hides_nothing(window, sizes.T) else window
            if narrow not in made:
                made[narrow] = _mask(tape, sizes, narrow, others) if always or narrow is not None else None
            arrays[window] = made[narrow]
    return arrays


def masks_of_last(tape: Tape, sizes: Sizes, windows: Iterable[int | None]) -> Masks:
    """For the last token as the only query, which attends to all keys: ALiBi's penalties, or nothing."""
    _refuse(tape, sizes)
    arrays: Masks = dict.fromkeys(windows)
    if sizes.spec.positions.kind != "alibi" or sizes.attention == "flash":
        return arrays
    if set(arrays) != {None}:
        rule = "with ALiBi is not decoded: keys of a window are stored out of order"
        raise InvalidInput([Problem("model.attention.window", sizes.spec.attention.window, rule, "none")])
    S, H = sizes.cached_tokens, sizes.spec.attention.n_heads
    assert S is not None
    position = tape.make("arange", "copy", elements=S, dtype="fp32")
    bias = tape.pointwise("mul", Array(H, "fp32", None), position, elements=H * S)
    return {None: op.cast(tape, bias, tape.compute_dtype)}


def _refuse(tape: Tape, sizes: Sizes) -> None:
    """Raise `InvalidInput` where the recipe's attention cannot do what the model needs."""
    problems = list(refusals(sizes, tape.compute_dtype))
    if problems:
        raise InvalidInput(problems)


def held_masks(sizes: Sizes, masks: Masks, recipe: Recipe) -> tuple[Array, ...]:
    """Those kept for backward: a fused kernel reads them again, and so does a recomputed block."""
    read = list(masks.values())
    if written_out_here(sizes):
        windows = {layer_kind.window for layer_kind in kinds_again(sizes.spec, recipe) if layer_kind.attends}
        read = [mask for window, mask in masks.items() if window in windows]
    return tuple({id(array): array for array in read if array is not None}.values())


def hides_nothing(window: int, tokens: Int) -> bool:
    """Whether a sequence is known to fit the window; symbols, and arrays with a longer one, are assumed not to."""
    fits = tokens <= window
    return bool(fits.all()) if hasattr(fits, "all") else bool(fits == True)  # noqa: E712 (a relation is no bool)


def _of_other_documents(tape: Tape, sizes: Sizes, ids: Array | None) -> Array:
    """A byte for each query and key that are of two documents."""
    assert ids is not None, "documents are found by their token ids"
    document = tape.make(
        "cumsum", "reduction", tape.pointwise("eq", ids, dtype="bool"), dtype="int64", flops=ids.elements
    )
    return tape.pointwise("ne", document, document, elements=sizes.rows * sizes.T, dtype="bool")


def _mask(tape: Tape, sizes: Sizes, window: int | None, others: Array | None) -> Array:
    mask = _of_all_sequences(tape, sizes, window)
    if others is None:
        return mask
    return tape.pointwise("masked_fill", mask, others, elements=sizes.B * mask.elements)


def _of_all_sequences(tape: Tape, sizes: Sizes, window: int | None) -> Array:
    T, dtype, heads = sizes.T, tape.compute_dtype, sizes.spec.attention.n_heads
    hidden = tape.make("full", "copy", elements=T * T, dtype=dtype)
    mask = tape.make("triu", "copy", hidden)
    if window is not None and sizes.spec.attention.chunked:
        chunk = tape.pointwise("floor_divide", tape.make("arange", "copy", elements=T, dtype="int64"))
        others = tape.pointwise("ne", chunk, chunk, elements=T * T, dtype="bool")
        mask = tape.pointwise("masked_fill", mask, others)
        del chunk, others
    elif window is not None:
        left = tape.make("tril", "copy", hidden)
        tape.change("add_", mask, left)
        del left
    del hidden
    if sizes.spec.positions.kind != "alibi":
        return mask
    position = tape.make("arange", "copy", elements=T, dtype="fp32")
    distance = tape.pointwise("sub", position, position, elements=T * T)
    bias = tape.pointwise("mul", Array(heads, "fp32", None), distance, elements=heads * T * T)
    del distance
    bias = op.cast(tape, bias, dtype)
    tape.change("add_", bias, mask)
    return bias
