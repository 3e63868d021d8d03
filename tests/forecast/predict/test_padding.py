"""Rows of uneven length: the closed form of a padded step against every draw, against a simulation, and against a
model that is trained on padded batches."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import randint
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import trainledger as tl
from trainledger import catalog
from trainledger.answers.load import load, resolve
from trainledger.answers.pages.padded_rows import lines_of as facts
from trainledger.cli import main
from trainledger.engine.data.lengths import binned
from trainledger.engine.nn.transformer import build
from trainledger.forecast.predict.padding import cut_rows, share_within
from trainledger.forecast.predict.predict import predict
from trainledger.ledger.ranks import account_run
from trainledger.spec.problem import InvalidInput
from trainledger.spec.row_lengths import longest_of
from trainledger.spec.run import Run

TINY = {"d_model": 32, "n_layers": 2, "feed_forward": {"d_ff": 64}, "vocab_size": 128, "max_seq_len": 256}
TINY_RUN: dict[str, Any] = {
    "model": TINY | {"attention": {"n_heads": 2, "n_kv_heads": 2, "head_dim": 16}},
    "recipe": {"seq_len": 64, "global_batch": 4, "micro_batch": 2, "steps": 1, "attention": "math"},
}
CHAT = [[60, 4000], [120, 6000], [250, 5000], [500, 2000], [900, 600], [1500, 150], [3000, 30]]
LORA: dict[str, Any] = {"method": "lora", "cluster.device": "a100-sxm-80gb"}


def pairs(lengths: list[int]) -> list[list[int]]:
    return [[tokens, lengths.count(tokens)] for tokens in sorted(set(lengths))]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.integers(1, 10))
def test_the_longest_of_a_batch_is_that_of_all_batches_there_are(lengths: list[int], drawn: int) -> None:
    law = longest_of([(tokens, rows) for tokens, rows in pairs(lengths)], drawn)
    longest = [max(batch) for batch in combinations(lengths, min(drawn, len(lengths)))]
    assert sum(share for _, share in law) == pytest.approx(1)
    for tokens, share in law:
        assert share == pytest.approx(longest.count(tokens) / len(longest))


@settings(max_examples=10)
@given(st.lists(st.integers(2, 64), min_size=4, max_size=10), st.booleans())
def test_flops_of_the_mean_step_are_those_of_all_its_batches(lengths: list[int], recomputed: bool) -> None:
    fields: dict[str, Any] = {"recipe.seq_len": max(lengths), "data.lengths": pairs(lengths)}
    fields["recipe.activation_checkpointing"] = "full" if recomputed else "none"
    run = load(TINY_RUN, fields)
    batches = [max(batch) for batch in combinations(lengths, 2)]
    by_length = {length: accounted(run, length).ledger for length in set(batches)}
    planned = tl.plan(run)
    assert planned.forecast.model_flops == pytest.approx(mean(by_length[at].model_flops for at in batches), abs=1)
    matmuls = mean(by_length[at].matmul_flops for at in batches)
    assert planned.forecast.flops["matmul"] + planned.forecast.flops.get("attention", 0) == pytest.approx(
        matmuls, abs=1
    )
    assert planned.peak.nbytes == accounted(run, max(lengths)).peak.nbytes


def accounted(run: Run, length: int) -> Any:
    full = replace(run, data=replace(run.data, lengths=None), recipe=replace(run.recipe, seq_len=length))
    return account_run(full, backend="cpu")


def drawn(rows: int) -> list[list[int]]:
    """Lengths as chats have them, in bins."""
    return binned(np.sort(np.random.default_rng(3).lognormal(5.2, 1.0, rows).astype(np.int64) + 8))


def seconds_of(run: Run, length: int) -> float:
    full = replace(run, data=replace(run.data, lengths=None), recipe=replace(run.recipe, seq_len=length))
    return predict(full, catalog.device("a100-sxm-80gb"), backend="cuda").step_seconds or 0.0


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.long
def test_the_mean_time_of_a_step_is_that_of_its_batches(batch: int) -> None:
    run = resolve("qwen2.5-0.5b", LORA | {"recipe.micro_batch": batch, "data.lengths": drawn(3000)})
    law = longest_of(cut_rows(run), batch)
    assert len(law) > 60
    forecast = tl.plan(run).forecast
    assert forecast.step_seconds == pytest.approx(sum(share * seconds_of(run, at) for at, share in law), rel=0.01)
    assert sum(bar.seconds for bar in forecast.waterfall) == pytest.approx(forecast.step_seconds, rel=1e-6)
    assert sum(forecast.step_causes.values()) == pytest.approx(forecast.step_seconds, rel=1e-9)
    counted = sum(tokens * rows for tokens, rows in cut_rows(run)) / 3000 * run.recipe.global_batch
    assert forecast.tokens_per_second == pytest.approx(counted / forecast.step_seconds)


# DDP waits once a step for the rank whose micro-batches are longest in all, FSDP in each micro-batch. Drawn 3,000 times
# from the rows themselves.
@pytest.mark.parametrize(("layout", "accumulated"), [("replicate", 1), ("replicate", 8), ("shard", 4)])
@pytest.mark.long
def test_ranks_wait_for_the_longest(layout: str, accumulated: int) -> None:
    fields = LORA | {f"layout.{layout}": 8, "cluster.count": 8, "recipe.micro_batch": 2, "data.lengths": CHAT}
    run = resolve("qwen2.5-0.5b", fields | {"recipe.global_batch": 16 * accumulated})
    draw, (rows, counts) = random.Random(0), zip(*cut_rows(run), strict=True)
    seconds, steps = {at: seconds_of(run, at) for at in rows}, []
    for _ in range(3000):
        longest = [[max(draw.choices(rows, counts, k=2)) for _ in range(8)] for _ in range(accumulated)]
        if layout == "shard":
            steps.append(mean(seconds[max(ranks)] for ranks in longest))
        else:
            steps.append(max(mean(seconds[at] for at in rank) for rank in zip(*longest, strict=True)))
    forecast = tl.plan(run).forecast
    assert forecast.step_seconds == pytest.approx(mean(steps), rel=0.02)
    assert forecast.step_causes["stragglers"] > 0


@pytest.mark.long
def test_real_batches_of_a_file_have_the_padding_that_is_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = random.Random(1)
    texts = ["x" * min(3000, 1 + int(draw.lognormvariate(4.5, 1.0))) for _ in range(8000)]
    text = tmp_path / "rows.jsonl"
    text.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    kept = tmp_path / "lengths.json"
    words = ["data", str(text), "--set", f"data.cache={tmp_path}", "--lengths", str(kept)]
    assert main(words) == 0
    capsys.readouterr()
    counted_by = json.loads(kept.read_text())
    assert counted_by["tokenizer"] == "bytes"
    assert len(counted_by["lengths"]) <= 160
    assert sum(count for _, count in counted_by["lengths"]) == len(texts)
    said = [words for name, words in facts(tl.plan("gpt2", {"data.lengths": str(kept)})) if name == "counted"]
    assert said[0].startswith(f"data.lengths counts bytes ({kept}), each taken for a token")
    for batch in (1, 8, 32):
        run = resolve("gpt2", {"recipe.seq_len": 1024, "recipe.global_batch": batch, "data.lengths": str(kept)})
        planned = tl.plan(run).padding
        assert planned is not None
        cut, computed, counted = [min(len(text) + 1, 1024) for text in texts], 0, 0
        for _ in range(20):
            draw.shuffle(cut)
            groups = [cut[at : at + batch] for at in range(0, len(cut) - len(cut) % batch, batch)]
            computed += sum(len(group) * max(group) for group in groups)
            counted += sum(map(sum, groups))
        assert planned.waste == pytest.approx(1 - counted / computed, abs=0.01)
        assert planned.longest == 1024


@pytest.mark.parametrize("texts", [["one"], ["one", "another"], ["short"] * 30], ids=len)
def test_lengths_of_few_documents_are_counted_without_holding_any_out(texts: list[str], tmp_path: Path) -> None:
    text, kept = tmp_path / "rows.jsonl", tmp_path / "lengths.json"
    text.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert main(["data", str(text), "--set", f"data.cache={tmp_path}", "--lengths", str(kept)]) == 0
    rows = dict(resolve("gpt2", {"data.lengths": str(kept)}).data.lengths or ())
    assert rows == Counter(len(text) + 1 for text in texts)


def test_bins_keep_rows_tokens_and_the_longest() -> None:
    lengths = np.random.default_rng(0).lognormal(6, 1.2, 50_000).astype(np.int64) + 1
    rows = binned(lengths)
    assert len(rows) <= 250
    assert sum(count for _, count in rows) == len(lengths)
    assert sum(tokens * count for tokens, count in rows) == pytest.approx(lengths.sum(), rel=1e-3)
    assert rows[-1][0] == lengths.max()


# PyTorch's own counter on a model that is trained on padded batches of one epoch: the FLOPs of the planned mean step.
def test_a_padded_epoch_trains_the_flops_that_are_planned() -> None:
    draw = random.Random(2)
    lengths = [draw.randint(4, 64) for _ in range(24)]
    run = load(TINY_RUN, {"data.lengths": pairs(lengths), "recipe.seq_len": max(lengths), "recipe.global_batch": 2})
    model = build(run.model, run.recipe)
    counted, expected = 0, 0
    for at in range(0, len(lengths), 2):
        rows = lengths[at : at + 2]
        ids = randint(1, 128, (2, max(rows) + 1))
        targets = ids[:, 1:].clone()
        for row, length in enumerate(rows):
            targets[row, length:] = -100
        with FlopCounterMode(display=False) as counter:
            F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), targets.flatten(), ignore_index=-100).backward()
        counted += counter.get_total_flops()
        expected += accounted(run, max(rows)).ledger.matmul_flops
    assert counted == expected
    steps = [max(lengths[at : at + 2]) for at in range(0, 24, 2)]
    by_draw = mean(accounted(run, at).ledger.matmul_flops for at in steps)
    planned = tl.plan(run).forecast.flops
    assert planned["matmul"] + planned.get("attention", 0) == pytest.approx(by_draw, rel=0.15)  # of one order of rows


def test_what_the_answer_says(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "llama-3-8b", "--method", "lora", "--set", f"data.lengths={json.dumps(CHAT)}", "--device"]
    assert main([*words, "a100-sxm-80gb", "--set", "recipe.micro_batch=4"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "17,780 rows (30 cut at 2,048) of 227 tokens in the mean, padded to the longest of 4: 454; 49.9 % of the tokens"
        in said
    )
    assert "packed an epoch" in said
    assert "nine in ten have at most 900" in said
    assert main([*words, "rtx-4090", "--set", "recipe.micro_batch=8"]) == 2
    said = " ".join(capsys.readouterr().out.split())
    assert "rows up to 500 fit, 30.2 % of the batches have a longer one and run out" in said
    law = longest_of([(min(tokens, 2048), rows) for tokens, rows in CHAT], 8)
    assert 1 - share_within(law, 500) == pytest.approx(0.302, abs=0.001)


def test_what_is_refused(tmp_path: Path) -> None:
    contents = {"torn": b"[[1, 2", "table": b'{"text": "a"}', "text": b"words", "binary": b"\xff\x00", "empty": b"[]"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    found = {
        "torn": "no JSON", "table": "a table", "text": "no JSON", "binary": "no JSON", "empty": "0 of them",
        "": "is a directory", "none": "no such file or directory",
    }  # fmt: skip
    wrong: list[tuple[Any, str]] = [(str(tmp_path / name), what) for name, what in found.items()]
    wrong += [([], "0 of them"), ([[0, 5]], r"\[0, 5\]"), ([[5, True]], r"\[5, True\]"), ([128, 256], "128")]
    for value, what in wrong:
        rule = "must be 1 to 10,000 pairs of tokens and rows, .* `trainledger data TEXT --lengths FILE` wrote; found: "
        with pytest.raises(InvalidInput, match=f"{rule}{what}$"):
            tl.plan("gpt2", {"data.lengths": value})
    short: dict[str, Any] = {"data.lengths": [[128, 3]], "recipe.seq_len": 256}
    with pytest.raises(InvalidInput, match=r"longest row of data.lengths, 128 tokens.*works: 128"):
        tl.plan("gpt2", short)
    with pytest.raises(InvalidInput, match=r"give recipe\.steps, of which an epoch has 3"):
        tl.plan("gpt2", short | {"recipe.seq_len": 128, "recipe.tokens": "1M"})
    with pytest.raises(InvalidInput, match=r"data.lengths draws one by one"):
        tl.plan("gpt2", {"data.lengths": [[128, 3]], "method": "dpo"})
    assert resolve("gpt2", {"data.lengths": [[128, 3]]}).recipe.seq_len == 128
