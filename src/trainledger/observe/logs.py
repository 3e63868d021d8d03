"""Logs of other people's runs: the lines of steps by a table of what programs print (``logs.toml``), and summaries.

A log is read line by line, however large, and may still be written: of very many lines every second is kept, every
fourth ... Colours, prefixes of ranks, timestamps and progress bars do not matter. What a log does not say is not
guessed: `Log.doubts` has it in sentences.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import groupby, pairwise, takewhile
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from trainledger.ledger.measured import ENOUGH_STEPS, Spread, spread
from trainledger.spec.durable import content_of, opened, parse_json
from trainledger.spec.frozen import frozen
from trainledger.spec.plain import is_amount, table_beside
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.units import MIB

TABLE: dict[str, Any] = table_beside(__file__, "logs.toml")
_MOST_LINES, _LONGEST_LINE = 2**17, 2**16  # lines that are kept; characters
_GRAINS = 20  # smallest parts of a clock that lie between two times at least: these are off by a twentieth at most
_SIDE, _FAR, _SPREADS, _JUMPS = 10, 0.2, 6, 8  # lines on each side; relative; of the spread there: times, losses
_TIMES, _SHORTEST, _LEAST_CHANGE = 400, 5, math.log(1.05)  # that are compared; between two changes; of the speed
Facts = defaultdict[str, float]


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text.replace("{n}", TABLE["number"]))


_ANSI, _RANK, _BAR, _STAMP, _ELAPSED = map(_pattern, TABLE["around"])
_PROGRAMS = {name: table for name, table in TABLE.items() if "marks" in table}
_FIELDS = {
    name: {kind: (_pattern(text), unit) for kind, (text, unit) in table["fields"].items()}
    for name, table in _PROGRAMS.items()
}
_STEP = {name: _pattern(table["step"]) for name, table in _PROGRAMS.items()}
_LINE = {name: _pattern(table.get("line", table["step"])) for name, table in _PROGRAMS.items()}
_FACTS = [(name, _pattern(text), unit) for name, some in TABLE["facts"].items() for text, unit in some]
_SOME_FACT = _pattern("|".join(text for some in TABLE["facts"].values() for text, _ in some))


class Line(NamedTuple):
    """What one line says of a step; ``clock`` is seconds from some moment, of which ``grain`` are the smallest part."""

    step: int
    values: Mapping[str, float]
    clock: float | None = None
    grain: float = 1.0


@frozen
class Timed:
    """The seconds of one step, from the first of some steps to the last."""

    first: int
    last: int
    seconds: float


@frozen(kw_only=True)
class Log:
    """A run as its log says it.

    ``steps`` are those of its lines. ``step_seconds`` are of undisturbed steps; ``disturbed`` ones are left out, the
    first one among them. ``speeds`` are there where the speed changed. ``figures`` have what is known of
    tokens_per_step, tokens_per_second, rate (of one device), devices, tflops and mfu (of a device, as the program
    counts), peak (FLOP/s that this MFU is of), flops_per_step, and at the allocator's peak the bytes allocated and
    reserved. ``not_finite`` are the steps whose loss is not, ``jumps`` those far above the median loss before.
    """

    path: str
    program: str
    steps: tuple[int, ...]
    step_seconds: Spread | None
    disturbed: tuple[int, ...]
    speeds: tuple[Timed, ...]
    figures: dict[str, float]
    not_finite: tuple[int, ...]
    jumps: tuple[dict[str, float], ...]
    doubts: tuple[str, ...]


def read_log(path: str) -> Log:
    """What the log of a run says; raises `InvalidInput` where it cannot be read, or has no line that is known."""
    facts, whole = Facts(float), None
    try:
        with opened(path) as file:
            begin = file.read(4096)
            if begin[:2] in (b"\x1f\x8b", b"\xff\xfe"):
                raise _refused(path, "must be text in UTF-8: unpack it with gunzip, or convert it with iconv")
            with suppress(OSError, ValueError):  # too long, or lines of JSON
                whole = parse_json(content_of(path)) if begin.lstrip()[:1] == b"{" else None
            if isinstance(whole, dict) and not {"loss", "current_steps"} <= whole.keys():
                return _log(path, *_summary(path, whole, facts), facts)
            file.seek(0)
            name, lines = _read(file, facts)
    except OSError as error:
        raise _refused(path, f"cannot be read: {error.strerror or error}") from None
    if name is None and not (facts["runtime"] and facts["steps_per_second"]):
        raise _refused(path, TABLE["unknown"])
    name = name or "transformers"  # whose summary at the end is all there is
    return _log(path, _PROGRAMS[name], lines, facts)


def _refused(path: str, rule: str) -> InvalidInput:
    return InvalidInput([Problem("--log", path, rule)])


def _read(file: io.BufferedReader, facts: Facts) -> tuple[str | None, list[Line]]:
    """The first program that prints a step, and its lines, those of one rank, once; other lines add to ``facts``."""
    lines, name, own, bar, seen, stride = list[Line](), None, None, ("",) * 0, 0, 1
    for text in _texts(file, facts):
        if "it" in text and (bars := _BAR.findall(text)):
            bar = bars[-1]
            facts["bar"] = float(bar[1])
        if (program := _program_of(text, name)) is None:
            for fact, pattern, unit in _FACTS if _SOME_FACT.search(text) else ():
                facts[fact] = max([facts[fact], *(_number(value) * unit for value in pattern.findall(text))])
            continue
        rank = _RANK.match(text)
        number = rank[rank.lastindex or 0] if rank else None
        name, own, seen = program, own if name else number, seen + (number == own)
        if number == own and seen % stride != 1 % stride:
            continue
        line = _line(name, text, bar, seen)
        again = lines and (line.step, line.values.get("micro")) == (lines[-1].step, lines[-1].values.get("micro"))
        if number != own or again:
            facts["repeated"] += 1
            continue
        lines.append(line)
        if len(lines) > _MOST_LINES:
            del lines[1::2]
            facts["stride"] = stride = 2 * stride
    return name, lines


def _texts(file: io.BufferedReader, facts: Facts) -> Iterator[str]:
    """Lines without colours, a long one in pieces; the last one may still be written where it has no end."""
    lines = io.TextIOWrapper(file, encoding="utf-8", errors="replace")
    for at, text in enumerate(iter(lambda: lines.readline(_LONGEST_LINE), "")):
        facts["replaced"] += "\ufffd" in text
        if at and text[-1] != "\n" and len(text) < _LONGEST_LINE:
            facts["unfinished"] = _program_of(text, None) is not None
        else:
            yield _ANSI.sub("", text) if "\x1b" in text else text


def _program_of(text: str, known: str | None) -> str | None:
    """The program that prints such a line of a step, the ``known`` one or any; None for any other line."""
    for name in (known,) if known else _PROGRAMS:
        if all(mark in text for mark in _PROGRAMS[name]["marks"]) and _LINE[name].search(text):
            return name
    return None


def _number(text: str) -> float:
    return float(text.replace(",", "").rstrip("KMGBT")) * float(TABLE["thousands"].get(text[-1], 1))


def _line(name: str, text: str, bar: tuple[str, ...], at: int) -> Line:
    """A line of a step, which has its number itself, in the progress bar before it, or is the ``at``-th."""
    found = ((kind, pattern.search(text), unit) for kind, (pattern, unit) in _FIELDS[name].items())
    values = {kind: _number(number[1]) * unit for kind, number, unit in found if number}
    values = {kind: value for kind, value in values.items() if kind == "loss" or math.isfinite(value)}
    if step := _STEP[name].search(text):
        bar = ()
    else:
        values["of" if bar else "unnumbered"] = float(bar[1]) if bar else 1
    number = int(step[1] if step else bar[0] if bar else at)
    return Line(number, values) if "seconds" in values else Line(number, values, *_clock(text, bar))


def _clock(text: str, bar: tuple[str, ...]) -> tuple[float | None, float]:
    """The time that a line has, in seconds since the program's start or any day, and the smallest part of it."""
    elapsed = _ELAPSED.search(text)
    with suppress(ValueError, OverflowError):
        if elapsed or bar:
            said = elapsed[1] if elapsed else bar[2]
            if number := re.fullmatch(TABLE["number"], said):
                seconds = _number(number[1])
                return seconds, 10.0 ** (math.floor(math.log10(max(seconds, 1))) - 3)  # of a float of four digits
            units = sum(int(count) * TABLE["seconds"][unit] for count, unit in re.findall(r"(\d+)\s*([dhms])", said))
            parts = reversed((re.findall(r"(?:\d+:)?\d+:\d\d", said) or ["0"])[0].split(":"))
            return units + sum(int(part) * 60**power for power, part in enumerate(parts)), 1.0
        if stamp := _STAMP.search(text):
            moment = datetime.fromisoformat(f"{stamp[1]}T{stamp[2]}+00:00").timestamp()
            return moment + float(f"0.{stamp[3] or 0}"), 0.001 if stamp[3] else 1.0
    return None, 1.0


def _times(lines: Sequence[Line]) -> Iterator[Timed]:
    """The seconds of steps: those that lines say, else those between two clocks that are far enough apart.

    Where lines are of micro-batches, a step is the mean of its own times as many as there are between two steps.
    """
    told = [line for line in lines if line.values.get("seconds", 0) > 0]
    batches, steps = lines[-1].values.get("micro", 0) - lines[0].values.get("micro", 0), lines[-1].step - lines[0].step
    for step, group in groupby(told, lambda line: line.step):
        some = [line.values["seconds"] for line in group]
        yield Timed(step, step, sum(some) / len(some) * max(round(batches / steps) if steps else 1, 1))
    clocks = [(line.step, line.clock) for line in lines if line.clock is not None and "unnumbered" not in line.values]
    if told or not clocks:
        return
    first, before = clocks[0]
    least = min(_GRAINS * max(line.grain for line in lines if line.clock is not None), clocks[-1][1] - before)
    for step, clock in clocks[1:]:
        if step > first and clock - before >= least > 0:
            yield Timed(first + 1, step, (clock - before) / (step - first))
        if clock < before or step == first or clock - before >= least:
            first, before = step, clock


def _log(path: str, table: Mapping[str, Any], lines: list[Line], facts: Facts) -> Log:
    """What the lines of one program and its facts say together."""
    totals = Counter(line.values.get("of") for line in lines).most_common(1)
    lines = [line for line in lines if line.values.get("of") == totals[0][0]]
    edges = [0, *(at for at, (a, b) in enumerate(pairwise(lines), 1) if b.step < a.step), len(lines)]
    sessions = [lines[a:b] for a, b in pairwise(edges) if b > a]  # between restarts, where steps go back
    timed = [list(_times(session)) for session in sessions]
    if any(timed):
        facts["mean"] = facts["evaluation"] = 0
    elif facts["runtime"] and facts["steps_per_second"]:
        counted, rounded = facts["runtime"] * facts["steps_per_second"], 0.0005 * facts["runtime"] + 1
        last = round(facts["bar"] if abs(facts["bar"] - counted) < rounded else max(counted, 1))
        timed, facts["whole"], facts["steps"] = [[Timed(1, last, facts["runtime"] / last)]], 1, last
    elif facts["seconds"]:
        timed = [[Timed(1, round(facts["steps"]), facts["seconds"])]]
    steady = [_steady(times) for times in timed]
    kept, disturbed = ([time for both in steady for time in both[which]] for which in (0, 1))
    seconds, steps = spread((time.seconds for time in kept), len(disturbed)), {time.last for time in kept}
    some = [line.values for line in lines if line.step in steps] or [line.values for line in lines]
    figures = {
        name: facts[name] or usual([values[name] for values in some if values.get(name, 0) > 0] or [0])
        for usual, names in ((median, TABLE["figures"]), (max, TABLE["largest"]))
        for name in names
    } | {"tokens_per_step": _tokens_per_step(lines, facts), "peak": table.get("peak", facts["peak"])}
    rate, devices, tokens = figures["rate"], figures["devices"], figures["tokens_per_step"]
    whole = (tokens / seconds.median if tokens and seconds else 0) or rate * devices or figures["tokens_per_second"]
    if rate and whole and abs(whole / rate / (round(whole / rate) or 1) - 1) < 0.05:
        devices = devices or round(whole / rate)
    figures |= {"tokens_per_second": whole, "devices": devices, "rate": rate or (whole / devices if devices else 0)}
    gaps = [b.step - a.step for session in sessions for a, b in pairwise(session)]
    facts |= {
        "untimed": seconds is None,
        "few": seconds is not None and seconds.count < ENOUGH_STEPS and not (facts["mean"] or facts["whole"]),
        "restarts": max(len(sessions) - 1, 0),
        "one_micro_batch": bool(lines) and "micro" in lines[0].values and lines[0].step == lines[-1].step,
        "unnumbered": any("unnumbered" in line.values for line in lines),
        "whole_seconds": any(line.clock is not None and line.grain >= 1 for line in lines),
        "no_tokens": not (whole or rate),
    }
    own = [table.get("doubt"), table.get("times") if gaps and median(gaps) > 1 and seconds else None]
    bad = [line for line in lines if line.values.get("nans") or not math.isfinite(line.values.get("loss", 0))]
    return Log(
        path=path,
        program=table["title"],
        steps=tuple(line.step for line in lines) or (round(facts["steps"]),),
        step_seconds=seconds,
        disturbed=tuple(time.last for time in disturbed),
        speeds=_speeds(kept),
        figures={name: value for name, value in figures.items() if value},
        not_finite=tuple(line.step for line in bad),
        jumps=tuple(jump for session in sessions for jump in _jumps(session)),
        doubts=(
            *filter(None, own),
            *(text.format(facts[name]) for name, text in TABLE["doubts"].items() if facts[name]),
        ),
    )


def _tokens_per_step(lines: Sequence[Line], facts: Facts) -> float:
    """Tokens of a step as the log says them, or its sequences times their length; 0 where it does not."""

    def usual(kind: str) -> float:
        return median([line.values[kind] for line in lines if kind in line.values] or [facts[kind]])

    def grown(kind: str) -> float:
        pairs = [(a, b) for a, b in pairwise(line for line in lines if kind in line.values) if b.step > a.step]
        return sum(b.values[kind] - a.values[kind] for a, b in pairs) / (sum(b.step - a.step for a, b in pairs) or 1)

    return grown("tokens") or facts["tokens_per_step"] or (usual("batch") or grown("samples")) * usual("length")


def _around(values: Sequence[float]) -> tuple[float, float]:
    """The median, and the standard deviation of a normal distribution with the same quartiles."""
    middle = spread(values)
    return (middle.median, (middle.high - middle.low) / 1.349) if middle else (0, 0)


def _steady(times: Sequence[Timed]) -> tuple[list[Timed], list[Timed]]:
    """The undisturbed steps of a session, of which the first time is none, and the others."""
    kept, disturbed = list(times[:1]) if len(times) < 3 else [], list(times[:1]) if len(times) >= 3 else []
    for at in range(1, len(times)):
        some = [time.seconds for time in (*times[max(1, at - _SIDE) : at], *times[at + 1 : at + 1 + _SIDE])]
        middle, sigma = _around(some)
        far = len(some) > 2 and abs(times[at].seconds - middle) > max(_FAR * middle, _SPREADS * sigma)
        (disturbed if far else kept).append(times[at])
    return kept, disturbed


def _speeds(times: Sequence[Timed]) -> tuple[Timed, ...]:
    """The speeds between changes: where medians before and after a step differ by more than the noise."""
    size = -(-len(times) // _TIMES) or 1
    logs = [math.log(time.seconds) for time in times[::size]]
    width = max(_SHORTEST, len(logs) // 20)
    # Differences of neighbours: a change of the speed is in one of them, the noise in all.
    noise = _around([b - a for a, b in pairwise(logs)])[1] / math.sqrt(2)
    sides = {at: (logs[at - width : at], logs[at : at + width]) for at in range(width, len(logs) - width + 1)}
    steps = {at: abs(median(after) - median(before)) for at, (before, after) in sides.items()}
    off = {at: sum(abs(value - median(side)) for side in both for value in side) for at, both in sides.items()}
    edges = [0, len(logs)]
    for at in sorted(steps, key=lambda at: -steps[at]):
        near = [other for other in steps if abs(other - at) <= width and steps[other] >= 0.9 * steps[at]]
        best = min(near, key=lambda other: off[other])
        if steps[at] > max(_LEAST_CHANGE, 3 * noise) and all(min(abs(at - e), abs(best - e)) >= width for e in edges):
            edges.append(best)
    parts = [times[a * size : b * size] for a, b in pairwise(sorted(edges))] if len(edges) > 2 else []
    speeds = [Timed(part[0].first, part[-1].last, median(time.seconds for time in part)) for part in parts]
    even = all(abs(math.log(b.seconds / a.seconds)) < _LEAST_CHANGE for a, b in pairwise(speeds))
    return () if even else tuple(speeds)


def _jumps(lines: Sequence[Line]) -> Iterator[dict[str, float]]:
    """Losses far above the median of the twenty lines before them, the first of those that are close together."""
    losses = [(line.step, line.values["loss"]) for line in lines if math.isfinite(line.values.get("loss", math.nan))]
    quiet = 2 * _SIDE
    for at in range(quiet, len(losses)):
        step, loss = losses[at]
        before, sigma = _around([value for _, value in losses[at - 2 * _SIDE : at]])
        if at >= quiet and loss - before > max(_FAR * abs(before), _JUMPS * sigma):
            quiet = at + 2 * _SIDE
            yield {"step": step, "before": before, "loss": loss}


def _summary(path: str, whole: Mapping[str, Any], facts: Facts) -> tuple[dict[str, str], list[Line]]:
    """The lines of trainer_state.json, a Trainer's results or a summary of W&B; its last values are ``facts``."""
    listed = whole["log_history"] if isinstance(whole.get("log_history"), list) else []
    history = [
        {str(name).removeprefix("train/"): value for name, value in entry.items() if is_amount(value) or value != value}
        for entry in (whole, whole.get("summary"), *listed)
        if isinstance(entry, Mapping)
    ]
    last = dict(item for entry in history for item in entry.items() if is_amount(item[1]))
    for kind, names in TABLE["summary"].items():
        facts[kind] = next((last[name] * unit for name, unit in names if name in last), 0)
    facts |= {} if listed else _of_config(path, whole.get("config"))
    counted = round(last.get("train_runtime", 0) * last.get("train_steps_per_second", 0))
    steps = facts["steps"] = max(last.get("global_step", counted), 1)
    facts["last_values"] = facts["seconds"] > 0
    if not facts["seconds"] and (runtime := last.get("train_runtime")):
        took = (entry.items() for entry in takewhile(lambda entry: "train_loss" not in entry, history[1:]))
        facts["evaluation"] = sum(value for items in took for name, value in items if name.endswith("_runtime"))
        facts["seconds"], facts["mean"] = max(runtime - facts["evaluation"], 0) / steps, True
    facts["flops_per_step"] = last.get("total_flos", 0) / steps
    facts["tokens_per_step"] = last.get("num_input_tokens_seen", 0) / steps
    if not listed and not facts["seconds"] and not facts["rate"]:
        raise _refused(path, "is JSON, but no trainer_state.json, train_results.json or summary of W&B with times")
    said = [entry for entry in history[1:] if is_amount(entry.get("step")) and "loss" in entry]
    lines = [Line(int(entry["step"]), {"loss": entry["loss"]}, entry.get("train_runtime"), 0.001) for entry in said]
    return {"title": "a Trainer of transformers" if listed or facts["mean"] else "W&B"}, lines


def _of_config(path: str, config: object) -> dict[str, float]:
    """Batch, length and devices in the configuration beside a summary, each a number or the ``value`` of a map."""
    text = json.dumps(config) if config else ""
    for name in ("config.yaml", "config.json"):
        with suppress(OSError, UnicodeDecodeError):
            text = text or content_of(Path(path).with_name(name), MIB)
    words = {fact: TABLE["setting"].replace("NAME", "|".join(names)) for fact, names in TABLE["config"].items()}
    return {fact: float(match[1]) for fact, word in words.items() if (match := re.search(word, text))}
