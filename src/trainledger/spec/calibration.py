"""The measured rates of a machine: the file that `measure machine` writes and predictions read."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from trainledger.spec.cluster import Device
from trainledger.spec.fit import Fit, fits_toml
from trainledger.spec.frozen import frozen
from trainledger.spec.plain import from_plain, replace_file, to_plain
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.rates import CollectiveTime, CopyTime

FORMAT = 3  # 1 had no kernels by operation and no matmuls of backward
READ_FORMATS = (2, 3)  # 2 had no copies to a device, no reading from disk, no loader and no collectives
ENVIRONMENT = "TRAINLEDGER_CALIBRATION"
KINDS = (
    "matmul", "attention", "elementwise", "norm", "softmax", "embedding", "reduction", "copy", "random", "update"
)  # fmt: skip


@frozen(kw_only=True)
class KernelTime:
    """One kind of operation timed at one size: FLOPs and bytes counted as a ledger entry counts them.

    ``shape`` is (m, n, k) of a matmul, (sequences x heads, seq_len, head_dim) of attention, and elements of the others.
    ``phase`` is ``backward`` for a kernel of the backward pass alone, ``operation`` the operator that it measures
    (empty: all of its kind).
    ``others`` is the share of a core that other processes used meanwhile (None = unknown).
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    flops: int
    nbytes: int
    seconds: float
    phase: str = ""
    operation: str = ""
    others: float | None = None

    def problems(self) -> Iterator[Problem]:
        if self.kind not in KINDS:
            yield Problem("kind", self.kind, f"must be one of {', '.join(KINDS)}")
        yield from _out_of_range(self)

    @property
    def flops_per_second(self) -> float:
        return self.flops / self.seconds

    @property
    def bytes_per_second(self) -> float:
        return self.nbytes / self.seconds


@frozen(kw_only=True)
class Calibration:
    """The measured rates of one machine: kernels by kind and size, overhead, memory and storage.

    ``operation_seconds`` is the overhead of an operation of a training step, Python included; ``update_seconds`` the
    overhead of a call of the optimizer, ``update_tensor_seconds`` of each of its tensors. ``fresh_bytes_per_second`` is
    the rate of writing newly mapped memory, as in a first step. ``storage_bytes_per_second`` is the rate of writing,
    syncing and hashing a file; ``busy`` says that the samples were disturbed, by other processes or a slower processor.
    ``read_bytes_per_second`` is the rate of reading a file that is not cached, ``loader_tokens_per_second`` that of the
    data loader. ``host_copies`` are those between an accelerator and its host, ``collectives`` between ranks of this
    machine. ``cores`` are those that the process may use, of which it used ``threads``; ``pace_seconds`` is what a
    small matmul took on a CPU at its full speed. ``compute_capability`` is NVIDIA's generation number of the device.
    ``fits`` are those to past runs, the last of which counts.
    """

    title: str
    backend: str
    date: str
    torch_version: str
    threads: int
    kernels: tuple[KernelTime, ...]
    fresh_bytes_per_second: float | None = None
    operation_seconds: float = 0.0
    update_seconds: float = 0.0
    update_tensor_seconds: float = 0.0
    storage_bytes_per_second: float | None = None
    memory_nbytes: int | None = None
    compute_capability: float | None = None
    read_bytes_per_second: float | None = None
    loader_tokens_per_second: float | None = None
    cores: int | None = None
    pace_seconds: float | None = None
    host_copies: tuple[CopyTime, ...] = ()
    collectives: tuple[CollectiveTime, ...] = ()
    samples: int = 0
    discarded: int = 0
    busy: bool = False
    notes: tuple[str, ...] = ()
    basis: str = "measured"
    fits: tuple[Fit, ...] = ()

    def problems(self) -> Iterator[Problem]:
        yield from _out_of_range(self)

    @property
    def factors(self) -> dict[str, float]:
        """The factors on predicted times of the last fit to past runs; none where there was none."""
        return self.fits[-1].factors if self.fits else {}

    @property
    def peak_flops_per_second(self) -> dict[str, float]:
        """The best matmul rate by dtype: the peak that MFU refers to."""
        best: dict[str, float] = {}
        for each in self.kernels:
            if each.kind == "matmul":
                best[each.dtype] = max(best.get(each.dtype, 0.0), each.flops_per_second)
        return best

    @property
    def memory_bytes_per_second(self) -> float | None:
        """Bytes read and written per second by the largest copy into memory used before."""
        copies = [each for each in self.kernels if each.kind == "copy"]
        return max(copies, key=lambda each: each.nbytes).bytes_per_second if copies else None

    @property
    def host_bytes_per_second(self) -> float | None:
        """The slower way between an accelerator and pinned memory of its host; None where none was measured."""
        pinned = [each.bytes_per_second for each in self.host_copies if each.what.endswith(", pinned")]
        return min((each for each in pinned if each is not None), default=None)


def to_device(calibration: Calibration, name: str = "this-machine") -> Device:
    """The measured machine as a device, like those of the catalog."""
    return Device(
        name=name,
        title=calibration.title,
        peak_flops_per_second=calibration.peak_flops_per_second,
        memory_nbytes=calibration.memory_nbytes,
        memory_bytes_per_second=calibration.memory_bytes_per_second,
        basis=calibration.basis,
        source=f"measured on {calibration.date} with torch {calibration.torch_version}, {calibration.threads} threads",
    )


def calibration_path(backend: str = "cpu") -> Path:
    """Where the calibration of this machine is kept: $TRAINLEDGER_CALIBRATION, or the user's cache."""
    named = os.environ.get(ENVIRONMENT)
    if named:
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(cache) / "trainledger" / f"machine-{backend}.toml"


def find_calibration(backend: str = "cpu", path: str | os.PathLike[str] | None = None) -> Calibration | None:
    """The calibration of this machine, or None where nothing was measured yet.

    Raises InvalidInput where a file is named (by ``path`` or the environment) and cannot be read.
    """
    where = Path(path) if path is not None else calibration_path(backend)
    if path is None and ENVIRONMENT not in os.environ and not where.exists():
        return None
    return read_calibration(where)


def write_calibration(calibration: Calibration, path: str | os.PathLike[str]) -> None:
    """Store it as TOML; the file appears whole or not at all."""
    import tomli_w

    if not os.environ.get(ENVIRONMENT) and Path(path) == calibration_path(calibration.backend):
        Path(path).parent.mkdir(parents=True, exist_ok=True)  # a place of our own; any other must be there
    record = {"format": FORMAT, **to_plain(replace(calibration, fits=()))}
    del record["fits"]
    replace_file(path, f"{tomli_w.dumps(record)}{fits_toml(calibration.fits)}".encode())


def read_calibration(path: str | os.PathLike[str]) -> Calibration:
    """The calibration in a file; raises InvalidInput with every problem found."""
    where = os.fspath(path)
    try:
        with open(path, "rb") as file:
            record = tomllib.load(file)
    except OSError as error:
        rule = f"cannot be read: {error.strerror}; trainledger measure machine writes one"
        raise InvalidInput([Problem("calibration", where, rule)]) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInput([Problem("calibration", where, f"is not TOML: {error}")]) from error
    written = record.pop("format", None)
    if written not in READ_FORMATS:
        rule = "is not a calibration that this version reads; measure again"
        raise InvalidInput([Problem("format", written, rule, FORMAT)], where)
    return from_plain(Calibration, record, where)


def _out_of_range(record: KernelTime | Calibration) -> Iterator[Problem]:
    """Amounts that must be positive, or at least not negative."""
    positive = ("seconds", "nbytes", "threads", "storage_bytes_per_second", "fresh_bytes_per_second", "memory_nbytes",
                "read_bytes_per_second", "loader_tokens_per_second", "cores")  # fmt: skip
    for name, value in vars(record).items():
        if name in positive and value is not None and value <= 0:
            yield Problem(name, value, "must be positive")
        elif isinstance(value, int | float) and value < 0:
            yield Problem(name, value, "must not be negative")
