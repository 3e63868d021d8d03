"""NVIDIA's own figures of its DGX Cloud recipes, NeMo and Megatron Bridge on GB200 and B200.

Rows are in ``blackwell_runs.csv``, which has the columns of ``nemo_runs.csv`` and the device, and are modelled like
those (`throughput_nemo`). A rack joins 72 GB200; its programs run in blocks of 64.
"""

from __future__ import annotations

from dataclasses import replace

from throughput_case import TimeCase, TimeSource
from throughput_nemo import BRIDGE, DGX_CLOUD, NEMO_LONG, case_of, rows_of

BLOCK = 64  # of the 72 devices that the links of a rack join
_GB200 = (("network", "ndr"), ("devices_per_node", BLOCK))
_AS_ON_H100 = "as on H100, in the same container or a later one"
_BLOCKS = f"GB200: blocks of {BLOCK} devices of a rack, then InfiniBand"
RECIPES = replace(
    DGX_CLOUD,
    name="NVIDIA/dgxc-benchmarking (llama3.1/README.md and nemotron/README.md of 25.04.01)",
    title="NVIDIA's DGX Cloud recipes of NeMo, GB200",
    network=_GB200,
    assumed=(
        _AS_ON_H100,
        _BLOCKS,
        "Llama 3.1 405B with one layer less in the first and in the last chunk",
    ),
)
PAGE_GB200 = replace(
    BRIDGE, title="Megatron Bridge performance page, GB200", network=_GB200,
    assumed=(_AS_ON_H100, _BLOCKS, "FP8-CS: one scale for each tensor"),
)  # fmt: skip
PAGE_B200 = replace(
    BRIDGE, title="Megatron Bridge performance page, B200", assumed=(_AS_ON_H100, "FP8-CS: one scale for each tensor")
)
LONG = replace(
    NEMO_LONG,
    title="NeMo Llama 3 8B, 8K to 1M tokens, B200",
    convention="TFLOP/s and device by 12 L d T for all pairs of tokens, masked ones too",
    assumed=(
        _AS_ON_H100,
        "by which formula its TFLOP/s are reckoned is not said: with all pairs, as the recipes of the same container "
        "do; with half of them attention in 16 bits, backward included, would run at 71 % of the peak",
    ),
)
SOURCES = (RECIPES, PAGE_GB200, PAGE_B200, LONG)
_SOURCE_OF: dict[tuple[str, str], TimeSource] = {
    ("dgxc", "gb200"): RECIPES, ("bridge", "gb200"): PAGE_GB200, ("bridge", "b200"): PAGE_B200,
    ("nemo-long", "b200"): LONG,
}  # fmt: skip
LEFT_OUT = (
    ("MXFP8, NVFP4", "a scale for 32 or 16 numbers, which no precision here has"),
    (
        "Llama 3 70B and 405B with Megatron FSDP",
        "activations are offloaded to the host's memory, which is not modelled",
    ),
    ("mixtures of experts", "the fraction of a step that overlaps with dispatch is not stated"),
    ("GB300, B300", "no calibration of this device"),
)


def blackwell_cases() -> tuple[TimeCase, ...]:
    """Every row as a run."""
    return tuple(
        case_of(row, _SOURCE_OF[row["source"], row["device"]], row["device"]) for row in rows_of("blackwell_runs.csv")
    )
