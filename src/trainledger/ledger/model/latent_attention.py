"""Multi-head latent attention on a tape: the same expressions as in `nn.latent_attention`.

Sizes: D d_model, H heads, P query rank, R key-value rank, N width without positions, Q rotary width, K = N + Q,
W value width.
"""

from __future__ import annotations

from trainledger.ledger.core.arithmetic import is_one
from trainledger.ledger.core.graph import Array
from trainledger.ledger.core.leaves import BlockLeaves
from trainledger.ledger.core.sizes import Sizes
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import Int
from trainledger.ledger.model.attention_core import attend, broadcast
from trainledger.ledger.model.self_attention import Angles, Shared, project, rotate
from trainledger.ledger.ops import operations as op
from trainledger.ledger.ops.norms import rms_norm, widened
from trainledger.ledger.serving.kv_cache import absorbed, remember


def latent_attention(tape: Tape, sizes: Sizes, leaves: BlockLeaves, x: Array, shared: Shared) -> Array:
    """Attention whose keys and values come from one latent."""
    spec, rows = sizes.spec, sizes.rows
    angles, mask = shared
    assert angles is not None
    assert spec.latent is not None
    D, H, W, Q = spec.d_model, spec.latent.n_heads, spec.value_size, spec.rotary_size
    R, N = spec.latent.kv_rank, spec.latent.nope_head_dim
    q = _queries(tape, sizes, leaves, x)
    q = rotate(tape, sizes, q, H, angles, before=N)
    joint = project(tape, sizes, leaves, "kv_a_proj_with_mqa", x, D, R + Q)
    latent, turning = op.parts(tape, joint, [rows * R, rows * Q])
    del joint
    if sizes.cache is not None:
        return _remembering(tape, sizes, leaves, q, latent, turning, angles, mask)
    kv = _normed(tape, sizes, leaves, "kv_a_layernorm", latent, R)
    kv = project(tape, sizes, leaves, "kv_b_proj", kv, R, H * (N + W))
    plain, v = op.parts(tape, kv, [rows * H * N, rows * H * W])
    del kv
    turned = rotate(tape, sizes, turning, 1, angles)
    k = op.concatenate(tape, (plain, broadcast(tape, turned, rows * H * Q, same=is_one(H))))
    del plain, turned, latent, turning
    y = attend(tape, sizes, q, k, v, mask, None)
    return project(tape, sizes, leaves, "o_proj", y, H * W, D)


def _remembering(
    tape: Tape, sizes: Sizes, leaves: BlockLeaves, q: Array, latent: Array, turning: Array, angles: Angles,
    mask: Array | None,
) -> Array:  # fmt: skip
    """The same with a cache, of which one query reads the latents alone."""
    spec, rows = sizes.spec, sizes.rows
    assert spec.latent is not None
    H, W, Q = spec.latent.n_heads, spec.value_size, spec.rotary_size
    R, N = spec.latent.kv_rank, spec.latent.nope_head_dim
    latent = _normed(tape, sizes, leaves, "kv_a_layernorm", latent, R)
    turned = rotate(tape, sizes, turning, 1, angles)
    new = op.concatenate(tape, (latent, turned))
    (seen,) = remember(tape, sizes, leaves.kind.window, ((1, R + Q),), (new,))
    if sizes.context is not None:
        del latent, turning, turned, new
        y = absorbed(tape, sizes, q, seen, leaves["self_attn.kv_b_proj.weight"])
    else:
        kv = project(tape, sizes, leaves, "kv_b_proj", latent, R, H * (N + W))
        plain, v = op.parts(tape, kv, [rows * H * N, rows * H * W])
        k = op.concatenate(tape, (plain, broadcast(tape, turned, rows * H * Q, same=is_one(H))))
        del kv, plain, turned, latent, turning, new, seen
        y = attend(tape, sizes, q, k, v, mask, None)
    return project(tape, sizes, leaves, "o_proj", y, H * W, spec.d_model)


def _queries(tape: Tape, sizes: Sizes, leaves: BlockLeaves, x: Array) -> Array:
    spec = sizes.spec
    assert spec.latent is not None
    D, P, out = spec.d_model, spec.latent.q_rank, spec.latent.n_heads * spec.head_size
    if P is None:
        return project(tape, sizes, leaves, "q_proj", x, D, out)
    low = project(tape, sizes, leaves, "q_a_proj", x, D, P)
    low = _normed(tape, sizes, leaves, "q_a_layernorm", low, P)
    return project(tape, sizes, leaves, "q_b_proj", low, P, out)


def _normed(tape: Tape, sizes: Sizes, leaves: BlockLeaves, name: str, x: Array, width: Int) -> Array:
    """The RMSNorm of a latent."""
    with tape.at(name):
        w = leaves[f"self_attn.{name}.weight"]
        return rms_norm(tape, widened(tape, x), w, sizes.rows, width, fused=sizes.fused_kernels)
