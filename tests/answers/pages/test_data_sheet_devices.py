"""Reports of a device of which only the data sheet is known: bounds are called bounds everywhere."""

from __future__ import annotations

import json

import pytest

from trainledger.cli import main
from trainledger.forecast.predict.device_memory import TENSORS_ALONE

pytestmark = pytest.mark.sweep

ALONE = TENSORS_ALONE[0].upper() + TENSORS_ALONE[1:]
RECIPE = ["--set", "recipe.global_batch=64", "--set", "recipe.micro_batch=1", "--set", "layout.shard=8"]


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*words, "--full"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    return " ".join(out.split())


@pytest.mark.agreement
@pytest.mark.parametrize(("device", "known"), [("mi300x", False), ("tpu-v5p", False), ("h100-sxm", True)])
def test_memory_says_where_nothing_around_the_tensors_is_counted(
    capsys: pytest.CaptureFixture[str], device: str, known: bool
) -> None:
    on = ["gpt2", "--device", device, "--count", "8"]
    plan = said(capsys, "plan", *on, *RECIPE)
    assert (ALONE in plan) is not known
    assert (" GB of tensors alone on the peak rank, of " in plan) is not known
    assert ("Outside the tensors (" in plan) is known
    assert (ALONE in said(capsys, "fit", *on, *RECIPE)) is not known
    serving = said(capsys, "plan", "gpt2", "--device", device, "--phase", "decode", "--context", "512")
    assert (ALONE in serving) is not known
    assert ("outside the tensors not counted" in serving) is not known
    layouts = said(capsys, "layouts", *on, "--set", "recipe.global_batch=64", "--set", "recipe.seq_len=512")
    assert (ALONE in layouts) is not known
    assert main(["plan", *on, *RECIPE, "--json"]) == 0
    basis = json.loads(capsys.readouterr().out)["forecast"]["basis"]["device_nbytes"]
    assert basis == ("assumed" if known else "bound")


@pytest.mark.agreement
@pytest.mark.parametrize(("device", "bound"), [("rtx-5090", True), ("h100-sxm", False)])
def test_times_of_layouts_and_of_a_budget_are_called_bounds(
    capsys: pytest.CaptureFixture[str], device: str, bound: bool
) -> None:
    words = ["layouts", "gpt2", "--device", device, "--count", "8", "--set", "recipe.global_batch=64"]
    out = said(capsys, *words)
    assert ("The quickest that fit by their bounds step" in out) is bound
    assert ("The quickest that fit step" in out) is not bound
    assert ("data sheet: no run is faster, most are slower" in out) is bound
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["basis"] == ("bound" if bound else "assumed")
    paid = said(capsys, "optimal", "--device", device, "--count", "8", "--days", "1")
    assert ("So the budget affords at most " in paid) is bound
    assert ("So the budget affords " in paid.replace("at most ", "")) is True
    assert (", a bound: no run is faster." in paid) is bound
    assert (" at best. " in paid) is bound
    assert TENSORS_ALONE not in paid  # both are NVIDIA's, whose memory is known
