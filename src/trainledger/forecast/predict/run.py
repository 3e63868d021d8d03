"""From a step to the whole run: data, evaluation, checkpoints, failures and warm-up.

Interruptions come at random and as often at any time (a Poisson process); each costs a restart and what was done since
the last checkpoint. Seconds throughout: ``write`` is how long saving stops the run, ``mtbf`` the mean time between
interruptions of the whole run, ``restart`` from an interruption until steps run again.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, exp, expm1, sqrt

from trainledger.forecast.predict.roofline import Machine
from trainledger.spec.device import Device, Published
from trainledger.spec.dtypes import TOKEN_NBYTES, token_dtype
from trainledger.spec.frozen import frozen
from trainledger.spec.run import Run
from trainledger.spec.units import SECONDS_PER_HOUR, counted, format_nbytes, format_seconds

LONGEST = 2.0**100  # seconds; what takes longer counts as never ending


def run_mtbf(mtbf_device_seconds: float, devices: int) -> float:
    """Mean time between interruptions of a run that any one of its devices stops.

    >>> round(run_mtbf(50677 * 3600, 16384) / 3600, 2)
    3.09
    """
    return mtbf_device_seconds / devices


def young(write: float, mtbf: float) -> float:
    """The interval between checkpoints that loses least, to first order: sqrt(2 write mtbf) (Young 1974).

    >>> young(50.0, 10_000.0)
    1000.0
    """
    return sqrt(2 * write * mtbf)


def daly(write: float, mtbf: float) -> float:
    """The same to higher order (Daly 2006, equation 37): the time of work between two checkpoints.

    >>> round(daly(50.0, 10_000.0), 1)
    966.9
    """
    if write >= 2 * mtbf:
        return mtbf
    ratio = write / (2 * mtbf)
    return young(write, mtbf) * (1 + sqrt(ratio) / 3 + ratio / 9) - write


def expected_seconds(work: float, interval: float, *, write: float, restart: float, mtbf: float) -> float:
    """The mean time of a run of ``work`` seconds that saves after every ``interval`` of them, and at its end.

    mtbf e^(restart / mtbf) (e^((interval + write) / mtbf) - 1) for each interval (Daly 2006, equation 20): a failure
    may also come while it saves or restarts. Infinite where hardly an interval would ever end.

    >>> round(expected_seconds(10_000.0, 1000.0, write=50.0, restart=100.0, mtbf=10_000.0))
    11182
    """
    whole, rest = divmod(work, interval)
    try:
        parts = whole * expm1((interval + write) / mtbf)
        if rest > 1e-9 * interval:  # what is less is the rounding of an interval that divides the work
            parts += expm1((rest + write) / mtbf)
        seconds = mtbf * exp(restart / mtbf) * parts
    except OverflowError:
        return float("inf")
    return seconds if seconds < LONGEST else float("inf")


@frozen
class Conditions:
    """Rates and waits of a whole run; None is not known, and then the time of it is left out.

    ``mtbf_seconds`` is of all devices together, as are ``storage_bytes_per_second`` and ``loader_tokens_per_second``;
    ``read_bytes_per_second`` is that of reading tokens where it differs from writing, ``host_bytes_per_second`` of one
    device, to its host's memory. ``notes`` names what was not said in the run file,
    with its source.
    """

    mtbf_seconds: float | None = None
    restart_seconds: float = 0.0
    storage_bytes_per_second: float | None = None
    read_bytes_per_second: float | None = None
    host_bytes_per_second: float | None = None
    loader_tokens_per_second: float | None = None
    compile_seconds: float = 0.0
    power_watts: float | None = None
    notes: tuple[str, ...] = ()


def conditions(run: Run, machine: Machine) -> Conditions:
    """The conditions of a run: what [cluster] says, else what was measured here, else what others published."""
    cluster, recipe = run.cluster, run.recipe
    known = {published.name: published for published in machine.published} if isinstance(machine, Device) else {}
    assumed: list[Published] = []

    def or_published(name: str, said: float | None = None) -> float | None:
        if said is None and name in known:
            assumed.append(known[name])
            return known[name].value
        return said

    mtbf = or_published("mtbf_device_hours", cluster.mtbf_device_hours)
    restart = cluster.restart_seconds if mtbf is None else or_published("restart_seconds", cluster.restart_seconds)
    storage: float | None = cluster.storage_bytes_per_second
    reads: float | None = None
    loads: float | None = cluster.loader_tokens_per_second
    fabric = machine.fabric if isinstance(machine, Device) else None
    host = None if fabric is None or fabric.host is None else fabric.host.reached
    if storage is None and isinstance(machine, Device):
        of_one = or_published("storage_bytes_per_second")
        storage = None if of_one is None else of_one * cluster.count
    elif storage is None and not isinstance(machine, Device):
        storage, reads = machine.storage_bytes_per_second, machine.read_bytes_per_second
    if not isinstance(machine, Device):
        host = machine.host_bytes_per_second
        loads = machine.loader_tokens_per_second if loads is None else loads
    compiling = or_published("compile_seconds") if recipe.compile else None
    notes = []
    if assumed:
        parts = [
            f"{_said(published.name, published.value)} [{published.source.partition(',')[0]}]" for published in assumed
        ]
        notes += [f"assumed, since the run file does not say: {'; '.join(parts)}; [cluster] has fields to set them"]
    if mtbf is None and isinstance(machine, Device) and cluster.count > 1:
        notes.append(
            "interruptions are not included: no rate is published for this device (cluster.mtbf_device_hours sets it)"
        )
    if recipe.compile and compiling is None:
        notes.append("compilation is not included: its time was not measured here")
    return Conditions(
        mtbf_seconds=None if mtbf is None else run_mtbf(mtbf * SECONDS_PER_HOUR, cluster.count),
        restart_seconds=restart or 0.0,
        storage_bytes_per_second=storage,
        read_bytes_per_second=reads,
        host_bytes_per_second=host,
        loader_tokens_per_second=loads,
        compile_seconds=compiling or 0.0,
        power_watts=machine.power_watts if isinstance(machine, Device) else None,
        notes=tuple(notes),
    )


def _said(name: str, value: float) -> str:
    return {
        "mtbf_device_hours": f"an interruption every {value:,.0f} device-hours",
        "restart_seconds": f"{format_seconds(value)} to restart",
        "storage_bytes_per_second": f"checkpoints at {format_nbytes(value)}/s for each device",
        "compile_seconds": f"{format_seconds(value)} to compile",
    }[name]


SHARED = "the run has no [layout]; --set layout=auto looks for one"


@frozen
class RunTime:
    """Predicted time of a whole run; ``steps_seconds`` and ``parts`` sum to ``total_seconds``.

    ``step_seconds`` is that of one step as it is run, ``tokens_per_second`` that of all devices together while steps
    run; ``waiting_seconds`` is what each step waits for its tokens beyond it. ``checkpoint_every`` is how many steps
    lie between checkpoints (None: only one at the end), as the recipe says or as costs least. ``interruptions`` is how
    many are to be expected, ``goodput`` the share of the time that goes to steps that are kept. ``total_seconds`` is
    infinite where a run fails faster than it gets on.
    """

    steps: int
    step_seconds: float
    tokens_per_second: float
    parts: dict[str, float]
    checkpoint_every: int | None = None
    interruptions: float | None = None
    notes: tuple[str, ...] = ()
    waiting_seconds: float = 0.0

    @property
    def steps_seconds(self) -> float:
        return self.steps * self.step_seconds

    @property
    def total_seconds(self) -> float:
        return self.steps_seconds + sum(self.parts.values())

    @property
    def goodput(self) -> float:
        return self.steps_seconds / self.total_seconds


def occasions(steps: int, every: int | None) -> int:
    """How often a run evaluates or saves that does so at ``every`` so many steps and at its end.

    >>> occasions(10, 5), occasions(10, 4), occasions(10, None)
    (2, 3, 1)
    """
    return 1 if every is None else steps // every + bool(steps % every)


def run_time(
    run: Run,
    step_seconds: float,
    *,
    forward_seconds: float | None = None,
    checkpoint_nbytes: int | None = None,
    warm_up_seconds: float = 0.0,
    conditions: Conditions | None = None,
) -> RunTime:
    """The whole run from one step's seconds under its ``conditions`` (None: nothing is known of them).

    ``forward_seconds`` is the part of a step that an evaluation costs for as many sequences, ``warm_up_seconds`` what
    the first steps take longer, at the start and after each failure. Several devices without a layout share steps and
    evaluations without loss. Steps and evaluations wait where tokens arrive too slowly. What is left out is named in
    ``notes``.
    """
    recipe, steps, around = run.recipe, run.recipe.total_steps, conditions or Conditions()
    notes = [*_assumed(run), *around.notes]
    if run.layout.alone:
        step_seconds = step_seconds / run.cluster.count
        forward_seconds = None if forward_seconds is None else forward_seconds / run.cluster.count
    # Loaders and storage work ahead: a step takes as long as the slower of itself and its tokens.
    waiting = max(0.0, _arriving_seconds(run, recipe.global_batch, around) - step_seconds)
    parts = {"data": steps * waiting}
    if forward_seconds is None:
        notes.append("evaluation is not included: the step is not split by phase")
    else:
        parts["evaluation"] = occasions(steps, recipe.evaluation.every) * _evaluation_seconds(
            run, forward_seconds, around
        )
    parts["warm-up"] = warm_up_seconds + around.compile_seconds
    steps_seconds = steps * step_seconds
    work = steps_seconds + sum(parts.values()) - parts["warm-up"]
    every, interruptions = recipe.checkpoints.every, None
    write = write_seconds(run, checkpoint_nbytes, around)
    if write is None:
        reason = "the rate of the storage is not known (cluster.storage_bytes_per_second)"
        notes.append(f"checkpoints and failures are not included: {reason}")
    else:
        pause, whole = write
        if every is None and around.mtbf_seconds is not None:
            every = _best_every(pause, whole, around.mtbf_seconds, work / steps, steps)
            if every is not None:
                notes.append(
                    f"assuming checkpoints every {every:,} steps ({format_seconds(every * work / steps)}), the "
                    f"interval that costs the least time (Daly 2006); --set recipe.checkpoints.every={every} makes it "
                    "explicit"
                )
        interval = work if every is None else work * min(every, steps) / steps
        pause = max(pause, min(whole, whole - interval))  # the next one waits until the last is written
        parts["checkpoints"] = occasions(steps, every) * pause
        if around.mtbf_seconds is not None:
            again = around.restart_seconds + whole + parts["warm-up"] + max(0.0, whole - pause)
            expected = expected_seconds(work, interval, write=pause, restart=again, mtbf=around.mtbf_seconds)
            parts["failures"] = max(0.0, expected - work - parts["checkpoints"])
            interruptions = expected / around.mtbf_seconds
    return RunTime(
        steps=steps,
        step_seconds=step_seconds,
        tokens_per_second=recipe.tokens_per_step / step_seconds,
        parts=parts,
        checkpoint_every=every,
        interruptions=interruptions,
        notes=tuple(notes),
        waiting_seconds=waiting,
    )


def too_few(run: Run) -> str | None:
    """Why the sequences of a step cannot be divided among devices that have no layout; None where they can."""
    recipe, count = run.recipe, run.cluster.count
    micro = recipe.micro_batch or 1
    if not run.layout.alone or recipe.global_batch % (count * micro) == 0:
        return None
    sequences, devices = counted(recipe.global_batch, "sequence"), counted(count, "device")
    if recipe.global_batch < count:
        return f"{sequences} a step cannot be divided among {devices}"
    batches = "" if micro == 1 else f", in micro-batches of {micro}"
    return f"{sequences} a step cannot be divided evenly among {devices}{batches}"


def token_nbytes(run: Run) -> int:
    """Bytes of a token in a token store: two where the vocabulary allows it."""
    return TOKEN_NBYTES[token_dtype(run.model.vocab_size)]


def _arriving_seconds(run: Run, sequences: int, around: Conditions) -> float:
    """How long the tokens of so many sequences take to arrive; zero where loaders and storage are not known."""
    tokens, arrives = sequences * run.recipe.seq_len, 0.0
    if around.loader_tokens_per_second is not None:
        arrives = tokens / around.loader_tokens_per_second
    reads = around.storage_bytes_per_second if around.read_bytes_per_second is None else around.read_bytes_per_second
    if reads is not None:
        arrives = max(arrives, tokens * token_nbytes(run) / reads)
    return arrives


def _evaluation_seconds(run: Run, forward_seconds: float, around: Conditions) -> float:
    """One evaluation: whole sequences on each data rank, as long as one of a step's forward takes or as it arrives."""
    sequences, ranks = run.recipe.evaluation.sequences, run.layout.data_ranks
    computed = float(forward_seconds * ceil(sequences / ranks) * ranks / run.recipe.global_batch)
    return max(computed, _arriving_seconds(run, sequences, around))


def write_seconds(run: Run, nbytes: int | None, around: Conditions) -> tuple[float, float] | None:
    """What saving holds the run up, and how long it is until the checkpoint is whole; None where that is not known.

    Asynchronous: the devices copy their parts to their hosts, and the hosts write while steps go on.
    """
    if nbytes is None or around.storage_bytes_per_second is None:
        return None
    whole = nbytes / around.storage_bytes_per_second
    if not run.recipe.checkpoints.asynchronous or around.host_bytes_per_second is None:
        return whole, whole
    return min(whole, nbytes / run.cluster.count / around.host_bytes_per_second), whole


def _best_every(pause: float, whole: float, mtbf_seconds: float, step_seconds: float, steps: int) -> int | None:
    """The steps between checkpoints that cost least (Daly 2006); None where one at the end does."""
    # One that is written while steps go on is whole before the next begins.
    every = max(1, round(daly(pause, mtbf_seconds) / step_seconds))
    if pause < whole:
        every = max(every, ceil(whole / step_seconds))
    return every if every < steps else None


def _assumed(run: Run) -> Iterator[str]:
    recipe, count = run.recipe, run.cluster.count
    if count > 1 and run.layout.alone:
        yield f"assuming that {count:,} devices share the work without loss: {SHARED}"
        if recipe.micro_batch is None and recipe.global_batch > 1:
            yield (
                f"micro_batch is not given: assuming that each device holds all {recipe.global_batch:,} sequences at "
                "once; --set recipe.micro_batch=1 splits them"
            )
    if rest := recipe.tokens_beyond_steps:
        steps = f"{counted(recipe.total_steps, 'step')} of {recipe.tokens_per_step:,} tokens"
        yield f"recipe.tokens = {recipe.tokens:,} is priced as {steps}: {abs(rest):,} {'fewer' if rest > 0 else 'more'}"
