"""Steps out of the ordinary are told, with what is usual and the documents of their batch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runs import StopAfter
from tiny_run import CountingFeed, tiny_run

from trainledger.engine.train.engine import train
from trainledger.engine.train.records import SpikeWatch, read_lines
from trainledger.engine.train.step import Batch
from trainledger.engine.train.stop import Interrupted
from trainledger.spec.parts import with_fields
from trainledger.spec.recipe import Watch
from trainledger.spec.run import DataSpec, Run
from trainledger.spec.runfile import digest

ODD = 52  # the index of a batch whose tokens do not count upwards


class OddFeed(CountingFeed):
    def batches(self, first_step: int) -> Iterator[Sequence[Batch]]:
        for step, found in enumerate(super().batches(first_step), first_step):
            odd = torch.Generator().manual_seed(1)
            yield (
                [(each, torch.randint(0, 64, target.shape, generator=odd)) for each, target in found]
                if step == ODD
                else found
            )


def watched(**fields: Any) -> Run:
    usual = {"steps": 60, "evaluation.every": None, "checkpoints.every": 20, "schedule": "constant"}
    return tiny_run(**usual | fields)


def spikes(run_dir: Path) -> list[dict[str, Any]]:
    return [each for each in read_lines(run_dir / "metrics.jsonl") if each.get("event") == "spike"]


def test_a_spike_is_told_with_the_usual_range_and_the_documents(tmp_path: Path) -> None:
    said: list[str] = []
    train(watched(**{"watch.window": 30}), tmp_path, open_feed=OddFeed, say=said.append)
    losses = {each["step"]: each["loss"] for each in read_lines(tmp_path / "metrics.jsonl") if "loss" in each}
    (event,) = [each for each in spikes(tmp_path) if each["step"] == ODD + 1]
    window = sorted(losses[step] for step in range(ODD - 29, ODD + 1))
    middle = (window[14] + window[15]) / 2
    apart = sorted(abs(each - middle) for each in window)
    usual = middle + 10 * (apart[14] + apart[15]) / 2
    assert event["above_usual"]["loss"]["value"] == losses[ODD + 1] > usual
    assert event["above_usual"]["loss"]["median"] == pytest.approx(middle)
    assert event["above_usual"]["loss"]["usual"][1] == pytest.approx(usual)
    assert event["documents"] == [f"{ODD} (batch {ODD})"]
    (sentence,) = [each for each in said if f"Step {ODD + 1} has loss" in each]
    assert re.search(r"loss \d\.\d+ \(usual [\d.]+ to [\d.]+, median [\d.]+\)", sentence)
    assert sentence.endswith(f"its batch is of document {ODD} (batch {ODD}).")


def test_a_resumed_run_knows_what_was_usual(tmp_path: Path) -> None:
    run = watched()
    train(run, tmp_path / "whole", open_feed=OddFeed)
    with pytest.raises(Interrupted):
        train(run, tmp_path / "parts", open_feed=OddFeed, observers=[StopAfter(ODD - 1)])
    train(run, tmp_path / "parts", open_feed=OddFeed, resume=True)
    assert spikes(tmp_path / "whole")
    assert spikes(tmp_path / "parts") == spikes(tmp_path / "whole")


def test_none_watches_nothing_and_is_no_other_run(tmp_path: Path) -> None:
    run = watched(**{"watch.deviations": None})
    train(run, tmp_path, open_feed=OddFeed)
    assert spikes(tmp_path) == []
    assert digest(run) == digest(watched())
    assert digest(run) != digest(watched(**{"guard.skips": 2}))


class NoDocuments(CountingFeed):
    """A feed whose text is gone."""

    def documents(self, step: int) -> Sequence[str]:
        raise FileNotFoundError("its index is gone")


def test_documents_that_cannot_be_named_end_no_run(tmp_path: Path) -> None:
    class Odd(OddFeed, NoDocuments):
        pass

    said: list[str] = []
    assert train(watched(), tmp_path, open_feed=Odd, say=said.append).step == 60
    assert any("cannot be named: its index is gone" in each for each in said)
    assert spikes(tmp_path)[-1]["documents"] == []


def test_real_text_names_its_files(tmp_path: Path) -> None:
    """A run on files, one of them of another kind than all others."""
    for number in range(40):
        (tmp_path / f"{number:02d}.txt").write_text(f"{number:02d}: the quick brown fox jumps over the lazy dog\n" * 36)
    (tmp_path / "17-odd.txt").write_text("".join(chr(33 + (i * i * 7 + i // 3) % 90) for i in range(1600)))
    data = DataSpec(path=(str(tmp_path / "*.txt"),), cache=str(tmp_path / "cache"), validation_fraction=0.1)
    run = tiny_run(
        {"vocab_size": 257}, steps=100, global_batch=8, schedule="constant",
        **{"evaluation.every": None, "checkpoints.every": None, "watch.window": 20},
    )  # fmt: skip
    said: list[str] = []
    train(with_data(run, data), tmp_path / "run", say=said.append)
    assert any("17-odd.txt byte 0" in each for each in said if "has loss" in each or "gradient norm" in each)


def with_data(run: Run, data: DataSpec) -> Run:
    return Run(model=run.model, recipe=run.recipe, data=data)


def quiet_watch(**fields: Any) -> SpikeWatch:
    return SpikeWatch(with_fields(Watch(), fields), CountingFeed(tiny_run(), torch.device("cpu")), print)


def test_only_what_is_above_is_a_spike_and_only_after_some_steps() -> None:
    watch = quiet_watch(window=40)
    noise = [1.0 + 0.01 * math.sin(each) for each in range(40)]
    assert all(not watch.spikes({"loss": each}) for each in [*noise[:18], 9.0])  # the 19th: too early
    assert all(not watch.spikes({"loss": each}) for each in noise)
    assert watch.spikes({"loss": 0.1}) == []
    assert watch.spikes({"loss": float("nan")}) == watch.spikes({"loss": None}) == []
    (spike,) = watch.spikes({"loss": 1.2, "grad_norm": 1e9})
    assert (spike.name, spike.value) == ("loss", 1.2)


def test_a_level_that_stays_becomes_usual() -> None:
    watch = quiet_watch(window=20)
    assert not any(watch.spikes({"grad_norm": 1.0}) for _ in range(20))
    told = [bool(watch.spikes({"grad_norm": 2.0})) for _ in range(30)]
    assert told[0]
    assert not any(told[11:])  # more than half of the window


def test_a_still_curve_may_tremble() -> None:
    watch = quiet_watch(window=20)
    assert not any(watch.spikes({"loss": 1.0}) for _ in range(20))
    assert watch.spikes({"loss": 1.009}) == []
    assert watch.spikes({"loss": 1.011}) != []
