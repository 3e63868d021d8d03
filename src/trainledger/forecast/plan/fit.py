"""What fits on a kind of device: five questions, for a run without and with changes that need less memory.

The largest model, the longest sequence, the largest micro-batch, the fewest devices, the least memory: each has the
last run that fits and the next one, which does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import field, replace

from trainledger import catalog
from trainledger.forecast.plan import sizes
from trainledger.forecast.plan.changes import RESULT, Change, made, memory_savings, smaller_batches, value_of
from trainledger.forecast.plan.family import family_of
from trainledger.forecast.plan.sizes import Sweep, edge
from trainledger.forecast.predict.device_memory import memory_of_device
from trainledger.forecast.predict.interval import LIKELY, chance_on, kept_free
from trainledger.forecast.predict.roofline import Machine
from trainledger.ledger.entry import Amounts
from trainledger.ledger.model.parameters import parameters
from trainledger.ledger.parallel.rank_plan import rank_plan
from trainledger.ledger.ranks import account_of_stage, heaviest_stages, static_memory
from trainledger.report.document import Answer
from trainledger.spec.convert.patch import Rewritten
from trainledger.spec.device import Device
from trainledger.spec.frozen import frozen
from trainledger.spec.problem import InvalidInput, Problem, nearest_text
from trainledger.spec.rules.run import memory_problems, recipe_problems
from trainledger.spec.run import Run
from trainledger.spec.run_text import as_override
from trainledger.spec.units import format_nbytes


@frozen
class MemoryUse:
    """Bytes of the heaviest rank at the peak of a step, and what a process gets of the device's memory.

    ``nbytes`` includes the driver's context, communicators and the allocator's waste (`predict.device_memory`);
    ``by_category`` sums to ``peak_nbytes``, the tensors alone. ``stage`` is counted from 0 of ``stages``. ``chance`` is
    that of fitting; None where it is not known.
    """

    nbytes: int
    usable_nbytes: int
    peak_nbytes: int
    by_category: dict[str, int]
    stage: int
    stages: int
    moment: str
    reserved: Amounts = ()
    chance: float | None = None

    @property
    def fits(self) -> bool:
        return self.nbytes <= self.usable_nbytes

    @property
    def tensors_alone(self) -> bool:
        """Whether nothing beyond the tensors is counted, as nothing else is known of the device."""
        return self.nbytes == self.peak_nbytes

    @property
    def category(self) -> str:
        """The largest category of the tensors at the peak."""
        return max(self.by_category, key=lambda each: self.by_category[each])

    @property
    def rank(self) -> str:
        """Whose peak it is."""
        return "every rank" if self.stages == 1 else f"stage {self.stage + 1} of {self.stages}"


@frozen
class MemoryModel:
    """Memory of runs on one kind of device, exactly as a plan states it.

    A run fits where the chance of it is at least ``chance``, or beside its own margin; with 0 where as many bytes are
    usable as are counted.
    """

    machine: Machine
    backend: str
    usable_nbytes: int
    chance: float
    heaviest: dict[int, int] = field(default_factory=dict)  # the heaviest stage so far, by number of stages
    uses: dict[tuple[Run, int], MemoryUse] = field(default_factory=dict)  # of stages that were accounted for

    def nbytes(self, run: Run, stage: int) -> int:
        """Bytes that a rank of a stage needs in all; of ranks with uneven shards the one with the largest."""
        return self._use_of_stage(run, stage).nbytes

    def fits(self, run: Run) -> bool:
        """Whether every stage fits; the stage that was heaviest before is checked first."""
        return self._over(run, heaviest_stages(run)) <= 0

    def likely(self, run: Run) -> bool:
        """Whether the first and the last stage fit, and the one that was heaviest before: false is certain."""
        return self.over(run) <= 0

    def over(self, run: Run) -> int:
        """The bytes that these stages lack; where the static memory alone is too much, those that it lacks."""
        return self._over(run, {0, run.layout.pipeline - 1})

    def never_fits(self, run: Run) -> bool:
        """Whether what no further rank would shard is too much: activations and logits at the peak."""
        kept = sum(self.use_of(run).by_category.get(name, 0) for name in ("activations", "logits and loss"))
        return self._in_all(run, kept) > self._room(run)

    def _over(self, run: Run, of: Iterable[int]) -> int:
        stages, over = run.layout.pipeline, -self.usable_nbytes
        for stage in dict.fromkeys((self.heaviest.get(stages, 0), *of)):
            over = max(over, self._over_of_stage(run, stage))
            if over > 0:
                self.heaviest[stages] = stage
                return over
        return over

    def _over_of_stage(self, run: Run, stage: int) -> int:
        room = self._room(run)
        if (run, stage) not in self.uses:
            static = static_memory(rank_plan(run, stage), backend=self.backend)
            least = self._in_all(run, static.resident + static.gradients)
            if least > room:
                return least - room
        return self.nbytes(run, stage) - room

    def _room(self, run: Run) -> int:
        """The usable bytes less those that are kept free for the chance."""
        kept = kept_free(run, self.machine, self.chance) if self.chance and isinstance(self.machine, Device) else 0
        return self.usable_nbytes - kept

    def use_of(self, run: Run) -> MemoryUse:
        """The heaviest rank of a run, in full."""
        use = max((self._use_of_stage(run, stage) for stage in heaviest_stages(run)), key=lambda each: each.nbytes)
        self.heaviest[run.layout.pipeline] = use.stage
        return use

    def _use_of_stage(self, run: Run, stage: int) -> MemoryUse:
        """The rank of a stage, accounted for once."""
        if (run, stage) in self.uses:
            return self.uses[run, stage]
        ledger = account_of_stage(run, stage, backend=self.backend)
        peak = ledger.peak()
        nbytes = self._in_all(run, peak.nbytes, ledger.reserved)
        device = self.machine if isinstance(self.machine, Device) and nbytes != peak.nbytes else None
        use = self.uses[run, stage] = MemoryUse(
            nbytes=nbytes,
            usable_nbytes=self.usable_nbytes,
            peak_nbytes=peak.nbytes,
            by_category=peak.by_category,
            stage=stage,
            stages=run.layout.pipeline,
            moment=f"{peak.entry.name} of {peak.entry.path or 'the update'}, {peak.entry.phase}",
            reserved=ledger.reserved,
            chance=chance_on(run, device, nbytes, self.usable_nbytes),
        )
        return use

    def _in_all(self, run: Run, peak_nbytes: int, reserved: Amounts = ()) -> int:
        return int(memory_of_device(run, peak_nbytes, self.machine, reserved).nbytes)


def memory_model(machine: Machine | None, *, backend: str, chance: float = 0) -> MemoryModel:
    """The memory of a catalog device or a measured machine; raises InvalidInput where it is not known."""
    if machine is None:
        rule = "was not measured yet, so its memory is not known; run `trainledger measure machine` once"
        raise InvalidInput([Problem("cluster.device", "this-machine", rule, "h100-sxm")])
    usable = machine.memory_nbytes
    if isinstance(machine, Device) and machine.usable_nbytes is not None:
        usable = machine.usable_nbytes
    if usable is None:
        raise InvalidInput([Problem("cluster.device", machine.title, "has no known memory")])
    return MemoryModel(machine, backend, usable, chance)


def refuse_beyond(run: Run, memory_nbytes: int, peak_nbytes: Callable[[Run], int], where: str) -> None:
    """Raise `InvalidInput` where a run's peak is more than the memory of ``where``, with the least change that fits.

    ``peak_nbytes`` is asked for the run and then for runs that need less: smaller micro-batches, then recomputation of
    every block, then both.
    """
    needed = peak_nbytes(run)
    if needed <= memory_nbytes:
        return
    rule = f"needs {format_nbytes(needed)} at the peak of a step, and {where} has {format_nbytes(memory_nbytes)}"
    for change in smaller_batches(run):
        if peak_nbytes(made(run, change)) <= memory_nbytes:
            nearest = " ".join(as_override(*each) for each in change.fields)
            raise InvalidInput([Problem("recipe.micro_batch", run.device_batch, rule, nearest)])
    raise InvalidInput([Problem("model", run.model.name, f"{rule}; no micro-batch is small enough")])


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
    smallest first (None where the least memory was not asked for). ``chance`` is the least of what fits;
    ``words`` are the changes in the words of the trainer's file that the run is of.
    """

    run: Run
    memory: MemoryUse
    family: str
    rows: tuple[Row, ...]
    devices: tuple[str, ...] | None
    chance: float = LIKELY
    words: Rewritten | None = None

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
