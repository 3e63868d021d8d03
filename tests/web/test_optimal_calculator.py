"""What a budget is best spent on, on the page and on the command line."""

import json
from math import inf

import pytest

import trainledger as tl
from drawn import marks
from trainledger.answers.pages.optimal_figures import figures, trained_table
from trainledger.cli import main
from trainledger.forecast.plan.optimal import Optimal
from trainledger.forecast.plan.scaling_law import laws
from trainledger.report.chart import Line
from trainledger.spec.problem import InvalidInput
from trainledger.web import answers
from trainledger.web.calculators.optimal import OPTIMAL


@pytest.mark.parametrize("title", OPTIMAL.presets)
def test_the_command_to_paste_gives_the_same_choices(title: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = answers.answer("optimal", OPTIMAL.presets[title])
    assert main([*found["paste"]["command"].split()[1:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(found["data"]))


def test_the_best_of_a_budget_lies_on_its_line_of_flops() -> None:
    answer: Optimal = tl.optimal(flops="1e22", family=None)
    plane = marks(figures(answer)[-1], Line)
    line = next(each for each in plane if each.name.startswith("this budget"))
    assert all(6 * (n or 0) * (d or 0) == pytest.approx(1e22) for n, d in zip(line.xs, line.ys, strict=True))
    best = next(each for each in plane if each.name.startswith("best by"))
    assert 6 * (best.xs[0] or 0) * (best.ys[0] or 0) == pytest.approx(1e22)


def test_lines_of_equal_loss_have_that_loss() -> None:
    answer = tl.optimal(flops="1e22", family=None)
    law = laws()["besiroglu"]
    for each in marks(figures(answer)[-1], Line):
        if each.name.startswith("loss "):
            places = zip(each.xs, each.ys, strict=True)
            losses = [law.loss(n, d) for n, d in places if n is not None and d is not None and d < inf]
            assert max(losses) - min(losses) < 1e-9
            assert f"loss {losses[0]:.3f}" == each.name


def test_chinchilla_is_closer_to_the_best_of_its_cost_than_gpt_3() -> None:
    rows = {row[0]: float(row[6]) for row in trained_table(tl.optimal(flops="1e22", family=None)).rows}
    assert rows["Chinchilla 70B"] < 0.002 < rows["GPT-3 175B"]


def test_a_model_and_a_ratio_at_once_get_the_sentence_of_the_command_line() -> None:
    with pytest.raises(InvalidInput, match="fix the same size: give one of them"):
        answers.view("optimal", {"params": "8B", "ratio": "20"})
