"""What does not fit is refused with the least change that does."""

import pytest

from models import sizes
from trainledger.forecast.plan.memory_model import refuse_beyond
from trainledger.ledger.step import account
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields
from trainledger.spec.problem import InvalidInput
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run

MODEL = from_fields(ModelSpec, sizes(V=64, D=32, L=6, H=4, F=64, T=64))


def run(**recipe):
    return Run(model=MODEL, recipe=from_fields(Recipe, {"seq_len": 64, "global_batch": 12, "steps": 1, **recipe}))


def peak(run):
    return account(run).peak().nbytes


def refused(memory_nbytes, **recipe):
    with pytest.raises(InvalidInput) as caught:
        refuse_beyond(run(**recipe), memory_nbytes, peak, "the device")
    return caught.value.problems[0]


def test_what_fits_to_the_byte_is_let_through():
    refuse_beyond(run(), peak(run()), peak, "the device")
    assert refused(peak(run()) - 1).nearest == "recipe.micro_batch=6"


def test_the_nearest_that_fits_is_tried_on_the_closed_form():
    problem = refused(peak(run(micro_batch=3)))
    assert (problem.field, problem.value, problem.nearest) == ("recipe.micro_batch", 12, "recipe.micro_batch=3")
    assert "at the peak of a step, and the device has" in problem.rule
    again = peak(run(micro_batch=1, activation_checkpointing="full"))
    assert again < peak(run(micro_batch=1))
    assert refused(again).nearest == "recipe.micro_batch=1 recipe.activation_checkpointing=full"


def test_where_nothing_fits_there_is_no_nearest():
    problem = refused(1000)
    assert (problem.field, problem.nearest) == ("model", None)
    assert "no micro-batch is small enough" in problem.rule
