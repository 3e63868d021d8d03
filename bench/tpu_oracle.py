"""A sharded training step as a TPU's compiler lays it out in memory, beside the ledger: docs/tables/tpu_oracle.csv.

    python bench/tpu_oracle.py --python PYTHON [CASE ...]

PYTHON is an interpreter with jax and libtpu (both on PyPI); no TPU is needed, as libtpu compiles ahead of time for a
topology. The step is MaxText's for Llama (src/maxtext at e591f30): layers in a scan under a `jax.checkpoint` policy,
splash attention, fp32 parameters sharded by FSDP, used in bf16, fp32 gradients, AdamW with clipping, buffers donated.
XLA assigns all memory before it generates code: its report is read and the compiler is ended, which takes half a
minute where code takes ten. ``--code`` waits for it in cases of `WITH_CODE`, for the compiler's own count of FLOPs.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TABLE = Path(__file__).resolve().parents[1] / "docs" / "tables" / "tpu_oracle.csv"
REPORT = "*jit_step*after_optimizations-memory-usage-report.txt"


@dataclass(frozen=True)
class Case:
    """A model, its batch on each chip, a slice of v6e chips and a policy of MaxText; ``inputs`` may be on the host."""

    slice: str = "2x2"
    d_model: int = 4096
    d_ff: int = 14336
    n_heads: int = 32
    n_kv_heads: int = 8
    vocab_size: int = 32768
    n_layers: int = 8
    seq_len: int = 4096
    batch: int = 2
    policy: str = "full"
    inputs: str = "device"

    @property
    def chips(self) -> int:
        rows, columns = map(int, self.slice.split("x"))
        return rows * columns


BIG = {"d_model": 8192, "d_ff": 28672, "n_heads": 64, "vocab_size": 128256, "seq_len": 8192}
HOSTED = {"policy": "qkv_proj_offloaded", "inputs": "host"}
WITH_CODE = ("small",)
CASES = {
    "small": Case(d_model=2048, d_ff=8192, n_heads=16, n_layers=4),
    "full": Case(),
    "minimal": Case(policy="minimal"),
    "minimal_with_context": Case(policy="minimal_with_context"),
    "save_qkv_proj": Case(policy="save_qkv_proj"),
    "save_out_proj": Case(policy="save_out_proj"),
    "qkv_proj_offloaded": Case(policy="qkv_proj_offloaded"),
    "minimal_offloaded": Case(policy="minimal_offloaded"),
    "16 layers": Case(n_layers=16),
    "long": Case(seq_len=8192, batch=4),
    "vocabulary on 4": Case(vocab_size=128256, seq_len=8192),
    "vocabulary on 8": Case("2x4", vocab_size=128256, seq_len=8192),
    "vocabulary on 16": Case("4x4", vocab_size=128256, seq_len=8192),
    "vocabulary on 32": Case("4x8", vocab_size=128256, seq_len=8192),
    "vocabulary on 64": Case("8x8", vocab_size=128256, seq_len=8192),
    "wide on 4": Case(n_layers=2, batch=1, **BIG),
    "wide on 32": Case("4x8", n_layers=8, batch=1, **BIG),
    "Llama 3 8B on 16": Case("4x4", vocab_size=128256, n_layers=32, seq_len=8192, batch=3),
    "Llama 3 70B on 64": Case("8x8", n_layers=80, **BIG, **HOSTED),
    "Llama 3 70B on 128": Case("8x16", n_layers=80, batch=4, **BIG, **HOSTED),
}
PROJECTIONS = {"query_proj": "q_proj", "key_proj": "k_proj", "value_proj": "v_proj"}
SAVED = {  # the names that each policy keeps on the device, and those on the host
    "full": ((), ()),
    "minimal": ((*PROJECTIONS, "out_proj", "mlpwi_0", "mlpwi_1", "mlpwo"), ()),
    "minimal_with_context": ((*PROJECTIONS, "out_proj", "mlpwi_0", "mlpwi_1", "mlpwo", "context"), ()),
    "save_qkv_proj": (tuple(PROJECTIONS), ()),
    "save_out_proj": (("out_proj",), ()),
    "qkv_proj_offloaded": ((), tuple(PROJECTIONS)),
    "minimal_offloaded": ((), (*PROJECTIONS, "out_proj", "mlpwi_0", "mlpwi_1", "mlpwo")),
}


def lowered(case: Case) -> Any:
    """The step of a case, lowered for its slice of v6e chips."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax
    from jax.ad_checkpoint import checkpoint_name
    from jax.experimental import topologies
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    devices = topologies.get_topology_desc(platform="tpu", topology_name=f"v6e:{case.slice}").devices
    mesh = Mesh(np.array(devices), ("fsdp",))
    D, F, H, G, V, L, T = (
        case.d_model, case.d_ff, case.n_heads, case.n_kv_heads, case.vocab_size, case.n_layers, case.seq_len
    )  # fmt: skip
    K, half = D // H, jnp.bfloat16
    last = P(None, None, None, "fsdp")
    shapes = {  # MaxText stacks layers along axis 1, and shards the model's width
        "query": ((D, L, H, K), P("fsdp")), "key": ((D, L, G, K), P("fsdp")), "value": ((D, L, G, K), P("fsdp")),
        "out": ((H, L, K, D), last), "wi_0": ((D, L, F), P("fsdp")), "wi_1": ((D, L, F), P("fsdp")),
        "wo": ((F, L, D), P(None, None, "fsdp")), "before": ((D, L), P()), "after": ((D, L), P()),
    }  # fmt: skip
    outside = {"embedding": ((V, D), P(None, "fsdp")), "head": ((D, V), P("fsdp")), "norm": ((D,), P())}

    def arrays(some: dict[str, Any]) -> dict[str, Any]:
        return {
            name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, split))
            for name, (shape, split) in some.items()
        }

    parameters = {"layers": arrays(shapes), "outside": arrays(outside)}
    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, P()))
    state = {"parameters": parameters, "first": parameters, "second": parameters, "count": count}
    tokens = jax.ShapeDtypeStruct((case.batch * case.chips, T), jnp.int32, sharding=NamedSharding(mesh, P("fsdp")))
    names = ("inputs", "targets", "positions", "inputs_segmentation", "targets_segmentation")
    batch = dict.fromkeys(names, tokens)
    by_batch = NamedSharding(mesh, P("fsdp", None, None))

    def shard(x: Any) -> Any:
        return lax.with_sharding_constraint(x, by_batch)

    def norm(x: Any, scale: Any) -> Any:
        wide = x.astype(jnp.float32)
        y = (wide * lax.rsqrt(jnp.mean(lax.square(wide), -1, keepdims=True) + 1e-5)).astype(half)
        return jnp.einsum("...k,k->...k", y, scale.astype(half))

    def rotated(x: Any, positions: Any) -> Any:
        angle = positions[:, :, None, None] / 500_000.0 ** (jnp.arange(K // 2) * 2 / K)
        sine, cosine = jnp.sin(angle).astype(half), jnp.cos(angle).astype(half)
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate([a * cosine - b * sine, b * cosine + a * sine], -1)

    size = min(T, 1024)
    kernel = splash.make_splash_mha(
        masks.MultiHeadMask([masks.CausalMask((T, T)) for _ in range(H)]), head_shards=1, q_seq_shards=1,
        block_sizes=splash.BlockSizes(
            **dict.fromkeys(
                ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute"), size
            ),
            use_fused_bwd_kernel=True,
        ),
        residual_checkpoint_name="context",
    )  # fmt: skip

    def attend(q: Any, k: Any, v: Any, segments: Any) -> Any:
        def own(q: Any, k: Any, v: Any, segments: Any) -> Any:
            return jax.vmap(kernel)(q, k, v, splash.SegmentIds(segments, segments))

        rows = P("fsdp", None, None, None)
        specs = (rows, rows, rows, P("fsdp", None))
        return jax.shard_map(own, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=False)(q, k, v, segments)

    def layer(x: Any, w: dict[str, Any], positions: Any, segments: Any) -> Any:
        x = checkpoint_name(shard(x), "decoder_layer_input")
        h = shard(norm(x, w["before"]))
        q, k, v = (jnp.einsum("btd,dhk->bthk", h, w[name].astype(half)) for name in ("query", "key", "value"))
        q, k = rotated(q, positions) / K**0.5, rotated(k, positions)
        q, k, v = (checkpoint_name(y, name) for y, name in zip((q, k, v), PROJECTIONS, strict=True))
        mixed = attend(*(y.transpose(0, 2, 1, 3) for y in (q, k, v)), segments).transpose(0, 2, 1, 3)
        out = jnp.einsum("bthk,hkd->btd", mixed, w["out"].astype(half))
        x = x + shard(checkpoint_name(out, "out_proj"))
        h = shard(norm(x, w["after"]))
        gate, up = (checkpoint_name(h @ w[f"wi_{i}"].astype(half), f"mlpwi_{i}") for i in (0, 1))
        down = (jax.nn.silu(gate) * up).astype(half) @ w["wo"].astype(half)
        return shard(x + shard(checkpoint_name(down, "mlpwo")))

    keep, offload = SAVED[case.policy]
    offload = (*offload, "decoder_layer_input") if case.inputs == "host" else offload
    policy = None
    if offload:
        policy = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(keep), names_which_can_be_offloaded=list(offload), offload_src="device",
            offload_dst="pinned_host",
        )  # fmt: skip
    elif keep:
        policy = jax.checkpoint_policies.save_only_these_names(*keep)

    def softmax(logits: Any, targets: Any) -> Any:
        shifted = logits - logits.max(-1, keepdims=True)
        powers = jnp.exp(shifted)
        total = powers.sum(-1, keepdims=True)
        return -(targets * (shifted - jnp.log(total))).sum(-1), (logits, targets, powers, total)

    @jax.custom_vjp
    def cross_entropy(logits: Any, targets: Any) -> Any:
        return softmax(logits, targets)[0]

    def backward(saved: Any, g: Any) -> Any:
        logits, targets, powers, total = saved
        return jnp.asarray(g[..., None] * (powers / total - targets), logits.dtype), None

    cross_entropy.defvjp(softmax, backward)

    def loss(parameters: Any, batch: Any) -> Any:
        own = parameters["outside"]
        x = shard(
            jnp.einsum("btv,vd->btd", jax.nn.one_hot(batch["inputs"], V, dtype=half), own["embedding"].astype(half))
        )

        def body(x: Any, w: Any) -> Any:
            again = jax.checkpoint(layer, policy=policy, prevent_cse=False)
            return again(x, w, batch["positions"], batch["inputs_segmentation"]), None

        x, _ = lax.scan(body, x, {name: jnp.moveaxis(w, 1, 0) for name, w in parameters["layers"].items()})
        logits = (norm(x, own["norm"]) @ own["head"].astype(half)).astype(jnp.float32)
        weights = batch["targets_segmentation"] != 0
        return (cross_entropy(logits, jax.nn.one_hot(batch["targets"], V)) * weights).sum() / (weights.sum() + 1e-8)

    def step(state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(state["parameters"], batch)
        length = jnp.sqrt(sum(jnp.sum(lax.square(g)) for g in jax.tree.leaves(gradients)))
        gradients = jax.tree.map(lambda g: g * jnp.where(length < 1, 1.0, 1 / length), gradients)
        count = state["count"] + 1
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["first"], gradients)
        second = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, state["second"], gradients)

        def updated(w: Any, m: Any, v: Any) -> Any:
            unbiased = (m / (1 - 0.9**count)) / (jnp.sqrt(v / (1 - 0.95**count)) + 1e-8)
            return w - 3e-4 * (unbiased + 0.1 * w)

        parameters = jax.tree.map(updated, state["parameters"], first, second)
        return {"parameters": parameters, "first": first, "second": second, "count": count}, value

    where = jax.tree.map(lambda x: x.sharding, state)
    shardings = (where, jax.tree.map(lambda x: x.sharding, batch))
    return jax.jit(step, donate_argnums=0, in_shardings=shardings, out_shardings=(where, None)).lower(state, batch)


def compile_here(name: str) -> None:
    """Compile a case in this process and print what the compiler says of it."""
    import jax
    import libtpu

    print(json.dumps({"jax": jax.__version__, "libtpu": libtpu.__version__}), flush=True)
    compiled = lowered(CASES[name]).compile()
    memory = compiled.memory_analysis()
    said = {
        "arguments": memory.argument_size_in_bytes, "temporaries": memory.temp_size_in_bytes,
        "flops": compiled.cost_analysis()["flops"],
    }  # fmt: skip
    print(json.dumps(said), flush=True)


def compiled_sizes(name: str, python: str, *, code: bool) -> dict[str, Any]:
    """What the compiler says of a case: bytes of arguments and of temporaries, FLOPs where it generates code."""
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "said", "w+", encoding="utf-8") as said:
        flags = f"--xla_dump_to={folder} --xla_dump_hlo_as_text"
        environment = {**os.environ, "XLA_FLAGS": flags, "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
        command = [python, __file__, "--compile", name]
        with subprocess.Popen(command, env=environment, stdout=said, stderr=subprocess.DEVNULL) as child:
            while child.poll() is None:
                time.sleep(1)
                if not code and list(Path(folder).glob(REPORT)):
                    time.sleep(2)  # until it is written
                    child.kill()
        said.seek(0)
        lines = [json.loads(line) for line in said if line.startswith("{")]
        (report,) = Path(folder).glob(REPORT)
        total = int(re.findall(r"Total bytes: (\d+)", report.read_text(encoding="utf-8"))[0])
    merged: dict[str, Any] = {key: value for line in lines for key, value in line.items()}
    return merged | {"total": total}


def account_of(case: Case) -> tuple[Any, int, int]:
    """The ledger of the same step, bytes of its arguments, and its peak."""
    from trainledger.answers.load import load
    from trainledger.ledger.memory.timeline import peak
    from trainledger.ledger.ranks import accounts
    from trainledger.spec.convert import trainers

    keys = {"remat_policy": case.policy}
    if case.inputs == "host":
        keys = {"remat_policy": "custom", "decoder_layer_input": "offload", **dict.fromkeys(PROJECTIONS, "offload")}
    read = trainers.from_values(keys, program="MaxText").table["recipe"]
    run = load({
        "model": {
            "vocab_size": case.vocab_size, "d_model": case.d_model, "n_layers": case.n_layers,
            "attention.n_heads": case.n_heads, "attention.n_kv_heads": case.n_kv_heads,
            "feed_forward.d_ff": case.d_ff, "max_seq_len": case.seq_len, "tie_embeddings": False,
        },
        "recipe": {
            "seq_len": case.seq_len, "micro_batch": case.batch, "global_batch": case.batch * case.chips, "steps": 1,
            "precision": "bf16-sharded", "activation_checkpointing": read["activation_checkpointing"],
        },
        "layout": {"shard": case.chips}, "cluster": {"device": "tpu-v6e", "count": case.chips},
    })  # fmt: skip
    ledger = accounts(run, backend="other")[0].ledger
    resident = dict(ledger.resident)
    # MaxText's five arrays of a batch in int32.
    batch = 5 * 4 * case.batch * case.seq_len
    arguments = resident["parameters"] + resident["optimizer state"]
    return ledger, int(arguments) + batch, int(peak(ledger).nbytes)


def flops_of_a_layer(case: Case) -> int:
    """FLOPs as the compiler counts them: a loop once, none of attention's kernel, the embedding as matmuls of ones."""
    from dataclasses import replace

    ledger, *_ = account_of(replace(case, n_layers=1))
    looked_up = 4 * case.batch * case.seq_len * case.vocab_size * case.d_model  # forward, and the weight's gradient
    return looked_up + int(sum(entry.flops for entry in ledger.entries if entry.kind != "attention"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--python", help="an interpreter with jax and libtpu")
    parser.add_argument("--code", action="store_true", help="also generate code, for the compiler's count of FLOPs")
    parser.add_argument("--compile", choices=CASES, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.compile:
        compile_here(asked.compile)
        return
    known: dict[str, dict[str, str]] = {}
    if TABLE.exists():
        with open(TABLE, newline="", encoding="utf-8") as file:
            known = {row["case"]: row for row in csv.DictReader(file)}
    for name in asked.cases or (CASES if asked.python else ()):
        sizes = compiled_sizes(name, asked.python, code=asked.code and name in WITH_CODE)
        known[name] = known.get(name, {}) | {key: str(value) for key, value in sizes.items()}
    rows = [row_of(name, known[name]) for name in CASES if name in known]
    with open(TABLE, "w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, rows[0], lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    for row in rows:
        print(f"{row['case']:<24}{row['total_ratio']:>8}{row['temporaries_ratio']:>8}")


def row_of(name: str, said: dict[str, str]) -> dict[str, str]:
    """A row of the table: a case, what the compiler said of it, and the ledger's figures over these."""
    case = CASES[name]
    _, arguments, peak = account_of(case)
    total = int(said["total"])
    flops = said.get("flops", "")
    ratio = f"{flops_of_a_layer(case) / float(flops):.4f}" if flops else ""
    own = {key: str(value) for key, value in asdict(case).items()}
    return {"case": name, **own} | {
        "jax": said["jax"], "libtpu": said["libtpu"], "total": said["total"], "flops": flops,
        "ledger": str(peak), "ledger_arguments": str(arguments), "total_ratio": f"{peak / total:.3f}",
        "temporaries_ratio": f"{(peak - arguments) / (total - arguments):.3f}", "flops_ratio": ratio,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
