"""A traced step on a device of the catalog: against the closed form's, and what is said of it."""

import json
from pathlib import Path

import pytest

from trainledger import catalog
from trainledger.answers.load import load
from trainledger.cli import main
from trainledger.forecast.predict.step import on_device, step_time
from trainledger.ledger.entry import Entry
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.step import account
from trainledger.observe.measure.step import rehearse

H100 = catalog.device("h100-sxm")
NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self, width=512):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(self.up(x).relu())
"""


def test_a_traced_step_takes_what_its_closed_form_takes() -> None:
    recipe = {"seq_len": 256, "global_batch": 2, "steps": 1, "precision": "bf16-mixed"}
    run = load({"model": {"preset": "gpt2", "n_layers": 2}, "recipe": recipe})
    answer, closed = on_device(rehearse(run), H100), step_time(account(run), H100)
    assert answer.step.seconds == pytest.approx(closed.seconds, rel=0.01)
    assert answer.dtype == "bf16"
    assert answer.mfu is not None
    assert answer.mfu * answer.step.seconds * answer.peak_flops_per_second == pytest.approx(account(run).model_flops)
    assert sum(each.seconds for each in answer.bars) == pytest.approx(answer.step.seconds, rel=1e-4)
    assert answer.memory.fits
    assert answer.memory.nbytes > account(run).peak().nbytes


def test_what_is_not_timed_is_said_and_its_buffers_count() -> None:
    matmul = Entry("mm", "up", "forward", "matmul", flops=2 * 10**12, model_flops=2 * 10**12, dtype="bf16")
    sent = Entry("all_gather", "up", "forward", "collective", payload=10**9, group="shard", ranks=8)
    alone, among = (on_device(Ledger(entries), H100) for entries in ((matmul,), (matmul, sent)))
    assert among.step.seconds == alone.step.seconds
    assert "1 collectives (1 GB in all) are not timed: a step takes longer by the exposed part of them" in among.notes
    assert {each.name for each in among.memory.lines} - {each.name for each in alone.memory.lines} == {"NCCL buffers"}


def test_a_rate_that_is_not_known_is_said_once_and_memory_is_counted_all_the_same() -> None:
    matmul = Entry("mm", "up", "forward", "matmul", flops=2 * 10**12, model_flops=2 * 10**12, dtype="bf16")
    answer = on_device(Ledger((matmul,)), catalog.device("v100-pcie"))
    assert answer.step.seconds is None
    assert (answer.mfu, answer.hfu, answer.bars, answer.bottleneck) == (None, None, (), None)
    assert answer.notes == (
        "no step time: NVIDIA V100 PCIe 16GB has no peak for bf16 on record (it has fp16, fp32); trainers take fp16 "
        "there: recipe.precision = fp16-mixed",
    )
    assert answer.memory.fits


@pytest.mark.parametrize(
    ("device", "name", "dtype", "runs_in"),
    [
        ("a100-sxm-80gb", "convolution", "fp32", "tf32"),
        ("h100-sxm", "convolution_backward", "fp32", "tf32"),
        ("l4", "convolution", "fp32", "tf32"),
        ("a100-sxm-80gb", "convolution", "bf16", "bf16"),
        ("a100-sxm-80gb", "addmm", "fp32", "fp32"),
        ("v100-sxm-32gb", "convolution", "fp32", "fp32"),
        ("mi300x", "convolution", "fp32", "fp32"),
    ],
)
def test_fp32_convolutions_run_in_tf32_where_cudnn_has_it(device: str, name: str, dtype: str, runs_in: str) -> None:
    entry = Entry(name, "stem", "forward", "matmul", flops=2 * 10**12, model_flops=2 * 10**12, dtype=dtype)
    on = catalog.device(device)
    answer = on_device(Ledger((entry,)), on)
    assert answer.dtype == runs_in
    assert answer.peak_flops_per_second == on.peak_flops_per_second[runs_in]
    assert answer.step.causes["ideal"] == pytest.approx(entry.flops / on.peak_flops_per_second[runs_in])
    assert any("torch.backends.cudnn.allow_tf32" in each for each in answer.notes) == (runs_in == "tf32")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "timed_net.py").write_text(NET)
    return tmp_path


def test_a_device_gives_time_and_memory_with_its_kernels(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["trace", "timed_net:Net", "--input", "fp32[4096,512]", "--loss", "mean", "--autocast", "bf16"]
    assert main([*words, "--device", "h100-sxm"]) == 0
    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines()) <= 80
    joined = " ".join(out.split())
    assert "What it costs on NVIDIA H100 SXM 80GB (assumed: rates of a data sheet or a calibration) step " in joined
    for said in ("steps an hour", "MFU", "memory fits: ", "CUDA context", "bottleneck ", "model FLOPs at the peak"):
        assert said in joined
    assert main([*words, "--device", "h100-sxm", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)["on_device"]
    assert answer["fits"] is True
    assert sum(answer["step_causes"].values()) == pytest.approx(answer["step_seconds"], rel=1e-4)
    assert next(iter(answer["step_causes"])) == "ideal"  # as a plan calls it
    assert answer["device_memory"]["nbytes"] == sum(each["nbytes"] for each in answer["device_memory"]["lines"])
    assert main([*words, "--json"]) == 0
    assert "on_device" not in json.loads(capsys.readouterr().out)


def test_what_does_not_fit_is_the_bottleneck(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["trace", "timed_net:Net", "--input", "fp32[4096000,512]", "--loss", "mean", "--step", "forward"]
    assert main([*words, "--device", "t4"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "memory does NOT fit: " in out
    assert "bottleneck device memory: a device needs " in out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--device", "h100-sxn"], "--device = 'h100-sxn': is not in the catalog"),
        (
            ["--device", "h100-sxm", "--kernels", "cpu"],
            "--kernels = 'cpu': are not those of --device h100-sxm; nearest that works: sm90",
        ),
        (["--device", "mi300x", "--kernels", "sm90"], "--kernels = 'sm90': are not those of --device mi300x"),
    ],
)
def test_devices_that_are_none(here: Path, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "timed_net:Net", "--input", "fp32[8,512]", *words]) == 2
    assert sentence in capsys.readouterr().err
