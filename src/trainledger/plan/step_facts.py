"""What a recipe does in a step beside the costs: how losses are averaged, gradients cut, and moments spread in time."""

from __future__ import annotations

from collections.abc import Iterator

from trainledger.frozen import frozen
from trainledger.ledger.entry import Ledger
from trainledger.ledger.rules_of_thumb import ADAM, averaging_steps
from trainledger.spec.run import Run

PASCANU = "Pascanu et al. 2013, On the difficulty of training recurrent neural networks (arXiv 1211.5063), section 3.2"
WITH_TWO_MOMENTS = ("adam", "adamw", "adam-8bit", "adamw-8bit")


@frozen
class StepFact:
    """One fact: what, its formula, the numbers of this run, and the sentence that they make."""

    what: str
    formula: str
    numbers: tuple[float, ...]
    said: str
    source: str


def step_facts(run: Run, ledger: Ledger) -> tuple[StepFact, ...]:
    """The facts of a run's recipe, counted in its ledger where the ledger has them."""
    return tuple(_facts(run, ledger))


def _facts(run: Run, ledger: Ledger) -> Iterator[StepFact]:
    recipe = run.recipe
    if recipe.optimizer in WITH_TWO_MOMENTS:
        steps = tuple(averaging_steps(each) for each in (recipe.beta1, recipe.beta2))
        said = f"over {steps[0]:,.4g} and {steps[1]:,.4g} steps"
        yield StepFact("moments average", "1 / (1 - beta)", steps, said, ADAM)
    divided = ledger.filter(lambda each: each.phase == "forward" and each.path == "loss" and each.name == "div")
    count = sum(each.times for each in divided)
    if count:
        said = f"loss / {count:,}, for each of {count:,} micro-batches"
        source = "the mean over the batch is the mean of its equal parts' means"
        yield StepFact("micro-batches", "loss / k", (count,), said, source)
    norms = [each for each in ledger if each.phase == "clip" and each.name == "stack"]
    if norms:
        tensors = ledger.filter(lambda each: each.phase == "clip" and each.name.endswith("norm")).entries[-1].flops
        said = f"{len(norms)} norm over all {tensors:,} tensors"
        yield StepFact("gradients are cut by", "sqrt(sum of g^2)", (len(norms), tensors), said, PASCANU)
