"""Ledgers and plans say what they said before the house was rebuilt, but for names (`golden.py` says how)."""

import pytest
from golden_cases import LEDGERS, PLANS, ledger_of

import trainledger as tl
from golden import figures, frozen, ledger_digest, renames
from trainledger.ledger.step import account

WORDS = renames()["words"]
EVERY = 21  # of the ledgers' cases, in the quick tests; `test_every_golden_ledger.py` has them all


@pytest.mark.parametrize("name", list(LEDGERS)[::EVERY])
def test_a_ledger_is_what_it_was(name: str) -> None:
    assert ledger_of(LEDGERS[name], WORDS) == frozen("ledgers")[name]


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_has_the_figures_that_it_had(name: str) -> None:
    names, today = renames()["figures"], figures(PLANS[name])
    found = {_old(path, names): value for path, value in today.items()}
    before = frozen("plans")[name]
    moved = {path: (value, found.get(path)) for path, value in before.items() if found.get(path) != value}
    assert not moved


def _old(path: str, names: dict[str, str]) -> str:
    """The path that a figure had."""
    for now, then in names.items():
        if path == now or path.startswith(now + "/"):
            return then + path[len(now) :]
    return path


def run_of(seq_len: int) -> tl.Run:
    return tl.load({"model": {"preset": "gpt2"}, "recipe": {"seq_len": seq_len, "global_batch": 1, "steps": 1}})


def test_the_digest_of_a_ledger_sees_a_byte_that_moves() -> None:
    run = run_of(64)
    ledger = account(run)
    other = account(run_of(65))
    assert ledger_digest(ledger, {}) == ledger_digest(account(run), {})
    assert ledger_digest(ledger, {})["sha256"] != ledger_digest(other, {})["sha256"]


def test_a_renamed_word_leaves_the_digest_as_it_was() -> None:
    ledger = account(run_of(64))
    assert ledger_digest(ledger, {"forward": "ahead"})["sha256"] != ledger_digest(ledger, {})["sha256"]
