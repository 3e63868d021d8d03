"""The account of every distinct rank of a run that is spread over devices, its static memory, and its figures.

Static memory follows no operation, so it is quick, and its sizes may be arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from trainledger.ledger.core.graph import Leaf
from trainledger.ledger.core.sizes import several, sizes_of
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import ON_HOST, Int
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.memory.timeline import Peak, peak_nbytes
from trainledger.ledger.model.parameters import ParameterCount, leaves_of, parameters
from trainledger.ledger.parallel.context import left_out
from trainledger.ledger.parallel.fully_sharded import formats
from trainledger.ledger.parallel.micro_batches import Work
from trainledger.ledger.parallel.rank_plan import RankPlan, parts_of, plans_of_stage, rank_plan
from trainledger.ledger.parallel.schedule import in_flight, rounds_of
from trainledger.ledger.step import account, follow, follow_places, resident_of
from trainledger.spec.dtypes import nbytes_in
from trainledger.spec.frozen import frozen
from trainledger.spec.layout import Layout
from trainledger.spec.plain import read_json, write_json
from trainledger.spec.problem import InvalidInput
from trainledger.spec.run import Run


@frozen
class RankAccount:
    """The plan of a rank, the ledger that follows it, and how many ranks have one like it.

    ``alike`` is the first stage whose ranks do the same in each micro-batch, though with others in flight; None where
    that is not known.
    """

    plan: RankPlan
    count: Int
    ledger: Ledger
    alike: int | None = None

    @property
    def stage(self) -> int:
        return self.plan.stage

    @property
    def in_flight(self) -> Int:
        """Forwards of all chunks before the first backward is over."""
        return in_flight(self.plan.layout, self.plan.stage, self.plan.whole.grad_accum)

    @property
    def title(self) -> str:
        """What distinguishes the rank, in words."""
        plan = self.plan
        if plan.first and plan.last:
            name = "every rank"
        elif plan.first or plan.last:
            name = "first stage" if plan.first else "last stage"
        else:
            name = f"stage {plan.stage + 1}"
        return name if plan.place == 0 else f"{name}, shard {plan.place + 1}"


@frozen
class RunAccount:
    """The account of a run: its whole step on one device, and where it is spread its distinct ranks."""

    run: Run
    ledger: Ledger
    ranks: tuple[RankAccount, ...] = ()
    backend: str = "cpu"

    @cached_property
    def parameters(self) -> ParameterCount:
        return parameters(self.run.model)

    @cached_property
    def tensors(self) -> Int:
        """Trained tensors of the whole model."""
        return leaves_of(self.run.model, self.run.recipe).trained().tensors

    @cached_property
    def heaviest(self) -> Ledger:
        """The ledger of the device that needs most memory."""
        return heaviest(self.ranks).ledger if self.ranks else self.ledger

    @cached_property
    def peak(self) -> Peak:
        """The peak of the device that needs most memory."""
        return self.heaviest.peak()


def account_run(run: Run, *, backend: str) -> RunAccount:
    """The account of a run and of its ranks."""
    if run.layout.alone:
        return RunAccount(run, account(run, backend=backend), backend=backend)
    return RunAccount(run, account(whole_run(run), backend=backend), accounts(run, backend=backend), backend)


def whole_run(run: Run) -> Run:
    """The same run on one device that has all of it, with the micro-batches of a data rank."""
    if run.layout.alone:
        return run
    return replace(run, layout=Layout(), recipe=replace(run.recipe, micro_batch=run.device_batch))


def heaviest(ranks: Sequence[RankAccount]) -> RankAccount:
    """The rank, of some, that needs most memory.

    Of stages that are alike one with the most micro-batches in flight holds the most, and the first has those.
    """
    some = [rank for rank in ranks if rank.alike in (None, rank.stage)]
    if len(some) == 1:
        return some[0]
    return max(some, key=lambda rank_account: peak_nbytes(rank_account.ledger) + rank_account.ledger.reserved_nbytes)


def accounts(run: Run, *, backend: str = "cpu") -> tuple[RankAccount, ...]:
    """The ledger of each distinct rank of a run, stage by stage; the counts add up to its devices.

    All ranks of a stage are alike but where pieces of parameters are uneven: then the last ones have less. Sizes of
    data-parallel, tensor and context axes may be arrays, and then those with the largest pieces count for all; the
    number of stages is an int, as it decides what there is.
    """
    rank_accounts: list[RankAccount] = []
    known: dict[Any, list[RankAccount]] = {}
    for stage in range(run.layout.pipeline):
        key = kind_of_stage(run, stage)
        if key not in known:
            plans, counts = zip(*plans_of_stage(run, stage), strict=True)
            ledgers = follow_places(plans, backend=backend)
            known[key] = [RankAccount(*rank, alike=stage) for rank in zip(plans, counts, ledgers, strict=True)]
            rank_accounts += known[key]
            continue
        rounds = rounds_of(run.layout, stage, run.grad_accum)
        for rank in known[key]:
            ledger = _with_rounds(rank.ledger, rounds)
            rank_accounts.append(replace(rank, plan=replace(rank.plan, stage=stage), ledger=ledger))
    return tuple(rank_accounts)


def kind_of_stage(run: Run, stage: int) -> Any:
    """Equal for stages whose entries are the same but for how often their loops over micro-batches run."""
    if not isinstance(run.model.n_layers, int):
        return stage
    rounds = rounds_of(run.layout, stage, run.grad_accum)
    return parts_of(run, stage), tuple((name, not isinstance(n, int) or n > 0) for name, n in rounds.items())


def heaviest_stages(run: Run) -> tuple[int, ...]:
    """The first stage of each kind, one of which holds the most: later ones of a kind have no more in flight."""
    found: dict[Any, int] = {}
    for stage in range(run.layout.pipeline):
        found.setdefault(kind_of_stage(run, stage), stage)
    return tuple(found.values())


def _with_rounds(ledger: Ledger, rounds: dict[str, Int]) -> Ledger:
    """The same ledger where these loops run so often. Nothing else depends on that."""
    known: dict[Any, Any] = {}  # loops by what they were
    entries = []
    for entry in ledger.entries:
        loop = entry.loop
        if loop and loop[0][0] in rounds:
            if id(loop) not in known:
                name = loop[0][0]
                known[id(loop)] = ((name, rounds[name]), *loop[1:])
            entries.append(entry.in_loops(known[id(loop)]))
        else:
            entries.append(entry)
    return replace(ledger, entries=tuple(entries))


def account_of_stage(run: Run, stage: int, *, backend: str = "cpu") -> Ledger:
    """The ledger of the rank of a stage that has the largest pieces; sizes may be arrays."""
    return follow(rank_plan(run, stage), backend=backend)


@frozen
class StaticMemory:
    """Bytes of a rank by what they are.

    ``resident`` is there before the step, batch and buffers left out (but for weights in 8 bits). ``gradients`` are
    those of all parameters once each has had a backward, ``gathered`` the whole parameters that are held from the first
    forward to the last backward, and ``outside`` else those of them outside the blocks. ``owned`` are the
    elements that its optimizer updates, and ``computed`` those that it computes with, of which ``experts`` are of
    expert ranks.
    """

    resident: Int
    gradients: Int
    gathered: Int
    outside: Int
    owned: Int
    computed: Int
    experts: Int = 0


def static_memory(rank: RankPlan, *, backend: str) -> StaticMemory:
    """The static memory of a rank; at least so much is live at some moment of the step."""
    precision = rank.run.recipe.precision
    tape = Tape(precision, backend)
    sizes = sizes_of(rank.run, backend)
    works = tuple(Work(tape, rank, sizes, chunk) for chunk in rank.chunks)
    owned = rank.owned
    resident = sum(nbytes for name, nbytes in resident_of(rank, works, owned, 0) if name not in (*ON_HOST, "buffers"))
    resident += sum(work.copies_nbytes for work in works)
    outside = sum(_gathered(rank, [(work.leaves.outside, 1)]) for work in works) if rank.gathers else 0
    whole = rank.gathers and not rank.layout.reshards
    gathered = sum(_gathered(rank, work.leaves.in_order()) for work in works) if whole else 0
    shared = [group for work in works for group in rank.by_group(work.leaves)]
    return StaticMemory(
        resident=resident,
        gradients=sum(_gradients(work) for work in works),
        gathered=gathered if whole else 0,
        outside=0 if whole else outside,
        owned=owned.elements(),
        computed=sum(work.leaves.elements() for work in works),
        experts=sum(leaf.elements * n for group, some in shared if group.axes != rank.group.axes for leaf, n in some),
    )


def _gradients(work: Work) -> Int:
    """Bytes of a chunk's gradients in addition to buffers that are there all the time."""
    if work.buffered or work.rank.offload(work.tape.backend) is not None:
        return 0
    precision, sharded = work.tape.precision, work.sharded
    if sharded is not None and not sharded.once:
        return nbytes_in(sharded.own_elements(), precision.gradients)
    least = min((precision.gradients, precision.arriving), key=lambda each: nbytes_in(8, each))
    return nbytes_in(work.leaves.elements(), least)


def _gathered(rank: RankPlan, runs: Iterable[tuple[tuple[Leaf, ...], Int]]) -> Int:
    """Bytes of the parameters that several ranks share, as they are gathered; experts may be on one rank only."""
    return sum(
        count * several(rank.group_of(leaf).ranks) * nbytes_in(each.elements, sent)
        for pattern, count in runs for leaf in pattern for each, _, sent in formats(leaf, rank.run.recipe)
    )  # fmt: skip


@frozen(kw_only=True)
class Figures:
    """Figures of a rank's optimizer step: FLOPs of matmuls, bytes kept for backward, at the peak, in collectives."""

    matmul_flops: int
    kept_nbytes: int
    peak_nbytes: int
    sent_nbytes: int


@frozen(kw_only=True)
class RankFigures:
    """A rank, its account's figures, and the metered ones."""

    rank: int
    title: str
    predicted: Figures
    measured: Figures


def figures(ledger: Ledger, layout: Layout | None = None) -> Figures:
    """The figures of a rank's ledger; with a ``layout`` of its account, less the attention that its ranks leave out."""
    attention = ledger.filter(lambda entry: entry.kind == "attention").flops
    masked = 0 if layout is None else int(attention * left_out(layout))
    return Figures(
        matmul_flops=ledger.matmul_flops - masked,
        kept_nbytes=ledger.kept_nbytes,
        peak_nbytes=ledger.peak().nbytes,
        sent_nbytes=ledger.total("payload"),
    )


def account_of(run: Run, rank: int, *, kernels: str) -> RankAccount:
    """The account of one rank of a run, numbered as in the device mesh."""
    stage, place = place_of(run.layout, rank)
    of_stage = [rank_account for rank_account in accounts(run, backend=kernels) if rank_account.stage == stage]
    return max(
        (rank_account for rank_account in of_stage if rank_account.plan.place <= place),
        key=lambda rank_account: rank_account.plan.place,
    )


def place_of(layout: Layout, rank: int) -> tuple[int, int]:
    """The stage of a rank, and its place among those that shard its stage.

    >>> place_of(Layout(pipeline=2, shard=2, tensor=2), 6)
    (1, 1)
    """
    of_a_stage = layout.devices // layout.pipeline
    return rank // of_a_stage, rank % of_a_stage // layout.tensor % (layout.shard * layout.context)


def read_ranks(run_dir: Path) -> tuple[RankFigures, ...]:
    """What ranks have written into a run's directory, by rank; what is damaged is left out."""
    found = []
    for path in sorted((run_dir / "ranks").glob("*.json")):
        try:
            found.append(read_json(RankFigures, path))
        except InvalidInput:
            continue
    return tuple(found)


def write_rank(run_dir: Path, rank_figures: RankFigures) -> None:
    """Keep a rank's figures in the run's directory."""
    folder = run_dir / "ranks"
    folder.mkdir(exist_ok=True)
    write_json(rank_figures, folder / f"{rank_figures.rank:05d}.json")
