"""Fits of a calibration to past runs: factors on its times, in blocks at the end of its file that can be taken back.

A block is appended to the bytes that are there, so that what was measured stays as it is, every fit has its date and
its runs, and taking the last one back leaves the bytes that were there before.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainledger.spec.frozen import frozen
from trainledger.spec.plain import replace_file, to_plain
from trainledger.spec.problem import InvalidInput, Problem

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
    """What a factor is for: operations of a kind in a phase; what is recomputed runs as it does forward.

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
    for each in fits:
        record = to_plain(each)
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
        text = path.read_bytes().decode()
        tomllib.loads(text)
    except OSError as error:
        raise InvalidInput([Problem("calibration", str(path), f"cannot be read: {error.strerror}")]) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInput([Problem("calibration", str(path), f"is not TOML: {error}")]) from error
    return text
