"""A step of post-training by reinforcement (GRPO, PPO) by its phases: memory of a device, seconds, who waits.

Answers are generated (rollout), the policy's and a reference's log-probabilities of them are taken, weights are
updated, and the generating engine gets the new ones (refit): DeepSeekMath (Shao et al. 2024, arXiv 2402.03300, section
4.1) for GRPO, HybridFlow (Sheng et al. 2024, arXiv 2409.19256, figure 1) for the phases and where they run. Each phase
is an account that exists elsewhere: a served model, forwards without a graph, a training step.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from trainledger.forecast.plan.serving import Inference, inference
from trainledger.forecast.predict.collective import collective_seconds, placement
from trainledger.forecast.predict.device_memory import memory_of_device
from trainledger.forecast.predict.forecast import Forecast
from trainledger.forecast.predict.interval import Interval, chance_of_fitting, of_memory, scaled
from trainledger.forecast.predict.predict import COMPUTED, forecast
from trainledger.forecast.predict.roofline import NoRate
from trainledger.ledger.entry import ON_HOST, Amounts
from trainledger.ledger.ranks import account_run
from trainledger.ledger.step import forwards
from trainledger.report.document import Answer
from trainledger.spec.device import Device, ErrorModel
from trainledger.spec.dtypes import nbytes_in
from trainledger.spec.frozen import frozen
from trainledger.spec.layout import Layout
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.run import Run
from trainledger.spec.serving import Serving
from trainledger.spec.units import ceil_div, counted

_AROUND = "CUDA context and libraries"
_PROFILED = 8192  # tokens of the forward that vLLM profiles, its default max_num_batched_tokens
_MOST_TENSOR = 64  # ranks of an engine
ENGINE_FORMAT = "bf16"  # of the engine's weights, and of those of a frozen reference


@frozen(kw_only=True)
class Rollout:
    """What is generated for a step, and by whom.

    ``prompts`` each get ``group`` answers of ``completion`` tokens in the mean, the longest of ``longest``. An engine's
    ``utilization`` is the share of a device's memory for weights, cache and all else (vLLM's gpu_memory_utilization).
    Engines have ``tensor`` ranks each (None: the fewest that hold a group), on ``devices`` of their own (0: on those
    that train). ``sleep`` frees an engine's memory outside of the rollout, as verl does. ``overlapped``: a rollout runs
    during the training on the answers of the one before. ``reference`` and ``critic`` are further models.
    ``packed``: answers are trained without padding. ``parked``: what is trained waits in host memory during
    a rollout.
    """

    prompts: int
    group: int
    prompt: int
    completion: int
    longest: int
    utilization: float
    tensor: int | None = None
    devices: int = 0
    sleep: bool = True
    overlapped: bool = False
    reference: bool = False
    critic: bool = False
    packed: bool = False
    parked: bool = False

    @property
    def sequences(self) -> int:
        return self.prompts * self.group

    @property
    def filled(self) -> float:
        """The share of the trained positions that have a token: all of them where answers are packed."""
        return (self.prompt + self.completion) / (self.prompt + self.longest)


@frozen
class Phase:
    """One phase: its seconds (None: not known), what a device that runs it holds, and on which devices it runs."""

    name: str
    seconds: float | None
    parts: Amounts
    devices: str

    @property
    def nbytes(self) -> int:
        return sum(int(nbytes) for _, nbytes in self.parts)

    @property
    def engine_nbytes(self) -> int:
        """The engine's share of the device, which is set and not predicted; 0 where it is not awake."""
        return int(dict(self.parts).get("engine", 0))


@frozen(kw_only=True)
class PostTraining(Answer, report="rl"):
    """A step by phases. ``seconds`` is the step's, ``idle`` the share of it in which devices of a kind wait.

    ``concurrent`` sequences are generated at once by each of ``engines``; ``cached_tokens`` is what its cache holds.
    ``fewest_devices``, where it was sought, is the smallest cluster that holds all phases, ``fitting_utilization`` the
    engine's largest share with which they fit. ``chance_of_fitting`` is of the phase that is least likely to,
    ``interval`` of the bytes of the peak one; the engine's share is set, not predicted, and no part of the errors.
    """

    run: Run
    rollout: Rollout
    phases: tuple[Phase, ...]
    seconds: float | None
    idle: dict[str, float]
    engines: int
    tensor: int
    cached_tokens: int
    concurrent: int
    updates: int
    usable_nbytes: int
    update: Forecast
    notes: tuple[str, ...]
    chance_of_fitting: float | None = None
    interval: Interval | None = None
    fewest_devices: int | None = None
    fitting_utilization: float | None = None

    def __repr__(self) -> str:
        return f"PostTraining({self.run.model.name}, {self.peak.name} {self.peak.nbytes} bytes, fits: {self.fits})"

    @property
    def peak(self) -> Phase:
        """The phase in which a device holds most."""
        return max(self.phases, key=lambda phase: phase.nbytes)

    @property
    def fits(self) -> bool:
        return self.peak.nbytes <= self.usable_nbytes

    @property
    def generated_per_second(self) -> float | None:
        """Generated tokens per second of the rollout, of all engines."""
        return _rate(self.rollout.sequences * self.rollout.completion, self.phases[0].seconds)

    @property
    def trained_per_second(self) -> float | None:
        """Trained tokens per second of the update, padding left out."""
        return _rate(self.rollout.sequences * (self.rollout.prompt + self.rollout.completion), self.phases[-2].seconds)


def _rate(tokens: int, seconds: float | None) -> float | None:
    return tokens / seconds if seconds else None


def post_training(run: Run, rollout: Rollout, machine: Device, *, backend: str) -> PostTraining:
    """The phases of a step whose update is a step of ``run`` for each ``recipe.global_batch`` of the sequences.

    Left out: rewards, the time between kernels of an engine, and graphs that it captures. Raises `InvalidInput` where
    no engine holds the model.
    """
    account = account_run(run, backend=backend)
    step = forecast(account, machine)
    peak, reserved = account.peak.nbytes, account.heaviest.reserved
    around = memory_of_device(run, peak, machine, reserved).nbytes - peak
    outside = memory_of_device(run, 0, machine).nbytes  # what an update's allocator reserved is emptied before others
    resident = dict((account.ranks[0].ledger if account.ranks else account.ledger).resident)
    own = sum(nbytes for name, nbytes in resident.items() if name not in ("batch", *ON_HOST))
    static = [("training states", own), (_AROUND, outside)]
    shared = run.layout.shard_ranks * run.layout.tensor * run.layout.pipeline
    whole = nbytes_in(account.parameters.total, ENGINE_FORMAT)
    if rollout.reference and run.recipe.lora is None:  # with adapters it is the model without them
        static.append(("reference", ceil_div(whole, shared)))
    if rollout.critic:
        static.append(("critic's states", own))
    static.append(("answers and their log-probabilities", _answers_nbytes(run, rollout)))
    share = int(rollout.utilization * (machine.capacity_nbytes or 0))
    engine, cache_nbytes = _engine(run, rollout, machine, share - outside, backend)
    cached = cache_nbytes // engine.token_nbytes
    devices = rollout.devices or run.layout.devices
    engines = devices // engine.run.layout.tensor
    concurrent = min(ceil_div(rollout.sequences, engines), cached // (rollout.prompt + rollout.completion))
    generating, awake = ("generation" if rollout.devices else "all"), ("engine", share)
    asleep = [] if rollout.devices or rollout.sleep else [awake]
    forward = forwards(run, backend=backend)
    training = [(_AROUND, around), *static[2:], *asleep]
    updates = max(1, rollout.sequences // run.recipe.global_batch)
    taken = _forward_seconds(step)
    work = rollout.filled if rollout.packed else 1.0
    once = None if taken is None else taken * updates * work
    kept = [] if rollout.devices else [static[1], static[-1]] if rollout.parked else static
    on_engine = (*kept, awake)
    generated = _rollout_seconds(engine, rollout, machine, concurrent, engines, backend)
    phases = [
        Phase("rollout", generated, on_engine, generating),
        Phase("log-probabilities", once, (*static, *asleep, ("forward", forward - own)), "training"),
    ]
    if rollout.reference:
        phases.append(replace(phases[-1], name="reference"))
    if rollout.critic:
        phases.append(replace(phases[1], name="values"))
    twice = 2 if rollout.critic else 1
    seconds = None if step.step_seconds is None else step.step_seconds * updates * twice * work
    copies = [("engine's weights", engine.weights.nbytes)] if not rollout.devices and rollout.sleep else asleep
    refit = Phase(
        "refit",
        _refit_seconds(devices + run.layout.devices * (rollout.devices > 0), whole, machine),
        (*static, *copies),
        "all",
    )
    phases += [Phase("update", seconds, (("training step", peak), *training), "training"), refit]
    whole_seconds, idle = _together(phases, rollout)
    answer = PostTraining(
        run=run, rollout=rollout, phases=tuple(phases), seconds=whole_seconds, idle=idle, engines=engines,
        tensor=engine.run.layout.tensor, cached_tokens=cached, concurrent=concurrent, updates=updates, update=step,
        usable_nbytes=machine.capacity_nbytes or 0,
        notes=tuple(_notes(run, rollout)),
    )  # fmt: skip
    return answer if machine.errors is None else _with_chance(answer, machine.errors)


def _with_chance(answer: PostTraining, errors: ErrorModel) -> PostTraining:
    """The answer with its chance to fit and the interval of its peak, from the errors of published peaks."""
    run, least = answer.run, 1.0
    for phase in answer.phases:
        if (needed := phase.nbytes - phase.engine_nbytes) > 0:
            room = max(1, answer.usable_nbytes - phase.engine_nbytes)
            least = min(least, chance_of_fitting(run, errors, needed, room))
    engine = answer.peak.engine_nbytes
    predicted = scaled(of_memory(run, errors), answer.peak.nbytes - engine)
    interval = Interval(predicted.low + engine, predicted.high + engine)
    return replace(answer, chance_of_fitting=least, interval=interval)


def _answers_nbytes(run: Run, rollout: Rollout) -> int:
    """Token ids (int64) of a data rank's prompts and answers, with a log-probability of each answer's token (fp32) of
    the policy, and where they are of a reference and a critic."""
    rows = ceil_div(rollout.sequences, run.layout.data_ranks)
    kept = 4 * (1 + rollout.reference + rollout.critic) * rollout.longest
    return int(rows * (8 * (rollout.prompt + rollout.longest) + kept))


def _notes(run: Run, rollout: Rollout) -> list[str]:
    notes = [
        "rewards, an engine's time between kernels and its graphs are not counted; weights of engine and reference in "
        f"{ENGINE_FORMAT}",
        f"assuming that the longest of {rollout.sequences:,} answers has {rollout.longest:,} tokens, the mean "
        f"{rollout.completion:,}: after the mean an engine generates with a tenth of its sequences",
        f"updates are training steps on prompt and longest answer, {'packed' if rollout.packed else 'padded'}; "
        "their loss is counted as that of next tokens",
    ]
    return notes + (["the critic is counted as a second model like the policy"] if rollout.critic else [])


def _engine(run: Run, rollout: Rollout, machine: Device, room: int, backend: str) -> tuple[Inference, int]:
    """The served model on the fewest tensor ranks, powers of two, whose cache holds a group of answers, and its bytes.

    They are what weights and the activations of a forward leave of the engine's share: vLLM runs that forward first,
    on an accelerator (`determine_available_memory` of its gpu_worker.py).
    """
    one, available = rollout.prompt + rollout.completion, rollout.devices or run.layout.devices
    sizes = [rollout.tensor] if rollout.tensor else [2**power for power in range(_MOST_TENSOR.bit_length())]
    least, refused = dict[int, int](), None  # bytes of an engine's share by its ranks; why it may not have more of them
    for tensor in sizes:
        try:
            engine = _served(run, rollout, machine, tensor, 1, backend)
        except InvalidInput as error:
            refused = error
            break
        reading = Serving(phase="prefill", batch=max(1, _PROFILED // rollout.prompt), context=rollout.prompt)
        held = engine.weights.nbytes
        if backend != "cpu":
            read = inference(engine.run, reading, machine, backend=backend, table=False)
            held = read.ledger.peak().nbytes - read.cache_nbytes
        wanted = (1 if rollout.tensor else rollout.group) * one * engine.token_nbytes
        if room - held >= wanted and tensor <= available:
            return engine, room - held
        least[tensor] = held + wanted
        if tensor >= available and held + wanted <= room:
            break
    if refused and rollout.tensor:
        raise refused
    raise _no_engine(rollout, machine, available, room, least, refused)


def _no_engine(
    rollout: Rollout, machine: Device, available: int, room: int, least: dict[int, int], refused: InvalidInput | None
) -> InvalidInput:
    """Why no engine is left room, with the share of a device or the devices that give it some."""
    rule = "leaves an engine no room for a group of answers besides its weights, on any number of the devices"
    if refused is not None:
        why = refused.problems[0].rule.partition(": ")[2].partition("; ")[0]
        rule += f"; it has at most {counted(max(least, default=0), 'tensor rank')}, as {why}"
    capacity, outside = machine.capacity_nbytes or 0, int(rollout.utilization * (machine.capacity_nbytes or 0)) - room
    fitting = [nbytes for tensor, nbytes in least.items() if tensor <= available]
    # Whole twentieths; a fiftieth more for the communicators of further devices.
    share = ceil(20 * ((min(fitting) + outside) / capacity + 0.02)) / 20 if fitting and capacity else 1.0
    more = next((tensor for tensor, nbytes in least.items() if tensor > available and nbytes <= room), None)
    ways = [f"{share:g}"] if share < 1 else []
    ways += [f"--{'generation-devices' if rollout.devices else 'count'} {more}"] if more else []
    return InvalidInput([Problem("utilization", rollout.utilization, rule, " or ".join(ways) or None)])


def _served(run: Run, rollout: Rollout, machine: Device, tensor: int, batch: int, backend: str) -> Inference:
    serving = Serving(batch=batch, context=rollout.prompt + rollout.completion // 2)
    one = replace(run, layout=Layout(tensor=tensor), recipe=replace(run.recipe, lora=None))
    try:
        return inference(one, serving, machine, backend=backend, table=False)
    except InvalidInput as refused:
        problems = refused.problems
    own = "of an engine, which needs them for its weights and a group of answers: "
    raise InvalidInput(
        [replace(problem, field="engine_tensor", rule=own + problem.rule, nearest=None) for problem in problems]
    )


def _seconds_of(forward: Inference) -> float | None:
    time = forward.time
    return None if time is None else time.bound_seconds if time.expected_seconds is None else time.expected_seconds


def _rollout_seconds(
    engine: Inference, rollout: Rollout, machine: Device, concurrent: int, engines: int, backend: str
) -> float | None:
    """Prefill of each prompt once, then tokens one by one: full batches to the mean length, few to the longest."""
    tensor = engine.run.layout.tensor
    waves = ceil_div(ceil_div(rollout.sequences, engines), concurrent)
    full, few = (
        _seconds_of(_served(engine.run, rollout, machine, tensor, batch, backend))
        for batch in (concurrent, max(1, concurrent // 10))
    )
    reading = Serving(phase="prefill", batch=1, context=rollout.prompt)
    prefill = _seconds_of(inference(engine.run, reading, machine, backend=backend, table=False))
    if full is None or few is None or prefill is None:
        return None
    prompts = ceil_div(rollout.prompts, engines)
    return prompts * prefill + waves * rollout.completion * full + (rollout.longest - rollout.completion) * few


def _refit_seconds(devices: int, nbytes: int, machine: Device) -> float | None:
    """The whole model gathered once over all devices that hold a part of it or get it."""
    fabric = machine.step_fabric
    if devices == 1 or fabric is None:
        return 0.0 if devices == 1 else None
    place = placement(Layout(shard=devices), "shard", devices, fabric.devices_per_node)
    try:
        return float(collective_seconds("all_gather", nbytes, place, fabric))
    except NoRate:  # the network between nodes is not known
        return None


def _forward_seconds(step: Forecast) -> float | None:
    by_phase = step.step_seconds_by_phase
    computed = sum(seconds for phase, seconds in by_phase.items() if phase in COMPUTED)
    if step.step_seconds is None or not computed:
        return None
    return by_phase.get("forward", 0.0) * step.step_seconds / computed


def _together(phases: list[Phase], rollout: Rollout) -> tuple[float | None, dict[str, float]]:
    """The step's seconds, and the share of it in which devices of a kind wait."""
    if any(phase.seconds is None for phase in phases):
        return None, {}
    spent = {phase.name: phase.seconds or 0.0 for phase in phases}
    refit, generating = spent["refit"], spent["rollout"]
    training = sum(spent.values()) - refit - generating
    if not rollout.devices:
        return refit + generating + training, {"all": 0.0}
    whole = refit + (max(generating, training) if rollout.overlapped else generating + training)
    waiting = {"generation": whole - refit - generating, "training": whole - refit - training}
    return whole, {kind: seconds / whole for kind, seconds in waiting.items()}
