"""Real steps on an accelerator beside the closed form: every kind of block, attention, expert and precision.

The cases are those of `test_kinds_agree`, where the CPU's kernels have their witness, with sizes that kernels of a GPU
take without filling them up, which the closed form leaves out: eight times as wide and long, and no masks over the
tokens that prediction modules leave.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

import pytest
import torch
from agreement import facts, shared_nbytes, unrolled
from pairwise import Case, covering
from random_runs import run_of
from test_kinds_agree import BY_MASTER, TRAINED, attention, blocks, combined, experts, precisions, run_from

from trainledger.engine.train.device import compute_capability
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.step import account
from trainledger.observe.measure.step import rehearse_really
from trainledger.spec.device import kernels_of_capability
from trainledger.spec.run import Run

pytestmark = pytest.mark.gpu

WIDTHS = ("d_model", "head_dim", "d_ff", "kv_rank", "q_rank", "dim", "nope_head_dim", "rope_head_dim", "v_head_dim")


def eight_times(case: Case) -> Case:
    """The same case with widths and a length that are multiples of 8."""
    wider = {
        name: 8 * value if name.rpartition(".")[2].removeprefix("expert_") in WIDTHS and value else value
        for name, value in case.items()
    }
    wider["recipe.seq_len"] = 8 * case["recipe.seq_len"]
    if case.get("n_mtp_layers") and (case.get("attention.window") or case.get("positions") == "alibi"):
        wider["n_mtp_layers"] = 0
    return wider


def difference(run: Run) -> str:
    """What differs between the account of a run and its step on the GPU; empty where nothing does."""
    predicted = account(run, backend=kernels_of_capability(compute_capability(torch.device("cuda"))))
    try:
        measured = rehearse_really(run, "cuda")
    except RuntimeError as error:
        return f"did not run: {error}"
    found = [
        f"{name}: run {theirs}, account {ours}"
        for name, ours, theirs in zip(TOTALS, totals(predicted), totals(measured), strict=True)
        if ours != theirs
    ]
    mine, theirs = predicted.peak(), measured.peak()
    if abs(mine.nbytes - theirs.nbytes) > max(0.01 * theirs.nbytes, shared_nbytes(run)):
        found.append(f"peak: run {theirs.nbytes} {theirs.by_category}, account {mine.nbytes} {mine.by_category}")
    ours_run, theirs_run = (Counter(map(facts, unrolled(each))) for each in (predicted, measured))
    for name, more in (("run", theirs_run - ours_run), ("account", ours_run - theirs_run)):
        found += [f"only the {name} has {each}" for each in list(more.items())[:8]]
    return "\n    ".join(found)


TOTALS = ("uncounted", "parameters", "matmul FLOPs", "attention FLOPs", "model FLOPs", "kept bytes", "resident")


def totals(ledger: Ledger) -> tuple[object, ...]:
    return (
        ledger.uncounted, ledger.parameters, ledger.matmul_flops, ledger.by("kind").get("attention"),
        ledger.model_flops, ledger.kept_nbytes, dict(ledger.resident),
    )  # fmt: skip


PARTS = 4  # of each table, which several processes take


@pytest.mark.parametrize("draw", [blocks, combined, attention, experts, precisions])
@pytest.mark.parametrize("part", range(PARTS))
def test_every_pair_of_settings_is_the_account(draw: Callable[[Random], Case], part: int) -> None:
    cases = [eight_times(each) for each in covering(draw)[part::PARTS]]
    differences = {str(each): difference(run_from(each)) for each in cases}
    different = [f"{case}\n    {what}" for case, what in differences.items() if what]
    assert not different, f"{len(different)} of {len(cases)}:\n" + "\n".join(different)


@pytest.mark.parametrize("precision", TRAINED)
@pytest.mark.parametrize("gpt2", [False, True])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_sizes_that_kernels_like_are_the_account(precision: str, gpt2: bool, head_dim: int) -> None:
    model = {"d_model": 256, "attention.head_dim": head_dim, "feed_forward.d_ff": 512, "max_seq_len": 128}
    for master in BY_MASTER.get(precision, (False,)):
        run = run_of(gpt2=gpt2, model=model, seq_len=128, precision=precision, **{"precision.master_weights": master})
        found = difference(run)
        assert not found, found


@pytest.mark.parametrize("optimizer", ["adamw", "adam-8bit", "muon", "lion", "sgd", "adafactor"])
@pytest.mark.parametrize("loss", ["full", "chunked", "fused"])
def test_optimizers_and_losses_are_the_account(optimizer: str, loss: str) -> None:
    found = difference(run_of(precision="bf16-mixed", optimizer=optimizer, loss=loss))
    assert not found, found
