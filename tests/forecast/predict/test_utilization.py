from dataclasses import replace

import pytest

from trainledger import catalog
from trainledger.answers.load import load
from trainledger.forecast.predict.roofline import ridge_of, roofline_table
from trainledger.forecast.predict.step import step_time
from trainledger.ledger.step import account

H100 = catalog.device("h100-sxm")


def rows_of(**recipe):
    run = load({
        "model": {"preset": "llama-3.2-1b"},
        "recipe": {"seq_len": 2048, "global_batch": 2, "steps": 1, "precision": "bf16-mixed", **recipe},
    })  # fmt: skip
    ledger = account(run, backend="cuda")
    step = step_time(ledger, H100)
    return ledger, step, roofline_table(step.entries, H100)


def test_the_rows_hold_all_of_the_step():
    ledger, step, rows = rows_of()
    assert sum(each.seconds for each in rows) == pytest.approx(step.seconds)
    assert sum(each.share for each in rows) == pytest.approx(1)
    assert sum(each.flops for each in rows) == ledger.flops
    assert sum(each.nbytes for each in rows) == ledger.total("read") + ledger.total("written")
    assert [each.seconds for each in rows] == sorted((each.seconds for each in rows), reverse=True)


def test_what_lies_above_its_ridge_is_bound_by_computing():
    _, _, rows = rows_of()
    assert {each.kind for each in rows if each.ridge is not None} == {"matmul", "attention"}
    for each in rows:
        if each.ridge is not None:
            assert each.ridge == pytest.approx(989.5e12 / 3350e9)
            assert (each.intensity > each.ridge) == (each.bound == "compute")
            assert each.flops_per_second < 989.5e12
        else:
            assert each.bound == "memory"
            assert each.bytes_per_second < 3350e9


def test_compiled_blocks_move_fewer_bytes_with_the_same_flops():
    plain, compiled = (rows_of(compile=each)[2] for each in (False, True))
    assert sum(each.flops for each in compiled) == sum(each.flops for each in plain)
    assert sum(each.nbytes for each in compiled) < sum(each.nbytes for each in plain)
    assert sum(each.seconds for each in compiled) < sum(each.seconds for each in plain)


def test_an_unknown_rate_has_no_ridge():
    assert ridge_of(H100, "nvfp4") is None
    assert ridge_of(replace(H100, memory_bytes_per_second=None), "bf16") is None
    assert roofline_table((), H100) == ()
