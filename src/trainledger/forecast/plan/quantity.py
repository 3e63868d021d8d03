"""Numbers given as numbers or as text, read within bounds, each error a sentence; and the budgets that they make."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from trainledger import catalog
from trainledger.spec.device import Device
from trainledger.spec.frozen import frozen
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.units import (
    SECONDS_PER_DAY,
    SECONDS_PER_HOUR,
    NotAQuantity,
    format_amount,
    format_flops_per_second,
    parse_amount,
    parse_count,
    parse_length,
    parse_number,
    parse_seconds,
)

LARGEST, SMALLEST = 1e18, 1e-6
WHOLE = (parse_count, parse_length)
_LARGEST_FLOAT = sys.float_info.max
_WRITTEN_OUT = 1e9  # from here on a bound is printed as 1e18


def read(
    name: str,
    value: Any,
    parse: Callable[[str], Any],
    problems: list[Problem],
    *,
    least: float = SMALLEST,
    most: float = LARGEST,
) -> Any:
    """A number or a quantity in text within its bounds; None where it is absent or wrong, which is added to problems.

    >>> wrong = []
    >>> read("days", "2w", parse_days, wrong), read("days", "soon", parse_days, wrong), len(wrong)
    (14.0, None, 1)
    """
    if value is None:
        return None
    number = _number(name, value, parse, problems)
    if number is None:
        near = problems[-1].nearest
        if near is not None:  # it has to be within the bounds too
            near_number = parse(str(near))
            bound = min(max(near_number, least), most)
            if bound != near_number:
                problems[-1] = replace(problems[-1], nearest=int(bound) if bound >= 1 else bound)
        return None
    if parse in WHOLE and number != int(number):
        problems.append(Problem(name, value, "must be a whole number", round(number)))
    elif not least <= number <= most:
        bound = least if number < least else most
        between = f"must be between {_short(least)} and {_short(most)}"
        rule = f"must be at least {_short(least)}" if bound == least and most == LARGEST else between
        near = _short(bound) if bound >= _WRITTEN_OUT else int(bound) if bound >= 1 else bound
        if parse is parse_number and most == 1 and 1 < number <= 100:
            near = f"{number:g}%"  # a share in percent was meant
        problems.append(Problem(name, value, rule, near))
    else:
        return int(number) if parse in WHOLE else float(number)
    return None


def read_mfu(value: object, problems: list[Problem]) -> float | None:
    """A share of the peak FLOP/s, above 0 and at most 1, from a number or a text; None where wrong, as in `read`.

    >>> read_mfu("50%", []), read_mfu(0.4, [])
    (0.5, 0.4)
    """
    share = _number("mfu", value, parse_number, problems)
    if share is None:
        return None
    if SMALLEST <= share <= 1:
        return float(share)
    if share > 1:
        percent_meant = 2 <= share <= 100 and "%" not in str(value)
        nearest = float(f"{share / 100:.6g}") if percent_meant else 1
        problems.append(Problem("mfu", value, "is a share of the peak, above 0 and at most 1", nearest))
    else:
        problems.append(Problem("mfu", value, f"must be between {SMALLEST:g} and 1", SMALLEST))
    return None


def checked_mfu(value: object) -> float:
    """As `read_mfu`; raises InvalidInput where the value is no share."""
    problems: list[Problem] = []
    share = read_mfu(value, problems)
    if share is None:
        raise InvalidInput(problems)
    return share


def read_peak(device: Device, dtype: str | None, problems: list[Problem]) -> tuple[float | None, str]:
    """The peak of a dtype and its name: of bf16 where none is given and the device has it, else fp16, else fp32."""
    peaks = device.peak_flops_per_second
    chosen = dtype or next((each for each in ("bf16", "fp16", "fp32") if each in peaks), "bf16")
    if chosen not in peaks:
        problems.append(Problem("dtype", chosen, f"{device.name} has no known peak for it; known: {', '.join(peaks)}"))
    return peaks.get(chosen), chosen


def _number(name: str, value: object, parse: Callable[[str], Any], problems: list[Problem]) -> float | None:
    if hasattr(value, "__index__") and not isinstance(value, bool):  # of numpy
        value = value.__index__()
    try:
        number = parse(value) if isinstance(value, str) else value
    except NotAQuantity as error:
        problems.append(Problem(name, value, error.rule, error.nearest))
        return None
    if isinstance(number, bool) or not isinstance(number, int | float) or not abs(number) <= _LARGEST_FLOAT:
        problems.append(Problem(name, value, "must be a finite number"))
        return None
    return number


def _short(value: float) -> str:
    whole = value == int(value) and value < 1e9
    return f"{value:,.0f}" if whole else f"{value:.4g}".replace("e+", "e")


def parse_days(text: str) -> float:
    """Days in text: a plain number, or a time with its unit."""
    try:
        return parse_number(text)
    except NotAQuantity:
        return parse_seconds(text) / SECONDS_PER_DAY


def parse_flops(text: str) -> float:
    """FLOPs in text: "6.3e24", or a count with its letter."""
    try:
        return parse_number(text)
    except NotAQuantity:
        return float(parse_count(text))


WAYS = "flops, device_hours, days (with count), or money (with price)"
_MOST_FLOPS = 1e29  # some 1,000 times the largest run planned; a law says nothing there
_MOST_DAYS = 3650


@frozen(kw_only=True)
class Budget:
    """FLOPs that a budget buys at a share of the peak, and how the budget was given.

    Where it was given in FLOPs no device need be known; ``count`` and ``days`` are None where they were not given.
    """

    flops: float
    mfu: float
    device: Device | None = None
    dtype: str = ""
    peak_flops_per_second: float | None = None
    device_hours: float | None = None
    count: int | None = None
    days: float | None = None
    price: float | None = None
    money: float | None = None

    @property
    def seconds(self) -> float | None:
        """Wall-clock seconds, where the number of devices is known."""
        if self.count is None or self.device_hours is None:
            return None
        return self.device_hours * SECONDS_PER_HOUR / self.count

    @property
    def formula(self) -> str:
        """How the FLOPs follow from what was given."""
        if self.device_hours is None or self.peak_flops_per_second is None:
            return f"C = {self.flops:.4g} FLOP, as given"
        rate = f"{format_flops_per_second(self.peak_flops_per_second)} x {100 * self.mfu:.3g} %"
        if self.days is not None and self.count is not None:
            return f"C = {self.count:,} devices x {rate} x {self.days:.4g} days = {self.flops:.4g} FLOP"
        hours = f"{format_amount(self.device_hours)} device-hours"
        if self.money is not None and self.price is not None:
            hours = f"{format_amount(self.money)} / {self.price:,g} = {hours}"
        return f"C = {hours} x {rate} = {self.flops:.4g} FLOP"


def read_budget(
    *,
    flops: Any = None,
    device: str | Device | None = None,
    device_hours: Any = None,
    count: Any = None,
    days: Any = None,
    money: Any = None,
    price: Any = None,
    mfu: Any = 0.5,
    dtype: str | None = None,
) -> Budget:
    """A budget from exactly one of FLOPs, device-hours, days x devices, or money; raises InvalidInput.

    Numbers may be text ("2w", "50%", "1e22"). All but FLOPs need a ``device``; money needs its ``price`` for an hour.

    >>> budget = read_budget(device="h100-sxm", count=32, days=14)
    >>> f"{budget.flops:.4g}", round(budget.device_hours)
    ('1.915e+22', 10752)
    """
    problems: list[Problem] = []
    given = {
        "flops": read("flops", flops, parse_flops, problems, least=1, most=_MOST_FLOPS),
        "device_hours": read("device_hours", device_hours, parse_amount, problems),
        "days": read("days", days, parse_days, problems, most=_MOST_DAYS),
        "money": read("money", money, parse_amount, problems),
    }
    devices = read("count", count, parse_count, problems, least=1, most=10**7)
    rate = read("price", price, parse_amount, problems)
    share = read_mfu(mfu, problems)
    raw = {"flops": flops, "device_hours": device_hours, "days": days, "money": money}
    named = [name for name, value in raw.items() if value is not None]
    if len(named) != 1:
        given_as = f"; given: {', '.join(named)}" if named else ""
        problems.append(Problem("budget", None, f"is given in exactly one way: {WAYS}{given_as}"))
    elif named == ["days"] and count is None:
        problems.append(Problem("count", None, "is missing: days are a budget together with how many devices"))
    elif named == ["money"] and price is None:
        problems.append(Problem("price", None, "is missing: money is a budget together with what a device-hour costs"))
    if named and named != ["flops"] and device is None:
        problems.append(Problem("device", None, "is missing: hours and money buy FLOPs on a device", "h100-sxm"))
    chip = None
    if isinstance(device, str):
        try:
            chip = catalog.device(device, "device")
        except InvalidInput as error:
            problems.extend(error.problems)
    else:
        chip = device
    peak, kind = (None, "") if chip is None else read_peak(chip, dtype, problems)
    if problems:
        raise InvalidInput(problems)
    assert share is not None
    if named == ["flops"]:
        hours = None if peak is None else given["flops"] / (peak * share * SECONDS_PER_HOUR)
    elif named == ["device_hours"]:
        hours = given["device_hours"]
    elif named == ["days"]:
        hours = devices * given["days"] * SECONDS_PER_DAY / SECONDS_PER_HOUR
    else:
        hours = given["money"] / rate
    too_much = _beyond(named[0], raw[named[0]], given[named[0]], hours, None if peak is None else peak * share, devices)
    if too_much is not None:
        raise InvalidInput([too_much])
    spent = given["flops"] if hours is None or peak is None else hours * SECONDS_PER_HOUR * peak * share
    return Budget(
        flops=spent,
        mfu=share,
        device=chip,
        dtype=kind,
        peak_flops_per_second=peak,
        device_hours=hours,
        count=devices,
        days=given["days"],
        price=rate,
        money=given["money"] if rate is None or hours is None else rate * hours,
    )


def _beyond(
    field: str, value: Any, number: float, hours: float | None, rate: float | None, count: int | None
) -> Problem | None:
    """What is wrong with more FLOPs or days than a scaling law or a fleet of devices is good for; None where nothing.

    ``number`` is what was read from ``value``, ``rate`` the FLOP/s that one device delivers.
    """
    if hours is None or rate is None:
        return None
    by_flops = _MOST_FLOPS / (hours * SECONDS_PER_HOUR * rate)
    by_days = _MOST_DAYS * 24 * count / hours if count else float("inf")
    if by_flops >= 1 - 1e-9 and by_days >= 1 - 1e-9:
        return None
    if by_days < by_flops:
        rule = f"takes more than {_MOST_DAYS:,} days on {count:,} devices, longer than devices last"
    else:
        rule = f"buys more than {_MOST_FLOPS:g} FLOP, for which no scaling law is known".replace("e+", "e")
    nearest = float(f"{0.995 * number * min(by_flops, by_days):.3g}")
    return Problem(field, value, rule, f"{nearest:g}".replace("e+", "e"))


def at_mfu(budget: Budget, mfu: float) -> Budget:
    """The same devices and hours at another share of the peak."""
    if budget.device_hours is None or budget.peak_flops_per_second is None:
        return replace(budget, mfu=mfu)
    return replace(budget, mfu=mfu, flops=budget.device_hours * SECONDS_PER_HOUR * budget.peak_flops_per_second * mfu)
