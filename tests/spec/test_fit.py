import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainledger.spec.calibration import (
    Calibration,
    Fit,
    KernelTime,
    append_fit,
    factor_of,
    read_calibration,
    undo_fit,
    write_calibration,
)
from trainledger.spec.problem import InvalidInput

KERNEL = KernelTime(kind="copy", dtype="fp32", shape=(1000,), flops=0, nbytes=8000, seconds=1e-6)
MACHINE = Calibration(
    title="a machine", backend="cpu", date="2026-01-02", torch_version="2.13.0", threads=2, kernels=(KERNEL,)
)
words = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=20)
fits = st.lists(
    st.builds(
        Fit, date=words, runs=st.lists(words, max_size=5).map(tuple), error_before=st.floats(0.001, 9),
        error_after=st.floats(0.001, 9),
        factors=st.dictionaries(st.sampled_from(["forward matmul", "step"]) | words, st.floats(0.1, 10), max_size=4),
    ),
    min_size=1, max_size=4,
)  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("fits") / "machine.toml"


@given(fits)
def test_fits_are_read_in_their_order_and_taken_back_byte_by_byte(path, made):
    write_calibration(MACHINE, path)
    versions = [path.read_bytes()]
    for each in made:
        append_fit(path, each)
        versions.append(path.read_bytes())
    found = read_calibration(path)
    assert found.fits == tuple(made)
    assert found.factors == made[-1].factors
    write_calibration(found, path)
    assert path.read_bytes() == versions[-1]
    for left in reversed(range(len(made))):
        assert undo_fit(path) == left
        assert path.read_bytes() == versions[left]
    with pytest.raises(InvalidInput, match="has no fit to undo"):
        undo_fit(path)


FIT = Fit(date="2026-02-03", runs=("a", "b", "c"), error_before=0.2, error_after=0.1, factors={"forward copy": 2.0})


def test_what_a_person_wrote_into_the_file_stays(path):
    write_calibration(MACHINE, path)
    own = b"# mine\r\n" + path.read_bytes().rstrip(b"\n")  # without a line end at its end
    path.write_bytes(own)
    append_fit(path, FIT)
    assert read_calibration(path).fits == (FIT,)
    undo_fit(path)
    assert path.read_bytes() == own


def test_a_fit_that_was_moved_by_hand_is_not_cut_out(path):
    write_calibration(MACHINE, path)
    append_fit(path, FIT)
    path.write_text(path.read_text() + '\n[[kernels]]\nkind = "copy"\n')
    before = path.read_bytes()
    with pytest.raises(InvalidInput, match="the last fit is not at its end"):
        undo_fit(path)
    assert path.read_bytes() == before


def test_a_factor_out_of_bounds_is_a_sentence(path):
    write_calibration(MACHINE, path)
    append_fit(path, FIT)
    path.write_text(path.read_text().replace('"forward copy" = 2.0', '"forward copy" = 200.0'))
    with pytest.raises(InvalidInput, match=r"fits\[0\].factors.forward copy = 200.0: must be 0.1 to 10"):
        read_calibration(path)


def test_the_factor_of_an_operation():
    assert factor_of({"forward matmul": 2.0}, "recompute", "matmul") == 2.0
    assert factor_of({"forward matmul": 2.0}, "backward", "matmul") == 1.0
    assert factor_of({"step": 3.0}, "backward", "matmul") == 3.0


def test_it_is_toml(path):
    write_calibration(MACHINE, path)
    append_fit(path, FIT)
    append_fit(path, FIT)
    assert [each["runs"] for each in tomllib.loads(path.read_text())["fits"]] == [["a", "b", "c"]] * 2
