"""maxtext on TPU v4, v5e and v5p: sizes from its scale factor, layouts from its public configurations."""

from __future__ import annotations

import math

from published_case import Row
from throughput_case import TimeCase, TimeSource, case, from_palm_flops

from trainledger.spec.layout import Layout
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields
from trainledger.spec.recipe import Recipe

_MAXTEXT = (
    "fully sharded within a slice, copies over slices; flash attention (Pallas); XLA's fusion modelled as compile = "
    "true; "
    "fp32 parameters gathered in bf16, AdamW; reshapes of sizes that a spec cannot express are left out",
    "TFLOP/s are the model's, 6N + 12 L d T for a token, causality not halved (maxtext of 2023 and 2024)",
    "remat_policy full = every block recomputed; minimal (matmuls kept) modelled as none",
)  # fmt: skip
V4 = TimeSource(
    name="AI-Hypercomputer/maxtext:src/maxtext/configs/tpu/v4/README.md",
    title="maxtext, TPU v4",
    convention="model TFLOP/s and chip",
    network=(("network", "ethernet-25"),),
    assumed=(
        *_MAXTEXT,
        "GPT of 2,048 tokens without gates, heads 256 wide, vocabulary 32,000; the batch of a chip as the row says",
    ),
)
V5E = TimeSource(
    name="AI-Hypercomputer/maxtext:src/maxtext/configs/tpu/v5e/README.md",
    title="maxtext, TPU v5e",
    convention="model TFLOP/s and chip",
    assumed=(
        *_MAXTEXT,
        "sizes by global_parameter_scale (gated MLP, heads 128 wide); 16B, 32B and 64B sharded over 256 chips, 128B "
        "over 16 with 16 tensor ranks (MaxText/configs/v5e/*.sh)",
    ),
)
V5P = TimeSource(
    name="AI-Hypercomputer/maxtext:src/maxtext/configs/tpu/v5p/README.md",
    title="maxtext, TPU v5p",
    convention="model TFLOP/s and chip",
    assumed=(
        *_MAXTEXT,
        "sizes by global_parameter_scale; tensor ranks, batches and remat policy as MaxText/configs/v5p/*.sh have "
        "them; every second row is two slices",
    ),
)
SOURCES = (V4, V5E, V5P)
# MaxText/configs/v5p/*.sh: batch of a chip, tensor ranks, whether every block is run again.
_V5P = {32: (7, 4, False), 64: (3, 4, False), 128: (1, 8, False), 256: (1, 8, False), 512: (2, 8, True),
        1024: (2, 8, True)}  # fmt: skip


def scaled_model(billions: int) -> ModelSpec:
    """The model of a global_parameter_scale: powers of two go to heads and MLP first, then to the width, then to layers
    (MaxText/pyconfig.py, from base.yml's width of 2,048, 16 heads of 128, MLP of 7,168 and 16 layers)."""
    thirds, rest = divmod(int(math.log2(billions)), 3)
    heads, width, layers = thirds + (rest > 0), thirds + (rest > 1), thirds
    return from_fields(
        ModelSpec,
        {
            "vocab_size": 32000,
            "d_model": 2048 * 2**width,
            "n_layers": 16 * 2**layers,
            "attention.n_heads": 16 * 2**heads,
            "attention.head_dim": 128,
            "feed_forward.d_ff": 7168 * 2**heads,
            "max_seq_len": 2048,
        },
    )


def tpu_case(row: Row) -> TimeCase | str:
    """A row of any of the three."""
    chips, billions = int(row["n_devices"]), int(row["model_family"].split("-")[1][:-1])
    tensor, again, batch = 1, True, int(row["micro_batch_per_device"] or 0)
    if "v4" in row["source"]:
        source, device = V4, "tpu-v4"
        slice_chips = 64 if billions == 22 else 192
        model = from_fields(
            ModelSpec,
            {
                "vocab_size": 32000,
                "d_model": int(row["d_model"]),
                "n_layers": int(row["n_layers"]),
                "attention.n_heads": int(row["n_heads"]),
                "attention.head_dim": 256,
                "feed_forward.d_ff": int(row["d_ff"]),
                "max_seq_len": 2048,
                "feed_forward.gated": False,
                "feed_forward.activation": "relu",
            },
        )
    elif "v5e" in row["source"]:
        source, device, slice_chips, model = V5E, "tpu-v5e", 256, scaled_model(billions)
        if billions == 128:
            tensor, again = 16, False
    else:
        source, device, model = V5P, "tpu-v5p", scaled_model(billions)
        batch, tensor, again = _V5P[billions]
        slices = 1 if int(row["id"][1:]) % 2 else 2
        slice_chips = chips // slices
    slices = chips // slice_chips
    layout = Layout(replicate=slices, shard=slice_chips // tensor, tensor=tensor)
    recipe = from_fields(Recipe, {
        "seq_len": 2048, "micro_batch": batch * tensor, "global_batch": batch * chips, "steps": 1,
        "precision": "bf16-sharded", "attention": "flash", "activation_checkpointing": "full" if again else "none",
        "compile": True,
    })  # fmt: skip
    return case(row, source, device, model, recipe, layout, from_palm_flops, devices_per_node=slice_chips)
