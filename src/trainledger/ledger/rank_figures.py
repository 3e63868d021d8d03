"""The predicted and measured figures of each rank's step, kept in the run's directory by the rank itself."""

from __future__ import annotations

from pathlib import Path

from trainledger.ledger.ledger import Ledger
from trainledger.ledger.parallel.context import left_out
from trainledger.ledger.ranks import RankAccount, accounts
from trainledger.spec.frozen import frozen
from trainledger.spec.layout import Layout
from trainledger.spec.plain import read_json, write_json
from trainledger.spec.problem import InvalidInput
from trainledger.spec.run import Run


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
    attention = ledger.filter(lambda each: each.kind == "attention").flops
    masked = 0 if layout is None else int(attention * left_out(layout))
    return Figures(
        matmul_flops=ledger.matmul_flops - masked, kept_nbytes=ledger.kept_nbytes, peak_nbytes=ledger.peak().nbytes,
        sent_nbytes=ledger.total("payload"),
    )  # fmt: skip


def account_of(run: Run, rank: int, *, kernels: str) -> RankAccount:
    """The account of one rank of a run, numbered as in the device mesh."""
    stage, place = place_of(run.layout, rank)
    of_stage = [each for each in accounts(run, backend=kernels) if each.stage == stage]
    return max((each for each in of_stage if each.place <= place), key=lambda each: each.place)


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


def write_rank(run_dir: Path, found: RankFigures) -> None:
    """Keep a rank's figures in the run's directory."""
    folder = run_dir / "ranks"
    folder.mkdir(exist_ok=True)
    write_json(found, folder / f"{found.rank:05d}.json")
