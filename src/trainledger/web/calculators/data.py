"""Data and loop: tokens, epochs, accumulation, size on disk, learning rate, checkpoints, and the loader's rate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import trainledger as tl
from trainledger.answers.defaults import sharded
from trainledger.answers.load import Source, resolve
from trainledger.answers.loop import headline, interval_chart, interval_table, schedule_chart, schedule_table
from trainledger.forecast.plan.limits import PASSES
from trainledger.forecast.plan.training_loop import TrainingLoop
from trainledger.spec.model import ModelSpec
from trainledger.spec.run import Run
from trainledger.spec.schedule import SCHEDULES
from trainledger.web.calculator import BAD, GOOD, WARN, Calculator, Drawing, Headline, Progress, Reply
from trainledger.web.field import FILE, Field, Query, of_run, one_of, powers, rising
from trainledger.web.remedies import that_fit_devices
from trainledger.web.run import (
    CLUSTER,
    MODEL,
    PASTED,
    of_pasted,
    python_of,
    refuse_search,
    run_file_of,
    settings_of,
    source_of,
    spread_of,
    texts_of,
    words_of,
)

# Title, unit and basis of each number; those of a forecast have the basis of its step.
_SHOWN = {
    "tokens_per_step": ("tokens of a step", "integer", "exact"),
    "micro_batches": ("micro-batches to accumulate", "integer", "exact"),
    "steps": ("steps", "integer", "exact"),
    "epochs": ("epochs", "amount", "exact"),
    "corpus_nbytes": ("corpus on disk", "nbytes", "exact"),
    "checkpoint_nbytes": ("a checkpoint", "nbytes", "exact"),
    "checkpoint_every": ("steps between checkpoints", "integer", "assumed"),
    "loader_tokens_per_second": ("tokens/s from the loader", "tokens_per_second", "assumed"),
    "loader_nbytes_per_second": ("bytes/s from storage", "nbytes_per_second", "assumed"),
}
_LOOP, _RATE, _SAVED = "Loop", "Learning rate", "Checkpoints and loader"
_RATES = ("1e-5", "3e-5", "6e-5", "1e-4", "1.5e-4", "2e-4", "3e-4", "4e-4", "6e-4", "8e-4", "1e-3", "2e-3", "3e-3")
_SHARES = ("0", "0.01", "0.05", "0.1", "0.15", "0.2", "0.3", "0.5")


def _reply(query: Query, progress: Progress) -> Reply:
    asked = _spread(_one_length(query))
    tokens: Any = query.get("corpus")
    answer = tl.loop(_without_search(asked), settings_of(asked), corpus=tokens)
    tone = WARN if answer.epochs > PASSES else GOOD
    corpus = [] if query.get("corpus") is None else ["--corpus", query["corpus"]]
    return Reply(
        document=answer.document(),
        headlines=tuple(_headlines(answer)),
        verdict=_verdict(answer),
        tone=BAD if answer.forecast.waits or answer.forecast.fits is False else tone,
        drawings=tuple(_drawings(answer)),
        values=texts_of(answer.run, query),
        unused=_unused(answer.run, query),
        remedies=() if query[FILE] else that_fit_devices(answer.run, answer.forecast, query, "cluster.count"),
        words=words_of("loop", asked, *corpus),
        python=python_of("loop", asked, **({"corpus": query["corpus"]} if corpus else {})),
        run_file=run_file_of(answer.run),
        notes=(*(() if query[FILE] else (spread_of(answer.run),)), *answer.remarks),
    )


def _one_length(query: Query) -> Query:
    """The query with steps in place of the default tokens, where steps are given."""
    if not query["recipe.steps"] or "recipe.tokens" in query.given:
        return query
    return replace(query, given={**query.given, "recipe.tokens": ""})


def _unused(run: Run, query: Query) -> dict[str, str]:
    """The fields that do not count, with the reason."""
    found, schedule = of_pasted(query), run.recipe.schedule
    if query["recipe.steps"] and "recipe.tokens" not in query.given:
        found["recipe.tokens"] = "steps are given"
    for name in ("final_ratio", "decay_fraction"):
        if not hasattr(schedule, name):
            found[f"recipe.schedule.{name}"] = f"a {schedule.kind} schedule has none"
    return found


def _spread(query: Query) -> Query:
    """The query with a layout and a batch for its devices, as nobody should wait for a search; a run file has its own.

    Parameters, gradients and optimizer state are sharded over all devices that the given axes leave.
    """
    source: Source = source_of(query)
    if query[FILE] or not isinstance(source, str | ModelSpec):
        return query
    settings = [each.partition("=") for each in sharded(source, settings_of(query))]
    return replace(query, given={**query.given, **{name: text for name, _, text in settings}})


def _verdict(answer: TrainingLoop) -> str:
    wrong = ["repeats its text, which is worth less each time"] if answer.epochs > PASSES else []
    wrong += ["does not fit in memory"] if answer.forecast.fits is False else []
    wrong += ["waits for its tokens"] if answer.forecast.waits else []
    return "; it ".join([headline(answer), *wrong])


def _without_search(query: Query) -> Source:
    """What the query is about; raises `InvalidInput` where its layout would have to be searched for."""
    source = source_of(query)
    if query[FILE] or "layout.auto" in query.overrides:
        refuse_search(resolve(source, settings_of(query), search=False))
    return source


def _headlines(answer: TrainingLoop) -> Iterator[Headline]:
    for formula in sorted(answer.formulas, key=lambda one: one.name != "steps"):
        title, unit, basis = _SHOWN[formula.name]
        value = getattr(answer, formula.name)
        if formula.name == "corpus_nbytes":
            value, title = value[answer.token_dtype], f"{title} as {answer.token_dtype}"
        yield Headline(
            name=formula.name, title=title, value=value, unit=unit, formula=f"{formula.formula} = {formula.numbers}",
            basis=basis, source=formula.source, said="" if value is not None else "one at the end",
        )  # fmt: skip


def _drawings(answer: TrainingLoop) -> Iterator[Drawing]:
    yield Drawing(chart=schedule_chart(answer), table=schedule_table(answer))
    saved = answer.checkpointing
    if saved is not None and saved.lost:
        yield Drawing(chart=interval_chart(answer, saved), table=interval_table(saved))


def _with_default(fields: Sequence[Field], name: str, default: str) -> Field:
    return replace(next(field for field in fields if field.name == name), default=default)


DATA = Calculator(
    name="data",
    title="Data and loop",
    question="How many steps and epochs, how large on disk, and what must the loader and the checkpoints do?",
    fields=(
        replace(MODEL, default="gpt2"),
        *PASTED,
        of_run("model.vocab_size", "vocabulary", stops=("256", *powers(512, 32768), "50257", "65536", "65537", "100277",
               "128256", "152064", "200064", "256000"), group="Model"),
        _with_default(CLUSTER, "cluster.device", "a100-sxm-40gb"),
        _with_default(CLUSTER, "cluster.count", "8"),
        of_run("recipe.tokens", "tokens", default="300B", stops=rising("1M", "100T"), group=_LOOP),
        of_run("recipe.steps", "or steps", stops=rising("100", "10M"), group=_LOOP),
        Field(name="corpus", title="tokens of the corpus", default="9B", stops=rising("1M", "100T"), group=_LOOP,
              about="tokens of text that there are; empty: as many as are trained on"),
        of_run("recipe.seq_len", "sequence length", stops=powers(128, 131072), group=_LOOP),
        of_run("recipe.global_batch", "global batch", stops=powers(1, 65536), group=_LOOP),
        of_run("recipe.micro_batch", "micro-batch", default="16", stops=powers(1, 256), group=_LOOP),
        of_run("recipe.learning_rate", "peak learning rate", stops=_RATES, group=_RATE),
        of_run("recipe.schedule", "schedule", choices=one_of(("", *SCHEDULES)), group=_RATE),
        of_run("recipe.schedule.warmup_steps", "warm-up steps", group=_RATE, stops=rising("10", "100k")),
        Field(name="recipe.schedule.final_ratio", title="last rate over the peak", stops=_SHARES, group=_RATE,
              about="last learning rate over the peak one; not of a constant schedule"),
        Field(name="recipe.schedule.decay_fraction", title="share that decays", stops=_SHARES[1:], group=_RATE,
              about="last share of the steps in which the rate falls; of wsd"),
        of_run("recipe.checkpoints.every", "checkpoint every", stops=rising("10", "1M"), group=_SAVED),
        of_run("recipe.checkpoints.asynchronous", "asynchronous", choices=one_of(("", "false", "true")), group=_SAVED),
        of_run("cluster.storage_bytes_per_second", "storage", group=_SAVED,
               stops=("100MB", "500MB", "1GB", "2GB", "5GB", "10GB", "20GB", "50GB", "100GB", "200GB", "500GB", "1TB")),
        of_run("cluster.mtbf_device_hours", "hours between failures of a device", group=_SAVED,
               stops=("1000", "2000", "5000", "10000", "20000", "50000", "100000", "200000", "500000", "1000000")),
        of_run("cluster.loader_tokens_per_second", "loader's tokens/s", stops=rising("10k", "1B"), group=_SAVED),
    ),
    reply=_reply,
    presets={
        "GPT-2 124M on OpenWebText, as nanoGPT": {
            "run": "gpt2", "recipe.steps": "600000", "corpus": "9.04B", "recipe.global_batch": "480",
            "recipe.micro_batch": "12", "recipe.learning_rate": "6e-4", "recipe.schedule.warmup_steps": "2000",
        },
        "Llama 3 8B on 15T: tokens of 4 bytes": {
            "run": "llama-3-8b", "cluster.device": "h100-sxm", "cluster.count": "1024", "recipe.tokens": "15T",
            "corpus": "15T", "recipe.micro_batch": "1", "recipe.schedule.warmup_steps": "2000",
        },
        "Too little text: 1B tokens, 40 epochs": {
            "run": "gpt2-medium", "recipe.tokens": "40B", "corpus": "1B",
        },
        "Flat, then a line (wsd)": {
            "recipe.tokens": "100B", "corpus": "100B", "recipe.schedule": "wsd",
            "recipe.schedule.decay_fraction": "0.2", "recipe.schedule.warmup_steps": "1000",
        },
        "70B on 4,096 devices with slow storage": {
            "run": "llama-3-70b", "cluster.device": "h100-sxm", "cluster.count": "4096", "recipe.tokens": "15T",
            "corpus": "15T", "recipe.micro_batch": "1", "recipe.activation_checkpointing": "full",
            "cluster.storage_bytes_per_second": "20GB",
        },
    },
    any_of_run=True,
)  # fmt: skip
