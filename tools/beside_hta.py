"""What HolisticTraceAnalysis says of traces, beside what `trainledger reconcile --trace` says.

    pip install HolisticTraceAnalysis
    python tools/beside_hta.py TRACE.json.gz ...

It leaves out device work whose launch is not in the trace (we do not: "ours, whole"), and rounds the times of each
kernel to whole units, inside of the kernel. So it is given all times in nanoseconds: in microseconds, which it takes
them to be, short kernels of traces with finer times would lose up to an eighth. A trace that it cannot read is named.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np

from trainledger.observe.profiler.kinds import COMMUNICATION
from trainledger.observe.profiler.read import read_profile
from trainledger.observe.profiler.recording import NONE, Recording, common, length, union, within, without
from trainledger.observe.profiler.step_time import timeline
from trainledger.observe.profiler.steps import steps_of

COLUMNS = ("computing", "communicating, copying", "idle", "overlapped")


def theirs(path: Path) -> tuple[float, ...]:
    """Milliseconds of computation, of what is left of the rest, of nothing; the share of communication overlapped."""
    from hta.trace_analysis import TraceAnalysis

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trace = json.loads(gzip.decompress(path.read_bytes()))
        for event in trace["traceEvents"]:
            event.update({name: round(1e3 * event[name]) for name in ("ts", "dur") if name in event})
        trace.setdefault("distributedInfo", {"rank": 0, "world_size": 1, "backend": "nccl"})
        rank = trace["distributedInfo"]["rank"]
        copy = Path(folder) / "rank.json.gz"
        copy.write_bytes(gzip.compress(json.dumps(trace).encode()))
        analysis = TraceAnalysis(trace_files={rank: str(copy)}, trace_dir=folder, include_last_profiler_step=True)
        row = analysis.get_temporal_breakdown(visualize=False).iloc[0]
        overlap = analysis.get_comm_comp_overlap(visualize=False).iloc[0]["comp_comm_overlap_pctg"]
    computing, rest, idle = (row[f"{name}_time(us)"] / 1e6 for name in ("compute", "non_compute", "idle"))
    return computing, rest, idle, overlap / 100


def ours(recording: Recording) -> tuple[float, ...]:
    """The same of the same stretch: from the first kernel of the first step to the last that there is."""
    kinds, work, end = timeline(recording).kinds, recording.work, int(recording.work.ends_ns.max())
    begin = int(work.begins_ns.min()) if _has_one_step(recording) else steps_of(recording).steps[0].device_ns[0]
    all_work = within(_together(kinds.values()), begin, end)
    computing = within(
        _together(each for kind, each in kinds.items() if kind not in (COMMUNICATION, "copy")), begin, end
    )
    rest = without(all_work, computing)
    sent = within(kinds.get(COMMUNICATION, all_work[:0]), begin, end)
    overlapped = length(common(sent, computing)) / max(length(sent), 1)
    return (
        length(computing) / 1e6, length(rest) / 1e6, (end - begin - length(all_work)) / 1e6, overlapped,
    )  # fmt: skip


def _has_one_step(recording: Recording) -> bool:
    """Then it looks at all device work: it has no step by which to leave out other work."""
    return len(steps_of(recording).steps) == 1


def _together(sets):  # type: ignore[no-untyped-def]
    every = np.concatenate(list(sets))
    every = every[np.argsort(every[:, 0], kind="stable")]
    return union(every[:, 0], every[:, 1])


def main() -> None:
    print(f"{'trace':<34} " + "  ".join(f"{each:>22}" for each in COLUMNS))
    for each in map(Path, sys.argv[1:]):
        try:
            them = theirs(each)
        except Exception as error:  # whatever it raises on a file that it cannot read
            print(f"{each.name:<34} it cannot be read there: {type(error).__name__}")
            continue
        recording = read_profile(each)
        linked = recording.work.where(recording.launch_of_work != NONE)
        whole = ours(recording)
        us = whole if _has_one_step(recording) else ours(replace(recording, work=linked))
        cells = [f"{a:.1f} / {b:.1f} ms" for a, b in zip(us[:3], them[:3], strict=True)]
        print(f"{each.name:<34} " + "  ".join(f"{cell:>22}" for cell in [*cells, f"{us[3]:.1%} / {them[3]:.1%}"]))
        cells = [f"{a:.1f} ms" for a in whole[:3]]
        print(f"{'  ours, whole':<34} " + "  ".join(f"{cell:>22}" for cell in [*cells, f"{whole[3]:.1%}"]))


if __name__ == "__main__":
    main()
