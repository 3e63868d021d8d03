"""What fits on a kind of device: five questions, for a run without and with changes that need less memory.

The largest model, the longest sequence, the largest micro-batch, the fewest devices, the least memory: each has the
last run that fits and the next one, which does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from trainledger import catalog
from trainledger.forecast.plan import sizes
from trainledger.forecast.plan.advise import Nearest
from trainledger.forecast.plan.changes import RESULT, Change, made, memory_savings, value_of
from trainledger.forecast.plan.edges import edge
from trainledger.forecast.plan.family import family_of
from trainledger.forecast.plan.memory_model import MemoryModel, MemoryUse, memory_model
from trainledger.forecast.plan.sizes import Sweep
from trainledger.forecast.predict.device_memory import memory_of_device
from trainledger.forecast.predict.interval import LIKELY, kept_free
from trainledger.forecast.predict.roofline import Machine
from trainledger.ledger.model.parameters import parameters
from trainledger.report.document import Answer
from trainledger.spec.convert.patch import Rewritten
from trainledger.spec.frozen import frozen
from trainledger.spec.problem import InvalidInput, Problem, nearest_text
from trainledger.spec.rules.run import memory_problems, recipe_problems
from trainledger.spec.run import Run
from trainledger.spec.run_text import as_override

_OF_MODEL = {"sequence", "micro-batch"}  # which ask what fits of this very model
Progress = Callable[[int, int], None]
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
    device; None where nothing fits. ``run`` and ``memory`` are of that size; ``beyond_run`` and ``beyond`` of the
    next size, which does not fit (None: there is none). ``note`` says what was kept, and why nothing fits.
    """

    question: str
    size: int | None
    run: Run | None = None
    memory: MemoryUse | None = None
    beyond_size: int | None = None
    beyond_run: Run | None = None
    beyond: MemoryUse | None = None
    note: str = ""

    def __repr__(self) -> str:
        return f"Found({QUESTIONS[self.question]}: {self.size})"


@frozen
class Row:
    """The answers for one recipe; ``settings`` are its lines for ``--set``."""

    name: str
    settings: tuple[str, ...]
    answers: dict[str, Found]


@frozen
class Fit(Answer, report="fit"):
    """What fits: a row for the unchanged run, and one for each change on top of the one before.

    ``memory`` is that of the run itself; ``devices`` names the devices of the catalog on which it fits unchanged, the
    smallest first (None where the least memory was not asked for). ``chance`` is the least of what fits; ``nearest``
    makes the run fit where it does not, as `advise` and `fits` have it; ``words`` are the changes in the words of the
    trainer's file that the run is of.
    """

    run: Run
    memory: MemoryUse
    family: str
    rows: tuple[Row, ...]
    devices: tuple[str, ...] | None
    chance: float = LIKELY
    words: Rewritten | None = None
    nearest: Nearest | None = None

    def __getitem__(self, question: str) -> Found:
        """The answer for the unchanged run."""
        return self.rows[0].answers[question]

    def __repr__(self) -> str:
        asked = ", ".join(f"{QUESTIONS[name]} {found.size}" for name, found in self.rows[0].answers.items())
        return f"Fit({self.run.model.name} on {self.run.cluster.device}: {asked})"


@frozen
class Recipe:
    """A run with some of its settings changed, each as a line for ``--set``; ``name`` says what the last one does."""

    name: str
    settings: tuple[str, ...]
    run: Run


def saving_recipes(run: Run) -> tuple[Recipe, ...]:
    """The unchanged run, and then with each further change of `memory_savings` that rules allow.

    With adapters the last one is frozen weights in 4 bits, which is the only one that changes the result.
    """
    recipes = [Recipe("unchanged", (), run)]
    changes = [*memory_savings(run)]
    if run.recipe.lora is not None and run.recipe.lora.base_format != "nf4":
        changes.append(_NF4)
    for change in changes:
        recipes += _further(recipes[-1], change)
    return tuple(recipes)


_NF4 = Change("frozen weights in nf4", (("recipe.lora.base_format", "nf4"),), RESULT)
_ADAPTERS = Change("adapters alone trained", (("recipe.lora.rank", 16), ("recipe.precision", "bf16")), RESULT)


def adapter_recipes(recipe: Recipe) -> tuple[Recipe, ...]:
    """A recipe with adapters in place of all weights, and then with frozen weights in 4 bits."""
    if recipe.run.recipe.lora is not None:
        return ()
    return tuple(more for adapters in _further(recipe, _ADAPTERS) for more in (adapters, *_further(adapters, _NF4)))


def _further(before: Recipe, change: Change) -> tuple[Recipe, ...]:
    """A recipe with a further change; none where a rule forbids it."""
    changed = made(before.run, change)
    if next(memory_problems(changed), None) is not None or next(recipe_problems(changed.recipe), None) is not None:
        return ()
    lines = tuple(as_override(name, value) for name, value in change.fields if value_of(before.run, name) != value)
    return (Recipe(f"+ {change.what}", (*before.settings, *lines), changed),)


def what_fits(
    run: Run,
    machine: Machine | None,
    *,
    backend: str,
    of: Sequence[str] = tuple(QUESTIONS),
    changes: bool = True,
    chance: float = LIKELY,
    progress: Progress | None = None,
) -> Fit:
    """The answers to the questions of ``of`` (`QUESTIONS`) for a run, without and with changes that save memory.

    ``changes`` off leaves the latter out; what fits does so with at least this ``chance``. ``progress`` is called with
    how many of how many answers are done. Raises InvalidInput for an unknown question and where the device's memory is
    not known.
    """
    unknown = [each for each in of if each not in QUESTIONS]
    if unknown or not of:
        rule = f"must be some of {', '.join(QUESTIONS)}"
        raise InvalidInput([Problem("of", each, rule, nearest_text(str(each), QUESTIONS)) for each in unknown or [""]])
    memory = memory_model(machine, backend=backend, chance=chance)
    tried = list(saving_recipes(run)[: None if changes else 1])
    rows = list[Row]()
    for at, recipe in enumerate(tried):  # grows: where the model does not fit in the end, adapters are tried
        answers = {}
        for place, question in enumerate(of):
            answers[question] = ask(question, recipe.run, memory)
            if progress is not None:
                progress(at * len(of) + place + 1, len(tried) * len(of))
        rows.append(Row(recipe.name, recipe.settings, answers))
        sizes_of_model = [answers[name].size for name in _OF_MODEL & answers.keys()]
        if changes and at == len(tried) - 1 and sizes_of_model and not any(sizes_of_model):
            tried += adapter_recipes(recipe)
    use = memory.use_of(run)
    family = family_of(run.model).rule if "model" in of else ""
    devices = tuple(_devices_for(run, use, chance)) if "memory" in of else None
    return Fit(run, use, family, tuple(rows), devices, chance)


def _devices_for(run: Run, use: MemoryUse, chance: float) -> list[str]:
    """The devices of the catalog on which the run fits, with the context and the allocator's waste of each."""
    found = []
    for name in catalog.device_names():
        device = catalog.device(name)
        needed = memory_of_device(run, use.peak_nbytes, device, use.reserved)
        kept = kept_free(run, device, chance) + (run.cluster.memory_margin_nbytes or 0)
        if needed.usable_nbytes is not None and needed.nbytes <= needed.usable_nbytes - kept:
            found.append((needed.usable_nbytes, name))
    return [name for _, name in sorted(found)]


def ask(question: str, run: Run, memory: MemoryModel) -> Found:
    """The answer to one of `QUESTIONS` for a run on a kind of device."""
    if question == "model":
        family = family_of(run.model)
        return _found(
            question, sizes.models(run, family), memory, lambda tried: parameters(tried.model).total, family.rule
        )
    if question == "micro-batch":
        note = f"{run.grad_accum} in a step as before, so that the global batch grows with it"
        return _found(question, sizes.micro_batches(run), memory, lambda tried: tried.device_batch, note)
    if question == "memory":
        use = memory.use_of(run)
        return Found(question, use.nbytes, run, use, note="usable memory that the unchanged run needs")
    return _longest_sequence(run, memory) if question == "sequence" else _fewest_devices(run, memory)


def _longest_sequence(run: Run, memory: MemoryModel) -> Found:
    unit = sizes.sequence_unit(run)
    note = f"in steps of {unit} tokens"
    found = _found("sequence", sizes.sequences(run), memory, lambda each: each.recipe.seq_len, note)
    if found.size is not None and found.size > run.model.max_seq_len:
        note = f"{found.note}; by memory alone: model.max_seq_len is {run.model.max_seq_len:,}"
        return replace(found, note=note)
    return found


def _fewest_devices(run: Run, memory: MemoryModel) -> Found:
    """Fewer ranks that shard, other axes kept: the last that does not fit and the first that does."""
    others = {name: getattr(run.layout, name) for name in ("context", "tensor", "pipeline")}
    kept = ", ".join(f"{name} {size}" for name, size in others.items() if size > 1)
    note = f"states sharded (zero = {run.layout.zero})" + (f", {kept} kept" if kept else "")
    sweep = sizes.shards(run)
    too_few, enough = sweep.allowed(len(sweep.values) - 1), None
    if too_few is None or not memory.never_fits(too_few[1]):
        too_few, enough = edge(sweep, lambda shard: not memory.likely(shard), memory.over)
        if enough is not None and not memory.fits(enough[1]):
            too_few, enough = edge(sweep, lambda shard: not memory.fits(shard), memory.over)
    if enough is None:
        most = None if too_few is None else memory.use_of(too_few[1])
        why = f"not even with states in {sizes.MOST_SHARDS:,} parts: the rest is not sharded"
        if too_few is not None and too_few[1].layout.shard == 1:
            why = sizes.why_not_sharded(run) or why
        return Found("devices", None, beyond=most, note=why)
    fewer = None if too_few is None else too_few[1]
    note = note if enough[1].layout.devices > 1 else ""
    return Found(
        "devices", enough[1].layout.devices, enough[1], memory.use_of(enough[1]),
        None if fewer is None else fewer.layout.devices, fewer, None if fewer is None else memory.use_of(fewer), note,
    )  # fmt: skip


def _found(question: str, sweep: Sweep, memory: MemoryModel, size: Callable[[Run], int], note: str) -> Found:
    last, beyond = edge(sweep, memory.likely, memory.over)
    if last is not None and not memory.fits(last[1]):  # a stage between the first and the last is heavier
        last, beyond = edge(sweep, memory.fits, memory.over)
    further = None if beyond is None else beyond[1]
    use = None if further is None else memory.use_of(further)
    beyond_size = None if further is None else size(further)
    if last is None:
        return Found(question, None, None, None, beyond_size, further, use, "not even the smallest fits")
    return Found(question, size(last[1]), last[1], memory.use_of(last[1]), beyond_size, further, use, note)


def divides_batch(run: Run, micro_batch: int) -> int:
    """The largest micro-batch up to one that divides what a rank has of the global batch.

    >>> from trainledger.answers.load import load
    >>> run = load({"model": {"preset": "gpt2"}, "recipe": {"seq_len": 8, "global_batch": 12, "steps": 1}})
    >>> divides_batch(run, 5)
    4
    """
    share = run.recipe.global_batch // run.layout.data_ranks
    return max(index for index in range(1, min(micro_batch, share) + 1) if share % index == 0)
