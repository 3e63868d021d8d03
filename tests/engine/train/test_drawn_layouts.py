"""Layouts drawn at random, trained by real processes: losses of one process, each rank's meter beside its account."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
from rank_runs import run_of, train_on_ranks
from spread_runs import told
from tiny_run import CountingFeed

from trainledger.engine.train.engine import train
from trainledger.ledger.ranks import RankFigures, account_of, read_ranks
from trainledger.spec.layout import Layout
from trainledger.spec.rules.run import run_problems
from trainledger.spec.run import Run

pytestmark = [pytest.mark.process, pytest.mark.slow]

STEPS, TRAINED = 5, 8
REFUSED = 2
# Every token goes to all experts: otherwise how many come to a rank is the router's choice.
EXPERTS: dict[str, Any] = {
    "feed_forward": "experts", "feed_forward.n_experts": 4, "feed_forward.per_token": 4,
    "feed_forward.expert_d_ff": 16,
}  # fmt: skip
AXES = ("replicate", "shard", "context", "tensor", "pipeline")


def drawn(random: Random) -> dict[str, Any]:
    """A layout of two or four ranks, and the fields of a run."""
    left = random.choice((2, 4, 4))
    axes = dict.fromkeys(AXES, 1)
    while left > 1:
        axes[random.choice(AXES)] *= 2
        left //= 2
    ranks = axes["shard"] * axes["context"]
    layout = {
        **axes,
        "zero": random.choice((1, 2, 3, 3)) if ranks > 1 else 3,
        "sequence_parallel": axes["tensor"] > 1 and random.random() < 0.5,
        "context_kind": random.choice(("ring", "all-to-all")),
        "schedule": random.choice(("gpipe", "1f1b", "zero-bubble")) if axes["pipeline"] > 1 else "1f1b",
    }
    model: dict[str, Any] = {"n_layers": 4, "attention.n_heads": 8, "attention.n_kv_heads": 4}
    fields: dict[str, Any] = {"activation_checkpointing": random.choice(("none", "none", "full"))}
    if axes["context"] * axes["pipeline"] == 1 and random.random() < 0.5:
        fields |= {"lora.rank": 2, "lora.targets": random.choice((("linear",), ("q_proj",), ("o_proj", "up_proj")))}
        fields["lora.dora"] = random.choice((False, True))
        if axes["tensor"] == 1:
            fields |= {"lora.base_format": random.choice((None, "bf16", "int8", "nf4"))}
            fields |= {"lora.dropout": random.choice((0.0, 0.1))}
    if axes["tensor"] == 1 and random.random() < 0.4:
        layout["expert"] = random.choice([each for each in (1, 2, 4) if ranks % each == 0])
        model, fields["load_balance_loss"] = model | EXPERTS, random.choice((0.0, 0.05))
        if "lora.rank" in fields and not fields["lora.dora"]:
            ways = {0.0: ("weights", "rows")}.get(fields["lora.dropout"], ("rows",))
            fields |= {"lora.targets": (*fields["lora.targets"], "experts"), "lora.experts": random.choice(ways)}
    fields |= {"model": model, "steps": STEPS, "global_batch": 8, "micro_batch": random.choice((1, 2))}
    # Adam divides a gradient by its own size: where that is rounding, a small epsilon makes a whole step of it.
    fields |= {"optimizer.epsilon": 1e-5, "checkpoints.every": STEPS, "evaluation.every": STEPS}
    return {"layout": layout, "fields": fields}


@pytest.mark.parametrize("seed", range(3))
def test_any_layout_has_the_losses_of_one_process_and_the_books_of_its_account(tmp_path: Path, seed: int) -> None:
    random, by_ranks, trained = Random(seed), dict[int, list[dict[str, Any]]](), 0
    while trained < TRAINED:
        found = drawn(random)
        if not list(run_problems(run_of(found))):
            trained += 1
            found |= {"dir": str(tmp_path / str(trained)), "metered": True}
            by_ranks.setdefault(Layout(**found["layout"]).devices, []).append(found)
    wrong: list[str] = []
    for ranks, runs in by_ranks.items():
        for found, codes in zip(runs, train_on_ranks(tmp_path, runs, ranks), strict=True):
            if codes == [REFUSED] * ranks:
                trained -= 1
                continue
            assert codes == [0] * ranks, found
            alone = tmp_path / f"{Path(found['dir']).name} alone"
            train(run_of({"fields": found["fields"]}), alone, open_feed=CountingFeed)
            mine = Path(found["dir"])
            for what in ("loss", "grad_norm", "validation_loss"):
                if told(mine, what) != pytest.approx(told(alone, what), rel=1e-6 if "loss" in what else 1e-5):
                    wrong.append(f"{found}: {what} {told(mine, what)}, of one process {told(alone, what)}")
            wrong += [f"{found}: {one}" for each in read_ranks(mine) for one in differences(each, run_of(found))]
    assert trained >= TRAINED // 2, "hardly any was trained"
    assert not wrong, "\n".join(wrong)


def differences(rank: RankFigures, run: Run) -> list[str]:
    """What a rank has metered otherwise than its account says, beyond what is known of torch.

    * Stages keep and hold otherwise than their account, and what is kept is told by phase: test_pipeline_witness.py.
    * Of tensor ranks DTensor keeps other copies of the targets at the loss: up to 96 bytes a token were seen.
    * gloo reduces and scatters in a copy of its input.
    """
    mine, meant, layout = rank.measured, rank.predicted, run.layout
    found = [name for name in ("matmul_flops", "sent_nbytes") if getattr(mine, name) != getattr(meant, name)]
    if layout.pipeline == 1:
        if not 0 <= mine.kept_nbytes - meant.kept_nbytes <= (0.01 * meant.kept_nbytes if layout.tensor > 1 else 0):
            found.append("kept_nbytes")
        account = account_of(run, rank.rank, kernels="cpu").ledger
        copied = max((each.payload for each in account if each.name == "reduce_scatter"), default=0)
        copied += 96 * run.device_batch * run.recipe.seq_len if layout.tensor > 1 else 0
        if not 0.99 * meant.peak_nbytes <= mine.peak_nbytes <= 1.01 * meant.peak_nbytes + copied:
            found.append("peak_nbytes")
    return [f"rank {rank.rank} {each}: {getattr(meant, each)}, metered {getattr(mine, each)}" for each in found]
