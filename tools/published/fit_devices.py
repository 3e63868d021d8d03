"""Fit the constants of devices to published throughput, write them into the catalog, and everything beside them.

``python tools/published/fit_devices.py [a100-sxm h100-sxm v100-sxm blackwell tpu]`` fits each device type (all of them
where none is named), writes ``catalog/calibrations/<device>.toml`` and the rows' predictions, in the sample and with
their source left out, into ``throughput_predicted.csv`` (``predict`` as the argument does that alone, with the
constants that are stored); ``python tools/published/throughput_page.py`` makes a page of that.
"""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np
from published_case import Errors
from throughput_case import CALIBRATED, TimeCase
from throughput_columns import Columns
from throughput_fit import Fitted, fit, move, prior_of
from throughput_sharded import META_CLOCK
from throughput_times import cases, predicted

import trainledger
from trainledger import catalog
from trainledger.spec.device import CLOCKED, Efficiency

CATALOG = Path(trainledger.__file__).parent / "catalog" / "calibrations"
PREDICTED = Path(__file__).parent / "throughput_predicted.csv"
DATE = "2026-11-21"  # of the rows; a calibration is as old as what it was fitted on
# A launch is work of the host and of the program, whatever the device. No row on H100, V100 or Blackwell waits for it;
# those on A100 give 44 microseconds, and steps that wait for it on an H200 47 to 54 (bench/results, 2026-11-26).
LAUNCH = 4.4e-5
# Large matmuls in 16 bits on B200 over its peak, by who timed them: the best of squares (1,696 TFLOP/s); 8192 x 8192 x
# 8192 by cuBLAS under a limit of 750 W (1,088), over the share of the clock that is left; the median of 514 shapes of
# training steps, run one after another (configs/system/b200_bf16_ceperm.json, 4dcaae5).
B200_MATMULS = {"zzc0721/torch-performance-test-data": 0.754, "facebookexperimental/triton#854": 0.548, "SimuMax": 0.49}
# What was known of each type before any fit (data sheets, measured matmuls, papers on attention kernels): the priors.
PRIORS = {
    "a100-sxm": Efficiency(
        matmul_share=0.85, float8_share=0.85, depth=64, attention_share=0.72, attention_backward_share=0.62,
        attention_length=300, bandwidth_share=0.85, kernel_seconds=2.5e-6, launch_seconds=8e-6, network_share=0.8,
        source="MAMF of stas00/ml-engineering; Dao 2023, FlashAttention-2, figures 4 to 7 (A100)", date=DATE,
    ),
    "h100-sxm": Efficiency(
        matmul_share=0.78, float8_share=0.65, depth=128, attention_share=0.5, attention_backward_share=0.42,
        attention_length=500, bandwidth_share=0.85, kernel_seconds=2.5e-6, launch_seconds=LAUNCH, network_share=0.8,
        odd_share=0.19,  # heads of 50,257 columns reach 12.5 % of the peak of an H200 (bench/results, 2026-11-26)
        source="MAMF of stas00/ml-engineering; Dao 2023, FlashAttention-2, figures 4 to 7 (H100)", date=DATE,
    ),
    "v100-sxm": Efficiency(
        matmul_share=0.78, float8_share=0.78, depth=64, attention_share=0.45, attention_backward_share=0.38,
        attention_length=300, bandwidth_share=0.85, kernel_seconds=2.5e-6, launch_seconds=LAUNCH, network_share=0.8,
        source="matmuls in fp16 of zzc0721/torch-performance-test-data", date=DATE,
    ),
    "blackwell": Efficiency(
        matmul_share=geometric_mean(B200_MATMULS.values()), float8_share=0.56, depth=128, attention_share=0.15,
        attention_backward_share=0.125, attention_length=500, bandwidth_share=0.85, kernel_seconds=2.5e-6,
        launch_seconds=LAUNCH, network_share=0.8,
        source=f"matmuls: {', '.join(B200_MATMULS)} (B200, 16 bits), egmsft/AI-benchmarking-guide (GB200, fp8 and "
        "FlashAttention-2)", date=DATE,
    ),
    "tpu": Efficiency(
        matmul_share=0.8, float8_share=0.8, depth=64, attention_share=0.5, attention_backward_share=0.45,
        attention_length=500, bandwidth_share=0.85, kernel_seconds=1e-6, launch_seconds=0.0,
        source="assumed: XLA compiles a whole step, so nothing is launched by the program", date=DATE,
    ),
}  # fmt: skip
# Devices predicted by the constants of a type, without rows of their own, and what they have in common with it.
ALSO = {"a100-sxm": ("a800-sxm",), "h100-sxm": ("h200", "h800-sxm"), "blackwell": ("b300", "gb300")}
SHARED = {"a100-sxm": "die", "h100-sxm": "die", "blackwell": "matmul units for 8 and 16 bits"}


@dataclass(frozen=True)
class DeviceFit:
    """The fit of one type: its constants, and each row's seconds in the sample and with its source left out."""

    name: str
    cases: tuple[TimeCase, ...]
    efficiency: Efficiency
    seconds: tuple[float, ...]
    left_out: tuple[float, ...]

    def errors(self, *, left_out: bool) -> Errors:
        found = self.left_out if left_out else self.seconds
        return Errors(tuple(each / case.seconds - 1 for each, case in zip(found, self.cases, strict=True)))


def fitted(name: str) -> DeviceFit:
    """Fit one type on all its rows, and again without each source."""
    some = tuple(each for each in cases() if each.calibration == name)
    columns = Columns(some)
    prior = prior_of(PRIORS[name])
    known = catalog.efficiency(CALIBRATED[name][0])
    start = known if known is not None and known.straggler_share else None
    found = fit(columns, prior, start=start)
    left_out = np.zeros(len(some))
    for source in dict.fromkeys(each.source.name for each in some):
        without = np.array([float(each.fitted and each.source.name != source) for each in some])
        efficiency = refitted(found, prior, without)
        for place, each in enumerate(some):
            if each.source.name == source:
                left_out[place] = predicted(each, efficiency).seconds
    seconds = tuple(float(each) for each in found.around.exact)
    return DeviceFit(name, some, rounded(found.efficiency), seconds, tuple(float(each) for each in left_out))


def refitted(found: Fitted, prior: Efficiency, rows: np.ndarray) -> Efficiency:
    """The constants on some rows only, found around those of all."""
    return move(found.around, prior, rows)


def rounded(efficiency: Efficiency) -> Efficiency:
    """Four digits: what is stored is what predicts."""
    changes: dict[str, Any] = {
        each.name: float(f"{getattr(efficiency, each.name):.4g}")
        for each in fields(efficiency)
        if isinstance(getattr(efficiency, each.name), float)
    }  # fmt: skip
    return replace(efficiency, **changes)


def write_calibration(found: DeviceFit) -> None:
    """The catalog's file of each device of the type."""
    some = [each for each in found.cases if each.fitted]
    sources = sorted({each.source.title for each in some})
    inside, outside = found.errors(left_out=False), found.errors(left_out=True)
    for device in (*CALIBRATED[found.name], *ALSO.get(found.name, ())):
        clock = META_CLOCK if device.endswith("500w") else 1.0
        lines = [
            "# Written by python tools/published/fit_devices.py: fitted on published runs, "
            "see docs/published_throughput.md.\n",
            f'source = "fitted on {len(some)} published runs of {len(sources)} sources: {"; ".join(sources)}"\n',
            f"date = {DATE}\n",
        ]
        if device in ALSO.get(found.name, ()):
            of = CALIBRATED[found.name][0]
            shared = f"the constants of {of}, which has the same {SHARED[found.name]}"
            lines.append(f'note = "no rows of its own: {shared}"\n')
        if clock != 1.0:
            lines.append(f'note = "shares of the peak times {clock:.3f}: what 500 W of 700 W leave of the clock"\n')
        lines.append("\n[efficiency]\n")
        for name, value in _constants(found.efficiency):
            scaled = value * clock if name in CLOCKED else value
            lines.append(f"{name} = {float(f'{scaled:.4g}')!r}\n")
        lines.append("\n[fit]\n")
        lines.append(f"rows = {len(some)}\nsources = {len(sources)}\n")
        lines.append(f"median_error = {inside.median:.4f}  # absolute, in the sample\n")
        lines.append(f"within_25_percent = {inside.within(0.25):.4f}\n")
        lines.append(f"median_error_left_out = {outside.median:.4f}  # each source predicted from the others\n")
        lines.append(f"within_25_percent_left_out = {outside.within(0.25):.4f}\n")
        (CATALOG / f"{device}.toml").write_text("".join(lines), encoding="utf-8")


def _constants(efficiency: Efficiency) -> Iterator[tuple[str, float]]:
    for each in fields(efficiency):
        if each.name not in ("source", "date"):
            yield each.name, float(getattr(efficiency, each.name))


@dataclass(frozen=True)
class Predicted:
    """A row as it was predicted when the calibrations were written."""

    name: str
    calibration: str
    measured: float
    seconds: float
    left_out: float
    causes: tuple[float, ...]


def read_predicted() -> dict[str, Predicted]:
    """The stored predictions by row."""
    with open(PREDICTED, newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    return {
        row[0]: Predicted(row[0], row[1], float(row[2]), float(row[3]), float(row[4]), tuple(map(float, row[5:])))
        for row in rows[1:]
    }


def write_predicted(left_out: dict[str, float]) -> None:
    """Every row with the stored calibrations; ``left_out`` has the seconds of those that were fitted just now."""
    from trainledger.forecast.predict.step import CAUSES

    known = read_predicted() if PREDICTED.exists() else {}
    with open(PREDICTED, "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("id", "calibration", "measured", "predicted", "left_out", *CAUSES))
        for each in cases():
            step = predicted(each)
            other = left_out.get(each.name) or (known[each.name].left_out if each.name in known else math.nan)
            values = (each.seconds, step.seconds, other, *(step.causes[name] for name in CAUSES))
            table.writerow((each.name, each.calibration, *(f"{value:.6g}" for value in values)))


def main(names: list[str]) -> None:
    left_out: dict[str, float] = {}
    for name in () if names == ["predict"] else names or CALIBRATED:
        found = fitted(name)
        write_calibration(found)
        left_out |= {each.name: seconds for each, seconds in zip(found.cases, found.left_out, strict=True)}
        for title, outside in (("in the sample", False), ("each source left out", True)):
            errors = found.errors(left_out=outside)
            print(f"{name}, {title}: median {errors.median:.1%}, within 25 % {errors.within(0.25):.1%}", flush=True)
    cases.cache_clear()
    write_predicted(left_out)


if __name__ == "__main__":
    main(sys.argv[1:])
