"""What `init` and `advise` say of fp32 and bf16 autocast, on machines that were measured or say what they can do."""

from pathlib import Path

import pytest

import trainledger as tl
from trainledger.answers import fast_precision as module
from trainledger.answers.fast_precision import cpu_flags, fast_precision
from trainledger.cli import main
from trainledger.spec.calibration import Calibration, KernelTime, write_calibration

RUN = {"model": {"preset": "teach-10m"}, "recipe": {"seq_len": 256, "global_batch": 16, "steps": 400}}
AMX = "processor : 0\nflags\t\t: fpu sse avx2 avx512f avx512_bf16 amx_bf16 amx_tile\n\nprocessor : 1\nflags : fpu\n"


@pytest.fixture(autouse=True)
def not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRAINLEDGER_CALIBRATION", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "NVIDIA", tmp_path / "no-gpu")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes the processor say what a text says."""

    def put(text: str) -> None:
        (tmp_path / "cpuinfo").write_text(text)
        monkeypatch.setattr(module, "CPUINFO", tmp_path / "cpuinfo")

    return put


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Calibrates a machine whose matmuls in bf16 take so many times the seconds of fp32; None: it has none."""

    def put(bf16: float | None) -> None:
        kernels = []
        for dtype, times in (("fp32", 1.0), ("bf16", bf16)):
            if times is None:
                continue
            attention = {"kind": "attention", "dtype": dtype, "shape": (32, 256, 64), "nbytes": 8 * 10**6}
            kernels += [
                KernelTime(kind="matmul", dtype=dtype, shape=(2048, 512, 512), flops=2**30, nbytes=9 * 2**20,
                           seconds=6e-3 * times),
                KernelTime(flops=10**9, seconds=1e-2 * times, **attention),
                KernelTime(flops=25 * 10**8, seconds=3e-2 * times, phase="backward", **attention),
                KernelTime(kind="copy", dtype="fp32", shape=(10**8,), flops=0, nbytes=8 * 10**8, seconds=8e-2),
            ]  # fmt: skip
        machine = Calibration(
            title="a machine", backend="cpu", date="2026-01-02", torch_version="2.13.0", threads=2,
            kernels=tuple(kernels), operation_seconds=5e-6, memory_nbytes=2 * 10**10, storage_bytes_per_second=10**9,
        )  # fmt: skip
        write_calibration(machine, tmp_path / "machine.toml")
        monkeypatch.setenv("TRAINLEDGER_CALIBRATION", str(tmp_path / "machine.toml"))

    return put


def init() -> tuple[str, str]:
    """The precision of a new run file, and its text without the breaks of comments."""
    assert main(["init", "run.toml", "--force"]) == 0
    return tl.load("run.toml").recipe.precision.kind, " ".join(Path("run.toml").read_text().replace("#", " ").split())


def test_a_machine_that_says_nothing_keeps_the_default() -> None:
    assert fast_precision(tl.load(RUN)) is None
    kind, text = init()
    assert kind == "fp32"
    assert "precision" not in text


def test_flags_of_the_first_processor_are_read(says) -> None:
    assert cpu_flags() == frozenset()
    says(AMX)
    assert {"avx2", "amx_bf16"} <= cpu_flags()
    says("Features : fp asimd bf16\n")
    assert cpu_flags() == frozenset()


@pytest.mark.parametrize("flag", ["amx_bf16", "avx512_bf16"])
def test_a_processor_with_matmuls_in_bf16_gets_them(says, flag: str, tmp_path: Path, monkeypatch) -> None:
    says(f"flags : fpu {flag}\n")
    kind, text = init()
    assert kind == "bf16-mixed"
    assert f"this processor multiplies in bf16 ({flag}); trainledger measure machine says" in text
    (note,) = tl.advise(tl.load(RUN), together=0).notes
    assert note.startswith("precision bf16-mixed is probably faster here: this processor multiplies in bf16")
    assert tl.advise(tl.load(RUN, {"recipe.precision": "bf16-mixed"}), together=0).notes == ()
    monkeypatch.setattr(module, "NVIDIA", tmp_path / "cpuinfo")  # a GPU would train it
    assert fast_precision(tl.load(RUN)) is None
    assert fast_precision(tl.load(RUN, {"cluster.backend": "cpu"})) is not None


def test_of_a_device_of_the_catalog_this_machine_says_nothing(says) -> None:
    says(AMX)
    assert fast_precision(tl.load(RUN, {"cluster.device": "h100-sxm"})) is None


def test_a_measured_machine_is_predicted(says, measured) -> None:
    says(AMX)
    measured(0.25)
    fast = fast_precision(tl.load(RUN))
    fp32, mixed = (tl.predict(tl.load(RUN, {"recipe.precision": each})).step_seconds for each in ("fp32", "bf16-mixed"))
    assert fast.kind == "bf16-mixed"
    assert 1.2 < fast.gain == fp32 / mixed < 4  # all but the matmuls takes as long as before
    kind, text = init()
    assert kind == "bf16-mixed"
    assert f"bf16 autocast is predicted to be {fast_precision(tl.load('run.toml')).gain:.2g} times as fast" in text
    advice = tl.advise(tl.load(RUN), together=0)
    (ours,) = (each for each in advice.alone if each.sets == ("recipe.precision=bf16-mixed",))
    assert ours.faster == pytest.approx(1 - mixed / fp32, rel=0.05)  # of a step; that is of the whole run
    assert advice.notes == ()


def test_where_bf16_is_slow_fp32_stays(says, measured) -> None:
    says(AMX)  # what was measured counts more
    measured(3.0)
    kind, text = init()
    assert kind == "fp32"
    assert "times as fast on this machine" in text
    advice = tl.advise(tl.load(RUN, {"recipe.precision": "bf16-mixed"}), together=0)
    (ours,) = (each for each in advice.alone if each.sets == ("recipe.precision=fp32",))
    assert ours.faster > 0.2


def test_where_bf16_was_not_worth_timing_fp32_stays(measured) -> None:
    measured(None)
    assert init()[0] == "fp32"
    (note,) = tl.advise(tl.load(RUN, {"recipe.precision": "bf16-mixed"}), together=0).notes
    assert "precision fp32 is probably faster here: this machine was measured" in note


def test_a_run_that_goes_with_one_precision_alone_gets_no_note(says) -> None:
    says(AMX)
    tuned = {"recipe.precision": "bf16", "recipe.lora.rank": 4, "recipe.lora.base_format": "bf16"}
    assert tl.advise(tl.load(RUN, tuned), together=0).notes == ()
