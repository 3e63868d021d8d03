"""The documents of a machine's calibration and of one measured step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trainledger.answers.pages.plain_data import named, run_data
from trainledger.forecast.predict.clock import link_fits
from trainledger.ledger.ledger import Ledger, summary
from trainledger.report.document import Amount, Cell, Document, Facts, Table, sections
from trainledger.spec.calibration import Calibration, KernelTime, to_device
from trainledger.spec.plain import to_plain
from trainledger.spec.run import Run
from trainledger.spec.units import GIGA, format_count, format_flops_per_second, format_nbytes, format_seconds

_UNDER_THE_RECORDER = "Times are those under the recorder, which makes small operations look slow."


def machine(calibration: Calibration, path: Path) -> Document:
    """The rates of a machine by kernel and in short, and the file that holds them."""
    columns = ("kernel", "dtype", "shape", "GFLOP/s", "GB/s", "one call")
    rows = tuple(map(_kernel, calibration.kernels))
    rates = named(to_device(calibration), "peak_flops_per_second memory_bytes_per_second")
    return Document(
        title=calibration.title,
        sections=sections(
            f"{calibration.title}, {calibration.backend}, threads: {calibration.threads}",
            Table("kernels", columns, rows, units=("", "", "", "", "", "seconds"), align="lllrrr"),
            Facts(tuple(_in_short(calibration))),
            f"{calibration.samples} samples; {calibration.discarded} of them were disturbed, by other processes "
            "or a processor below its full speed.",
            (f"Note: {note}." for note in calibration.notes),
            f"Written to {path}",
        ),
        data=lambda: {"path": str(path), **rates, **to_plain(calibration)},
    )


def _kernel(each: KernelTime) -> tuple[Cell, ...]:
    name = each.operation or " ".join(filter(None, (each.kind, each.phase)))
    computes = each.kind in ("matmul", "attention")
    flops = f"{each.flops_per_second / GIGA:,.1f}" if computes else ""
    moves = f"{each.bytes_per_second / GIGA:,.1f}"
    return name, each.dtype, " x ".join(map(str, each.shape)), flops, moves, each.seconds


def _in_short(calibration: Calibration) -> Iterator[tuple[str, str]]:
    for dtype, rate in calibration.peak_flops_per_second.items():
        yield f"peak {dtype}", f"{format_flops_per_second(rate)} (the best matmul)"
    if calibration.memory_bytes_per_second is not None:
        yield "memory", f"{format_nbytes(calibration.memory_bytes_per_second)}/s copied, read and write"
    if calibration.fresh_bytes_per_second is not None:
        yield "new memory", f"{format_nbytes(calibration.fresh_bytes_per_second)}/s into untouched pages"
    yield "operation", f"{format_seconds(calibration.operation_seconds)} for the smallest"
    call, tensor = (format_seconds(each) for each in (calibration.update_seconds, calibration.update_tensor_seconds))
    yield "optimizer", f"{call} a call and {tensor} a tensor, beyond its operations"
    if calibration.storage_bytes_per_second is not None:
        read = calibration.read_bytes_per_second
        reads = "" if read is None else f"; {format_nbytes(read)}/s read"
        yield "storage", f"{format_nbytes(calibration.storage_bytes_per_second)}/s written, synced and hashed{reads}"
    if calibration.loader_tokens_per_second is not None:
        yield "loader", f"{format_count(calibration.loader_tokens_per_second)} tokens/s read ahead"
    for host_copy in calibration.host_copies:
        if host_copy.bytes_per_second is not None:
            yield host_copy.what, f"{format_nbytes(host_copy.bytes_per_second)}/s"
    for fit in link_fits(calibration.collectives):
        bus = f"{format_nbytes(fit.bus_bytes_per_second)}/s bus bandwidth"
        yield (
            fit.name.replace("_", "-"),
            f"{format_seconds(fit.latency_seconds)} and {bus} between {fit.ranks} ranks of this machine",
        )


def step(run: Run, ledger: Ledger, output: str | None) -> Document:
    """FLOPs and seconds of a recorded step by kind of operation."""
    facts = summary(ledger)
    seconds: dict[str, float] = {}
    for entry in ledger:
        if entry.seconds is not None:
            seconds[entry.kind] = seconds.get(entry.kind, 0.0) + entry.seconds
    rows = tuple((kind, Amount(facts["flops"].get(kind, 0), "flops"), took) for kind, took in seconds.items())
    return Document(
        title=f"One step of {run.model.name}",
        sections=sections(
            (
                f"{format_count(facts['parameters'])} parameters, {len(ledger)} operations in one optimizer step",
                f"peak {format_nbytes(facts['peak_nbytes'])}, kept for backward {format_nbytes(facts['kept_nbytes'])}",
            ),
            Table("kinds", ("kind", "FLOPs", "time"), rows, units=("", "", "seconds"), align="lrr"),
            _UNDER_THE_RECORDER,
        ),
        data=lambda: {"run": run_data(run), **facts, "seconds_by_kind": seconds, "output": output},
    )
