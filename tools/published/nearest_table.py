"""Write the published runs that are part of the package, for `forecast.plan.published`: `catalog/published.tsv`.

``python tools/published/nearest_table.py`` (about a minute: it predicts the memory of every run) writes it from the
rows of this directory and from what `fit_devices.py` and `unseen_runs.py` have stored. Of a step that constants are
fitted on it has the prediction by the constants fitted on all other sources. Sources are in `published_sources.tsv`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from published_case import Case, Row, read_rows
from published_memory import predictions
from published_runs import case_of
from throughput_case import TimeCase
from throughput_predictions import predicted_cases
from unseen_runs import unseen

from trainledger import catalog
from trainledger.forecast.plan.published import PublishedRun, described, written
from trainledger.spec.run import Run

HERE = Path(catalog.__file__).parent
RUNS, SOURCES = HERE / "published.tsv", HERE / "published_sources.tsv"
PERCENT = 100

Values = dict[str, Any]


def memory_cases() -> tuple[Case, ...]:
    """The rows whose peak memory is published."""
    cases = (case_of(row) for row in read_rows())
    return tuple(each for each in cases if isinstance(each, Case) and each.measured is not None)


def predicted_memory() -> dict[str, int]:
    """The bytes that the program predicts of each of `memory_cases`, by its row."""
    return {each.case.name: each.nbytes for each in predictions()[0] if each.case.measured is not None}


def table(memory: Mapping[str, int]) -> list[Values]:
    """Every published run as fields of `PublishedRun`; ``memory`` are the predicted bytes by row."""
    measured = {each.name: each for each in memory_cases()}
    found = [_timed(each.case, each.stored.left_out, fitted=each.case.fitted) for each in predicted_cases()[0]]
    found += [_timed(each.case, each.seconds, fitted=False) for each in unseen()]
    timed = {each["id"] for each in found}
    found += [_printed(each.row, each.run) for each in measured.values() if each.name not in timed]
    return [each | _memory(measured.get(each["id"]), memory) for each in found]


def _timed(case: TimeCase, seconds: float, *, fitted: bool) -> Values:
    row, model = case.row, case.row["model_family"]
    if "container" in row:  # NVIDIA's pages: the title of a row has the container, which is where a figure was read
        row, model = {**row, "source": f"{case.source.name}, {row['container']}"}, row["model"]
    return _printed(row, case.run) | {
        "model": model, "step_seconds": f"{case.seconds:.6g}", "predicted_step_seconds": f"{seconds:.6g}",
        "fitted": fitted,
    }  # fmt: skip


def _printed(row: Row, run: Run) -> Values:
    """What a row says of its run, and the figures as its source prints them."""
    mfu = row.get("measured_mfu") or row.get("mfu")
    return {each.name: None for each in fields(PublishedRun)} | described(run) | {
        "id": row["id"], "source": row["source"], "model": row["model_family"], "fitted": False,
        "tokens_per_second_per_device": row.get("measured_tokens_per_s_per_device") or row.get("tokens_per_s"),
        "mfu": f"{float(mfu) / PERCENT:.4g}" if mfu else None,
    }  # fmt: skip


def _memory(case: Case | None, memory: Mapping[str, int]) -> Values:
    if case is None:
        return {}
    return {
        "peak_nbytes": case.measured, "peak_is": case.source.figure, "predicted_peak_nbytes": memory[case.name],
    }  # fmt: skip


def texts(found: Iterable[Values]) -> tuple[str, str]:
    """Both files: the runs, and what each key of a source stands for."""
    sources: dict[str, str] = {}
    rows = [[each.name for each in fields(PublishedRun)]]
    for each in found:
        key = sources.setdefault(each["source"], f"S{len(sources) + 1:02}")
        rows.append([written(value) for value in (each | {"source": key}).values()])
    return _lines(rows), _lines([["key", "source"], *([key, source] for source, key in sources.items())])


def _lines(rows: Iterable[list[str]]) -> str:
    return "".join("\t".join(each) + "\n" for each in rows)


if __name__ == "__main__":
    for path, text in zip((RUNS, SOURCES), texts(table(predicted_memory())), strict=True):
        path.write_text(text, encoding="utf-8")
