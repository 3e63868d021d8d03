"""How a field of a run file is declared: its meaning, its unit and what it may be, in one place.

The run-file reader, its error sentences and the commented file that ``trainledger init`` writes all read
this metadata; there is no second list of fields.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, field
from typing import Any

QUANTITIES = ("count", "nbytes", "seconds", "number", "flag", "text", "texts")


def setting(
    doc: str,
    *,
    quantity: str = "count",
    default: Any = MISSING,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    choices: tuple[str, ...] | None = None,
) -> Any:
    """A dataclass field with its meaning and its rule.

    ``quantity`` says how text becomes a value: a count ("15T"), nbytes ("80GB"), seconds ("2w"), a plain
    number, a flag, a text, or a list of texts. A default of ``None`` makes the field optional.
    """
    assert quantity in QUANTITIES
    metadata = {
        "doc": doc, "quantity": quantity, "at_least": at_least, "above": above, "at_most": at_most, "choices": choices,
    }  # fmt: skip
    return field(default=default, metadata=metadata)


def rule_of(each: Field[Any]) -> dict[str, Any]:
    """The metadata that `setting` put on a dataclass field."""
    return dict(each.metadata)
