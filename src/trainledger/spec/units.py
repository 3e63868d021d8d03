"""Quantities: counts rounded up, and text, of which only this file knows what T, GB, GiB and w stand for.

Counts and FLOPs are decimal (K = 1e3), bytes are decimal (GB = 1e9) or binary (GiB = 2**30), always
written out, times are seconds.
"""

from __future__ import annotations

from typing import Any, overload

KILO, MEGA, GIGA, TERA, PETA, EXA = 10**3, 10**6, 10**9, 10**12, 10**15, 10**18
KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
NANOSECONDS_PER_SECOND = 10**9
SECONDS_PER_HOUR = 3600
SECONDS_PER_DAY = 86400

_COUNTS = {"": 1, "k": KILO, "m": MEGA, "b": GIGA, "g": GIGA, "t": TERA, "p": PETA}
_LENGTHS = {"": 1, "k": KIB, "m": MIB}
_BYTES = {
    "": 1, "b": 1, "kb": KILO, "mb": MEGA, "gb": GIGA, "tb": TERA, "pb": PETA,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB,
}  # fmt: skip
_RATES = {
    **{f"{unit}{per}": scale for unit, scale in _BYTES.items() for per in (("", "/s") if unit else ("",))},
    **{
        f"{unit}{per}": scale // 8
        for unit, scale in (("kbit", KILO), ("mbit", MEGA), ("gbit", GIGA), ("tbit", TERA))
        for per in ("", "/s")
    },
}
_SECONDS = {
    "": 1.0, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0,
    "y": 365.25 * 86400.0,
}  # fmt: skip


_LONGEST = 40
_MANY_PERCENT = 10_000  # from here on tenths say nothing


@overload
def ceil_div(a: int, b: int) -> int: ...
@overload
def ceil_div(a: Any, b: Any) -> Any: ...
def ceil_div(a: Any, b: Any) -> Any:
    """The number of pieces of size ``b`` that hold ``a``, the last one perhaps in part; exact for integers of any size.

    Also of arrays, for many counts at once, and of sympy expressions, for a formula.

    >>> ceil_div(10, 4), ceil_div(8, 4), ceil_div(0, 4)
    (3, 2, 0)
    """
    return -(-a // b)


@overload
def round_up(a: int, multiple: int) -> int: ...
@overload
def round_up(a: Any, multiple: Any) -> Any: ...
def round_up(a: Any, multiple: Any) -> Any:
    """The smallest multiple that is not below ``a``, of what `ceil_div` takes.

    >>> round_up(50257, 128), round_up(256, 128)
    (50304, 256)
    """
    return -(-a // multiple) * multiple


class NotAQuantity(ValueError):  # noqa: N818
    """A text that is no quantity: the rule it breaks, and the nearest quantity where there is one (or its text)."""

    def __init__(self, text: str, rule: str, nearest: int | str | None = None) -> None:
        self.rule = rule
        self.nearest = nearest
        super().__init__(f"{text[:_LONGEST]!r} {rule}" + (f"; the nearest is {nearest}" if nearest is not None else ""))


def _split(text: str) -> tuple[str, str]:
    """The number and the unit of a quantity such as ``"1.5 GB"`` (a mantissa may end in ``e9``)."""
    compact = text.strip().replace("_", "").replace(",", "") if len(text) <= _LONGEST else ""
    for end in range(len(compact), 0, -1):
        try:
            float(compact[:end])
        except ValueError:
            continue
        return compact[:end], compact[end:].strip()
    return "", compact


def _between_thousands(text: str) -> bool:
    """Every comma stands between thousands, as in ``1,500``, and none for a point, as in ``0,500``."""
    import re

    compact = text.strip().replace("_", "")
    return re.fullmatch(r"[+-]?[1-9]\d{0,2}(,\d{3})+(?![\d,])[^,]*", compact, re.ASCII) is not None


def _parse(text: str, units: dict[str, int] | dict[str, float], rule: str, things: str = "") -> float | int:
    """The value of a quantity; whole where ``things`` names what must not be halved."""
    if "," in text and len(text) <= _LONGEST and not _between_thousands(text):
        nearest: int | str | None = text.strip().replace(",", ".")
        try:
            _parse(str(nearest), units, rule, things)
        except NotAQuantity as error:
            nearest = error.nearest
        raise NotAQuantity(text, f"{rule}; a comma only parts thousands, as in 4,096", nearest)
    number, unit = _split(text)
    scale = units.get(unit.lower())
    if not number or scale is None:
        raise NotAQuantity(text, rule)
    value = int(number) * scale if number.lstrip("+-").isdigit() else float(number) * scale
    if not -float("inf") < value < float("inf"):  # false for nan as well
        raise NotAQuantity(text, "is too large for any quantity" if number.lstrip("+-.")[:1].isdigit() else rule)
    return _whole(value, text, things) if things else value


def _whole(value: float | int, text: str, what: str) -> int:
    if isinstance(value, float):
        if not value.is_integer() and abs(value - round(value)) > 1e-9 * abs(value):
            raise NotAQuantity(text, f"is not a whole number of {what}", round(value) or 1)
        value = round(value)
    return value


def parse_count(text: str) -> int:
    """A count in text as an integer.

    >>> parse_count("15T"), parse_count("1e9"), parse_count("1.5k")
    (15000000000000, 1000000000, 1500)
    """
    return int(_parse(text, _COUNTS, 'is not a count; write it like 4096, "1e9" or "15T"', "things"))


def parse_length(text: str) -> int:
    """Tokens of a sequence in text, as the lengths of models are written: k is 1,024.

    >>> parse_length("32k"), parse_length("1M"), parse_length("8192")
    (32768, 1048576, 8192)
    """
    return int(_parse(text, _LENGTHS, 'is not a length; write it like 8192 or "32k"', "tokens"))


def parse_amount(text: str) -> float:
    """Money or device-hours in text, where parts of a whole may be left.

    >>> parse_amount("30.84M"), parse_amount("0.5"), parse_amount("10,000"), parse_amount("$20k")
    (30840000.0, 0.5, 10000.0, 20000.0)
    """
    return float(_parse(text.strip().strip("$€£"), _COUNTS, 'is not an amount; write it like 0.5, "10,000" or "1.5M"'))


def parse_nbytes(text: str) -> int:
    """Bytes in text as an integer; GB is 1e9, GiB is 2**30.

    >>> parse_nbytes("80GB"), parse_nbytes("1GiB")
    (80000000000, 1073741824)
    """
    return int(_parse(text, _BYTES, 'is not a number of bytes; write it like "80GB" or "1GiB"', "bytes"))


def parse_bytes_per_second(text: str) -> int:
    """Bytes per second in text as an integer; of Gbit an eighth.

    >>> parse_bytes_per_second("50GB/s"), parse_bytes_per_second("400Gbit/s"), parse_bytes_per_second("50GB")
    (50000000000, 50000000000, 50000000000)
    """
    number, unit = _split(text)
    bare = unit.removesuffix("/s")
    if len(bare) == 2 and bare[0].isupper() and bare[1] == "b":  # GB or Gbit: eight times apart
        rule = f'has a unit that stands for bits or for bytes; write "{number}{bare[0]}bit/s" or "{number}{bare[0]}B/s"'
        raise NotAQuantity(text, rule)
    rule = 'is not a number of bytes per second; write it like "50GB/s" or "400Gbit/s"'
    return int(_parse(text, _RATES, rule, "bytes per second"))


def parse_seconds(text: str) -> float:
    """A time in text as seconds.

    >>> parse_seconds("2w"), parse_seconds("90min")
    (1209600.0, 5400.0)
    """
    return float(_parse(text, _SECONDS, 'is not a time; write it like "2w", "3d", "12h", "90min" or "30s"'))


def parse_number(text: str) -> float:
    """A plain number in text; percent is a hundredth.

    >>> parse_number("3e-4"), parse_number("50%")
    (0.0003, 0.5)
    """
    value = _parse(text, {"": 1, "%": 1}, 'is not a number; write it like 0.5, "3e-4" or "50%"')
    return float(value) / 100 if text.rstrip().endswith("%") else float(value)


def _scaled(value: float, steps: tuple[tuple[float, str], ...]) -> str:
    scale, unit = next((step for step in steps if abs(value) >= step[0]), steps[-1])
    number = value / scale
    form = ".4g" if abs(number) < 9999.5 else ",.0f" if abs(number) < 1e6 else ".3e"
    return f"{number:{form}} {unit}".rstrip()


def format_count(value: float) -> str:
    """A count with three or four digits: 8.03 B, 15 T.

    >>> format_count(8030261248), format_count(15 * 10**12), format_count(512), format_count(10**18)
    ('8.03B', '15T', '512', '1e18')
    """
    if abs(value) >= 10 * PETA:
        return f"{value:.4g}".replace("e+", "e")
    steps = ((TERA, "T"), (GIGA, "B"), (MEGA, "M"), (KILO, "K"), (1, ""))
    return _scaled(value, steps).replace(" ", "")


def format_amount(value: float) -> str:
    """Money or device-hours, as a bill writes them.

    >>> format_amount(1_000_000), format_amount(10752), format_amount(0.25)
    ('1,000,000', '10,752', '0.25')
    """
    return f"{value:,.0f}" if 1e5 <= value < 1e15 else f"{value:,.6g}"


def format_nbytes(value: float) -> str:
    """Bytes in decimal units.

    >>> format_nbytes(80 * 10**9), format_nbytes(512)
    ('80 GB', '512 B')
    """
    return _scaled(value, ((PETA, "PB"), (TERA, "TB"), (GIGA, "GB"), (MEGA, "MB"), (KILO, "kB"), (1, "B")))


def format_gigabytes(value: float) -> str:
    """Bytes in GB whatever their size, for columns that are compared.

    >>> format_gigabytes(1120 * 10**9), format_gigabytes(12.345 * 10**9)
    ('1,120 GB', '12.35 GB')
    """
    return f"{value / GIGA:,.0f} GB" if abs(value) >= 100 * GIGA else f"{value / GIGA:.4g} GB"


def format_flops(value: float) -> str:
    """Floating-point operations (a count, not a rate).

    >>> format_flops(6.3e24), format_flops(268435456)
    ('6.300e+24 FLOP', '268.4 MFLOP')
    """
    if abs(value) >= 10**21:
        return f"{value:.3e} FLOP"
    steps = ((EXA, "EFLOP"), (PETA, "PFLOP"), (TERA, "TFLOP"), (GIGA, "GFLOP"), (MEGA, "MFLOP"), (KILO, "kFLOP"))
    return _scaled(value, (*steps, (1, "FLOP")))


def format_flops_per_second(value: float) -> str:
    """A rate of floating-point operations.

    >>> format_flops_per_second(989e12)
    '989 TFLOP/s'
    """
    return format_flops(value) + "/s"


def format_seconds(value: float) -> str:
    """A time in the unit that reads best; steps of up to two minutes are compared in seconds.

    >>> format_seconds(0.0123), format_seconds(143.93 * 86400), format_seconds(86400), format_seconds(75)
    ('12.3 ms', '143.9 days', '1 day', '75 s')
    """
    if 1 <= abs(value) < 120:
        return f"{value:.4g} s"
    steps = ((86400.0, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
    text = _scaled(value, steps)
    return "1 day" if text == "1 days" else text


def format_percent(value: float, *, signed: bool = False) -> str:
    """A ratio as percent.

    >>> format_percent(0.5), format_percent(-1e-9), format_percent(0.061, signed=True), format_percent(7369.042)
    ('50.0 %', '0.0 %', '+6.1 %', '736,904 %')
    """
    percent = round(100 * value, 1) + 0.0  # minus zero becomes zero
    if abs(percent) >= _MANY_PERCENT:
        return f"{percent:+,.0f} %" if signed else f"{percent:,.0f} %"
    return f"{percent:+.1f} %" if signed and percent else f"{percent:.1f} %"


def counted(count: int, thing: str) -> str:
    """A whole number of things.

    >>> counted(1, "step"), counted(1000, "step")
    ('1 step', '1,000 steps')
    """
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"
