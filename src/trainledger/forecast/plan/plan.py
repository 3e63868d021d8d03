"""A plan: everything that can be said of a run before it starts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace

from trainledger.forecast.plan.quantity import checked_mfu
from trainledger.forecast.predict import predict
from trainledger.forecast.predict.device_memory import DeviceMemory, memory_of_device
from trainledger.forecast.predict.forecast import Forecast
from trainledger.forecast.predict.host_memory import HostMemory, host_memory
from trainledger.forecast.predict.padding import PaddedRows, cut_rows, padding, share_within
from trainledger.forecast.predict.roofline import Machine, NoRate, matmul_dtype, peak_rate
from trainledger.ledger import rules_of_thumb as thumb
from trainledger.ledger.entry import in_any_memory
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.memory.timeline import Peak
from trainledger.ledger.model.parameters import parameters
from trainledger.ledger.ranks import RankAccount, RunAccount, account_run
from trainledger.ledger.rules_of_thumb import CONVENTIONS, training_flops, training_seconds
from trainledger.report.document import Answer
from trainledger.spec.device import Device
from trainledger.spec.dtypes import nbytes_in
from trainledger.spec.frozen import frozen
from trainledger.spec.optimizers import Adam, Adam8bit
from trainledger.spec.problem import InvalidInput, Problem, nearest_text
from trainledger.spec.row_lengths import longest_of
from trainledger.spec.run import Run
from trainledger.spec.units import SECONDS_PER_DAY, ceil_div, format_count, format_percent


@frozen
class RuleOfThumb:
    """One quantity by a rule of thumb and by the ledger; ``unit`` is count, flops, nbytes or seconds.

    ``why`` names what the rule leaves out or assumes.
    """

    quantity: str
    rule: str
    unit: str
    by_rule: float
    by_ledger: float
    why: str

    @property
    def error(self) -> float:
        """How far the rule is off, as a share of the ledger's figure."""
        return self.by_rule / self.by_ledger - 1 if self.by_ledger else 0.0


def rules_of_thumb(
    account: RunAccount,
    peak_nbytes: int,
    *,
    memory_nbytes: int | None = None,
    flops_per_second: float | None = None,
    mfu: float = 0.5,
) -> tuple[RuleOfThumb, ...]:
    """The rules of thumb that apply to this run, each with what the ledger counts.

    With a device's memory also how many devices the rule and the ledger ask for, and with the FLOP/s that all
    devices reach together at an ``mfu`` also how long the run takes.
    """
    run, ledger = account.run, account.ledger
    rows = list(_rows(account, peak_nbytes))
    if memory_nbytes is not None and run.recipe.optimizer.kind in ("adamw", "adam"):
        rule, nbytes = _static(account)
        why = "as memory at the peak; assumes that it can be spread evenly"
        counts = ceil_div(nbytes, memory_nbytes), ceil_div(peak_nbytes, memory_nbytes)
        rows.append(RuleOfThumb("devices to hold it", f"{rule} / memory", "count", *counts, why))
    if flops_per_second is not None:
        steps, tokens = run.recipe.total_steps, run.recipe.tokens_per_step
        by_rule = thumb.training_flops(account.parameters.active, steps * tokens) / flops_per_second
        by_ledger = steps * (tokens // ledger.tokens) * ledger.model_flops / flops_per_second
        name = f"6 {_n(run)} D / rate"
        rows.append(
            RuleOfThumb(f"time at {100 * mfu:g} % MFU", name, "seconds", by_rule, by_ledger, "as FLOPs per token")
        )
    return tuple(rows)


def _rows(account: RunAccount, peak_nbytes: int) -> Iterator[RuleOfThumb]:
    run, ledger = account.run, account.ledger
    spec, recipe = run.model, run.recipe
    N, d, L, T = ledger.parameters, spec.d_model, spec.n_layers, recipe.seq_len
    count, n = account.parameters, _n(run)
    blocks = thumb.block_parameters(d, L)
    table = spec.vocab_size * d
    why = "assumes d_ff = 4 d without a gate, as many key-value as query heads, and one embedding matrix"
    yield RuleOfThumb("parameters", "12 d^2 L + V d", "count", blocks + table, count.total, why)
    why = "layers alone; the same assumptions, and no norms or biases"
    yield RuleOfThumb("parameters", "12 d^2 L", "count", blocks, count.total - count.outside, why)
    flops = ledger.by("phase", "model_flops")
    per_token, forward = sum(flops.values()) / ledger.tokens, flops.get("forward", 0) / ledger.tokens
    kept = ledger.kept_nbytes
    attention = thumb.attention_flops_per_token(L, d, T)
    six = thumb.training_flops(count.active, 1)
    idle = "; frozen weights need no gradient of their own: about 4 N" if recipe.lora is not None else ""
    forwards = recipe.objective.mismatched + (recipe.objective.reference == "device") * (
        1 + recipe.objective.mismatched
    )
    beside = f"; forwards beside the model's are {2 * forwards} {n} more" if forwards else ""
    if run.teacher is not None:
        beside = f"; the teacher's forward is {format_count(2 * parameters(run.teacher).active)} more"
    why = f"no attention scores; counts the input embedding as a matmul{beside}"
    yield RuleOfThumb(
        "FLOPs per token", f"2 {n}, forward", "flops", thumb.forward_flops_per_token(count.active), forward, why
    )
    idle += beside
    yield RuleOfThumb("FLOPs per token", f"6 {n}", "flops", six, per_token, f"no attention scores{idle}")
    why = f"counts the input embedding as a matmul; assumes n_heads x head size = d_model{idle}"
    yield RuleOfThumb("FLOPs per token", f"6 {n} + 12 L d T", "flops", six + attention, per_token, why)
    why = "assumes 16-bit activations, unfused attention, GELU, d_ff = 4 d, dropout; leaves out the logits"
    yield RuleOfThumb(
        "kept for backward",
        "L B T d (34 + 5 H T / d)",
        "nbytes",
        thumb.activation_nbytes(L, run.device_batch, T, d, spec.attention.n_heads),
        kept,
        why,
    )
    why = "counts one tensor of each block"
    yield RuleOfThumb(
        "kept for backward", "2 B T d L", "nbytes", thumb.activation_nbytes_napkin(L, run.device_batch, T, d), kept, why
    )
    static = in_any_memory(ledger.resident)
    gradients = nbytes_in(N, recipe.precision.gradients)
    states = sum(static.get(each, 0) for each in ("frozen weights", "parameters", "optimizer state")) + gradients
    if recipe.optimizer.kind in ("adamw", "adam"):
        rule, nbytes = _static(account)
        frozen_too = "; frozen weights in 16 bits" if recipe.lora is not None else ""
        why = f"assumes 4 bytes of a parameter, 4 of its gradient and 8 of its moments{frozen_too}; no step counters"
        yield RuleOfThumb("static state", rule, "nbytes", nbytes, states, why)
        why = "no activations, logits, scratch; and gradients need not all exist at the peak"
        yield RuleOfThumb("memory at the peak", rule, "nbytes", nbytes, peak_nbytes, why)


def _static(account: RunAccount) -> tuple[str, int]:
    """The rule for what is there for the whole run, and its bytes: with adapters also frozen weights in 16 bits."""
    trained: int = thumb.static_nbytes(account.ledger.parameters, "fp32-adamw")
    if account.run.recipe.lora is None:
        return "16 N", trained
    return "2 N + 16 N_adapters", 2 * account.parameters.total + trained


def _n(run: Run) -> str:
    """What N is in the rules for FLOPs: of a mixture of experts the parameters that a token passes through."""
    return "N" if run.model.experts is None else "N_active"


PASCANU = "Pascanu et al. 2013, On the difficulty of training recurrent neural networks (arXiv 1211.5063), section 3.2"


@frozen
class StepFact:
    """One fact: what, its formula, the numbers of this run, and the sentence that they make."""

    what: str
    formula: str
    numbers: tuple[float, ...]
    sentence: str
    source: str


def step_facts(run: Run, ledger: Ledger) -> tuple[StepFact, ...]:
    """The facts of a run's recipe, counted in its ledger where the ledger has them."""
    return tuple(_facts(run, ledger))


def _facts(run: Run, ledger: Ledger) -> Iterator[StepFact]:
    recipe = run.recipe
    if isinstance(recipe.optimizer, Adam | Adam8bit):
        steps = tuple(thumb.averaging_steps(each) for each in (recipe.optimizer.beta1, recipe.optimizer.beta2))
        sentence = f"over {steps[0]:,.4g} and {steps[1]:,.4g} steps"
        yield StepFact("moments average", "1 / (1 - beta)", steps, sentence, thumb.ADAM)
    divided = ledger.filter(lambda entry: entry.phase == "forward" and entry.path == "loss" and entry.name == "div")
    count = sum(entry.times for entry in divided) // run.layout.data_ranks
    if count:
        of_a_rank = " of a data rank" if run.layout.data_ranks > 1 else ""
        sentence = f"loss / {count:,}, for each of {count:,} micro-batches{of_a_rank}"
        source = "the mean over the batch is the mean of its equal parts' means"
        yield StepFact("micro-batches", "loss / k", (count,), sentence, source)
    norms = [entry for entry in ledger if entry.phase == "clip" and entry.name == "stack"]
    if norms:
        tensors = ledger.filter(lambda entry: entry.phase == "clip" and entry.name.endswith("norm")).entries[-1].flops
        sentence = f"{len(norms)} norm over all {tensors:,} tensors"
        yield StepFact("gradients are cut by", "sqrt(sum of g^2)", (len(norms), tensors), sentence, PASCANU)


@frozen
class Napkin:
    """6ND over what the devices do at a share of their peak: the first line of every plan."""

    mfu: float
    dtype: str
    peak_flops_per_second: float
    parameters: int
    tokens: int
    devices: int
    days: float

    @property
    def flops(self) -> int:
        return int(training_flops(self.parameters, self.tokens))

    @property
    def tokens_per_parameter(self) -> float:
        return self.tokens / self.parameters

    def __repr__(self) -> str:
        return f"Napkin({self.days:.4g} days at {format_percent(self.mfu)} of the {self.dtype} peak)"


@frozen
class Plan(Answer, report="plan"):
    """A run's ledger, its forecast, and the rules of thumb; ``napkin`` is None without a known peak.

    ``ranks`` are the distinct ranks of a run that is spread over devices; its ledger is that of the whole step.
    ``heaviest`` is the ledger of the device that needs most memory, whose ``peak`` it is.
    ``convention`` says how its model FLOPs are counted. ``device_memory`` is the memory of the peak rank in
    all; None where the device is not of the catalog. ``machine`` is what times are predicted for, ``host``
    what is in host memory, where anything is or its size is given, ``padding`` what rows of uneven length take.
    """

    run: Run
    ledger: Ledger
    heaviest: Ledger
    peak: Peak
    forecast: Forecast
    rules: tuple[RuleOfThumb, ...]
    napkin: Napkin | None
    memory_nbytes: int | None
    ranks: tuple[RankAccount, ...] = ()
    device_memory: DeviceMemory | None = None
    convention: str = "dense"
    machine: Machine | None = None
    host: HostMemory | None = None
    padding: PaddedRows | None = None

    def __repr__(self) -> str:
        on = f"{self.run.cluster.count:,} x {self.run.cluster.device}"
        return f"Plan({self.run.model.name} on {on}: {self.forecast!r})"


def make_plan(account: RunAccount, machine: Machine | None, *, mfu: float | str = 0.5) -> Plan:
    """The plan of a run on one device or on many from its account, and its machine (None: not known, so no times).

    Raises InvalidInput where ``mfu`` is no share of the peak.
    """
    share = checked_mfu(mfu)
    run, ledger, ranks, peak = account.run, account.ledger, account.ranks, account.peak
    napkin = _napkin(account, machine, share)
    memory = machine.memory_nbytes if machine is not None else None
    given = machine.capacity_nbytes if isinstance(machine, Device) else memory
    rate = None if napkin is None else napkin.devices * napkin.peak_flops_per_second * napkin.mfu
    of_all = ledger.peak() if ranks else peak
    return Plan(
        run=run,
        ledger=ledger,
        heaviest=account.heaviest,
        peak=peak,
        forecast=predict.forecast(account, machine),
        rules=rules_of_thumb(account, of_all.nbytes, memory_nbytes=given, flops_per_second=rate, mfu=share),
        napkin=napkin,
        memory_nbytes=memory,
        ranks=ranks,
        device_memory=(
            memory_of_device(run, peak.nbytes, machine, account.heaviest.reserved)
            if isinstance(machine, Device)
            else None
        ),
        machine=machine,
        host=host_memory(account, machine.fabric.devices_per_node if machine.fabric else 1)
        if isinstance(machine, Device)
        else None,
        padding=None if run.data.lengths is None else _padding(account, machine),
    )


def _padding(account: RunAccount, machine: Machine | None) -> PaddedRows:
    """What padding takes, beside a step of full rows, and the longest rows that fit where not all do."""
    run = account.run
    rows, full = padding(run), replace(run, data=replace(run.data, lengths=None))
    packed = predict.forecast(replace(account, run=full), machine)
    rows = replace(rows, packed_step_seconds=packed.step_seconds)
    if packed.fits is not False:
        return rows
    law = longest_of(cut_rows(run), run.device_batch)
    sizes = [tokens for tokens, _ in law]

    def too_long(tokens: int) -> bool:
        shorter = replace(full, recipe=replace(full.recipe, seq_len=tokens))
        return predict.forecast(account_run(shorter, backend=account.backend), machine).fits is False

    fit = bisect_left(sizes, True, key=too_long)
    if not fit:
        return replace(rows, share=0.0)
    return replace(rows, fitting=sizes[fit - 1], share=share_within(law, sizes[fit - 1]))


def counted_by(plan: Plan, convention: str) -> Plan:
    """The same plan with model FLOPs and MFU by one of `CONVENTIONS`; raises InvalidInput for another name."""
    if convention not in CONVENTIONS:
        rule = f"must be one of {', '.join(CONVENTIONS)}"
        raise InvalidInput([Problem("convention", convention, rule, nearest_text(convention, CONVENTIONS))])
    forecast = plan.forecast
    flops = CONVENTIONS[convention].flops(plan.run, plan.ledger)
    mfu = forecast.mfu * flops / plan.ledger.model_flops if forecast.mfu is not None else None
    return replace(plan, convention=convention, forecast=replace(forecast, model_flops=flops, mfu=mfu))


@frozen
class Causal:
    """MFU and HFU of a plan where attention is counted without what the mask leaves out.

    ``mfu`` is by the convention ``causal``, ``hfu`` by ``kernels``: what kernels run that skip masked pairs.
    """

    mfu: float
    hfu: float


def by_causal(plan: Plan) -> Causal | None:
    """The plan's MFU and HFU without masked pairs; None where it has none."""
    forecast, ledger = plan.forecast, plan.ledger
    if forecast.mfu is None or forecast.hfu is None or not forecast.model_flops or not ledger.matmul_flops:
        return None
    if plan.padding is not None:  # the ledger is that of the longest rows
        return None
    model, kernels = (CONVENTIONS[name].flops(plan.run, ledger) for name in ("causal", "kernels"))
    return Causal(forecast.mfu * model / forecast.model_flops, forecast.hfu * kernels / ledger.matmul_flops)


def with_notes(plan: Plan, notes: list[str]) -> Plan:
    """The same plan with further sentences after its own."""
    forecast = plan.forecast
    return replace(plan, forecast=replace(forecast, notes=(*forecast.notes, *notes))) if notes else plan


def of_one_step(plan: Plan) -> Plan:
    """The same plan where the run has no given length: without evaluation, checkpoints and totals of the run."""
    note = "one step, without evaluation and checkpoints; --set recipe.tokens=... plans the whole run"
    return with_notes(replace(plan, forecast=predict.of_one_step(plan.run, plan.forecast)), [note])


def _napkin(account: RunAccount, machine: Machine | None, mfu: float) -> Napkin | None:
    if machine is None:
        return None
    run, dtype = account.run, matmul_dtype(account.ledger)  # the peak that the forecast's MFU is taken against
    try:
        peak = peak_rate(machine, dtype)
    except NoRate:
        return None
    tokens, active = run.recipe.total_steps * run.recipe.tokens_per_step, account.parameters.active
    seconds = training_seconds(training_flops(active, tokens), run.cluster.count, peak, mfu)
    return Napkin(mfu, dtype, peak, active, tokens, run.cluster.count, seconds / SECONDS_PER_DAY)
