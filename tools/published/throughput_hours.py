"""Whole published runs: tokens and device-hours are known, the layout mostly is not and is assumed here, run by run."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from published_case import Row, read_rows
from published_sources import LEFT_OUT, REASONS, TIME, WHOLE
from throughput_case import gpt, llama
from throughput_megatron import bigscience_case, sequence_parallel
from throughput_sharded import nano_case, pythia_case

from trainledger import catalog
from trainledger.forecast.predict.forecast import Forecast
from trainledger.forecast.predict.predict import predict, step_waterfall
from trainledger.spec.cluster import Cluster
from trainledger.spec.layout import Layout
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run
from trainledger.spec.units import SECONDS_PER_HOUR

A100_80, H100 = "a100-sxm-80gb", "h100-sxm"


@dataclass(frozen=True)
class WholeRun:
    """A run with the device-hours that were published, and what is assumed of it.

    ``steps_only`` says that the hours are those of steps alone: nothing is added for failures and checkpoints.
    ``at_most`` says that the hours are an upper bound: what the whole project took, not the steps.
    ``reason`` says why the prediction is more than 25 % off, where it is.
    """

    row: Row
    run: Run
    hours: float
    assumed: str
    steps_only: bool = False
    at_most: bool = False
    reason: str = ""

    @property
    def name(self) -> str:
        return f"{self.row['model_family']} ({self.row['id']})"


_META_A100 = (
    "tensor ranks as many as the checkpoint has files, sequence parallelism as Korthikanti et al. have it, sums of "
    "inputs' gradients overlapped with those of weights (LLaMA's section 2.4: all_reduce operations overlapped as "
    "much as "
    "possible), optimizer sharded (ZeRO-1), outputs of matmuls kept (selective recomputation), 4M tokens in a step, "
    "those of a data rank in micro-batches as large as fit; {devices:,} devices; {network}"
)


def _recipe(row: Row, length: int, batch: int, total: int, **others: Any) -> Recipe:
    fields = {
        "seq_len": length, "micro_batch": batch, "global_batch": total, "tokens": int(row["tokens_total"]),
        "precision": "bf16-sharded", "attention": "flash", "activation_checkpointing": "none",
    }  # fmt: skip
    return from_fields(Recipe, {**fields, **others})


def _run(row: Row, model: ModelSpec, recipe: Recipe, layout: Layout, device: str, network: str) -> Run:
    cluster = Cluster(device=device, count=layout.devices, network=network)
    return Run(model=model, recipe=recipe, layout=layout, cluster=cluster)


def _meta(row: Row) -> tuple[Run, str]:
    """LLaMA and Llama 2 on A100."""
    size = row["model_family"].split("-")[-1]
    tensor, devices = {
        "7B": (1, 1024), "13B": (2, 1024), "30B": (4, 2048), "34B": (4, 1024), "65B": (8, 2048), "70B": (8, 2048),
    }[size]  # fmt: skip
    first = row["model_family"].startswith("LLaMA")
    length = 2048 if first else 4096
    total = 4 * 2**20 // length
    layout = Layout(
        shard=devices // tensor, zero=1, tensor=tensor, **sequence_parallel(tensor),
        overlap=("gradients", "parameters", *(("input-gradients",) if tensor > 1 else ())),
    )  # fmt: skip
    fields = {**row, "seq_len": str(length)}
    recipe = _recipe(
        row, length, total * tensor // devices, total, attention="efficient" if first else "flash",
        activation_checkpointing="selective", precision="bf16",
        **{"activation_checkpointing.keep": ("mm", "attention"), "precision.master_weights": True},
    )  # fmt: skip
    network = "hdr" if first else "roce-200"
    words = "InfiniBand or RoCE of 200 Gb/s for each GPU"
    if first:
        words += "; xformers' attention modelled as `efficient`"
    model = llama({**fields, "n_heads": row["n_heads"] or "64"})
    run = _run(row, model, recipe, layout, A100_80, network)
    if size == "34B":
        words += "; limited to 350 W (Llama 2's table 2; the others had 400 W)"
        run = replace(run, cluster=replace(run.cluster, power_limit_watts=350))
    return run, _META_A100.format(devices=devices, network=words)


def _llama_3(row: Row) -> tuple[Run, str]:
    """Llama 3 and 3.1 on H100 (arXiv 2407.21783, table 4 for 405B)."""
    model = llama(row)
    if model.n_layers == 126:
        layout = Layout(
            shard=128, tensor=8, **sequence_parallel(8), pipeline=16, schedule="interleaved", virtual_stages=8,
            stage_layers=(0, *(1,) * 126, 0), reshard_after_forward=False,
        )  # fmt: skip
        recipe = _recipe(row, 8192, 1, 2048, steps=None)
        assumed = (
            "table 4 of the paper: 16,384 devices, tensor 8, 16 stages, 128 data ranks, 16M tokens in a step (other "
            "batches and the longer sequences left out); interleaved with a layer to a chunk, none in the first and "
            "the last (section 3.3.2)"
        )
        return _run(row, model, recipe, layout, H100, "roce-400"), assumed
    tensor, devices = (8, 2048) if model.n_layers == 80 else (1, 1024)
    layout = Layout(shard=devices // tensor, tensor=tensor, **sequence_parallel(tensor))
    recipe = _recipe(
        row, 8192, 1024 * tensor // devices, 1024, activation_checkpointing="selective",
        **{"activation_checkpointing.keep": ("mm", "attention")},
    )  # fmt: skip
    assumed = (
        f"{devices:,} devices, tensor {tensor}, fully sharded over the rest, 8M tokens in a step, those of a data rank "
        "in micro-batches as large as fit; nothing of it stated"
    )
    return _run(row, model, recipe, layout, H100, "roce-400"), assumed


def _bloom(row: Row) -> tuple[Run, str]:
    final = next(each for each in read_rows() if each["id"] == "R0389")
    case = bigscience_case(final)
    assert not isinstance(case, str)
    recipe = replace(case.run.recipe, steps=None, tokens=int(row["tokens_total"]))
    return replace(case.run, recipe=recipe), "the run of R0389; " + TIME["CHRONICLES"].assumed[-1]


def _stated(name: str, row: Row) -> tuple[Run, str]:
    """A run as ``sources.toml`` says it."""
    said = WHOLE[name]
    like, fields = said["model"]["like"], {key: value for key, value in said["model"].items() if key != "like"}
    if like in SHAPES:
        model = SHAPES[like]({**row, **said["row"]}, **fields)
    else:
        model = from_fields(ModelSpec, {**catalog.model(like), **fields})
    recipe = _recipe(row, *said["batch"], **said["recipe"])
    return _run(row, model, recipe, from_fields(Layout, said["layout"]), said["device"], said["network"]), said[
        "assumed"
    ]


SHAPES: dict[str, Callable[..., ModelSpec]] = {"gpt": gpt, "llama": llama}
_TOLD = {"LLaMA-": _meta, "Llama2-34B": _meta, "Llama3-": _llama_3, "BLOOM": _bloom}
_NO_SIZES = {"Falcon-180B": "no sizes in the row", "StarCoderBase-15.5B": "no sizes in the row"}


# Layout and micro-batch are published, or those of a published step time.
STATED = ("R0232", "R0765", "R0982", "R1135")


def fitting(run: Run) -> Run:
    """The run with its micro-batch halved until its account fits the device: what does not fit was not run."""
    while not _forecast(run).fits and run.device_batch > 1:
        run = replace(run, recipe=replace(run.recipe, micro_batch=run.device_batch // 2))
    return run


def _forecast(run: Run) -> Forecast:
    return predict(run, catalog.placed(catalog.device(run.cluster.device), run.cluster), backend="cuda")


@cache
def whole_runs() -> tuple[WholeRun, ...]:
    return tuple(_found())


def _found() -> Iterator[WholeRun]:
    for row in read_rows():
        printed, family = row["measured_total_hours_or_gpu_hours"], row["model_family"]
        if not printed or row["id"] in LEFT_OUT["hours"] or family in _NO_SIZES:
            continue
        hours = float(printed)
        if "Pythia" in family or row["id"] == "R0846":
            case = pythia_case(row) if "Pythia" in family else nano_case(row)
            recipe = replace(case.run.recipe, steps=None, tokens=int(row["tokens_total"]))
            words = "as its row of step times; the hours are those of steps"
            reason = REASONS["hours"].get(row["id"], "")
            yield WholeRun(row, replace(case.run, recipe=recipe), hours, words, steps_only=True, reason=reason)
            continue
        if row["id"] == "R0765":
            run, words = _stated("Llama2-7B", row)
        elif "llama2/MODEL_CARD" in row["source"]:
            run, words = _meta(row)
        else:
            tell = next((tell for name, tell in _TOLD.items() if family.startswith(name)), None)
            run, words = tell(row) if tell else _stated(next(name for name in WHOLE if family.startswith(name)), row)
        if row["id"] not in STATED:
            run = fitting(run)
        at_most = "upper bound" in row["notes"]
        yield WholeRun(row, run, hours, words, at_most=at_most, reason=REASONS["hours"].get(row["id"], ""))


HOURS = Path(__file__).parent / "throughput_hours.csv"


@dataclass(frozen=True)
class PredictedHours:
    """A whole run as it was predicted when the calibrations were written; bars are device-hours by cause."""

    row: str
    hours: float
    predicted: float
    mfu: float
    bars: tuple[tuple[str, float], ...]

    @property
    def error(self) -> float:
        return self.predicted / self.hours - 1


def predicted_hours(whole: WholeRun) -> PredictedHours:
    """Device-hours of a run and what they go to, with the catalog's calibrations."""
    run = whole.run
    forecast = _forecast(run)
    assert forecast.mfu is not None, forecast.notes
    assert forecast.device_hours is not None, forecast.notes
    devices = run.layout.devices
    bars = step_waterfall(run, forecast) if whole.steps_only else forecast.waterfall
    times = run.recipe.total_steps if whole.steps_only else 1
    found = tuple((each.cause, each.seconds * times * devices / SECONDS_PER_HOUR) for each in bars)
    return PredictedHours(whole.row["id"], whole.hours, sum(hours for _, hours in found), forecast.mfu, found)


def read_hours() -> tuple[PredictedHours, ...]:
    """The stored predictions."""
    with open(HOURS, newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    return tuple(
        PredictedHours(
            row[0], float(row[1]), float(row[2]), float(row[3]),
            tuple((cause, float(each)) for cause, each in zip(header[4:], row[4:], strict=True) if each),
        )
        for row in rows
    )  # fmt: skip


def write_hours() -> None:
    """Predict every whole run and store it."""
    found = [predicted_hours(each) for each in whole_runs()]
    causes = list(dict.fromkeys(cause for each in found for cause, _ in each.bars))
    with open(HOURS, "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("id", "published", "predicted", "mfu", *causes))
        for each in found:
            bars = dict(each.bars)
            values = (each.hours, each.predicted, each.mfu)
            shown = (f"{bars[cause]:.6g}" if cause in bars else "" for cause in causes)
            table.writerow((each.row, *(f"{value:.9g}" for value in values), *shown))


if __name__ == "__main__":
    write_hours()
