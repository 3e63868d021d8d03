"""One run once for each value of a field, side by side: memory, activations, time, recomputation."""

from __future__ import annotations

from collections.abc import Iterator

from trainledger.answers.load import resolve
from trainledger.answers.machine import kernels_of, machine_of
from trainledger.answers.pages.heading import of_run
from trainledger.answers.pages.plain_data import plain, run_data
from trainledger.answers.question import Progress
from trainledger.forecast.predict.predict import forecast
from trainledger.ledger.ranks import account_run
from trainledger.report.chart import Chart, bar_chart, beside, usable_memory
from trainledger.report.document import Answer, Cell, Document, Table, notes, sections, shown
from trainledger.report.table import sentence
from trainledger.spec import runfile
from trainledger.spec.frozen import frozen
from trainledger.spec.layers import segment_size
from trainledger.spec.optimizers import ACCOUNTED_ONLY
from trainledger.spec.parts import field_at
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.reading import field_of, nearest_path
from trainledger.spec.run import Run
from trainledger.spec.setting import rule_of
from trainledger.spec.units import GIGA

IMPLEMENTATION = "recipe.optimizer.implementation"
UNFUSED = (
    "adamw-8bit and adam-8bit: the time is that of an unfused implementation, many small kernels for each tensor as "
    "in eager PyTorch; bitsandbytes runs one, as in the rows named fused"
)


@frozen(kw_only=True)
class Swept:
    """The run with one value: ``memory_nbytes`` of its peak rank, of which ``activation_nbytes`` at the peak.

    Without a forecast, or without a time in it, ``why`` is the reason. ``relative`` is the step over that of the first
    row that has a time; ``recomputed_flops`` are those of all operations that run again in backward.
    """

    value: str
    override: str
    memory_nbytes: int | None = None
    activation_nbytes: int | None = None
    step_seconds: float | None = None
    relative: float | None = None
    recomputed_flops: int | None = None
    fits: bool | None = None
    why: str = ""


@frozen
class Sweep(Answer, report="sweep"):
    """A run once for each value of ``field``; ``run`` is the one that was asked about, ``own`` its own value."""

    run: Run
    field: str
    own: str
    rows: tuple[Swept, ...]
    usable_nbytes: int | None

    def __repr__(self) -> str:
        return f"Sweep({self.field}: {', '.join(row.value for row in self.rows)})"


def sweep(run: Run, over: str, progress: Progress) -> Sweep:
    """The run once for each value of ``over``: a field, or ``FIELD=VALUE,VALUE``; raises `InvalidInput`.

    A field without a list of values needs some. All else stays, a layout that was found too.
    """
    name, _, given = over.partition("=")
    values = _values(run, name, given)
    section, _, field = name.partition(".")
    own, usable = str(field_at(getattr(run, section), field)), None
    rows: list[Swept] = []
    first = None
    changes = [(value, [f"{name}={value}"]) for value in values]
    if name == "recipe.optimizer":
        kinds = [kind for kind in ACCOUNTED_ONLY if kind[0] in values]
        changes += [(" ".join(kind), [f"{name}={kind[0]}", f"{IMPLEMENTATION}={kind[1]}"]) for kind in kinds]
    for value, overrides in changes:
        progress(f"{name} = {value}", len(rows), len(changes))
        try:
            changed = run if value == own else resolve(run, overrides, search=False)
            account, machine = account_run(changed, backend=kernels_of(changed)), machine_of(changed)
            found = forecast(account, machine)
        except InvalidInput as error:
            problem = error.problems[0]
            rows.append(Swept(value=value, override=overrides[-1], why=f"{problem.field} {problem.rule}"))
            continue
        usable = found.usable_nbytes
        first = first or found.step_seconds
        rows.append(
            Swept(
                value=_named(value, changed),
                override=overrides[-1],
                memory_nbytes=found.peak_nbytes if found.device_nbytes is None else found.device_nbytes,
                activation_nbytes=found.peak_by_category.get("activations", 0),
                step_seconds=found.step_seconds,
                relative=found.step_seconds / first if found.step_seconds and first else None,
                recomputed_flops=account.ledger.by("phase").get("recompute", 0),
                fits=found.fits,
                why="" if found.step_seconds else (*found.notes, "no time is known")[0],
            )
        )
    return Sweep(run, name, own, tuple(rows), usable)


def _values(run: Run, name: str, given: str) -> list[str]:
    """The values of a field that were given, or all that it may have; raises `InvalidInput`."""
    field = field_of(runfile.SECTIONS, name)
    if field is None:
        raise InvalidInput([Problem("over", name, "is no field of a run", nearest_path(runfile.SECTIONS, name))])
    rule = rule_of(field)
    known = rule["choices"] or (("false", "true") if field.type == "bool" else ())
    values = [part.strip() for part in given.split(",") if part.strip()] or list(known)
    if not values:
        size = field_at(getattr(run, name.partition(".")[0]), name.partition(".")[2])
        some = f"{size // 2},{size}" if isinstance(size, int) and size > 1 else "1,2,4"
        raise InvalidInput([Problem("over", name, "has no list of values; name some", f"--over {name}={some}")])
    return list(dict.fromkeys(values))


def _named(value: str, run: Run) -> str:
    """A value with what it leaves open: the blocks of a segment."""
    return f"segments of {segment_size(run.model.n_layers, run.recipe)}" if value == "segments" else value


def page(found: Sweep) -> Document:
    """One table; a value that the run cannot have stands in it, with the reason below."""
    known = [row for row in found.rows if row.memory_nbytes is not None]
    columns = (found.field.rpartition(".")[2].replace("_", " "), "memory", "activations", "step")
    units = ("", "nbytes", "nbytes", "seconds", "factor", "flops", "")
    least = min(known, key=lambda swept: swept.memory_nbytes or 0, default=None)
    fastest = min(
        (swept for swept in known if swept.step_seconds), key=lambda swept: swept.step_seconds or 0, default=None
    )
    verdict = [] if least is None else [f"{least.value} needs least memory: {shown(least.memory_nbytes, 'nbytes')}"]
    verdict += [] if fastest is None else [f"{fastest.value} is fastest: {shown(fastest.step_seconds, 'seconds')}"]
    return Document(
        title=f"{found.run.model.name} by {found.field}",
        verdict=sentence("; ".join(verdict) or f"No value of {found.field} gives a run"),
        sections=sections(
            "; ".join(of_run(found.run)),
            Table("values", (*columns, "relative", "recomputed", "fits"), _cells(found), units, align="lrrrrrl"),
            notes(_remarks(found)),
        ),
        data=lambda: {"field": found.field, "own": found.own, "rows": plain(found.rows), "run": run_data(found.run)},
        figures=lambda: [_figure(found)],
    )


def _cells(found: Sweep) -> tuple[tuple[Cell, ...], ...]:
    rows = []
    for row in found.rows:
        fits = "no" if row.fits is False else "" if row.memory_nbytes is not None else "cannot be"
        cells = row.activation_nbytes, row.step_seconds, row.relative, row.recomputed_flops, fits
        rows.append((row.value + (" *" if _is_own(row, found) else ""), row.memory_nbytes, *cells))
    return tuple(rows)


def _is_own(row: Swept, found: Sweep) -> bool:
    return row.override == f"{found.field}={found.own}"


def _remarks(found: Sweep) -> Iterator[str]:
    if any(_is_own(row, found) for row in found.rows):
        yield "* the run's own value"
    for why in dict.fromkeys(row.why for row in found.rows if row.why):
        yield f"{', '.join(row.value for row in found.rows if row.why == why)}: {why}"
    if any(row.value == kind and row.step_seconds for row in found.rows for kind, _ in ACCOUNTED_ONLY):
        yield UNFUSED


def _figure(found: Sweep) -> Chart:
    rows = [row for row in found.rows if row.memory_nbytes is not None]
    sides = {"memory of a device": [(row.memory_nbytes or 0) / GIGA for row in rows]}
    sides["activations"] = [(row.activation_nbytes or 0) / GIGA for row in rows]
    bars = beside(sides, lambda side, at: f"{rows[at].value}\n{side}: {sides[side][at]:.4g} GB")
    band = usable_memory(found.usable_nbytes) if any(row.fits is False for row in rows) else []
    return bar_chart(f"Memory by {found.field}", "GB", [row.value for row in rows], [*bars, *band])
