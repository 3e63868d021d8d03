"""Several devices without a layout: what cannot be shared among them gets no bill, and says so first."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import trainledger as tl
from trainledger.answers.plan import plan
from trainledger.cli import main
from trainledger.forecast.plan.breaks import RULE
from trainledger.forecast.predict.forecast import nanoseconds
from trainledger.report.terminal import text
from trainledger.spec.layout import Layout
from trainledger.spec.rules.run import run_problems
from trainledger.spec.units import format_nbytes

pytestmark = pytest.mark.sweep

A100 = {"device": "a100-sxm-80gb", "price_per_device_hour": 2.0}
OF_THE_RUN = ("total_seconds", "days", "device_hours", "money", "kwh", "co2_kg", "goodput", "interruptions")


def run_of(name: str, count: int, **recipe: Any) -> tl.Run:
    fields = {"seq_len": 1024, "global_batch": 1, "tokens": "1B", "precision": "bf16-mixed", "micro_batch": 1, **recipe}
    return tl.load({"model": {"preset": name}, "recipe": fields, "cluster": {**A100, "count": count}})


@pytest.mark.parametrize(
    ("count", "recipe", "why"),
    [
        (8, {}, "1 sequence a step cannot be divided among 8 devices"),
        (8, {"global_batch": 6}, "6 sequences a step cannot be divided among 8 devices"),
        (4, {"global_batch": 6}, "6 sequences a step cannot be divided evenly among 4 devices"),
        (4, {"global_batch": 8, "micro_batch": 4},
         "8 sequences a step cannot be divided evenly among 4 devices, in micro-batches of 4"),
    ],
)  # fmt: skip
def test_a_batch_that_cannot_be_spread_has_no_bill(count: int, recipe: dict[str, Any], why: str) -> None:
    run = run_of("gpt2", count, **recipe)
    answer = tl.predict(run)
    assert answer.impossible == (why,)
    assert all(getattr(answer, name) is None for name in OF_THE_RUN)
    alone = tl.predict(tl.load({"model": {"preset": "gpt2"}, "recipe": vars(run.recipe), "cluster": A100}))
    assert answer.step_seconds == alone.step_seconds
    assert answer.tokens_per_second == alone.tokens_per_second
    assert answer.mfu == alone.mfu
    assert not any("without loss" in each for each in answer.notes)


@pytest.mark.parametrize(("count", "batch", "micro_batch"), [(8, 8, 1), (8, 64, 4), (4, 8, None), (1, 3, 1)])
def test_what_can_be_shared_is_billed(count: int, batch: int, micro_batch: int | None) -> None:
    answer = tl.predict(run_of("gpt2", count, global_batch=batch, micro_batch=micro_batch))
    assert answer.impossible == ()
    assert answer.money == pytest.approx(2.0 * answer.device_hours)
    assert answer.tokens_per_second == pytest.approx(count * batch * 1024 / answer.step_seconds)


def test_a_batch_can_be_shared_where_replicas_have_whole_micro_batches() -> None:
    """The rule of a layout of replicas says the same."""
    for count in (2, 4, 6):
        for batch in (1, 2, 3, 4, 6, 8, 12):
            for micro_batch in (1, 2):
                run = run_of("gpt2", count, global_batch=max(batch, micro_batch) // micro_batch * micro_batch,
                             micro_batch=micro_batch)  # fmt: skip
                spread = tl.Run(model=run.model, recipe=run.recipe, cluster=run.cluster, layout=Layout(replicate=count))
                assert bool(list(run_problems(spread))) == bool(tl.predict(run).impossible)


def test_a_model_that_no_device_holds_has_no_bill() -> None:
    answer = tl.predict(run_of("llama-3-70b", 64, global_batch=64))
    (why,) = answer.impossible
    assert why.startswith("a device needs ")
    assert why.endswith(" for the whole model and its part of the sequences, and has 84.98 GB")
    assert answer.money is None


def test_what_a_device_needs_is_said_of_one_device_in_each_sentence() -> None:
    """The reason is about a device with its part of the sequences, all the rest about one that does all of it."""
    run = run_of("llama-3-8b", 64, global_batch=64, micro_batch=None)
    answer = tl.predict(run)
    assert answer.bottleneck is not None
    assert answer.device_nbytes is not None
    alone = f"one device that does all of it alone needs {format_nbytes(answer.device_nbytes)}"
    assert answer.bottleneck.sentence.startswith(f"{alone} and has 84.98 GB; ")
    assert answer.impossible[0].endswith(" for the whole model and its part of the sequences, and has 84.98 GB")
    out = " ".join(str(plan(run)).split())
    needed = format_nbytes(answer.device_nbytes)
    assert re.search(rf"does NOT fit: {needed} \(80 %: \S+ to \S+ GB\) on one device that does all of it alone", out)
    assert f"a device needs {needed}" not in out


def test_a_batch_that_is_too_large_for_one_device_alone_is_shared() -> None:
    """Without a micro-batch one device has all sequences; each of several has its part."""
    answer = tl.predict(run_of("gpt2", 64, global_batch=1024, micro_batch=None))
    assert answer.fits is False
    assert answer.impossible == ()
    assert answer.money is not None
    assert tl.predict(run_of("gpt2", 2, global_batch=1024, micro_batch=None)).impossible


def test_a_plan_says_it_before_any_number() -> None:
    out = str(plan(run_of("llama-3-70b", 512)))
    verdict, _, costs = (" ".join(each.split()) for each in out.partition("Where the time")[0].partition("\nstep "))
    assert verdict.startswith("Impossible without a [layout]: 1 sequence a step cannot be divided")
    assert "--set layout=auto looks for one" in costs
    assert "money" not in costs
    assert " days" not in costs
    assert "Where the time of a step goes" in out
    assert "on one device alone" in costs
    assert max(map(len, out.splitlines())) <= 80


def test_a_bill_that_rests_on_sharing_says_so_with_the_step() -> None:
    out = " ".join(str(plan(run_of("gpt2", 8, global_batch=8))).split())
    assert " on one device alone, shared by 8 without loss; goodput " in out


def test_programs_read_why(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        '[model]\npreset = "gpt2"\n[recipe]\nseq_len = 1024\nglobal_batch = 1\ntokens = "1B"\n'
        '[cluster]\ndevice = "a100-sxm-80gb"\ncount = 8\n'
    )
    words = [str(file)]
    assert main(["plan", *words, "--json"]) == 2
    answer = json.loads(capsys.readouterr().out)["forecast"]
    assert answer["impossible"] == ["1 sequence a step cannot be divided among 8 devices"]
    assert answer["money"] is None
    assert main(["advise", *words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["impossible"] == ["1 sequence a step cannot be divided among 8 devices"]
    assert answer["total_seconds"] is None


def test_advice_says_it_first_and_what_makes_it_possible_leads() -> None:
    run = run_of("llama-3-8b", 64, global_batch=64, precision="bf16-sharded")
    advice = tl.advise(run, together=1)
    assert advice.forecast.impossible
    assert advice.alone[0].works
    assert advice.alone[0].run.layout == Layout(shard=64)
    assert advice.alone[0].seconds == (None, advice.alone[0].forecast.total_seconds)
    assert advice_is_sorted([each.works for each in advice.alone])
    out = " ".join(str(advice).split())
    assert out.startswith("Impossible without a [layout]: a device needs ")
    assert " in all, memory -" in out


def advice_is_sorted(works: list[bool]) -> bool:
    return works == sorted(works, reverse=True)


def test_a_batch_that_fits_nowhere_is_advised_a_layout_first() -> None:
    """One sequence on four devices: tensor ranks share it."""
    advice = tl.advise(run_of("llama-3.2-1b", 4, precision="bf16-sharded"), together=0)
    assert advice.goal == "time"
    assert advice.alone[0].run.layout == Layout(tensor=4)
    assert advice.alone[0].forecast.money is not None
    assert not any(each.forecast.money for each in advice.alone[1:] if each.run.layout.alone)


def test_breaks_does_not_say_that_it_holds_as_planned() -> None:
    found = tl.breaks(run_of("gpt2", 8), along=["devices", "depth"], reach=4)
    first = found.already[0]
    assert (first.limit, first.why) == (RULE, "1 sequence a step cannot be divided among 8 devices")
    assert first.remedy == "--set layout=auto looks for a layout"
    devices = found.along[0]
    (broken,) = devices.breaks
    assert (broken.limit, broken.holds, broken.breaks, broken.factor) == (RULE, 0, 8, 1)
    assert "8 data ranks" in broken.why
    out = text(found.document(), full=True)
    assert out.startswith("Broken as planned: divisibility.")
    assert "Broken already, as planned: divisibility. 1 sequence a step cannot be divided" in " ".join(out.split())
    assert "devices divisibility - 8 1x" in " ".join(out.split())


def test_breaks_of_a_batch_that_can_be_spread_holds_as_planned() -> None:
    found = tl.breaks(run_of("gpt2", 8, global_batch=16), along=["devices"], reach=8)
    assert all(each.limit != RULE for each in found.already)
    broken = next(each for each in found.along[0].breaks if each.limit == RULE)
    assert (broken.holds, broken.breaks) == (16, 32)


def test_runs_of_which_one_cannot_be_are_compared_by_a_step() -> None:
    alone = run_of("gpt2", 8, global_batch=60)
    spread = replace(run_of("gpt2", 8, global_batch=64), layout=Layout(shard=8))
    found = tl.compare(spread, alone)
    assert found.of == "one step"
    assert sum(each.b for each in found.times) == nanoseconds(found.forecast_b.step_seconds or 0.0)
    said = " ".join(str(found).split())
    assert "B is impossible without a [layout]: 60 sequences a step cannot be divided evenly among 8 devices" in said
    assert "its step and its tokens/s are of one device alone" in said
    assert "The whole run" not in said
