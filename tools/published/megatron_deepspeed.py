"""BigScience's runs: Megatron-DeepSpeed, early 2022, and what its optimizers and its pipeline hold."""

from __future__ import annotations

from published_case import Case, Extra, Row, Source

from trainledger import catalog
from trainledger.ledger.ranks import RankAccount
from trainledger.spec.cluster import Cluster
from trainledger.spec.layout import Layout
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run
from trainledger.units import MIB

BUCKET = 500_000_000
_DEEPSPEED = (
    "ZeRO-1 of fp16: 16-bit parameters and gradients whole on every data rank, fp32 master, moments and own gradients "
    "sharded (deepspeed/runtime/zero/stage_1_and_2.py)",
    "every block run again in backward, its input kept whole on every tensor rank (--checkpoint-activations "
    "--deepspeed-activation-checkpointing, no partitioning); 1F1B",
    "tensor parallelism without sequence parallelism; attention written out, softmax fused in 16 bits, attention and "
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
        "ALiBi adds one number for each key, in the product itself: no scores are kept for it (positions = none)",
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


def _deepspeed_extras(run: Run, rank: RankAccount, peak_nbytes: int, *, low_gradients: bool) -> tuple[Extra, ...]:
    """What DeepSpeed's pipeline engine and its optimizers hold beside the ledger's tensors."""
    model, recipe, layout = run.model, run.recipe, run.layout
    parameters = rank.ledger.parameters
    activation = 2 * run.device_batch * recipe.seq_len * model.d_model
    found = []
    if not rank.last:
        why = "runtime/pipe/engine.py keeps pipe_buffers['outputs'] until their backward"
        found.append(Extra("outputs of forwards in flight", int(rank.in_flight) * activation, why))
    if not rank.first:
        why = "runtime/pipe/engine.py runs forward on a clone of pipe_buffers['inputs']"
        found.append(Extra("clones of received inputs", int(rank.in_flight) * activation, why))
    embedding = model.padded_vocab * model.d_model // layout.tensor
    matrix = model.feed_forward.d_ff * model.d_model // layout.tensor
    if low_gradients:
        why = (
            "runtime/bf16_optimizer.py adds them to the fp32 ones after a stage's backward and lets them go before the "
            "next one (clear_lp_grads=False)"
        )
        found.append(Extra("16-bit gradients of a whole backward", 2 * parameters, why))
        why = "update_hp_grads of the same file: lp.grad.to(fp32), one parameter at a time"
        found.append(Extra("fp32 copy of the largest gradient", 4 * embedding, why))
        return tuple(found)
    own = -(-parameters // layout.shard)
    resident = dict(rank.ledger.resident)
    states = resident["parameters"] + resident["optimizer state"] + 2 * parameters
    why = (
        "zero/stage_1_and_2.py makes them for the first time before any activation (initialize_optimizer_states), so "
        "their block is there from then on"
    )
    beside = max(0, states + 4 * own - peak_nbytes)
    found.append(Extra("own gradients in fp32 beside all in 16 bits", beside, why))
    largest = max(min(embedding, own), min(matrix, own))
    counted = largest if rank.first else min(matrix, own)
    requests = [
        (2 * min(BUCKET, parameters),),  # reduce_bucket_size, flattened: contiguous_gradients is off in stage 1
        (4 * largest,),  # has_overflow: x.float().sum() of each gradient
        (8 * counted,),  # get_grad_norm_direct: g.data.double().norm(2), but for the last stage's tied embedding
        (2 * own, 4 * own),  # step: the gradients of its own piece, flat, and beside that in fp32
    ]
    why = (
        "zero/stage_1_and_2.py: bucket of gradients, fp32 copy to look for overflow, fp64 copy for the norm, flat copy "
        "of the own piece; the allocator never joins segments"
    )
    found.append(Extra("temporaries of the step that fit in no free block", new_segments([4 * own], requests), why))
    return tuple(found)


def new_segments(free: list[int], requests: list[tuple[int, ...]]) -> int:
    """Bytes that the caching allocator takes from the driver for large requests, one tuple alive at a time.

    It gives the smallest free block that is large enough, split, and else takes a new segment; segments are never
    joined (c10/cuda/CUDACachingAllocator.cpp). ``free`` are the large blocks at the beginning.

    >>> new_segments([10], [(4,), (12,), (6, 10)])
    12
    """
    segments, taken = list(free), 0
    for together in requests:
        rest = list(segments)  # all of a segment is free again when nothing of it is in use
        for nbytes in together:
            able = [index for index, each in enumerate(rest) if each >= nbytes]
            if able:
                rest[min(able, key=rest.__getitem__)] -= nbytes
            else:
                segments.append(nbytes)
                rest.append(0)
                taken += nbytes
    return taken


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
        "precision.gradient_dtype": "fp32" if wide else None, "attention": "math", "dropout": 0.1,
        "attention_dropout": 0.1, "activation_checkpointing": row["activation_ckpt"],
    })  # fmt: skip
    layout = Layout(shard=data, zero=1, tensor=tensor, pipeline=stages, stage_layers=_stage_layers(row))
    device = {"A100 SXM 80GB": "a100-sxm-80gb", "V100 SXM 32GB": "v100-sxm-32gb", "V100 SXM 16GB": "v100-sxm-16gb"}
    name = device[row["hardware"]]
    run = Run(model=model, recipe=recipe, layout=layout, cluster=Cluster(device=name, count=layout.devices))
    source = CHRONICLES if chronicles else TR3M
    return Case(
        row,
        source,
        run,
        catalog.device(name),
        lambda rank, peak: _deepspeed_extras(run, rank, peak, low_gradients=wide),
    )
