"""Mixers on a tape: as `engine.nn.mixers`, their scans one operation each as `engine.nn.scans`.

Sizes: N = B T tokens, C channels, W tokens of the convolution, H heads, P their width, G groups, S width of the state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainledger.ledger import rules
from trainledger.ledger.core.graph import Array, BlockLeaves, Gradients
from trainledger.ledger.core.sizes import Sizes
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import Int
from trainledger.ledger.model.parameters import scan_flops
from trainledger.ledger.ops import operations as op
from trainledger.spec.mixers import GatedDelta, KimiDelta, Mamba2

Parts = dict[str, Array]


def mix(tape: Tape, sizes: Sizes, leaves: BlockLeaves, x: Array) -> Array:
    """A block's mixer."""
    part, D = sizes.spec.mixer, sizes.spec.d_model
    assert part is not None
    widths = part.sizes(D)
    joined = _project(tape, sizes, leaves, "in_proj", x, D, sum(width for _, width in widths.inward))
    arrays = op.parts(tape, joined, [sizes.rows * width for _, width in widths.inward])
    del joined, x
    parts = {name: array for (name, _), array in zip(widths.inward, arrays, strict=True)}
    del arrays
    return _project(tape, sizes, leaves, "out_proj", _CORES[part.kind](tape, sizes, leaves, parts), widths.outward, D)


def _project(tape: Tape, sizes: Sizes, leaves: BlockLeaves, name: str, x: Array, d_in: Int, d_out: Int) -> Array:
    w, b = leaves[f"mixer.{name}.weight"], leaves.get(f"mixer.{name}.bias")
    with tape.at(name):
        return op.linear(tape, x, w, b, sizes.rows, d_in, d_out)


def _vector(leaves: BlockLeaves, name: str) -> Array:
    return leaves[f"mixer.{name}"].array()


def _convolved(tape: Tape, sizes: Sizes, leaves: BlockLeaves, x: Array) -> Array:
    part = sizes.spec.mixer
    assert part is not None
    bias = leaves.get("mixer.conv.bias")
    inputs = [x, _vector(leaves, "conv.weight"), *(() if bias is None else (bias.array(),))]
    channels = part.sizes(sizes.spec.d_model).channels
    flops = rules.matmul_flops(sizes.rows, channels, part.conv_width)
    return _scan(tape, sizes, "convolution", inputs, flops, sizes.B * (part.conv_width - 1) * channels)


def _scanned(tape: Tape, sizes: Sizes, name: str, inputs: Sequence[Array]) -> Array:
    part, spec = sizes.spec.mixer, sizes.spec
    assert part is not None
    return _scan(
        tape, sizes, name, inputs, scan_flops(spec, sizes.B, sizes.T), sizes.B * part.sizes(spec.d_model).state_size
    )


# mamba-ssm's `mamba_chunk_scan_combined` and flash-linear-attention's `chunk_gated_delta_rule` save what they are given
# and compute the states of the chunks again in backward; `causal_conv1d_fn` does so with the sum before its SiLU. The
# states of all chunks, which live within a kernel's call, are in no account.
def _scan(tape: Tape, sizes: Sizes, name: str, inputs: Sequence[Array], flops: Int, state: Int) -> Array:
    """One operation with a result like its first input: it keeps its inputs, and its backward computes it again."""
    like = inputs[0].elements, inputs[0].dtype
    more = {"flops": flops, "model_flops": flops}
    if sizes.cache is not None:
        changes = [Array(state, "fp32", None)]
        return tape.emit(f"{name}_cached", "matmul", reads=inputs, changes=changes, makes=[like], **more)[0]

    def backward(g: Array, *saved: Array) -> Gradients:
        makes = [(array.elements, array.dtype) for array in saved]
        more = {"flops": 3 * flops, "model_flops": 2 * flops}
        return list(tape.emit(f"{name}_backward", "matmul", reads=[g, *saved], makes=makes, **more))

    (y,) = tape.emit(name, "matmul", reads=inputs, makes=[like], **more)
    y.node = tape.node([array.node for array in inputs], tuple(inputs), backward)
    return y


# As `rms_norm_gated` of both packages: one kernel, which makes the normed values again in backward. The few bytes of a
# root for each row are left out.
def _gated_norm(tape: Tape, leaves: BlockLeaves, x: Array, gate: Array) -> Array:
    """An RMS norm and a gate in one operation."""
    inputs = (x, gate, _vector(leaves, "norm.weight"))
    elements, dtype = x.elements, x.dtype
    del x, gate

    def run(name: str, reads: Sequence[Array], makes: Sequence[tuple[Int, str]]) -> list[Array]:
        flops = rules.FLOPS_PER_ELEMENT["gated rmsnorm" + name] * elements
        spelled = "gated_norm" + name.replace(" ", "_")
        return tape.emit(spelled, "norm", reads=reads, makes=makes, flops=flops, basis="assumed")

    def backward(g: Array, *saved: Array) -> Gradients:
        return list(run(" backward", [g, *saved], [(array.elements, array.dtype) for array in saved]))

    (y,) = run("", inputs, [(elements, dtype)])
    y.node = tape.node([array.node for array in inputs], inputs, backward)
    return y


def _state_space(tape: Tape, sizes: Sizes, leaves: BlockLeaves, parts: Parts) -> Array:
    part, N = sizes.spec.mixer, sizes.rows
    assert isinstance(part, Mamba2)
    mixed = _convolved(tape, sizes, leaves, parts.pop("conv"))
    shared = N * part.n_groups * part.state
    x, b, c = op.parts(tape, mixed, [N * part.n_heads * part.head_dim, shared, shared])
    vectors = [_vector(leaves, name) for name in ("A_log", "dt_bias", "D")]
    y = _scanned(tape, sizes, "state_space", [x, parts.pop("step"), *vectors[:2], b, c, vectors[2]])
    del mixed, x, b, c
    if not part.norm:
        return op.multiply(tape, op.activate(tape, parts.pop("gate"), "silu"), y)
    return _gated_norm(tape, leaves, y, parts.pop("gate"))


def _delta_rule(tape: Tape, sizes: Sizes, leaves: BlockLeaves, parts: Parts) -> Array:
    part, N = sizes.spec.mixer, sizes.rows
    assert isinstance(part, GatedDelta | KimiDelta)
    raised = {name: (d_in, d_out) for name, d_in, d_out in part.sizes(sizes.spec.d_model).raised}

    def full(name: str) -> Array:
        own = f"{name}_proj"
        return _project(tape, sizes, leaves, own, parts.pop(name), *raised[own]) if raised else parts.pop(name)

    mixed = _convolved(tape, sizes, leaves, parts.pop("conv"))
    keys = N * part.n_key_heads * part.key_dim
    q, k, v = op.parts(tape, mixed, [keys, keys, N * part.n_heads * part.value_dim])
    decay = full("decay")
    vectors = [_vector(leaves, name) for name in ("A_log", "dt_bias")]
    y = _scanned(tape, sizes, "delta_rule", [v, q, k, parts.pop("rate"), decay, *vectors])
    del mixed, q, k, v, decay
    return _gated_norm(tape, leaves, y, full("gate"))


def _short_convolution(tape: Tape, sizes: Sizes, leaves: BlockLeaves, parts: Parts) -> Array:
    y = _convolved(tape, sizes, leaves, op.multiply(tape, parts.pop("before"), parts.pop("conv")))
    return op.multiply(tape, parts.pop("after"), y)


_CORES: dict[str, Callable[[Tape, Sizes, BlockLeaves, Parts], Array]] = {
    "mamba-2": _state_space,
    "gated-delta": _delta_rule,
    "kimi-delta": _delta_rule,
    "short-conv": _short_convolution,
}
