"""The five questions: each has the last run that fits, and the next one, which does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from trainledger.frozen import frozen
from trainledger.ledger.parameters import parameters
from trainledger.plan.family import family_of
from trainledger.plan.fit import axis as axes
from trainledger.plan.fit.axis import edge
from trainledger.plan.fit.held import Held, Scale
from trainledger.spec.run import Run

QUESTIONS = {
    "model": "largest model",
    "sequence": "longest sequence",
    "micro-batch": "largest micro-batch",
    "devices": "fewest devices",
    "memory": "least memory",
}


@frozen
class Found:
    """The answer to one question.

    ``size`` is what was asked for: parameters, tokens of a sequence, sequences of a micro-batch, devices, or bytes of a
    device; None where nothing fits. ``run`` and ``held`` are the run that has it; ``beyond_run`` and ``beyond`` those
    one step further, which does not fit (None: there is none). ``note`` says what was kept, and why nothing fits.
    """

    question: str
    size: int | None
    run: Run | None = None
    held: Held | None = None
    beyond_size: int | None = None
    beyond_run: Run | None = None
    beyond: Held | None = None
    note: str = ""

    def __repr__(self) -> str:
        return f"Found({QUESTIONS[self.question]}: {self.size})"


def ask(question: str, run: Run, scale: Scale) -> Found:
    """The answer to one of `QUESTIONS` for a run on a kind of device."""
    return _ASK[question](run, scale)


def _largest_model(run: Run, scale: Scale) -> Found:
    family = family_of(run.model)
    return _found("model", axes.models(run, family), scale, lambda each: parameters(each.model).total, family.rule)


def _longest_sequence(run: Run, scale: Scale) -> Found:
    unit = axes.sequence_unit(run)
    note = f"in steps of {unit} tokens"
    found = _found("sequence", axes.sequences(run), scale, lambda each: each.recipe.seq_len, note)
    if found.size is not None and found.size > run.model.max_seq_len:
        note = f"{found.note}; memory alone: the model is made for {run.model.max_seq_len:,}"
        return replace(found, note=note)
    return found


def _largest_micro_batch(run: Run, scale: Scale) -> Found:
    note = f"{run.grad_accum} in a step as before, so that the global batch grows with it"
    return _found("micro-batch", axes.micro_batches(run), scale, lambda each: each.device_batch, note)


def _fewest_devices(run: Run, scale: Scale) -> Found:
    """Fewer ranks that shard, other axes kept: the last that does not fit and the first that does."""
    others = {name: getattr(run.layout, name) for name in ("context", "tensor", "pipeline")}
    kept = ", ".join(f"{name} {size}" for name, size in others.items() if size > 1)
    note = f"states sharded (zero = {run.layout.zero})" + (f", {kept} kept" if kept else "")
    too_few, enough = edge(axes.shards(run), lambda each: not scale.likely(each))
    if enough is not None and not scale.fits(enough[1]):
        too_few, enough = edge(axes.shards(run), lambda each: not scale.fits(each))
    if enough is None:
        most = None if too_few is None else scale.held(too_few[1])
        why = f"not even with states in {axes.MOST_SHARDS:,} parts: the rest is not sharded"
        if too_few is not None and too_few[1].layout.shard == 1:
            why = axes.why_not_sharded(run) or why
        return Found("devices", None, beyond=most, note=why)
    fewer = None if too_few is None else too_few[1]
    note = note if enough[1].layout.devices > 1 else ""
    return Found(
        "devices", enough[1].layout.devices, enough[1], scale.held(enough[1]),
        None if fewer is None else fewer.layout.devices, fewer, None if fewer is None else scale.held(fewer), note,
    )  # fmt: skip


def _least_memory(run: Run, scale: Scale) -> Found:
    held = scale.held(run)
    return Found("memory", held.nbytes, run, held, note="what a process must get of a device for the run as it is")


def _found(question: str, axis: axes.Axis, scale: Scale, size: Callable[[Run], int], note: str) -> Found:
    last, beyond = edge(axis, scale.likely)
    if last is not None and not scale.fits(last[1]):  # a stage between the first and the last is heavier
        last, beyond = edge(axis, scale.fits)
    further = None if beyond is None else beyond[1]
    held = None if further is None else scale.held(further)
    beyond_size = None if further is None else size(further)
    if last is None:
        return Found(question, None, None, None, beyond_size, further, held, "not even the smallest fits")
    return Found(question, size(last[1]), last[1], scale.held(last[1]), beyond_size, further, held, note)


_ASK: dict[str, Callable[[Run, Scale], Found]] = {
    "model": _largest_model,
    "sequence": _longest_sequence,
    "micro-batch": _largest_micro_batch,
    "devices": _fewest_devices,
    "memory": _least_memory,
}


def divides_batch(run: Run, micro_batch: int) -> int:
    """The largest micro-batch up to one that divides what a rank has of the global batch.

    >>> from trainledger.loaded import load
    >>> run = load({"model": {"preset": "gpt2"}, "recipe": {"seq_len": 8, "global_batch": 12, "steps": 1}})
    >>> divides_batch(run, 5)
    4
    """
    share = run.recipe.global_batch // run.layout.data_ranks
    return max(each for each in range(1, min(micro_batch, share) + 1) if share % each == 0)
