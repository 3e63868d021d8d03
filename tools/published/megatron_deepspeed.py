"""BigScience's runs: Megatron-DeepSpeed, early 2022, and what its optimizers and its pipeline hold."""

from __future__ import annotations

from published_case import Case, Row, Source

from trainledger import catalog
from trainledger.spec.cluster import Cluster
from trainledger.spec.layout import Layout
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run
from trainledger.spec.units import MIB

_DEEPSPEED = (
    "ZeRO-1 of fp16: 16-bit parameters and gradients whole on every data rank, fp32 master, moments and own gradients "
    "sharded (deepspeed/runtime/zero/stage_1_and_2.py)",
    "every block run again in backward, its input kept whole on every tensor rank (--checkpoint-activations "
    "--deepspeed-activation-checkpointing, no partitioning); 1F1B",
    "tensor parallelism without sequence parallelism; unfused attention, softmax fused in 16 bits, attention and "
    "hidden dropout 0.1 (Megatron's defaults; the slurm scripts set neither)",
    "a norm after the embedding (--embed-layernorm), tied embeddings on the first and the last stage",
)
BIGSCIENCE_UNIT = (
    "read off nvidia-smi, which prints MiB: thousands of them. One page has an `80GB` on a device of 81,251 MiB, the "
    "other a `16GB` on one of 16,160 MiB: more GiB than there are"
)
CHRONICLES = Source(
    name="bigscience-workshop/bigscience:train/tr11-176B-ml/chronicles-prequel.md",
    title="BigScience 176B trials, A100",
    group="dense pretraining, 16 bit",
    figure="driver",
    stages="ends",
    unit=1000 * MIB,
    unit_why=BIGSCIENCE_UNIT,
    context=1573 * MIB,
    assumed=(
        *_DEEPSPEED,
        "the figure is a snapshot of nvidia-smi after the second iteration (the page, at the end of the trials): what "
        "the allocator has once taken counts, used or not; it is the largest of the first and last nodes (the page)",
        "ALiBi adds one number for each key, in the matmul itself: no scores are kept for it (positions = none)",
        "layers over stages: `type:transformer`, 7 7 ... 7 1 of 78 over 12 as the page says; from 02-27 on, where "
        "layers and both embeddings go evenly over stages, `type:transformer|embedding`, one layer less at both ends",
        "rows of 02-28 use the BF16 optimizer that was `just written` (the page): gradients added up whole in fp32; "
        "bf16 rows before it are ZeRO-1 like fp16",
        "CUDA context 1,573 MiB, measured on the page for a 40 GB A100",
    ),
)  # fmt: skip
TR3M = Source(
    name="bigscience-workshop/bigscience:experiments/tr3m-1B3.md",
    title="BigScience 1.3B, V100",
    group="dense pretraining, 16 bit",
    figure="driver",
    stages="first",
    unit=1000 * MIB,
    unit_why=BIGSCIENCE_UNIT,
    context=1113 * MIB,
    assumed=(
        *_DEEPSPEED,
        "read off nvidia-smi like the context, and of the first stage: over two stages 16 sequences ran out of 32 GB "
        "where 8 are given as 15 GB; what ran out are head and loss of a last stage that was not read",
        "learned positions, a vocabulary of 50,257 padded to a multiple of 128 x tensor (Megatron's default)",
        "CUDA context 1,113 MiB, measured on the page for both V100s",
    ),
)  # fmt: skip


def _stage_layers(row: Row) -> tuple[int, ...] | None:
    layers, stages = int(row["n_layers"]), int(row["pp"])
    if layers % stages == 0:
        return None
    if (layers + 2) % stages == 0 and layers != 78:
        each = (layers + 2) // stages
        return (each - 1, *(each,) * (stages - 2), each - 1)
    most = -(-layers // stages)
    return tuple(min(most, max(0, layers - most * stage)) for stage in range(stages))


def megatron_case(row: Row) -> Case:
    chronicles = "chronicles" in row["source"]
    tensor, stages = int(row["tp"]), int(row["pp"])
    data = int(row["n_devices"]) // (tensor * stages)
    batch = int(row["micro_batch_per_device"])
    model = from_fields(
        ModelSpec,
        {
            "vocab_size": int(row["vocab"]),
            "vocab_multiple": 1 if chronicles else 128 * tensor,
            "d_model": int(row["d_model"]),
            "n_layers": int(row["n_layers"]),
            "attention.n_heads": int(row["n_heads"]),
            "feed_forward.d_ff": int(row["d_ff"]),
            "max_seq_len": 2048,
            "norm": "layernorm",
            "norm.bias": True,
            "feed_forward.activation": "gelu_tanh",
            "feed_forward.gated": False,
            "feed_forward.bias": True,
            "attention.bias": True,
            "positions": "none" if chronicles else "learned",
            "tie_embeddings": True,
            "embedding_norm": True,
        },
    )
    wide = row["precision"] == "bf16" and "02-28" in row["notes"]
    recipe = from_fields(Recipe, {
        "seq_len": 2048, "micro_batch": batch, "steps": 1, "precision": row["precision"],
        "precision.master_weights": True,
        "global_batch": max(1, int(row["global_batch_seqs"]) // (batch * data)) * batch * data,
        "framework": "deepspeed",
        "precision.gradient_dtype": "fp32" if wide else None, "attention": "math", "dropout": 0.1,
        "attention_dropout": 0.1, "activation_checkpointing": row["activation_ckpt"],
    })  # fmt: skip
    layout = Layout(shard=data, zero=1, tensor=tensor, pipeline=stages, stage_layers=_stage_layers(row))
    device = {"A100 SXM 80GB": "a100-sxm-80gb", "V100 SXM 32GB": "v100-sxm-32gb", "V100 SXM 16GB": "v100-sxm-16gb"}
    name = device[row["hardware"]]
    run = Run(model=model, recipe=recipe, layout=layout, cluster=Cluster(device=name, count=layout.devices))
    source = CHRONICLES if chronicles else TR3M
    return Case(row, source, run, catalog.device(name))
