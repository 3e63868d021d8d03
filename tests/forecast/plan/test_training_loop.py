"""The training loop: published runs, agreement with the plan, Daly's interval at the bottom of its curve, and sums."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import trainledger as tl
from trainledger.answers.loop import figures, schedule_table
from trainledger.cli import main
from trainledger.engine.data.shard import token_dtype
from trainledger.forecast.plan.training_loop import TrainingLoop

# https://github.com/karpathy/nanoGPT, config/train_gpt2.py: 12 x 1,024 x 5 x 8 tokens in a step, 600,000 steps.
NANOGPT = {
    "recipe.steps": 600_000, "recipe.global_batch": 480, "recipe.micro_batch": 12, "recipe.seq_len": 1024,
    "recipe.learning_rate": 6e-4, "recipe.schedule.warmup_steps": 2000, "layout.shard": 8, "cluster.count": 8,
    "cluster.device": "a100-sxm-40gb",
}  # fmt: skip


def test_nanogpt() -> None:
    found = tl.loop("gpt2", NANOGPT, corpus="9.04B")
    assert (found.tokens_per_step, found.micro_batches, found.steps) == (491_520, 5, 600_000)
    assert found.epochs == pytest.approx(32.6, abs=0.05)
    # Its train.bin of uint16 has about 17 GB (data/openwebtext/prepare.py), 9,035,582,198 tokens of 2 bytes.
    assert found.token_dtype == "uint16"
    assert found.corpus_nbytes == {"uint16": 18_080_000_000, "uint32": 36_160_000_000}
    rates = dict(found.learning_rates)
    assert rates[1999] == max(rates.values()) == 6e-4
    assert rates[599_999] == pytest.approx(6e-5)
    assert any("32.6 passes over the corpus" in each for each in found.notes)


def test_it_agrees_with_the_plan() -> None:
    made = tl.plan("gpt2", NANOGPT).forecast
    found = tl.loop("gpt2", NANOGPT)
    assert found.step_seconds == made.step_seconds
    assert found.loader_tokens_per_second == made.tokens_per_second
    assert found.checkpoint_every == made.checkpoint_every
    assert found.epochs == 1


def test_dalys_interval_is_at_the_bottom_of_the_curve() -> None:
    more = {"cluster.mtbf_device_hours": 2000, "cluster.storage_bytes_per_second": 10**8}
    found = tl.loop("gpt2", NANOGPT | more)
    saved = found.checkpointing
    assert saved is not None
    best = min(saved.lost, key=lambda each: each[1])
    intervals = [interval for interval, _ in saved.lost]
    step = intervals[1] / intervals[0]
    assert saved.daly_seconds / step <= best[0] <= saved.daly_seconds * step
    assert found.checkpoint_every is not None
    assert found.step_seconds is not None
    assert found.checkpoint_every * found.step_seconds == pytest.approx(saved.daly_seconds, rel=1e-3)
    titles = ["The learning rate over the steps", "What the interval between checkpoints costs"]
    assert [each.title for each in figures(found)] == titles


def test_a_slow_loader_and_a_run_that_does_not_fit_are_said() -> None:
    slow = tl.loop("gpt2", NANOGPT | {"cluster.loader_tokens_per_second": 1000})
    assert any("steps wait for tokens: loaders deliver 1K/s" in each for each in slow.notes)
    large = tl.loop("llama-3-70b", {"cluster.device": "a100-sxm-40gb"})
    assert any("does not fit in the memory" in each for each in large.notes)
    assert large.steps == 20 * tl.parameters(large.run.model).active // large.tokens_per_step


def test_without_a_known_machine_there_are_no_times(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TRAINLEDGER_CALIBRATION", raising=False)
    found = tl.loop("gpt2", {"recipe.steps": 10, "recipe.checkpoints.every": 3})
    assert (found.step_seconds, found.loader_tokens_per_second, found.checkpointing) == (None, None, None)
    assert (found.checkpoint_every, found.checkpoints) == (3, 4)
    assert "loader" not in str(found)


@given(
    batch=st.sampled_from([8, 16, 24, 64]), micro=st.sampled_from([1, 2, 8]), seq_len=st.integers(1, 1024),
    steps=st.integers(1, 10**9), corpus=st.integers(1, 10**15), vocabulary=st.integers(1, 10**6),
)  # fmt: skip
def test_sums(batch: int, micro: int, seq_len: int, steps: int, corpus: int, vocabulary: int) -> None:
    found = tl.loop(
        {"model": {"preset": "gpt2", "n_layers": 1, "vocab_size": vocabulary},
         "recipe": {"seq_len": seq_len, "global_batch": batch, "micro_batch": micro, "steps": steps}},
        corpus=corpus,
    )  # fmt: skip
    assert found.tokens == found.steps * found.tokens_per_step == steps * batch * seq_len
    assert found.micro_batches * micro == batch
    assert found.epochs == found.tokens / corpus
    assert found.token_dtype == token_dtype(vocabulary)  # what the token store writes
    assert found.corpus_nbytes["uint32"] == 2 * found.corpus_nbytes["uint16"] == 4 * corpus


def test_the_verb(capsys: pytest.CaptureFixture[str], tmp_path: object) -> None:
    words = ["loop", "gpt2", *(word for name, value in NANOGPT.items() for word in ("--set", f"{name}={value}"))]
    assert main([*words, "--corpus", "9.04B"]) == 0
    out = capsys.readouterr().out
    assert "gpt2: 600,000 steps of 491.5K tokens, 32.6 epochs, a checkpoint every" in out
    assert max(len(line) for line in out.splitlines()) <= 80
    assert main([*words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["tokens_per_step"] == 491_520
    assert said["formulas"]["micro_batches"]["numbers"] == "480 / (12 x 8) = 5"
    assert main([*words, "--corpus", "much"]) == 2
    assert "corpus = 'much': is not a count" in capsys.readouterr().err
    assert main([*words, "--plot", f"{tmp_path}/loop.html"]) == 0


def test_it_prints_in_python() -> None:
    found = tl.loop("gpt2", NANOGPT)
    assert isinstance(found, TrainingLoop)
    assert found.records("corpus")[0] == {
        "tokens as": "uint16", "tokens": found.tokens, "bytes": 2 * found.tokens,
        "column 4": "the smallest for a vocabulary of 50,257",
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["cosine", "wsd"])
def test_the_table_of_the_schedule_has_the_step_of_the_peak(kind: str) -> None:
    fields = {"learning_rate": 6e-4, "schedule": {"kind": kind, "warmup_steps": 700}, "steps": 20_000}
    recipe = {"seq_len": 1024, "global_batch": 480, "micro_batch": 12, **fields}
    answer = tl.loop({"model": {"preset": "gpt2"}, "recipe": recipe})
    for most in (6, 24):
        rates = {row[0]: float(row[2]) for row in schedule_table(answer, most).rows}  # type: ignore[arg-type]
        assert (rates[699], max(rates.values())) == (6e-4, 6e-4)  # the warm-up's last step, the first at the peak
        assert {0, 19_999} < set(rates)
