"""The measured rates of a machine: the file that `measure machine` writes and predictions read, and fits to past runs.

A fit is a block at the end of that file, appended to the bytes that are there: what was measured stays as it is, every
fit has its date and its runs, and taking the last one back leaves the bytes that were there before.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainledger.spec.device import Device
from trainledger.spec.durable import content_of
from trainledger.spec.frozen import frozen
from trainledger.spec.plain import from_plain, replace_file, to_plain
from trainledger.spec.problem import InvalidInput, Problem

STRAIGHT = "a @ b"  # both factors of a matmul by rows
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


def _positive(record: object, *names: str) -> Iterator[Problem]:
    for name in names:
        value = getattr(record, name)
        if value is not None and value <= 0:
            yield Problem(name, value, "must be positive")


class _Timed:
    flops: int
    nbytes: int
    seconds: float

    @property
    def flops_per_second(self) -> float:
        return self.flops / self.seconds

    @property
    def bytes_per_second(self) -> float:
        return self.nbytes / self.seconds


@frozen(kw_only=True)
class MatmulTime(_Timed):
    """One call of a matmul [m, k] @ [k, n] of ``shape`` (m, n, k); ``factors`` says how the two lie in memory.

    ``others`` is the share of a core that other processes used meanwhile (None: unknown).
    """

    shape: tuple[int, ...]
    dtype: str
    factors: str
    flops: int
    nbytes: int
    seconds: float
    others: float | None = None

    @property
    def intensity(self) -> float:
        """FLOPs for each byte that is read or written once."""
        return self.flops / self.nbytes


@frozen(kw_only=True)
class CopyTime:
    """One copy, or its replacement; ``seconds`` is None where it was not measured, and ``note`` why.

    ``nbytes`` are read and written of a copy in memory, and those that pass once of any other.
    """

    what: str
    nbytes: int
    seconds: float | None = None
    note: str = ""

    def problems(self) -> Iterator[Problem]:
        yield from _positive(self, "seconds")

    @property
    def bytes_per_second(self) -> float | None:
        return None if self.seconds is None or not self.nbytes else self.nbytes / self.seconds


@frozen(kw_only=True)
class LoaderTime:
    """Tokens that were read, or made of text, in so many seconds by so many ``workers`` (threads or processes)."""

    what: str
    workers: int
    tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@frozen(kw_only=True)
class CollectiveTime:
    """One collective over ``ranks`` of one machine, of ``nbytes`` counted as `Entry.payload` counts them.

    Those are the bytes of the whole result of an all-gather, of the whole input of a reduce-scatter, else of a rank's
    tensor. ``others`` is the share of a core that other processes used meanwhile (None: unknown).
    """

    name: str
    backend: str
    ranks: int
    nbytes: int
    seconds: float
    others: float | None = None

    def problems(self) -> Iterator[Problem]:
        if self.name not in COLLECTIVES:
            yield Problem("name", self.name, f"must be one of {', '.join(COLLECTIVES)}")
        yield from _positive(self, "nbytes", "seconds")
        if self.ranks < 2:
            yield Problem("ranks", self.ranks, "must be at least 2")


WHOLE_STEP = "step"  # the kind for all operations, where a run was not split
LEAST_FACTOR, MOST_FACTOR = 0.1, 10.0
_MARKER = "\n# Fitted by reconcile --update; reconcile --undo removes the last of these.\n[[fits]]\n"


@frozen(kw_only=True)
class Fit:
    """Factors on the times that a calibration predicts, by phase and kind of operation (`fit_kind`).

    ``error_before`` and ``error_after`` are median errors of the step time of runs without a fit, and of each by the
    fit to the others.
    """

    date: str
    runs: tuple[str, ...]
    error_before: float
    error_after: float
    factors: dict[str, float]

    def problems(self) -> Iterator[Problem]:
        for name, factor in self.factors.items():
            if not LEAST_FACTOR <= factor <= MOST_FACTOR:
                yield Problem(f"factors.{name}", factor, f"must be {LEAST_FACTOR:g} to {MOST_FACTOR:g}")


def fit_kind(phase: str, kind: str) -> str:
    """The target of a factor: operations of a kind in a phase; what is recomputed runs as it does forward.

    >>> fit_kind("recompute", "matmul"), fit_kind("backward", "matmul")
    ('forward matmul', 'backward matmul')
    """
    return f"{'forward' if phase == 'recompute' else phase} {kind}"


def factor_of(factors: Mapping[str, float], phase: str, kind: str) -> float:
    """The factor on the time of an operation; 1 where none was fitted."""
    return factors.get(fit_kind(phase, kind), factors.get(WHOLE_STEP, 1.0))


def fits_toml(fits: tuple[Fit, ...]) -> str:
    """Fits as the end of a calibration file lists them."""
    import tomli_w

    blocks = []
    for fit in fits:
        record = to_plain(fit)
        factors = record.pop("factors")
        blocks.append(f"{_MARKER}{tomli_w.dumps(record)}[fits.factors]\n{tomli_w.dumps(factors)}")
    return "".join(blocks)


def append_fit(path: Path, fit: Fit) -> None:
    """Put a fit at the end of a calibration file."""
    before = path.read_bytes()
    after = before + fits_toml((fit,)).encode()
    assert tomllib.loads(after.decode())["fits"][-1]["date"] == fit.date
    replace_file(path, after)


def undo_fit(path: Path) -> int:
    """Take the last fit of a calibration file back; how many are left. The rest of the file keeps its bytes.

    Raises `InvalidInput` where there is none, or it is not where `append_fit` puts it.
    """
    text = _text(path)
    whole = tomllib.loads(text)
    fits: list[Any] = whole.get("fits", [])
    if not fits:
        raise InvalidInput([Problem("--undo", str(path), "has no fit to undo")])
    before, found, _ = text.rpartition(_MARKER)
    rest = tomllib.loads(before) if found else {}
    if not found or rest.get("fits", []) != fits[:-1] or {**rest, "fits": 0} != {**whole, "fits": 0}:
        rule = "was changed after it was written, and the last fit is not at its end; delete its [[fits]] by hand"
        raise InvalidInput([Problem("calibration", str(path), rule)])
    replace_file(path, before.encode())
    return len(fits) - 1


def _text(path: Path) -> str:
    """The text of a calibration file, its line ends as they are; raises InvalidInput."""
    try:
        text = content_of(path)
        tomllib.loads(text)
    except OSError as error:
        raise InvalidInput([Problem("calibration", str(path), f"cannot be read: {error.strerror}")]) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput([Problem("calibration", str(path), f"is not TOML: {error}")]) from error
    return text


FORMAT = 3  # 1 had no kernels by operation and no matmuls of backward
READ_FORMATS = (2, 3)  # 2 had no copies to a device, no reading from disk, no loader and no collectives
ENVIRONMENT = "TRAINLEDGER_CALIBRATION"
KINDS = ("matmul", "attention", "elementwise", "norm", "softmax", "embedding", "reduction", "copy", "random", "update")


@frozen(kw_only=True)
class KernelTime(_Timed):
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
        for kernel in self.kernels:
            if kernel.kind == "matmul":
                best[kernel.dtype] = max(best.get(kernel.dtype, 0.0), kernel.flops_per_second)
        return best

    @property
    def memory_bytes_per_second(self) -> float | None:
        """Bytes read and written per second by the largest copy into memory used before."""
        copies = [kernel for kernel in self.kernels if kernel.kind == "copy"]
        return max(copies, key=lambda copy: copy.nbytes).bytes_per_second if copies else None

    @property
    def host_bytes_per_second(self) -> float | None:
        """The slower way between an accelerator and pinned memory of its host; None where none was measured."""
        pinned = [copy.bytes_per_second for copy in self.host_copies if copy.what.endswith(", pinned")]
        return min((rate for rate in pinned if rate is not None), default=None)


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
        record = tomllib.loads(content_of(path))
    except OSError as error:
        rule = f"cannot be read: {error.strerror}; trainledger measure machine writes one"
        raise InvalidInput([Problem("calibration", where, rule)]) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
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
