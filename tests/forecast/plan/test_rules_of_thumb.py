"""Rules of thumb against published examples; each is arithmetic that any number-like thing goes through."""

import csv
import doctest
from pathlib import Path

import pytest

from trainledger.ledger import rules_of_thumb as rules
from trainledger.ledger.core.graph import Leaf
from trainledger.ledger.optimizers.states import state_nbytes_of
from trainledger.spec.parts import from_fields
from trainledger.spec.recipe import Recipe

with open(Path(__file__).parents[3] / "tools/published" / "worked_examples.csv", newline="", encoding="utf-8") as file:
    EXAMPLES = {row["id"]: row for row in csv.DictReader(file)}


def test_the_examples_in_the_docstrings_hold():
    failed, tried = doctest.testmod(rules)
    assert tried >= 9
    assert failed == 0


# Each worked example that a rule answers, as the rule is called. `published` is compared where the
# example's verdict is that it holds, `our_value` always.
CALLS = {
    "flops_70b": lambda: rules.training_flops(70e9, 15e12),
    "flops_gpt3": lambda: rules.training_flops(175e9, 300e9),
    "flops_300b": lambda: rules.training_flops(1.28e9, 300e9),
    "days_70b": lambda: rules.training_seconds(rules.training_flops(70e9, 15e12), 1024, 1979e12 / 2, 0.5) / 86400,
    "days_70b_88": lambda: rules.training_seconds(rules.training_flops(70e9, 15e12), 1024, 1979e12 / 2, 0.5) / 86400,
    "days_1_28b": lambda: rules.training_seconds(rules.training_flops(1.28e9, 300e9), 8, 989e12, 0.5) / 86400,
    "static_70b": lambda: rules.static_nbytes(70 * 10**9, "fp32-adamw") / 1e9,
    "static_1_28b": lambda: rules.static_nbytes(1.28e9, "fp32-adamw") / 1e9,
    "fit_8h100_16b": lambda: 8 * 80e9 / rules.STATES["fp32-adamw"].bytes_per_parameter,
    "fit_8h100_12b": lambda: 8 * 80e9 / rules.STATES["bf16-fp32-moments-adamw"].bytes_per_parameter,
    "params_1_2b": lambda: rules.block_parameters(2048, 24),
    "params_1_28b": lambda: rules.block_parameters(2048, 24) + 32000 * 2048,
    "params_150m": lambda: rules.block_parameters(1024, 12),
    "forward_per_token": lambda: rules.forward_flops_per_token(1.28e9) / 1e9,
}


@pytest.mark.parametrize("name", sorted(CALLS))
def test_worked_examples(name):
    example, answer = EXAMPLES[name], CALLS[name]()
    assert answer == pytest.approx(float(example["our_value"]), rel=1e-3)
    published = example["published_value"]
    if example["verdict"] == "holds" and " to " not in published:
        assert answer == pytest.approx(float(published), rel=0.04)
    if example["verdict"] == "wrong":
        assert answer != pytest.approx(float(published), rel=0.04)


def test_bytes_per_parameter_of_the_optimizers():
    published = {"fp32-sgd": 8, "fp32-momentum": 12, "fp32-adamw": 16, "bf16-fp32-moments-adamw": 12}
    published |= {"bf16-master-adamw": 16, "bf16-master-fp32-gradients-adamw": 18, "bf16-adamw": 8}
    published |= {"fp32-8bit-adamw": 10, "bf16-8bit-adamw": 10, "fp32-amsgrad": 20, "fp32-centred-rmsprop": 20}
    published |= {"fp32-lion": 12, "fp32-muon": 12, "fp32-adafactor": 8}
    assert {name: rules.STATES[name].bytes_per_parameter for name in published} == published


# The account's own optimizer of each state recipe, where its parameters and gradients are fp32.
SAME = {
    "fp32-adamw": {"optimizer": "adamw"}, "fp32-8bit-adamw": {"optimizer": "adamw-8bit"},
    "fp32-amsgrad": {"optimizer": "adamw", "optimizer.amsgrad": True}, "fp32-momentum": {"optimizer": "momentum"},
    "fp32-centred-rmsprop": {"optimizer": "rmsprop", "optimizer.momentum": 0.9, "optimizer.centered": True},
    "fp32-lion": {"optimizer": "lion"}, "fp32-muon": {"optimizer": "muon"},
    "fp32-adafactor": {"optimizer": "adafactor"}, "fp32-sgd": {"optimizer": "sgd"},
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_of_a_large_matrix_the_rule_is_nearly_what_the_account_says(name):
    """What each leaves out (block scales, rows and columns, step counters) is under 2 % of all."""
    leaf = Leaf("up_proj.weight", (8192, 8192))
    recipe = from_fields(Recipe, {"seq_len": 8, "global_batch": 1, "steps": 1, **SAME[name]})
    counted = 8 + state_nbytes_of(leaf, recipe) / leaf.elements
    assert rules.STATES[name].bytes_per_parameter == pytest.approx(counted, rel=0.02)
    assert counted >= rules.STATES[name].bytes_per_parameter


def test_every_rule_and_state_names_its_source():
    for each in (*rules.RULES.values(), *rules.STATES.values()):
        assert len(each.source) > 10, each.name


def test_rules_take_symbols_and_arrays():
    sympy = pytest.importorskip("sympy")
    numpy = pytest.importorskip("numpy")
    n, d, layers, t = sympy.symbols("N D L T", positive=True)
    assert rules.training_flops(n, d) == 6 * n * d
    assert sympy.simplify(rules.tokens_of_flops(rules.training_flops(n, d), n) - d) == 0
    assert sympy.simplify(rules.parameters_of_flops(rules.training_flops(n, d), d) - n) == 0
    assert rules.attention_flops_per_token(layers, d, t) == 12 * layers * d * t
    optimal = rules.compute_optimal_parameters(rules.training_flops(n, rules.compute_optimal_tokens(n)))
    assert float(sympy.simplify(optimal / n)) == pytest.approx(1)
    assert rules.block_parameters(numpy.array([1024, 2048]), 12).tolist() == [150994944, 603979776]
