"""A published throughput: its row, the run that models it, and the seconds of a step by the row's own convention.

What a row does not say is assumed for all rows of its source alike, in words, in its `TimeSource`. Nothing here is
fitted, and no constant belongs to a source.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from published_case import Row
from published_sources import TimeSource

from trainledger import catalog
from trainledger.spec.cluster import Cluster
from trainledger.spec.device import Device
from trainledger.spec.layout import Layout
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run

# Devices that share a calibration: one chip with more or less memory, or of one design.
CALIBRATED = {
    "a100-sxm": ("a100-sxm-80gb", "a100-sxm-40gb"),
    "h100-sxm": ("h100-sxm", "h100-sxm-96gb-500w"),
    "v100-sxm": ("v100-sxm-32gb", "v100-sxm-16gb"),
    "blackwell": ("b200", "gb200"),
    "tpu": ("tpu-v4", "tpu-v5e", "tpu-v5p"),
}


@dataclass(frozen=True)
class TimeCase:
    """A row as a run on its device, and the seconds of a step that its source measured.

    ``fitted`` says whether constants are fitted on it: not where the program is known to have lost time in a way that
    nothing here tells. It is predicted all the same.
    """

    row: Row
    source: TimeSource
    run: Run
    device: Device
    seconds: float
    fitted: bool = True

    @property
    def name(self) -> str:
        return self.row["id"]

    @property
    def calibration(self) -> str:
        """The type of its device, which has one calibration."""
        return next(name for name, devices in CALIBRATED.items() if self.run.cluster.device in devices)


def number(row: Row, name: str) -> int:
    """A whole number of a row, 1 where it is blank."""
    return int(row[name]) if row[name] else 1


def from_step(row: Row, run: Run) -> float:
    """The printed seconds of a step."""
    return float(row["measured_step_time_s"])


def from_tokens(row: Row, run: Run) -> float:
    """Tokens per second and device."""
    rate = float(row["measured_tokens_per_s_per_device"]) * float(run.layout.devices)
    return run.recipe.tokens_per_step / rate


def gpt_flops(run: Run, *, recomputed: bool) -> float:
    """FLOPs of a step by the formula of Narayanan et al. 2021 (arXiv 2104.04473, section 5.1), recomputation in it.

    96 B s l h^2 (1 + s / 6h + V / 16lh), causality not halved; without recomputation the blocks count 72 and not 96.
    """
    model, recipe = run.model, run.recipe
    B, s, L, h, V = recipe.global_batch, recipe.seq_len, model.n_layers, model.d_model, model.padded_vocab
    blocks = (96 if recomputed else 72) * B * s * L * h * h * (1 + s / (6 * h))
    return float(blocks + 6 * B * s * h * V)


def from_gpt_flops(row: Row, run: Run, *, recomputed: bool = True) -> float:
    """TFLOP/s and device by `gpt_flops`."""
    rate = float(row["measured_tflops_per_device"]) * 1e12 * run.layout.devices
    return gpt_flops(run, recomputed=recomputed) / float(rate)


def from_palm_flops(row: Row, run: Run) -> float:
    """TFLOP/s and device of 6N + 12 L d T for each token (Chowdhery et al. 2022, appendix B), causality not halved."""
    from trainledger.ledger.model.parameters import parameters

    model, recipe = run.model, run.recipe
    heads = model.attention.n_heads * model.head_size
    per_token = 6 * parameters(model).total + 12 * model.n_layers * heads * recipe.seq_len
    rate = float(row["measured_tflops_per_device"]) * 1e12 * float(run.layout.devices)
    return float(per_token) * recipe.tokens_per_step / rate


from_hardware_flops = partial(from_gpt_flops, recomputed=True)
from_model_gpt_flops = partial(from_gpt_flops, recomputed=False)
Convention = Callable[[Row, Run], float]


def case(
    row: Row, source: TimeSource, device: str, model: ModelSpec, recipe: Recipe, layout: Layout, seconds: Convention,
    *, devices_per_node: int | None = None, **changed: Any,
) -> TimeCase:  # fmt: skip
    """A row as a run; ``changed`` are fields of the device that are not the catalog's."""
    network = dict(source.network)
    if devices_per_node is not None:
        network["devices_per_node"] = devices_per_node
    cluster = Cluster(device=device, count=layout.devices, **network)
    run = Run(model=model, recipe=recipe, layout=layout, cluster=cluster)
    found = catalog.device(device)
    return TimeCase(row, source, run, replace(found, **changed) if changed else found, seconds(row, run))


def gpt(row: Row, **others: Any) -> ModelSpec:
    """A GPT with the sizes of a row: layer norms, GELU, biases, learned positions, tied embeddings."""
    fields = {
        "vocab_size": int(row["vocab"] or 51200),
        "d_model": int(row["d_model"]),
        "n_layers": int(row["n_layers"]),
        "attention.n_heads": int(row["n_heads"]),
        "feed_forward.d_ff": int(row["d_ff"]),
        "max_seq_len": int(row["seq_len"] or 2048),
        "norm": "layernorm",
        "norm.bias": True,
        "feed_forward.activation": "gelu_tanh",
        "feed_forward.gated": False,
        "feed_forward.bias": True,
        "attention.bias": True,
        "positions": "learned",
        "tie_embeddings": True,
    }
    return from_fields(ModelSpec, {**fields, **others})


def llama(row: Row, **others: Any) -> ModelSpec:
    """A Llama with the sizes of a row."""
    fields = {
        "vocab_size": int(row["vocab"]),
        "d_model": int(row["d_model"]),
        "n_layers": int(row["n_layers"]),
        "attention.n_heads": int(row["n_heads"]),
        "attention.n_kv_heads": int(row["n_kv_heads"]),
        "feed_forward.d_ff": int(row["d_ff"]),
        "max_seq_len": int(row["seq_len"] or 2048),
        "tie_embeddings": row["tied"] == "1",
    }
    return from_fields(ModelSpec, {**fields, **others})
