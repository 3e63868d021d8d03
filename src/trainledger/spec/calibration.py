"""What a machine was measured to do: the file that measuring writes and predicting reads."""

from __future__ import annotations

import os
import tomllib
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from trainledger.spec.cluster import Device
from trainledger.spec.problem import InvalidInput, Problem

FORMAT = 1
ENVIRONMENT = "TRAINLEDGER_CALIBRATION"
KINDS = (
    "matmul", "attention", "elementwise", "norm", "softmax", "embedding", "reduction", "copy", "random", "update"
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class KernelTime:
    """One kind of operation timed at one size: FLOPs and bytes counted as a ledger entry counts them.

    ``shape`` is (m, n, k) of a matmul, (sequences x heads, seq_len, head_dim) of attention, and elements else.
    ``phase`` is ``backward`` where the kernel is one of the backward pass alone.
    ``others`` is the share of a core that other processes used meanwhile (None = unknown).
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    flops: int
    nbytes: int
    seconds: float
    phase: str = ""
    others: float | None = None

    @property
    def flops_per_second(self) -> float:
        return self.flops / self.seconds

    @property
    def bytes_per_second(self) -> float:
        return self.nbytes / self.seconds


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The speed of one machine as measured: kernels by kind and size, overhead, memory, storage.

    ``operation_seconds`` is what an operation costs however small. ``fresh_bytes_per_second`` is how fast
    memory is written that the system has just given, as in a first step. ``storage_bytes_per_second`` is the
    rate of writing, syncing and hashing a file; ``busy`` says that other processes disturbed the samples.
    """

    title: str
    backend: str
    date: str
    torch_version: str
    threads: int
    kernels: tuple[KernelTime, ...]
    fresh_bytes_per_second: float | None = None
    operation_seconds: float = 0.0
    storage_bytes_per_second: float | None = None
    memory_nbytes: int | None = None
    samples: int = 0
    discarded: int = 0
    busy: bool = False
    notes: tuple[str, ...] = ()
    basis: str = "measured"

    @property
    def peak_flops_per_second(self) -> dict[str, float]:
        """The best matmul rate by dtype, which is the peak that MFU is taken against."""
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

    def filled(record: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in record.items() if value is not None}

    record = filled(asdict(calibration))
    record["kernels"] = [filled(each) for each in record["kernels"]]
    text = tomli_w.dumps({"format": FORMAT, **record})
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with open(draft, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)


def read_calibration(path: str | os.PathLike[str]) -> Calibration:
    """The calibration in a file; raises InvalidInput with every problem found."""
    try:
        with open(path, "rb") as file:
            record = tomllib.load(file)
    except OSError as error:
        raise _invalid(path, "calibration", os.fspath(path), f"cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise _invalid(path, "calibration", os.fspath(path), f"is not TOML: {error}") from error
    format = record.pop("format", None)
    if format != FORMAT:
        raise _invalid(path, "format", format, "is not a calibration that this version reads; measure again", FORMAT)
    problems: list[Problem] = []
    record["kernels"] = _read_each(KernelTime, record, "kernels", problems)
    whole = _read(Calibration, record, "", problems)
    if problems:
        raise InvalidInput(problems, where=os.fspath(path))
    assert isinstance(whole, Calibration)
    return whole


def _invalid(path: str | os.PathLike[str], field: str, value: object, rule: str, nearest: object = None) -> Exception:
    return InvalidInput([Problem(field, value, rule, nearest)], where=os.fspath(path))


def _read_each(cls: type[Any], record: dict[str, Any], key: str, problems: list[Problem]) -> list[Any]:
    tables = record.get(key, [])
    if isinstance(tables, list) and all(isinstance(each, dict) for each in tables):
        return [_read(cls, each, f"{key}[{at}].", problems) for at, each in enumerate(tables)]
    problems.append(Problem(key, tables, "must be a list of tables"))
    return []


def _read(cls: type[Any], record: dict[str, Any], at: str, problems: list[Problem]) -> Any:
    """One dataclass from a TOML table; what is wrong with it is added to ``problems``."""
    known = {each.name: each for each in fields(cls)}
    found = [Problem(at + key, record[key], "is not a field of a calibration") for key in record.keys() - known.keys()]
    for name, each in known.items():
        if name in record:
            rule = _broken_rule(name, str(each.type), record[name])
            found.extend([Problem(at + name, record[name], rule)] if rule else [])
        elif each.default is MISSING:
            found.append(Problem(at + name, None, "is missing"))
    problems.extend(found)
    if found:
        return None
    return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in record.items()})


_MAY_BE_ZERO = ("flops", "operation_seconds", "samples", "discarded", "others")


def _broken_rule(name: str, type_name: str, value: Any) -> str:
    if type_name.startswith("tuple"):
        whole = name == "shape" and isinstance(value, list) and not all(type(each) is int for each in value)
        return "must be a list of whole numbers" if whole else "" if isinstance(value, list) else "must be a list"
    if type_name == "str":
        if name == "kind" and value not in KINDS:
            return f"must be one of {', '.join(KINDS)}"
        return "" if isinstance(value, str) else "must be a text"
    if type_name == "bool":
        return "" if isinstance(value, bool) else "must be true or false"
    if isinstance(value, bool) or not isinstance(value, int if type_name.startswith("int") else (int, float)):
        return "must be a whole number" if type_name.startswith("int") else "must be a number"
    if value == 0 and name in _MAY_BE_ZERO:
        return ""
    return "" if 0 < value < float("inf") else "must be positive and finite"
