"""JSON files of Hugging Face directories, read with a limit on their size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainledger.spec.problem import InvalidInput, Problem
from trainledger.units import MEGA, format_nbytes

LARGEST_NBYTES = 10 * MEGA  # real ones have a few kB


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of at most 10 MB; `InvalidInput` says what is wrong with any other."""
    name = path.name
    if not path.is_file():
        raise InvalidInput([Problem(name, None, f"is not a file of {path.parent.absolute()}")])
    nbytes = path.stat().st_size
    if nbytes > LARGEST_NBYTES:
        rule = f"has {format_nbytes(nbytes)}; more than {format_nbytes(LARGEST_NBYTES)} is no {name}"
        raise InvalidInput([Problem(name, None, rule)], str(path.parent))
    try:
        value = json.loads(path.read_bytes())
    except RecursionError:
        raise InvalidInput([Problem(name, None, "is nested too deeply to be read")], str(path.parent)) from None
    except ValueError as error:  # json, encoding, or an integer of thousands of digits
        raise InvalidInput([Problem(name, None, f"is not JSON: {error}")], str(path.parent)) from None
    if not isinstance(value, dict):
        raise InvalidInput([Problem(name, value, "must be a JSON object, { ... }")], str(path.parent))
    return value
