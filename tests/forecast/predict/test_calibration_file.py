import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainledger.spec.calibration import (
    FORMAT,
    KINDS,
    Calibration,
    KernelTime,
    calibration_path,
    find_calibration,
    read_calibration,
    to_device,
    write_calibration,
)
from trainledger.spec.problem import InvalidInput

positive = st.floats(1e-9, 1e15)
words = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=20)
kernel = st.builds(
    KernelTime,
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(["fp32", "bf16"]),
    shape=st.lists(st.integers(1, 2**30), max_size=3).map(tuple),
    flops=st.integers(0, 2**62),
    nbytes=st.integers(1, 2**62),
    seconds=positive,
    phase=st.sampled_from(["", "backward"]),
    others=st.none() | st.just(0.0) | st.floats(1e-6, 8),
)
calibrations = st.builds(
    Calibration,
    title=words,
    backend=st.sampled_from(["cpu", "cuda"]),
    date=words,
    torch_version=words,
    threads=st.integers(1, 512),
    kernels=st.lists(kernel, max_size=4).map(tuple),
    fresh_bytes_per_second=st.none() | positive,
    operation_seconds=positive,
    storage_bytes_per_second=st.none() | positive,
    memory_nbytes=st.none() | st.integers(1, 2**50),
    compute_capability=st.none() | st.sampled_from([8.0, 9.0, 10.3]),
    samples=st.integers(0, 1000),
    discarded=st.integers(0, 1000),
    busy=st.booleans(),
    notes=st.lists(words, max_size=2).map(tuple),
)


@pytest.fixture
def small():
    kernels = (
        KernelTime(kind="matmul", dtype="fp32", shape=(8, 8, 8), flops=1024, nbytes=768, seconds=1e-6),
        KernelTime(kind="matmul", dtype="fp32", shape=(16, 16, 16), flops=8192, nbytes=3072, seconds=2e-6),
        KernelTime(kind="copy", dtype="fp32", shape=(1000,), flops=0, nbytes=8000, seconds=1e-6),
    )
    return Calibration(
        title="a machine", backend="cpu", date="2026-01-02", torch_version="2.13.0", threads=2, kernels=kernels
    )


@given(calibrations)
def test_what_is_written_is_read(tmp_path_factory, calibration):
    path = tmp_path_factory.getbasetemp() / "machine.toml"
    write_calibration(calibration, path)
    assert read_calibration(path) == calibration


def test_the_peak_is_the_best_matmul_and_memory_the_largest_copy(small):
    device = to_device(small)
    assert device.peak_flops_per_second == {"fp32": pytest.approx(8192 / 2e-6)}
    assert device.memory_bytes_per_second == pytest.approx(8e9)
    assert device.basis == "measured"
    assert "2026-01-02" in device.source


def test_every_problem_of_a_damaged_file_is_named(small, tmp_path):
    path = tmp_path / "machine.toml"
    write_calibration(small, path)
    text = path.read_text().replace("threads = 2", 'threads = "two"').replace('kind = "copy"', 'kind = "cpoy"')
    path.write_text(text.replace("backend", "backnd").replace("seconds = 2e-06", "seconds = 0.0"))
    with pytest.raises(InvalidInput) as caught:
        read_calibration(path)
    answer = str(caught.value)
    for sentence in (
        "threads = 'two': must be a whole number",
        "kernels[2].kind = 'cpoy': must be one of matmul, attention",
        "backnd = 'cpu': is not a known field; nearest that works: backend",
        "backend: is missing",
        "kernels[1].seconds = 0.0: must be positive",
    ):
        assert sentence in answer


def test_a_torn_file_is_a_sentence(small, tmp_path):
    path = tmp_path / "machine.toml"
    write_calibration(small, path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(InvalidInput, match="is not TOML"):
        read_calibration(path)


def test_another_format_asks_for_a_new_measurement(small, tmp_path):
    path = tmp_path / "machine.toml"
    write_calibration(small, path)
    path.write_text(path.read_text().replace(f"format = {FORMAT}", "format = 99"))
    with pytest.raises(InvalidInput, match="measure again"):
        read_calibration(path)


def test_where_it_is_looked_for(small, tmp_path, monkeypatch):
    monkeypatch.delenv("TRAINLEDGER_CALIBRATION", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert calibration_path("cuda") == tmp_path / "trainledger" / "machine-cuda.toml"
    assert find_calibration("cpu") is None
    write_calibration(small, calibration_path("cpu"))
    assert find_calibration("cpu") == small
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert calibration_path() == tmp_path / ".cache" / "trainledger" / "machine-cpu.toml"


def test_a_named_file_that_is_not_there_is_an_error_not_an_unmeasured_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINLEDGER_CALIBRATION", str(tmp_path / "absent.toml"))
    with pytest.raises(InvalidInput, match="No such file"):
        find_calibration()


def test_reading_one_needs_neither_torch_nor_numpy(small, tmp_path):
    path = tmp_path / "machine.toml"
    write_calibration(small, path)
    code = (
        "import sys; from trainledger.spec.calibration import read_calibration, to_device\n"
        "import trainledger.forecast.predict.forecast, trainledger.observe.reconcile\n"
        "import trainledger.answers.pages.record\n"
        f"to_device(read_calibration({str(path)!r}))\n"
        "assert not {'torch', 'numpy', 'rich', 'plotly'} & sys.modules.keys(), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_failed_write_leaves_the_old_file(small, tmp_path):
    path = tmp_path / "machine.toml"
    write_calibration(small, path)
    before = path.read_bytes()
    with pytest.raises(TypeError):
        write_calibration(Calibration(**{**vars(small), "title": object()}), path)
    assert path.read_bytes() == before
    assert [each.name for each in Path(tmp_path).iterdir()] == ["machine.toml"]
