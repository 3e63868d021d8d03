"""`reconcile --trace` as a person types it: text, JSON, a page, and what is refused."""

import json
from pathlib import Path

import pytest

from trainledger.cli import main

TRACE = Path(__file__).parents[1] / "observe" / "profiler" / "traces" / "h100_qwen_forward.json.gz"


@pytest.fixture
def asked(tmp_path, monkeypatch, capsys):
    """Exit code, output and errors of a command in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        code = main(["reconcile", *words])
        return code, *capsys.readouterr()

    return run


def test_it_says_where_the_time_went_and_writes_a_page(asked, tmp_path):
    code, out, err = asked("--trace", str(TRACE), "--html", "step.html")
    assert code == 0, err
    assert "HFU 17.4 %" in out
    assert "elementwise" in (tmp_path / "step.html").read_text()
    assert "<script" not in (tmp_path / "step.html").read_text()


def test_json_has_the_same_numbers(asked):
    found = json.loads(asked("--trace", str(TRACE), "--json")[1])
    assert sum(found["parts_ns"].values()) == found["steps"][0]["nanoseconds"]
    assert found["device"] == "h100-sxm"


def test_the_forecast_of_its_run_stands_beside_a_trace(asked):
    trace = TRACE.parents[1] / "gpu_steps" / "gpt2_compiled.json.gz"
    fields = ("recipe.seq_len=1024", "recipe.global_batch=16", "recipe.precision=bf16-mixed", "recipe.compile=true")
    sets = [word for each in (*fields, "cluster.device=h200") for word in ("--set", each)]
    code, out, err = asked("--trace", str(trace), "--run", "gpt2", *sets, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert sum(each["measured_ns"] for each in found["beside"]) == round(found["step_seconds"] * 1e9)
    assert sum(each["nanoseconds"] for each in found["waterfall"]) == round(found["step_seconds"] * 1e9)
    assert all(each["equal"] for each in found["operations"])
    assert found["remedies"][0]["set"] == ["model.vocab_multiple=64"]


def test_two_traces_are_compared(asked):
    code, out, err = asked("--trace", str(TRACE), "--against", str(TRACE.parent / "a100_ddp_2ranks.json.gz"))
    assert code == 0, err
    assert "host too late: 159.5 ms less" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--trace", "nothing.json"), "--trace = 'nothing.json': cannot be read: No such file or directory"),
        (("--trace", "."), "has no traces (*.json, *.json.gz)"),
        (("--trace", str(TRACE), "--set", "recipe.steps=2"), "changes a field of the run; name it with --run"),
        (("--run", "run.toml"), "is for --trace"),
        (("--against", "other.json"), "is for --trace"),
        (("--trace", str(TRACE), "--against", "other.json", "--run", "run.toml"), "cannot be combined with --run"),
        (("--trace", str(TRACE), "--against", "."), "must be one trace, as --trace"),
        (("--trace", str(TRACE), "--run", "run.toml"), "run.toml"),
        (("runs/x", "--trace", "trace.json"), "replaces RUN_DIR; give one of them"),
        ((), "is not a directory; trainledger runs lists those there are"),
        (("--trace", str(TRACE), "--html", str(TRACE)), "html"),
    ],
)
def test_what_is_wrong_is_a_sentence(asked, words, said):
    code, _, err = asked(*words)
    assert code == 2
    assert said in " ".join(err.split())
