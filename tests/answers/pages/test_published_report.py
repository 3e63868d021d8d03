"""The section of a plan that shows published runs, and the key of its JSON."""

import json

import pytest

import trainledger as tl
from trainledger.answers.pages import published
from trainledger.cli import main
from trainledger.forecast.plan.published import nearest
from trainledger.report.document import Document
from trainledger.report.terminal import text

RUN = ["llama-3-8b", "--device", "h100-sxm", "--count", "8"]
TITAN = [
    "layout.shard=8", "recipe.global_batch=16", "recipe.micro_batch=2", "recipe.activation_checkpointing=selective",
]  # fmt: skip
SETS = [word for each in TITAN for word in ("--set", each)]


@pytest.fixture(scope="module")
def run() -> tl.Run:
    with pytest.warns(UserWarning, match="assuming"):
        return tl.load("llama-3-8b", [*TITAN, "cluster.device=h100-sxm", "cluster.count=8"])


def test_a_row_has_what_was_published_and_what_is_predicted(run: tl.Run) -> None:
    found = nearest(run, 1)
    each = found[0].published
    made = published.table(found)
    assert made.columns[-3:] == ("error", "memory error", "source")
    assert made.rows[0] == (
        "Llama3-8B", "8 x h100-sxm-96gb-500w", "shard 8, selective recompute", each.step_seconds,
        each.predicted_step_seconds, each.error, each.memory_error, "R0002",
    )  # fmt: skip
    assert made.texts()[0][5] == f"{100 * (each.predicted_step_seconds / each.step_seconds - 1):+.1f} %"


def test_errors_are_said_in_one_sentence(run: tl.Run) -> None:
    found = nearest(run)
    sizes = sorted(abs(each.published.memory_error or 0) for each in found)
    said = published.errors(found)
    assert f"; predicted peaks are {100 * sizes[1]:.1f} % off in the median and {100 * sizes[2]:.1f} % at most." in said
    first = found[0].published.error
    assert first is not None
    assert published.errors(found[:1]).startswith(f"Predicted step times are {100 * abs(first):.1f} % off; ")


def test_the_column_of_memory_is_left_out_where_none_is_published() -> None:
    run = tl.load({
        "model": {"preset": "llama-3.1-70b"}, "layout": {"shard": 32, "tensor": 4, "pipeline": 4, "context": 2},
        "recipe": {"seq_len": 8192, "global_batch": 2048, "micro_batch": 1, "steps": 1, "precision": "bf16"},
        "cluster": {"device": "h100-sxm", "count": 1024},
    })  # fmt: skip
    found = nearest(run)
    assert [each.distance for each in found[:2]] == pytest.approx([0, 0], abs=1e-6)  # the same layout in two containers
    assert "memory error" not in published.table(found).columns
    assert "peak" not in published.errors(found)


def test_a_plan_shows_them_within_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", *RUN, *SETS, "--full"])
    section = capsys.readouterr().out.partition("Nearest published runs\n")[2].partition("\n\n")[0]
    assert "R0002       h100-sxm-96gb-500w, not h100-sxm" in section
    assert "pytorch/torchtitan:benchmarks/llama3_h100_202412_torchtitan.md Table" in section
    assert max(map(len, section.splitlines())) <= 80


def test_json_has_them_with_their_errors(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", *RUN, *SETS, "--json"])
    found = json.loads(capsys.readouterr().out)["nearest_published"]
    assert len(found) == 3
    first = found[0]
    assert (first["id"], first["distance"]) == ("R0002", 1)
    assert first["error"] == pytest.approx(first["predicted_step_seconds"] / first["step_seconds"] - 1)
    assert first["memory_error"] == pytest.approx(first["predicted_peak_nbytes"] / first["peak_nbytes"] - 1)


def test_a_plan_of_this_machine_shows_none(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "gpt2", "--device", "this-machine"]
    main(words)
    assert "published" not in capsys.readouterr().out
    main([*words, "--json"])
    assert json.loads(capsys.readouterr().out)["nearest_published"] == []


def test_no_runs_make_no_section() -> None:
    nothing = published.nearest_section(())
    assert nothing.parts == ()
    assert text(Document("", (nothing,))) == ""
