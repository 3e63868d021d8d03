"""The napkin: parameters, tokens, devices, days and MFU, any one of which follows from the other four; and the most
parameters that memory holds."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from math import ceil
from typing import Any

from trainledger import catalog
from trainledger.forecast.plan.quantity import LARGEST, SMALLEST, parse_days, read, read_mfu, read_peak
from trainledger.forecast.predict.forecast import NAPKIN, Bar, nanoseconds
from trainledger.ledger import rules_of_thumb as rules
from trainledger.report.document import Answer
from trainledger.spec.calibration import find_calibration, to_device
from trainledger.spec.device import Device
from trainledger.spec.frozen import frozen
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.units import (
    KILO,
    SECONDS_PER_DAY,
    SECONDS_PER_HOUR,
    NotAQuantity,
    ceil_div,
    counted,
    format_count,
    format_nbytes,
    format_percent,
    format_seconds,
    parse_count,
    parse_nbytes,
    parse_number,
)

UNKNOWNS = ("params", "tokens", "count", "days", "mfu")
BELOW_THE_PEAK = "added, as the MFU is below 100 %"
NOT_STATIC = "Not in it: activations, buffers of communication, the CUDA context and fragmentation, which `fit` counts."
HIGHEST_PUBLISHED_MFU = 0.72  # of the collected published runs: FlashAttention-2 (arXiv 2307.08691), table 1


@frozen
class Formula:
    """A result with its rule: the formula, the same with numbers, and the source."""

    name: str
    formula: str
    numbers: str
    source: str


@frozen(kw_only=True)
class Napkin(Answer, report="napkin"):
    """What five numbers say about a training run; ``solved`` names the one that followed from the others.

    ``count`` is whole devices; ``count_exact`` is what the equation gives. ``static_nbytes`` and
    ``devices_for_static`` are by precision recipe (`rules_of_thumb.STATES`), before any activation. ``kwh`` is the
    energy of the devices at their rated power; None where that is not known.
    """

    params: int
    tokens: int
    count: int
    count_exact: float
    days: float
    mfu: float
    device: Device
    dtype: str
    peak_flops_per_second: float
    solved: str
    flops: int
    device_hours: float
    static_nbytes: dict[str, int]
    devices_for_static: dict[str, int] | None
    money: float | None
    kwh: float | None
    formulas: tuple[Formula, ...]
    remarks: tuple[str, ...]

    @property
    def waterfall(self) -> tuple[Bar, ...]:
        """The run's time as bars: 6 N D at the whole peak, and what the MFU adds.

        >>> one = napkin(params="70B", tokens="15T", device="h100-sxm", count=1024, mfu=0.5)
        >>> [round(each.seconds / 86400, 2) for each in one.waterfall]
        [71.96, 71.96]
        """
        whole, at_peak = nanoseconds(self.days * SECONDS_PER_DAY), nanoseconds(self.days * SECONDS_PER_DAY * self.mfu)
        return Bar(NAPKIN, at_peak), Bar(BELOW_THE_PEAK, whole - at_peak)

    def __repr__(self) -> str:
        """The five numbers in one line."""
        return f"Napkin({headline(self)})"


def napkin(
    *,
    device: str | Device,
    params: Any = None,
    tokens: Any = None,
    count: Any = None,
    days: Any = None,
    mfu: Any = None,
    price: Any = None,
    dtype: str | None = None,
) -> Napkin:
    """Days, FLOPs and bytes of a run by 6 N D, solved for the one of params, tokens, count, days, mfu not given.

    Values are numbers or text ("70B", "15T", "2w", "50%"); tokens may be "20x", that many per parameter.
    Days alone is solved when no other is left out. ``price`` is money per device-hour.

    >>> answer = napkin(params="70B", tokens="15T", device="h100-sxm", count=1024, mfu=0.5)
    >>> round(answer.days, 1), answer.devices_for_static["fp32-adamw"]
    (143.9, 14)
    """
    problems: list[Problem] = []
    per_parameter = _tokens_per_parameter(tokens, problems)
    given = {
        "params": read("params", params, parse_count, problems, least=1),
        "tokens": read("tokens", None if per_parameter else tokens, parse_count, problems, least=1),
        "count": read("count", count, parse_count, problems, least=1),
        "days": read("days", days, parse_days, problems),
        "mfu": None if mfu is None else read_mfu(mfu, problems),
    }
    money = read("price", price, parse_number, problems, least=0)
    chip = _device(device, problems)
    peak, dtype = (None, "") if chip is None else read_peak(chip, dtype, problems)
    raw = {"params": params, "tokens": tokens, "count": count, "days": days, "mfu": mfu}
    missing = [name for name in UNKNOWNS if raw[name] is None]
    if len(missing) != 1:
        rule = f"needs all of {', '.join(UNKNOWNS)} but one, which is solved for; "
        rule += f"left out: {', '.join(missing)}" if missing else "all five are given"
        problems.append(Problem("napkin", None, rule))
    if problems:
        raise InvalidInput(problems)
    assert chip is not None
    assert peak is not None
    solved = missing[0]
    numbers, exact = _solve(solved, given, per_parameter, peak)
    return _answer(solved, numbers, exact, chip, dtype, peak, money, per_parameter)


@frozen(kw_only=True)
class LargestModels(Answer, report="napkin"):
    """The most parameters whose static state devices hold, by recipe (`rules_of_thumb.STATES`), or for one number of
    bytes a parameter that was given (`GIVEN`). ``params`` are of all devices together, which share the state evenly
    (ZeRO-3), ``params_of_one`` of one alone.

    ``device`` is None where memory was given; ``bytes_per_parameter`` is as exact as it was given.
    """

    memory_nbytes: int
    count: int
    device: Device | None
    bytes_per_parameter: dict[str, float]
    params: dict[str, int]
    params_of_one: dict[str, int]
    formulas: tuple[Formula, ...]
    remarks: tuple[str, ...]


GIVEN = "given"


def largest_models(
    *, device: str | Device | None = None, memory: Any = None, count: Any = None, bytes_per_param: Any = None
) -> LargestModels:
    """The most parameters N whose static state devices hold: devices x memory / bytes per parameter.

    ``memory`` is that of one device; absent, that of ``device``. No activation is in it.

    >>> largest_models(memory="80GB", count=8).params["fp32-adamw"]
    40000000000
    >>> largest_models(memory="80GB", count=8, bytes_per_param=12).params
    {'given': 53333333333}
    """
    problems: list[Problem] = []
    nbytes = read("memory", memory, parse_nbytes, problems, least=1)
    devices = 1 if count is None else read("count", count, parse_count, problems, least=1)
    each = read("bytes_per_param", bytes_per_param, parse_number, problems, least=0.01, most=1e6)
    chip = None if device is None or memory is not None else _device(device, problems)
    if chip is not None and (nbytes := chip.memory_nbytes) is None:
        problems.append(Problem("memory", None, f"is missing: the memory of {chip.name} is not known", "80GB"))
    if memory is None and device is None:
        problems.append(Problem("memory", None, "is missing, and no device is given that has one", "80GB"))
    if problems:
        raise InvalidInput(problems)
    per = {name: float(recipe.bytes_per_parameter) for name, recipe in rules.STATES.items()}
    per = per if each is None else {GIVEN: each}
    nbytes = int(nbytes)
    one = {name: int(nbytes / Fraction(per_parameter)) for name, per_parameter in per.items()}
    most = {name: int(devices * nbytes / Fraction(per_parameter)) for name, per_parameter in per.items()}
    first = next(iter(per))
    numbers = f"{devices} x {format_nbytes(nbytes)} / {per[first]:g} B = {short(most[first])}"
    return LargestModels(
        memory_nbytes=nbytes, count=devices, device=chip, bytes_per_parameter=per, params=most, params_of_one=one,
        formulas=(Formula("params", "N = devices x memory / bytes per parameter", numbers, "arithmetic"),),
        remarks=(NOT_STATIC, *(["Together devices hold it only where they shard all of it (ZeRO-3)."] * (devices > 1))),
    )  # fmt: skip


def headline_of_largest(answer: LargestModels) -> str:
    """The largest model of the first recipe in one line.

    >>> headline_of_largest(largest_models(memory="80GB", count=8))
    '8 devices of 80 GB hold at most 40B parameters at 16 bytes each (fp32, AdamW)'
    """
    name, params = next(iter(answer.params.items()))
    holds = "holds" if answer.count == 1 else "hold"
    state = "" if name == GIVEN else f" ({rules.STATES[name].title.partition(' (')[0]})"
    what = f"{counted(answer.count, 'device')} of {format_nbytes(answer.memory_nbytes)} {holds} at most"
    return f"{what} {format_count(params)} parameters at {answer.bytes_per_parameter[name]:g} bytes each{state}"


def _solve(
    solved: str, given: dict[str, Any], per_parameter: float | None, peak: float
) -> tuple[dict[str, Any], float]:
    """All five numbers, and the device count before it is rounded up."""
    numbers = dict(given)
    if solved in ("params", "tokens"):
        flops = numbers["count"] * peak * numbers["mfu"] * numbers["days"] * SECONDS_PER_DAY
        if solved == "tokens":
            numbers["tokens"] = round(rules.tokens_of_flops(flops, numbers["params"]))
        elif per_parameter is None:
            numbers["params"] = round(rules.parameters_of_flops(flops, numbers["tokens"]))
        else:
            numbers["params"] = round(rules.compute_optimal_parameters(flops, per_parameter))
    if per_parameter is not None:
        numbers["tokens"] = round(rules.compute_optimal_tokens(numbers["params"], per_parameter))
    for name in ("params", "tokens"):
        if numbers[name] < 1:
            raise InvalidInput([Problem("napkin", None, f"these devices and days afford less than one of {name}")])
    flops = rules.training_flops(numbers["params"], numbers["tokens"])
    if solved == "days":
        numbers["days"] = rules.training_seconds(flops, numbers["count"], peak, numbers["mfu"]) / SECONDS_PER_DAY
    seconds = numbers["days"] * SECONDS_PER_DAY
    if solved == "mfu":
        numbers["mfu"] = rules.training_seconds(flops, numbers["count"], peak, seconds)
    exact = float(numbers["count"] or 0)
    if solved == "count":
        exact = rules.training_seconds(flops, seconds, peak, numbers["mfu"])
        numbers["count"] = ceil(exact * (1 - 1e-12))
    return numbers, exact


def _answer(
    solved: str, numbers: dict[str, Any], exact: float, chip: Device, dtype: str, peak: float, price: float | None,
    per_parameter: float | None,
) -> Napkin:  # fmt: skip
    params, tokens, days, mfu = numbers["params"], numbers["tokens"], numbers["days"], numbers["mfu"]
    flops = rules.training_flops(params, tokens)
    hours = exact * days * SECONDS_PER_DAY / SECONDS_PER_HOUR
    static = {name: rules.static_nbytes(params, name) for name in rules.STATES}
    memory, watts = chip.memory_nbytes, chip.power_watts
    kwh = None if watts is None else hours * watts / KILO
    fit = {name: ceil_div(nbytes, memory) for name, nbytes in static.items()} if memory else None
    return Napkin(
        params=params, tokens=tokens, count=numbers["count"], count_exact=exact, days=days, mfu=mfu, device=chip,
        dtype=dtype, peak_flops_per_second=peak, solved=solved, flops=flops, device_hours=hours,
        static_nbytes=static, devices_for_static=fit, money=None if price is None else price * hours, kwh=kwh,
        formulas=(
            *_formulas(solved, params, tokens, exact, days, mfu, peak, flops, hours, price, per_parameter),
            *_energy(hours, watts, kwh),
        ),
        remarks=tuple(_remarks(numbers, chip, dtype, fit)),
    )  # fmt: skip


def _formulas(
    solved: str, params: int, tokens: int, count: float, days: float, mfu: float, peak: float, flops: int,
    hours: float, price: float | None, per_parameter: float | None,
) -> list[Formula]:  # fmt: skip
    six_nd, time = rules.RULES["training_flops"], rules.RULES["training_seconds"]
    n, d, c, f = short(params), short(tokens), short(flops), short(peak)
    day = f"{SECONDS_PER_DAY} s"
    formulas = [Formula("flops", six_nd.formula, f"6 x {n} x {d} = {c} FLOP", six_nd.source)]
    devices = f"{count:.6g}"  # the result of the equation need not be whole
    whole = f": {ceil(count):,} whole devices (the rows below are for {devices})" if count != ceil(count) else ""
    rate = f"{devices} x {f} x {short(mfu)}"
    span = f"{short(days)} x {day}"
    texts = {
        "days": ("C / (devices x peak x MFU)", f"{c} / ({rate}) / {day} = {short(days)} days"),
        "mfu": ("MFU = C / (devices x peak x t)", f"{c} / ({devices} x {f} x {span}) = {short(mfu)}"),
        "count": ("devices = C / (peak x MFU x t)", f"{c} / ({f} x {short(mfu)} x {span}) = {devices}{whole}"),
        "params": ("N = devices x peak x MFU x t / (6 D)", f"{rate} x {span} / (6 x {d}) = {n}"),
        "tokens": ("D = devices x peak x MFU x t / (6 N)", f"{rate} x {span} / (6 x {n}) = {d}"),
    }
    if solved == "params" and per_parameter is not None:
        six = f"6 x {short(per_parameter)}"
        texts["params"] = ("N = sqrt(devices x peak x MFU x t / (6 D/N))", f"sqrt({rate} x {span} / ({six})) = {n}")
    formulas.append(Formula(solved, *texts[solved], time.source))
    spent = f"{devices} x {short(days)} x 24 = {short(hours)}"
    formulas.append(Formula("device_hours", "devices x days x 24", spent, "arithmetic"))
    if price is not None:
        bill = f"{short(hours)} x {short(price)} = {price * hours:,.0f}"
        formulas.append(Formula("money", "device-hours x price", bill, "arithmetic"))
    optimal = rules.RULES["compute_optimal_tokens"]
    formulas.append(Formula("tokens_per_parameter", "D / N", f"{d} / {n} = {short(tokens / params)}", optimal.source))
    return formulas


def _energy(hours: float, watts: float | None, kwh: float | None) -> Iterator[Formula]:
    if watts is not None and kwh is not None:
        spent = f"{short(hours)} x {short(watts)} W / {KILO} = {short(kwh)} kWh"
        yield Formula("kwh", "device-hours x rated power", spent, "arithmetic")


def _remarks(numbers: dict[str, Any], chip: Device, dtype: str, fit: dict[str, int] | None) -> list[str]:
    remarks = []
    mfu, count = numbers["mfu"], numbers["count"]
    if mfu > 1:
        remarks.append(f"Impossible: it needs {format_percent(mfu)} of the peak.")
    elif mfu > HIGHEST_PUBLISHED_MFU:
        highest = format_percent(HIGHEST_PUBLISHED_MFU)
        remarks.append(f"Not plausible: {format_percent(mfu)} MFU is more than the highest published, about {highest}.")
    if fit and fit["fp32-adamw"] > count:
        needed = f"{fit['fp32-adamw']:,} of these devices, not {count:,}"
        remarks.append(f"At 16 bytes per parameter the static state alone needs {needed}.")
    if f"peak.{dtype}" in chip.unverified:
        remarks.append(f"The {dtype} peak of {chip.name} was not verified in a source.")
    if chip.note:
        remarks.append(f"{chip.name}: {chip.note}.")
    return remarks


def why_impossible(answer: Napkin) -> Problem | None:
    """Why the answer cannot be: it needs more than the peak of its devices, and how many would do; else None."""
    if answer.mfu <= 1:
        return None
    count = ceil(answer.count_exact * answer.mfu / HIGHEST_PUBLISHED_MFU)
    rule = f"these parameters, tokens and days need {format_percent(answer.mfu)} of the peak of the devices"
    near = f"{count}, at {format_percent(HIGHEST_PUBLISHED_MFU)} MFU"
    return Problem("count", answer.count, rule, near)


def short(value: float) -> str:
    """A number for a formula: plain where it is short, else with an exponent.

    >>> short(70 * 10**9), short(1024), short(0.5), short(143.93)
    ('7e10', '1024', '0.5', '143.9')
    """
    if value == int(value) and abs(value) < 1e5:
        return str(int(value))
    return f"{value:.4g}".replace("e+", "e")


def _tokens_per_parameter(tokens: Any, problems: list[Problem]) -> float | None:
    if not isinstance(tokens, str) or not tokens.strip().lower().endswith("x"):
        return None
    try:
        value = parse_number(tokens.strip()[:-1])
    except NotAQuantity:
        value = 0.0
    if not SMALLEST <= value <= LARGEST:
        problems.append(Problem("tokens", tokens, 'tokens per parameter are written like "20x"', "20x"))
        return 20.0
    return value


def _device(device: str | Device, problems: list[Problem]) -> Device | None:
    if isinstance(device, Device):
        return device
    try:
        if device != "this-machine":
            return catalog.device(device, "device")
        calibration = find_calibration()
        if calibration is not None:
            return to_device(calibration)
        problems.append(Problem("device", device, "was not measured yet; `trainledger measure machine` does it"))
    except InvalidInput as error:
        problems.extend(error.placed())
    return None


def headline(answer: Napkin) -> str:
    """The run in one line."""
    return (
        f"{format_count(answer.params)} parameters, {format_count(answer.tokens)} tokens, "
        f"{answer.count:,} x {answer.device.name} at {format_percent(answer.mfu)} MFU (6 N D): "
        f"{format_seconds(answer.days * SECONDS_PER_DAY)}"
    )
