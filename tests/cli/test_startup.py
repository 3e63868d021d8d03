"""What a verb that only calculates imports, and what stands in for modules that it does not need in full."""

import subprocess
import sys

import pytest

NAPKIN = ["napkin", "--params", "70B", "--tokens", "15T", "--device", "h100-sxm", "--count", "1024", "--mfu", "0.5"]


def python(*words):
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60, check=False)


IMPORTS = """
import sys
from trainledger.cli import main
code = main({words!r})
{more}
heavy = {heavy!r} & set(sys.modules)
assert not heavy, heavy
sys.exit(code)
"""
HEAVY = {"torch", "numpy", "rich", "tokenizers", "plotly"}


@pytest.mark.parametrize("words", [["--help"], ["--version"], NAPKIN, ["catalog"], ["catalog", "--json"]])
def test_light_verbs_import_nothing_heavy(words):
    done = python("-c", IMPORTS.format(words=words, more="pass", heavy=HEAVY))
    assert done.returncode == 0, done.stderr


def test_the_test_of_light_imports_can_fail():
    done = python("-c", IMPORTS.format(words=["--version"], more="import numpy", heavy=HEAVY))
    assert "AssertionError: {'numpy'}" in done.stderr


def test_a_plan_leaves_the_search_of_layouts_and_serving_alone():
    others = {"torch", "trainledger.answers.layouts", "trainledger.answers.inference"}
    words = ["plan", "gpt2", "--set", "cluster.device=h100-sxm"]
    done = python("-c", IMPORTS.format(words=words, more="pass", heavy=others))
    assert done.returncode == 0, done.stderr
