"""Intervals and chances in words: between what published runs find a prediction, and from how many of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import sqrt
from string import ascii_letters

from trainledger.forecast.predict.forecast import Forecast
from trainledger.forecast.predict.interval import (
    EVEN,
    LIKELY,
    SURE,
    Interval,
    middle_of_memory,
    peaks_like,
    steps_like,
    unlike,
)
from trainledger.forecast.predict.interval import of_memory as of_peak
from trainledger.forecast.predict.roofline import Machine
from trainledger.spec.device import SHARE, Device, ErrorModel, MemoryErrors, StepErrors
from trainledger.spec.run import Run
from trainledger.spec.units import counted, format_nbytes

_SHARE, _SURE = (f"{each:.0%}".replace("%", " %") for each in (SHARE, SURE))
_UNITS = f" %{ascii_letters}"
_DIGITS = 3  # of an end: more would be noise
_ABOVE = 1.1  # measured over predicted, from which on a middle is explained
_TIMED_BY = {
    "own": "",
    "other": " by the constants of another device (no step on this one is published)",
    "bound": " by the data sheet alone (no constants of this device are known)",
}


def between(forecast: Forecast, name: str, write: Callable[[float], str]) -> str:
    """The interval of a quantity, to follow its number; empty where it has none.

    >>> from trainledger.spec.units import format_seconds
    >>> between(Forecast(intervals={"step_seconds": Interval(1.2134, 1.718)}), "step_seconds", format_seconds)
    ' (80 %: 1.21 to 1.72 s)'

    A prediction below its interval is a bound, or of a kind whose published figures are higher.
    """
    interval, value = forecast.intervals.get(name), getattr(forecast, name)
    if interval is None:
        return ""
    if value is not None and value < interval.low:
        return f" counted, likely {_rounded(write(sqrt(interval.low * interval.high)))} ({ends(interval, write)})"
    return f" ({ends(interval, write)})"


def ends(interval: Interval, write: Callable[[float], str]) -> str:
    """Both ends with the share that lies between them; a unit that they have in common once."""
    low, high = (_rounded(write(each)) for each in (interval.low, interval.high))
    number, _, unit = low.partition(" ")
    return f"{_SHARE}: {number if unit and high.endswith(f' {unit}') else low} to {high}"


def _rounded(text: str) -> str:
    """A number with its unit, in `_DIGITS` digits."""
    number = text.rstrip(_UNITS)
    value = float(f"{float(number.replace(',', '')):.{_DIGITS}g}")
    return (f"{value:.{_DIGITS}g}" if abs(value) < 10**_DIGITS else f"{value:,.0f}") + text[len(number) :]


def chance(value: float) -> str:
    """A chance in whole percent, never certain, and never rounded up to one that decides.

    >>> chance(0.974), chance(0.9991), chance(1e-4), chance(0.797)
    ('97 %', 'over 99 %', 'under 1 %', '79 %')
    """
    percent = round(100 * value)
    percent -= any(value < least <= percent / 100 for least in (EVEN, LIKELY, SURE))
    return f"{percent} %" if 1 <= percent <= 99 else "over 99 %" if percent > 99 else "under 1 %"


def fits(counted: bool | None, likely: float | None) -> str:
    """Whether a run fits by the bytes that are ``counted``, and how ``likely`` that is where published peaks say it.

    >>> fits(True, 0.97), fits(True, 0.6), fits(True, 0.07), fits(False, 0.01), fits(True, None)
    ('fits (chance 97 %)', 'may fit (chance 60 %)', 'likely does NOT fit (chance 7 %)', 'does NOT fit', 'fits')
    """
    if counted is False:
        return "does NOT fit"
    if likely is None:
        return "fits"
    word = "fits" if likely >= LIKELY else "may fit" if likely >= EVEN else "likely does NOT fit"
    return f"{word} (chance {chance(likely)})"


def room(forecast: Forecast) -> str:
    """What to leave free for a chance of `SURE`; empty where that is not known, or is free already."""
    if forecast.margin_nbytes is None or forecast.chance_of_fitting is None or forecast.chance_of_fitting >= SURE:
        return ""
    if not forecast.fits:
        return f"; chance that it fits: {chance(forecast.chance_of_fitting)}"
    return f"; leave {_rounded(format_nbytes(forecast.margin_nbytes))} free for a chance of {_SURE}"


def rests_on(run: Run, machine: Machine | None) -> Iterator[str]:
    """What the intervals of a plan hold, and why they are wider where they are."""
    if not isinstance(machine, Device) or machine.errors is None:
        return
    errors = machine.errors
    yield (
        f"{_SHARE}: intervals hold four of five published runs, each predicted without its source "
        f"({_steps(errors.step)}; {_peaks(peaks_like(run, errors))}); trainledger explain says more"
    )
    if middle_of_memory(run, errors) > _ABOVE:
        yield (
            f"the interval of the memory is mostly above its prediction: half of the published peaks "
            f"{'with adapters ' if run.recipe.lora else ''}are at least {middle_of_memory(run, errors):.3g} times "
            "the predicted ones"
        )
    yield from _wider(run, errors)


def of_steps(run: Run, errors: ErrorModel, seconds: float) -> Iterator[str]:
    """What the interval of a step of so many predicted seconds rests on."""
    steps, by = steps_like(run, errors, seconds), _TIMED_BY[errors.step.basis]
    yield (
        f"the interval of a step: {_SHARE} of {_steps(errors.step)} took {steps.low:.3g} to {steps.high:.3g} times "
        f"the predicted time{by}, each predicted without its source; steps on about as many devices, about as long, "
        "with experts or without as here, weigh more"
    )
    yield from _wider(run, errors)


def of_memory(run: Run, errors: ErrorModel) -> Iterator[str]:
    """What the interval of the memory rests on."""
    interval = of_peak(run, errors)
    yield (
        f"the interval of the memory: over {_peaks(peaks_like(run, errors))}, {_SHARE} of the peaks of "
        f"another source are {interval.low:.3g} to {interval.high:.3g} times the predicted ones"
    )
    yield from _wider(run, errors)


def _wider(run: Run, errors: ErrorModel) -> Iterator[str]:
    """Why intervals are wider than those of published runs."""
    without = {"times": unlike(run, errors.steps_seen), "memory": unlike(run, errors.memory_seen)}
    if without["times"] == without["memory"]:
        without = {"times and memory": without["times"]}
    for what, kinds in without.items():
        if kinds:
            yield (
                f"no published run has {', '.join(kinds)}: intervals of {what} are {errors.widening:.2g} times as "
                "wide (of logarithms), as for a device without published runs"
            )


def _steps(errors: StepErrors) -> str:
    return f"{counted(errors.rows, 'step')} of {counted(errors.sources, 'source')}"


def _peaks(errors: MemoryErrors) -> str:
    return f"{counted(errors.rows, 'peak')} of memory of {counted(errors.sources, 'source')}"
