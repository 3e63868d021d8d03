import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainledger.ledger import ledger as ledger_store
from trainledger.ledger.entry import BASES, CATEGORIES, KINDS, PHASES, Entry
from trainledger.ledger.ledger import Ledger, from_json, read_ledger, to_json, write_ledger
from trainledger.spec.problem import InvalidInput

number = st.integers(0, 2**70)
amounts = st.lists(st.tuples(st.sampled_from(CATEGORIES), number), max_size=3).map(tuple)
entry = st.builds(
    Entry,
    name=st.text(max_size=8),
    path=st.text(max_size=8),
    phase=st.sampled_from(PHASES),
    kind=st.sampled_from(KINDS),
    flops=number,
    model_flops=number,
    read=number,
    written=number,
    kept=number,
    scratch=number,
    allocated=amounts,
    freed=amounts,
    dtype=st.sampled_from(["", "fp32"]),
    shape=st.lists(number, max_size=4).map(tuple),
    fused=st.one_of(st.just(()), st.tuples(number, number, st.integers(0, 1))),
    loop=st.lists(st.tuples(st.text(max_size=3), st.integers(1, 99)), max_size=2).map(tuple),
    payload=number,
    group=st.text(max_size=3),
    seconds=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    basis=st.sampled_from(BASES),
    source=st.text(max_size=8),
)
ledgers = st.builds(
    Ledger,
    entries=st.lists(entry, max_size=4).map(tuple),
    resident=amounts,
    parameters=number,
    tokens=number,
    micro_batches=st.integers(1, 9),
    uncounted=st.lists(st.tuples(st.text(max_size=5), st.integers(1, 9)), max_size=2).map(tuple),
    writer=st.text(max_size=8),
)


@given(ledgers, st.sampled_from(["ledger.json", "ledger.json.gz"]))
def test_a_ledger_survives_its_file(tmp_path_factory, ledger, name):
    path = tmp_path_factory.getbasetemp() / name
    write_ledger(ledger, path)
    assert read_ledger(path) == ledger
    before = path.read_bytes()
    write_ledger(ledger, path)
    assert path.read_bytes() == before


def test_a_torn_file_is_a_sentence_at_any_length(tmp_path):
    path = tmp_path / "ledger.json.gz"
    write_ledger(Ledger((Entry("mm", "", "forward", "matmul", flops=8),)), path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(InvalidInput, match=r"ledger\.json\.gz"):
            read_ledger(path)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"format": 7}, "format = 7: is not a ledger this version reads; nearest that works: 1"),
        ({"format": 1, "entries": [{"name": "x"}]}, "Entry lacks the argument 'path'"),
        ({"format": 1, "entries": [{"nme": "x"}]}, "Entry has no field 'nme'; nearest: 'name'"),
        ({"format": 1}, "is not what trainledger writes"),
        ([1], "is not what trainledger writes"),
    ],
)
def test_something_else_is_a_sentence(tmp_path, content, sentence):
    path = tmp_path / "ledger.json.gz"
    path.write_bytes(gzip.compress(json.dumps(content).encode()))
    with pytest.raises(InvalidInput) as caught:
        read_ledger(path)
    assert sentence in str(caught.value)


def test_a_missing_file_is_a_sentence(tmp_path):
    with pytest.raises(InvalidInput, match="cannot be read: No such file"):
        read_ledger(tmp_path / "absent.json")


def test_a_formula_is_no_run_and_is_not_stored():
    sympy = pytest.importorskip("sympy")
    ledger = Ledger((Entry("mm", "", "forward", "matmul", flops=sympy.Symbol("B")),))
    with pytest.raises(TypeError, match="flops = B of a ledger is not a number"):
        to_json(ledger)


def test_plain_data_goes_through_json_itself():
    ledger = Ledger((Entry("mm", "", "forward", "matmul", allocated=(("scratch", 2**60 + 1),)),))
    assert from_json(json.loads(json.dumps(to_json(ledger)))) == ledger


def test_a_compressed_file_that_expands_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger_store, "LARGEST_NBYTES", 10**6)
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b" " * 10**7))
    with pytest.raises(InvalidInput, match="has more than 1000000 bytes when it is decompressed"):
        read_ledger(path)
