"""The declaration of a field of a run file: its meaning, its unit and what it may be, in one place.

The run-file reader, its error sentences and the commented file that ``trainledger init`` writes all read
this metadata; there is no second list of fields.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, field
from typing import Any

from trainledger.spec.durable import content_of, parse_json
from trainledger.spec.problem import nearest_text, shown
from trainledger.spec.units import (
    NotAQuantity,
    parse_amount,
    parse_bytes_per_second,
    parse_count,
    parse_length,
    parse_nbytes,
    parse_number,
    parse_seconds,
)

_QUANTITY_OF = {
    "int": "count",
    "float": "number",
    "bool": "flag",
    "str": "text",
    "tuple[str, ...]": "texts",
    "tuple[int, ...]": "counts",
}
NONE = "none"  # TOML has no null: this text is None in a field that may be absent
LARGEST_COUNT = 10**18
LONGEST_LIST = 10_000
LONGEST_ROW = 10**9


def setting(
    doc: str,
    default: Any = MISSING,
    *,
    quantity: str = "",
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    choices: tuple[str, ...] | None = None,
    unit: str = "",
    members: type[Any] | None = None,
) -> Any:
    """A dataclass field with its meaning and its rule.

    The type of the field says how text becomes a value: a count ("15T"), a plain number, a flag, a text, a list of
    names (also between commas in one text) or of counts; ``quantity`` says it of paths, of a length ("32k" is 32,768),
    nbytes ("80GB"), bytes/s ("50GB/s") and seconds ("2w"). ``members`` is the class of each of any number of tables by
    name. A default of ``None`` makes the field optional. ``unit`` names the unit of a bare number in the error for a
    value below ``at_least``.
    """
    metadata = {
        "doc": doc, "quantity": quantity, "at_least": at_least, "above": above, "at_most": at_most, "choices": choices,
        "unit": unit, "members": members,
    }  # fmt: skip
    return field(default=default, metadata=metadata)


def rule_of(declared: Field[Any]) -> Mapping[str, Any]:
    """The metadata that `setting` put on a dataclass field."""
    return declared.metadata


def quantity_of(declared: Field[Any]) -> str:
    """The quantity of a field, which text becomes: as `setting` was told, or by its type."""
    return declared.metadata["quantity"] or _QUANTITY_OF.get(str(declared.type).removesuffix(" | None"), "named")


class Broken(Exception):  # noqa: N818
    """A value that breaks the rule of its field."""

    def __init__(self, rule: str, nearest: object = None) -> None:
        self.rule = rule
        self.nearest = nearest


def read_value(declared: Field[Any], value: Any) -> Any:
    """A given value as the field's type and within its rule; raises Broken."""
    rule, quantity = rule_of(declared), quantity_of(declared)
    choices = rule["choices"]
    if may_be_none(declared) and (value is None or value == NONE) and NONE not in (choices or ()):
        return None
    if quantity == "texts" and value in ([], (), "[]") and may_be_none(declared):
        raise Broken(f'must name at least one, or be "{NONE}"', NONE)
    if quantity == "texts" and value in ([], (), "[]") and declared.default == ():
        return ()
    if quantity in ("flag", "text", "texts", "paths", "part"):
        return _READ[quantity](value, choices)
    if quantity == "counts":
        return _counts(rule, value)
    if quantity == "lengths":
        return _lengths(value)
    try:
        number = _READ[quantity](value, choices)
    except (Broken, NotAQuantity) as error:
        raise Broken(error.rule, _nearest_within(rule, error.nearest)) from None
    return _within(rule, number)


def _nearest_within(rule: Mapping[str, Any], nearest: Any) -> Any:
    """The nearest number that is written right, moved to where the rule holds."""
    try:
        return None if nearest is None else _within(rule, nearest)
    except Broken as error:
        return error.nearest
    except TypeError:  # a text
        return nearest


def _within(rule: Mapping[str, Any], number: Any) -> Any:
    at_least, above, at_most = rule["at_least"], rule["above"], rule["at_most"]
    if at_most is None and isinstance(number, int) and not rule["quantity"]:
        at_most = LARGEST_COUNT
    if at_least is not None and number < at_least:
        least = f"must be at least {at_least}"
        raise Broken(f"{least} ({rule['unit']})" if rule["unit"] else least, at_least)
    if above is not None and number <= above:
        raise Broken(f"must be above {above}")
    if at_most is not None and number > at_most:
        raise Broken(f"must be at most {at_most}", at_most)
    return number


def _counts(rule: Mapping[str, Any], value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise Broken("must be a list of whole numbers, such as [4, 4]")
    if len(value) > LONGEST_LIST:
        raise Broken(f"must be a list of at most {LONGEST_LIST} numbers")
    try:
        return tuple(_within(rule, _READ["count"](item, None)) for item in value)
    except NotAQuantity as error:
        raise Broken(f"each of them {error.rule}") from None
    except Broken as broken:
        raise Broken(f"each of them {broken.rule}") from None


def _lengths(value: Any) -> tuple[tuple[int, int], ...]:
    """Pairs of tokens and rows, ascending, of a list or of a JSON file that has one, alone or as its ``lengths``."""
    try:
        value = parse_json(content_of(value)) if isinstance(value, str) else value
    except OSError as error:
        raise _no_lengths(str(error.strerror).lower()) from None
    except ValueError:
        raise _no_lengths("no JSON") from None
    pairs = value.get("lengths", value) if isinstance(value, Mapping) else value
    if not isinstance(pairs, list | tuple) or not 0 < len(pairs) <= LONGEST_LIST:
        raise _no_lengths(f"{len(pairs):,} of them" if isinstance(pairs, list | tuple) else shown(pairs))
    rows: dict[int, int] = {}
    for pair in pairs:
        numbers = isinstance(pair, list | tuple) and len(pair) == 2 and {type(number) for number in pair} == {int}
        if not numbers or not all(0 < number <= LONGEST_ROW for number in pair):
            raise _no_lengths(shown(pair))
        rows[pair[0]] = rows.get(pair[0], 0) + pair[1]
    return tuple(sorted(rows.items()))


def _no_lengths(what: str) -> Broken:
    """The one sentence on lengths that are none, with what there is instead."""
    pairs = f"1 to {LONGEST_LIST:,} pairs of tokens and rows, each at most {LONGEST_ROW:,}, such as [[128, 400]]"
    return Broken(f"must be {pairs}, or a file that `trainledger data TEXT --lengths FILE` wrote; found: {what}")


def may_be_none(declared: Field[Any]) -> bool:
    """The field may be absent."""
    return "None" in str(declared.type)


def _whole(parse_text: Callable[[str], int], example: str, value: Any) -> int:
    if isinstance(value, str):
        return parse_text(value)
    if isinstance(value, float):
        if value.is_integer():
            return int(value)
        finite = value - value == 0
        raise Broken("must be a whole number", round(value) if finite else None)
    try:
        return int(operator.index(value)) if not isinstance(value, bool) else int("")
    except (TypeError, ValueError):
        raise Broken(f"must be a whole number, such as {example}") from None


def _number(parse_text: Callable[[str], float], value: Any) -> float:
    if isinstance(value, str):
        return parse_text(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Broken("must be a number")
    try:
        number = float(value) + 0.0  # minus zero becomes zero
    except OverflowError:
        raise Broken("must be a finite number") from None
    if number - number != 0:
        raise Broken("must be a finite number")
    return number


def _flag(value: Any, choices: object) -> bool:
    if isinstance(value, bool):
        return value
    word = value.lower() if isinstance(value, str) else value
    guess = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    raise Broken("must be true or false", guess.get(word) if isinstance(word, str) else None)


def _text(value: Any, choices: tuple[str, ...] | None) -> str:
    if not isinstance(value, str):
        raise Broken("must be a text in quotes")
    if choices is not None and value not in choices:
        several = [choice for choice in choices if choice.startswith(f"{value}-")]
        if len(several) > 1:
            raise Broken(f"is several things: {', '.join(several)}", several[0])
        raise Broken(f"must be one of {', '.join(choices)}", nearest_text(value, choices))
    if not value.strip() or "\0" in value:
        raise Broken("must not be empty" if "\0" not in value else "must not contain a NUL character")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Broken("must be Unicode text") from None
    if not value.isprintable():  # it would move the cursor of the terminal that shows it
        plain = " ".join("".join(item if item.isprintable() else " " for item in value).split())
        raise Broken("must contain only printable characters", plain or None)
    return str(value)


def _texts(value: Any, choices: tuple[str, ...] | None) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [name.strip() for name in value.strip().removesuffix(",").split(",")]
    if not isinstance(value, list | tuple) or not value:
        raise Broken("must be a text or a list of texts")
    return tuple(_text(item, choices) for item in value)


_READ: dict[str, Callable[[Any, Any], Any]] = {
    "count": lambda value, _: _whole(parse_count, '4096 or "15T"', value),
    "length": lambda value, _: _whole(parse_length, '8192 or "32k"', value),
    "nbytes": lambda value, _: _whole(parse_nbytes, '"80GB"', value),
    "bytes/s": lambda value, _: _whole(parse_bytes_per_second, '"50GB/s"', value),
    "seconds": lambda value, _: _number(parse_seconds, value),
    "number": lambda value, _: _number(parse_number, value),
    "amount": lambda value, _: _number(parse_amount, value),
    "flag": _flag,
    "text": _text,
    "part": _text,  # its kind
    "texts": _texts,
    "paths": lambda value, choices: _texts([value] if isinstance(value, str) else value, choices),
}
