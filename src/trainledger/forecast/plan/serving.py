"""A trained model served: the memory, bytes and FLOPs of one forward, its least time, and the batch that fits.

Decode reads all weights and the whole cache for one new token of each sequence, so that memory bounds it until the
batch is large (Pope et al. 2022, Efficiently Scaling Transformer Inference, arXiv 2211.05102, section 2.1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import field, replace
from functools import cache

from trainledger.forecast.plan.edges import last_holding, straight
from trainledger.forecast.predict.collective import collective_seconds, placement
from trainledger.forecast.predict.device_memory import DeviceMemory, device_memory
from trainledger.forecast.predict.roofline import COMPUTE_KINDS, Machine, NoRate, Roofline, ridge_of
from trainledger.ledger.entry import Entry, Int
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.model.attention import kv_cache
from trainledger.ledger.serving import WeightBytes, account_serving, serving_rank, weight_bytes, weights_read
from trainledger.report.document import Answer
from trainledger.spec.device import Device
from trainledger.spec.frozen import frozen
from trainledger.spec.layout import Layout
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.run import Run
from trainledger.spec.serving import WHOLE, Serving
from trainledger.spec.units import counted, format_nbytes

MOST_BATCH = 2**20
Account = Callable[[int], Ledger]  # of a batch
_APART = 64  # the batch that is accounted for beside one, to guess the largest


@frozen
class ServingTime:
    """Seconds of one forward: the least it can take, and what is expected.

    ``bound_seconds`` is least: matmuls, attention and links at the data sheet, all else fused away.
    ``bound_seconds_by_limit`` splits it into memory, compute and links; ``limit`` is the most of it.
    ``expected_seconds`` is what all operations take one after the other, at the rates that the machine's calibration
    says, without the time to launch them, and ``expected_link_seconds`` the part of it that collectives take; None
    where there is none. ``basis`` is ``bound`` of a data sheet, and ``assumed`` of a measured machine, whose measured
    rates serve both.
    """

    bound_seconds: float
    limit: str
    expected_seconds: float | None
    basis: str = "bound"
    bound_seconds_by_limit: dict[str, float] = field(default_factory=dict)
    expected_link_seconds: float | None = None


@frozen
class BatchRow:
    """One batch size: what it holds and how fast it is; times are None where a rate is not known.

    Tokens per second are as those of `Inference`.
    """

    batch: int
    device_nbytes: int
    cache_nbytes: int
    fits: bool | None
    time: ServingTime | None
    bound_tokens_per_second: float | None
    expected_tokens_per_second: float | None


@frozen(kw_only=True)
class Inference(Answer, report="inference"):
    """The account of one forward of one tensor rank, and the table of batches around it.

    ``weights`` are the rank's bytes, ``cache_nbytes`` those of its cache and ``token_nbytes`` what one more token of
    one sequence adds while no window is full; ``whole_token_nbytes`` that of all ranks together had they no copies.
    ``moved_nbytes`` says what a forward reads and writes: weights, cache and the rest. ``fits`` says whether the device
    holds this batch, ``largest_batch`` the most that it holds (0: not even one); None where its memory is not known.
    """

    run: Run
    serving: Serving
    ledger: Ledger
    weights: WeightBytes
    cache_nbytes: int
    token_nbytes: int
    whole_token_nbytes: int
    memory: DeviceMemory | None
    fits: bool | None
    moved_nbytes: dict[str, int]
    time: ServingTime | None
    ridge: float | None
    device: str
    batches: tuple[BatchRow, ...]
    largest_batch: int | None
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        shown = [self.run.model.name, self.serving.phase, f"batch {self.serving.batch}"]
        if self.time is not None:
            least = "at least" if self.time.basis == "bound" else "about"
            shown.append(f"{least} {self.time.bound_seconds:.4g} s ({self.time.limit}-bound)")
            if self.time.expected_seconds is not None:
                shown.append(f"expected {self.time.expected_seconds:.4g} s")
        if self.fits is False:
            shown.append("does NOT fit")
        return f"Inference({', '.join(shown)})"

    @property
    def bound_tokens_per_second(self) -> float | None:
        """New tokens of all sequences per second at the bound, which nothing exceeds; in a prefill, tokens read."""
        return _tokens_per_second(self.serving, None if self.time is None else self.time.bound_seconds)

    @property
    def expected_tokens_per_second(self) -> float | None:
        """The same at the expected time; None where the machine has no calibration."""
        return _tokens_per_second(self.serving, None if self.time is None else self.time.expected_seconds)

    @property
    def intensity(self) -> float:
        """FLOPs per byte moved."""
        return float(self.ledger.matmul_flops / sum(self.moved_nbytes.values()))

    @property
    def collectives(self) -> dict[str, Int]:
        """How often tensor ranks talk in one forward, by the name of the collective."""
        found: dict[str, Int] = {}
        for collective in _collectives(self.ledger):
            found[collective.name] = found.get(collective.name, 0) + collective.times
        return found


def inference(run: Run, serving: Serving, machine: Machine | None, *, backend: str, table: bool = True) -> Inference:
    """The account of a served model; raises `InvalidInput` where the serving or the layout is not possible.

    Of the run its model, its tensor ranks and its device count. ``table`` False leaves the other batches out.
    """
    _check(run, serving)
    rank = serving_rank(run, serving, backend=backend)

    @cache
    def account(batch: int) -> Ledger:
        return account_serving(run, replace(serving, batch=batch), backend=backend)

    ledger = account(serving.batch)
    leaves = rank.owned
    memory_use = _memory(run, ledger, machine)
    whole, local = kv_cache(run.model, serving.cache), kv_cache(rank.run.model, serving.cache)
    cache_nbytes = local.nbytes(serving.batch, serving.context)
    notes: list[str] = []
    time = _time(run, ledger, machine, notes)
    everything = ledger.total("read") + ledger.total("written")
    moved = {
        "weights": weights_read(leaves, rank.run.model, serving),
        "cache": cache_nbytes,  # read by decode, written by prefill
    }
    moved["activations"] = everything - sum(moved.values())
    largest = _largest_batch(run, account, machine) if table else None
    notes += _notes(run, serving)
    return Inference(
        run=run, serving=serving, ledger=ledger, weights=weight_bytes(leaves, serving), cache_nbytes=cache_nbytes,
        token_nbytes=local.token_nbytes(), whole_token_nbytes=whole.token_nbytes(), memory=memory_use, time=time,
        fits=_fits(memory_use, ledger, machine), moved_nbytes=moved, ridge=ridge_of(machine, serving.compute),
        device="" if machine is None else machine.title,
        batches=tuple(_rows(run, serving, machine, account, largest)) if table else (), largest_batch=largest,
        notes=tuple(dict.fromkeys(notes)),
    )  # fmt: skip


def _check(run: Run, serving: Serving) -> None:
    problems = list(serving.problems())
    longest = run.model.max_seq_len
    if not problems and serving.context > longest:
        problems.append(Problem("context", serving.context, f"is longer than model.max_seq_len = {longest}", longest))
    if problems:
        raise InvalidInput(problems)


def _notes(run: Run, serving: Serving) -> list[str]:
    notes = []
    if run.cluster.count > 1 and run.layout.tensor == 1:
        notes.append(
            f"of the {run.cluster.count:,} devices one is accounted for, with the whole model on it; --set "
            "layout.tensor=... splits it"
        )
    others = [each for each in ("replicate", "shard", "context", "pipeline", "expert") if getattr(run.layout, each) > 1]
    if others:
        notes.append(f"of the layout only tensor counts here; {', '.join(others)} left out")
    if run.recipe.lora is not None:
        notes.append("assuming that adapters (recipe.lora) are merged into the weights")
    if run.model.unserved:
        notes.append(run.model.unserved)
    if serving.phase == "prefill":
        notes.append("FLOPs count every query against every key; times only the pairs that a causal kernel computes")
    if serving.weights not in WHOLE:
        kept = "embeddings, norms, biases, routers and head" if serving.quantized == "linear" else "all but experts"
        notes.append(f"{kept} stay in {serving.compute}, and matmuls run in it: weights are widened when they are read")
    if run.model.experts is not None:
        notes.append("of the experts those are read that have a token, in the mean over even routes")
    return notes


def _memory(run: Run, ledger: Ledger, machine: Machine | None) -> DeviceMemory | None:
    if not isinstance(machine, Device):
        return None
    overheads = {overhead.name: overhead for overhead in machine.overheads}
    groups = (run.layout.tensor,) if run.layout.tensor > 1 else ()
    device = machine if overheads else replace(machine, compute_capability=None)
    return device_memory(ledger.peak().nbytes, device, overheads, groups=groups)


def _time(run: Run, ledger: Ledger, machine: Machine | None, notes: list[str]) -> ServingTime | None:
    """The bound and the expectation; None with a note where a rate is not known."""
    if machine is None:
        notes.append("no times: this machine was not measured yet; run `trainledger measure machine` once")
        return None
    try:
        return _times(run, ledger, machine)
    except NoRate as reason:
        notes.append(f"no times: {reason}")
        return None


def _times(run: Run, ledger: Ledger, machine: Machine) -> ServingTime:
    calibrated = not isinstance(machine, Device) or machine.efficiency is not None
    sheet = replace(machine, efficiency=None) if isinstance(machine, Device) else machine
    split = {"memory": 0.0, "compute": 0.0, "links": 0.0}
    roofline = Roofline(sheet)
    for entry in ledger:
        if entry.kind == "collective":
            split["links"] += _link_seconds(run, entry, machine, bound=True) * entry.times
        elif entry.kind in COMPUTE_KINDS:  # what no fusion takes away
            time = roofline.time(entry)
            split["compute" if time.bound == "compute" else "memory"] += float(time.seconds)
    expected = expected_links = None
    if calibrated:
        roofline = Roofline(machine)
        expected_links = sum(
            _link_seconds(run, collective, machine, bound=False) * collective.times
            for collective in _collectives(ledger)
        )
        expected = expected_links + sum(
            float(roofline.time(entry).seconds) for entry in ledger if entry.kind not in ("transfer", "collective")
        )
    basis = "bound" if isinstance(machine, Device) else "assumed"
    limit = max(split, key=lambda each: split[each])
    return ServingTime(sum(split.values()), limit, expected, basis, split, expected_links)


def _tokens_per_second(serving: Serving, seconds: float | None) -> float | None:
    return None if seconds is None else serving.batch * serving.new_tokens / seconds


def _collectives(ledger: Ledger) -> list[Entry]:
    return [entry for entry in ledger if entry.kind == "collective"]


def _link_seconds(run: Run, entry: Entry, machine: Machine, *, bound: bool) -> float:
    fabric = machine.step_fabric if isinstance(machine, Device) else None
    if fabric is None:
        raise NoRate(f"no link between several of {machine.title} is known")
    fabric = fabric.bound if bound else fabric
    layout = Layout(tensor=run.layout.tensor)
    place = placement(layout, entry.group, entry.ranks, fabric.devices_per_node)
    return float(collective_seconds(entry.name, entry.payload, place, fabric))


# Batches


def _row(run: Run, serving: Serving, machine: Machine | None, account: Account, batch: int) -> BatchRow:
    chosen, ledger = replace(serving, batch=batch), account(batch)
    memory_use = _memory(run, ledger, machine)
    time = _time(run, ledger, machine, [])
    nbytes: int = ledger.peak().nbytes if memory_use is None else memory_use.nbytes
    return BatchRow(
        batch,
        nbytes,
        dict(ledger.resident)["cache"],
        _fits(memory_use, ledger, machine),
        time,
        _tokens_per_second(chosen, None if time is None else time.bound_seconds),
        _tokens_per_second(chosen, None if time is None else time.expected_seconds),
    )


def _over(memory_use: DeviceMemory | None, ledger: Ledger, machine: Machine | None) -> int | None:
    """The bytes by which a forward is larger than its device; None where that is not known."""
    if memory_use is not None:
        return None if memory_use.usable_nbytes is None else memory_use.nbytes - memory_use.usable_nbytes
    if machine is None or machine.memory_nbytes is None:
        return None
    return int(ledger.peak().nbytes) - machine.memory_nbytes


def _fits(memory_use: DeviceMemory | None, ledger: Ledger, machine: Machine | None) -> bool | None:
    over = _over(memory_use, ledger, machine)
    return None if over is None else over <= 0


def _largest_batch(run: Run, account: Account, machine: Machine | None) -> int | None:
    """The most sequences that fit: memory grows with every one, about as much with each."""

    def over(batch: int) -> int:
        return _over(_memory(run, account(batch), machine), account(batch), machine) or 0

    if _over(_memory(run, account(1), machine), account(1), machine) is None:
        return None
    start = 1 - over(1) * (_APART - 1) // max(1, over(_APART) - over(1))  # where a straight line meets the limit
    start = min(max(start, 1), MOST_BATCH)
    if over(start) <= 0 < over(start + 1):
        return start
    return last_holding(lambda batch: over(batch) <= 0, MOST_BATCH + 1, start, least=1, guess=straight(over)) or 0


def _rows(run: Run, serving: Serving, machine: Machine | None, account: Account, largest: int | None) -> list[BatchRow]:
    """Batches from one to the largest that fits, the requested one among them, and the first beyond."""
    end = max(largest or 1, serving.batch)
    sizes = {1, serving.batch, *(4**power for power in range(1, 11) if 4**power <= min(end, 4096))}
    if largest:
        sizes |= {largest, largest + 1} if largest < MOST_BATCH else {largest}
    return [_row(run, serving, machine, account, size) for size in sorted(sizes)]


def served(run: Run, serving: Serving, machine: Machine | None, *, backend: str) -> Inference:
    """As `inference`; a run with ``layout.auto`` on the fewest tensor ranks of its devices that hold weights and cache.

    More tensor ranks than one that the run says itself are kept. Raises `InvalidInput` where no ranks hold it.
    """
    if not run.layout.auto:
        return inference(run, serving, machine, backend=backend)
    if run.layout.tensor > 1:
        return inference(_on(run, run.layout.tensor), serving, machine, backend=backend)
    devices = run.cluster.count
    for account in _accounts(run, serving, machine, backend, range(1, devices + 1)):
        if account.fits is None:  # the memory of the device is not known
            return inference(_on(run, 1, devices), serving, machine, backend=backend)
        if account.fits:
            whole = inference(account.run, serving, machine, backend=backend)
            note = (
                f"served on {account.run.layout.tensor:,} of the {devices:,} devices, the fewest that hold weights and "
                "cache (layout=auto; set layout.tensor for another number)"
            )
            return whole if devices == 1 else replace(whole, notes=(note, *whole.notes))
    raise InvalidInput([_too_large(run, account, serving, machine, backend)])


def _on(run: Run, ranks: int, devices: int | None = None) -> Run:
    layout = replace(run.layout, tensor=ranks, auto=False)
    return replace(run, layout=layout, cluster=replace(run.cluster, count=devices or layout.devices))


def _accounts(run: Run, serving: Serving, machine: Machine | None, backend: str, sizes: range) -> Iterator[Inference]:
    """The forward on so many tensor ranks, for those that go evenly into the model; one always does."""
    for ranks in sizes:
        if ranks > run.model.attention.n_heads:
            return
        try:
            yield inference(_on(run, ranks), serving, machine, backend=backend, table=False)
        except InvalidInput:
            if ranks == 1:
                raise


def _too_large(run: Run, largest: Inference, serving: Serving, machine: Machine | None, backend: str) -> Problem:
    """Why no ranks hold it, with the batch that the most of them hold and the devices that would hold this one.

    ``largest`` is the account on the most ranks that there can be.
    """
    devices = run.cluster.count
    most = inference(largest.run, serving, machine, backend=backend)
    ways = [f"batch {most.largest_batch:,}"] if most.largest_batch else []
    more = _accounts(run, serving, machine, backend, range(devices + 1, run.model.attention.n_heads + 1))
    ways += [f"cluster.count={each.run.layout.tensor}" for each in more if each.fits][:1]
    nbytes = most.ledger.peak().nbytes if most.memory is None else most.memory.nbytes
    needs = f"{format_nbytes(nbytes)} in each of {most.run.layout.tensor:,}"
    rule = f"finds no tensor ranks on {counted(devices, 'device')} that hold weights and cache: {needs}, the most that"
    return Problem("layout", "auto", f"{rule} there can be, are too much", " or ".join(ways) or None)
