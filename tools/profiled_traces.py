"""Writes docs/profiled_traces.md: what `trainledger reconcile --trace` finds in public traces.

    python tools/profiled_traces.py           # those that tests keep, and the stored rows of others
    python tools/profiled_traces.py FOLDER    # also read those of a folder, and store their rows

The rows of traces that are too large to keep here are in `tools/profiled_traces.csv`.
"""

from __future__ import annotations

import csv
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from trainledger.observe.profiler.profile import profile
from trainledger.observe.profiler.read import read_profile
from trainledger.observe.profiler.recording import NONE
from trainledger.report.document import shown
from trainledger.spec.units import format_percent

HOUSE = Path(__file__).parents[1]
KEPT = HOUSE / "tests" / "observe" / "profiler" / "traces"
STORED = HOUSE / "tools" / "profiled_traces.csv"
PAGE = HOUSE / "docs" / "profiled_traces.md"
HTA, LENS = "HolisticTraceAnalysis f4d0062 (MIT)", "TraceLens 171dd74 (MIT)"
SOURCES = {
    "a100_ddp_2ranks": ("DDP over 2 A100, fp32, a rank", f"{HTA}, tests/data/nccl_parser_config"),
    "a100_dlrm_rank3of8": ("recommender over 8 A100, a rank", f"{HTA}, tests/data/trace_diff/control"),
    "a100_idle_rank0of16": (
        "recommender over 16 A100, a rank", f"{HTA}, tests/data/negative_queue_length_values_check",
    ),
    "h100_qwen_forward": ("forward of Qwen1.5-0.5B, H100, bf16", f"{LENS}, tests/traces/h100"),
    "mi300_resnet_checkpointed_ddp8": ("ResNet, checkpointed, DDP over 8 MI300X", f"{LENS}, tests/traces/mi300"),
    "sampled_rank0": ("a rank of 128, sampled", f"{HTA}, tests/data/timeline_analysis"),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """What is found in one trace; times are those of the median step."""

    name: str
    device: str
    steps: str
    found_by: str
    step: str
    busy: str
    communication: str
    overlapped: str
    launch_known: str
    operator_known: str
    recomputed: str
    mfu: str
    hfu: str
    largest: str


def row_of(path: Path) -> Row:
    """The row of a trace."""
    recording = read_profile(path)
    found = profile(recording)
    step = found.step
    communication = step.communication_ns
    bars = sorted(found.waterfall, key=lambda each: -each.nanoseconds)[:2]
    assert sum(each.nanoseconds for each in found.waterfall) == step.nanoseconds
    return Row(
        name=path.name.removesuffix(".json.gz"), device=found.device_name or "none named", steps=str(len(found.steps)),
        found_by=found.found_by.partition(" annotations")[0], step=shown(step.nanoseconds, "nanoseconds"),
        busy=format_percent(step.busy_ns / step.nanoseconds),
        communication=shown(communication, "nanoseconds") if communication else "none",
        overlapped=format_percent(step.overlapped_ns / communication) if communication else "",
        launch_known=_share(recording.launch_of_work), operator_known=_share(recording.operator_of_work),
        recomputed=format_percent(1 - found.model_flops / found.flops) if found.flops else "no shapes",
        mfu="" if found.mfu is None else format_percent(found.mfu),
        hfu="" if found.hfu is None else format_percent(found.hfu),
        largest="; ".join(f"{each.title} {format_percent(each.nanoseconds / step.nanoseconds)}" for each in bars),
    )  # fmt: skip


def _share(known) -> str:  # type: ignore[no-untyped-def]
    return format_percent(float((known != NONE).mean())) if len(known) else ""


def stored() -> list[Row]:
    with open(STORED, encoding="utf-8", newline="") as file:
        return [Row(**each) for each in csv.DictReader(file)]


def store(rows: list[Row]) -> None:
    with open(STORED, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [each.name for each in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(each) for each in rows)


def page(rows: list[Row]) -> str:
    """The text of the page."""
    kept = {each.name.removesuffix(".json.gz") for each in KEPT.glob("*.json.gz")}
    heads = (
        "trace", "device", "steps", "median step", "busy", "communication", "overlapped", "launch known",
        "operator known", "of FLOPs computed again", "MFU / HFU", "largest bars",
    )  # fmt: skip
    lines = [
        "# Public traces, analysed", "", "Written by `python tools/profiled_traces.py`.", "",
        "Traces of other people's programs, by `trainledger reconcile --trace` ([profiling](profiling.md)): of",
        "each the median step. *Launch known*, *operator known*: shares of the device work. The bars of each waterfall",
        "sum to its step. MFU and HFU are against the data sheet's peak, of matmuls, attention and convolutions whose",
        "shapes were recorded. Rows of traces that tests do not keep are stored; the rest is read again by a test.", "",
        f"| {' | '.join(heads)} |", f"|{'---|' * 2}{'---:|' * (len(heads) - 3)}---|",
    ]  # fmt: skip
    for each in sorted(rows, key=lambda row: row.name):
        what, _ = SOURCES[each.name]
        speed = f"{each.mfu} / {each.hfu}" if each.mfu else ""
        cells = (
            what, each.device, f"{each.steps} ({each.found_by})", each.step, each.busy, each.communication,
            each.overlapped, each.launch_known, each.operator_known, each.recomputed, speed, each.largest,
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| trace | from | kept in tests |", "|---|---|---|"]
    for each in sorted(rows, key=lambda row: row.name):
        what, source = SOURCES[each.name]
        lines.append(f"| {what} | {source} | {'reduced' if each.name in kept else 'no'} |")
    return "\n".join([*lines, ""])


def rows_of_today() -> list[Row]:
    """The rows of the traces that tests keep, read now, and the stored ones of others."""
    found = [row_of(each) for each in sorted(KEPT.glob("*.json.gz"))]
    names = {each.name for each in found}
    return [*found, *(each for each in stored() if each.name not in names)]


def main() -> None:
    for folder in map(Path, sys.argv[1:]):
        kept = {each.name for each in KEPT.glob("*.json.gz")}
        store([row_of(each) for each in sorted(folder.glob("*.json.gz")) if each.name not in kept])
    PAGE.write_text(page(rows_of_today()), encoding="utf-8")


if __name__ == "__main__":
    main()
