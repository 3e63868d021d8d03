import fcntl
import io
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from html import escape
from pathlib import Path
from types import SimpleNamespace

import pytest
from make_run import STEPS, make_run
from offline import CHROMIUM, opened

from drawn import marks
from trainledger.answers.pages import runs
from trainledger.answers.pages.reconciliation import (
    figures,
    html,
    loss_curve,
    step_time_distribution,
    table_of,
    write_html,
)
from trainledger.answers.pages.record import FILES, read_run
from trainledger.cli import main
from trainledger.report.chart import Area, Band, Bars, Line

pytestmark = pytest.mark.sweep


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "tiny")


@pytest.fixture
def copy(run_dir, tmp_path):
    return Path(shutil.copytree(run_dir, tmp_path / "runs" / "tiny"))


def trainledger(*words):
    """Exit code, output and errors of a command in this process."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = main([str(word) for word in words])
    return SimpleNamespace(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())


# What a directory holds


def test_a_whole_directory_misses_nothing(run_dir):
    record = read_run(run_dir)
    assert record.missing == ()
    assert (len(record.steps), len(record.evaluations)) == (STEPS, 2)
    assert record.predicted_ledger == record.measured_ledger


@pytest.mark.parametrize("name", FILES)
def test_each_file_may_be_missing_or_torn(copy, name):
    whole = (copy / name).read_bytes()
    for content in (None, b"", whole[: len(whole) // 2], b"\x00\xff" * 50, b"[]"):
        (copy / name).unlink(missing_ok=True)
        if content is not None:
            (copy / name).write_bytes(content)
        record = read_run(copy)
        if name not in ("run.toml", "metrics.jsonl") or content is None:
            assert [each for each in record.missing if each.startswith(name)], (name, content)
        str(record.reconciliation)
        html(record)


def test_a_torn_last_line_of_the_metrics_is_passed_over(copy):
    with open(copy / "metrics.jsonl", "a") as file:
        file.write('{"step": 13, "loss": 1.')
    assert len(read_run(copy).steps) == STEPS


def test_lines_that_are_no_metrics_are_passed_over(copy):
    with open(copy / "metrics.jsonl", "a") as file:
        file.write('{"step": "x", "loss": 1}\n{"step": 3, "loss": 1}\n3\nnull\n{"phase_seconds": {"a": "b"}}\n')
    (copy / "measured.json").unlink()
    record = read_run(copy)
    assert len(record.steps) == STEPS
    assert record.measured.step_seconds.count == STEPS - 2  # without measured.json the metrics still tell


# In the terminal


def test_the_table_has_every_quantity_and_fits_80_columns(run_dir):
    shown = str(read_run(run_dir).reconciliation)
    assert all(len(line) <= 80 for line in shown.splitlines())
    for title in ("parameters", "hardware FLOPs", "kept for backward", "peak memory", "allocator's peak", "step time",
                  "tokens per second", "MFU", "total time"):  # fmt: skip
        assert re.search(rf"^{title} ", shown, re.MULTILINE), title
    assert re.search(r"^parameters .* equal +exact$", shown, re.MULTILINE)
    assert "- unexplained" in shown
    assert "half of them lie between" in shown


def test_the_allocators_rest_is_printed_as_unexplained(run_dir):
    rows = {row[0]: row for row in table_of(read_run(run_dir).reconciliation).rows}
    assert rows["allocator's peak"][-1] == "unexplained +4.096 kB"


def test_reconcile_prints_and_writes(copy, tmp_path):
    done = trainledger("reconcile", copy, "--html", tmp_path / "out.html")
    assert done.returncode == 0, done.stderr
    assert "step time" in done.stdout
    assert (tmp_path / "out.html").stat().st_size > 1000
    answer = json.loads(trainledger("reconcile", copy, "--json").stdout)
    row = next(each for each in answer["rows"] if each["quantity"] == "peak_nbytes")
    assert (row["difference"], row["unexplained"], row["ratio"]) == (0, 0, 1.0)


def test_reconcile_of_nothing_is_a_sentence(tmp_path):
    done = trainledger("reconcile", tmp_path / "absent")
    assert (done.returncode, done.stdout) == (2, "")
    assert "is not a directory; trainledger runs lists those there are" in done.stderr
    done = trainledger("reconcile", tmp_path)
    assert done.returncode == 2
    assert "has no run: forecast.json is not there" in done.stderr


def test_runs_lists_whole_and_broken_ones(copy):
    broken = copy.parent / "broken"
    broken.mkdir()
    (broken / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0, "tokens": 64, "seconds": 1.0}\n{"ste')
    (broken / "forecast.json").write_text('{"parameters": ')
    (copy.parent / "no-run").mkdir()
    (copy.parent / "file").write_text("x")
    done = trainledger("runs", "--dir", copy.parent)
    assert done.returncode == 0, done.stderr
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    assert re.search(r"^tiny +finished +12 .* 1\.000 ", done.stdout, re.MULTILINE)
    assert re.search(r"^broken +unknown +1 +1 s", done.stdout, re.MULTILINE)
    assert "forecast.json: is not whole JSON" in " ".join(done.stdout.split())
    assert "no-run" not in done.stdout
    listed = json.loads(trainledger("runs", "--dir", copy.parent, "--json").stdout)["runs"]
    assert {each["run"]: each["step"] for each in listed} == {"broken": 1, "tiny": STEPS}


def test_no_runs_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["runs"]) == 0
    assert main(["runs", "--dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("No runs in") == 2


def test_runs_of_what_is_no_directory_is_wrong_input(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for named, rule in (("file", "is not a directory"), ("absent", "does not exist")):
        assert main(["runs", "--dir", str(tmp_path / named)]) == 2
        assert capsys.readouterr().err.endswith(f"{rule}\n")
    assert main(["runs", "--dir", ""]) == 2


DEEP = "[" * 100_000
LONG = "9" * 400


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("forecast.json", DEEP), ("measured.json", DEEP), ("metrics.jsonl", DEEP), ("state.json", DEEP),
        ("forecast.json", f'{{"parameters": {LONG}, "step_seconds": 1.0}}'),
        ("forecast.json", f'{{"step_seconds": {LONG}, "tokens_per_step": 64, "model_flops": 5}}'),
        ("forecast.json", '{"step_seconds": 5e-324, "peak_flops_per_second": 5e-324, "model_flops": 5}'),
        ("measured.json", f'{{"total_seconds": {LONG}}}'),
        ("metrics.jsonl", f'{{"step": {LONG}, "loss": 1, "tokens": 5, "seconds": 1}}'),
        ("metrics.jsonl", f'{{"step": 1, "loss": {LONG}, "tokens": 5, "seconds": 1e300}}'),
        ("metrics.jsonl", '{"step": 1, "loss": 1, "tokens": 5, "seconds": 1, "phase_seconds": {"forward": null}}'),
        ("state.json", "[]"), ("state.json", '{"state": ["running"]}'), ("state.json", '{"state": {"a": 1}}'),
        ("state.json", f'{{"state": "finished", "unigram_entropy": {LONG}}}'), ("state.json", "\udcff"),
    ],
)  # fmt: skip
def test_one_damaged_run_does_not_hide_the_others(copy, capsys, name, content):
    damaged = Path(shutil.copytree(copy, copy.parent / "damaged"))
    if name == "metrics.jsonl":
        (damaged / "measured.json").unlink()
    (damaged / name).write_bytes(content.encode(errors="surrogateescape"))
    assert main(["runs", "--dir", str(copy.parent), "--json"]) == 0
    listed = {each["run"]: each for each in json.loads(capsys.readouterr().out)["runs"]}
    assert listed["tiny"]["step_seconds_ratio"] is not None
    assert name in str(listed["damaged"]["missing"]) or name in ("metrics.jsonl", "state.json")
    assert main(["runs", "--dir", str(copy.parent)]) == 0
    html(read_run(damaged))


def test_a_file_of_a_run_that_is_a_fifo_is_not_waited_for(copy):
    (copy / "forecast.json").unlink()
    os.mkfifo(copy / "forecast.json")
    assert "forecast.json is not a file" in read_run(copy).missing


# Who holds a lock until its standard input ends, as training holds it until it ends.
HOLD = (
    "import fcntl, sys; lock = open(sys.argv[1], 'a'); fcntl.flock(lock, fcntl.LOCK_EX)\n"
    "print('held', flush=True); input()"
)


def test_a_run_is_running_only_while_a_process_holds_it(copy):
    def state():
        listed = json.loads(trainledger("runs", "--dir", copy.parent, "--json").stdout)["runs"]
        return listed[0]["state"]

    (copy / "state.json").write_text('{"state": "running", "step": 3}')
    assert state() == "killed"  # there is no lock at all
    command = [sys.executable, "-c", HOLD, str(copy / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as training:
        assert training.stdout.readline() == b"held\n"
        assert state() == "running"
        training.kill()
    assert (copy / "lock").exists()
    assert state() == "killed"
    before = (copy / "state.json").read_text()
    assert before == '{"state": "running", "step": 3}'  # looking changes nothing
    (copy / "state.json").write_text('{"state": "interrupted"}')
    assert state() == "interrupted"


def test_looking_lets_go_of_the_lock(copy):
    (copy / "state.json").write_text('{"state": "running"}')
    with open(copy / "lock", "a") as lock:
        assert read_run(copy).state["state"] == "killed"
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert read_run(copy).state["state"] == "running"


@pytest.mark.parametrize("named", ["", "no/where.html", "fifo", "tiny", "tiny/state.json/x.html"])
def test_a_page_is_only_written_where_a_file_can_be(copy, capsys, named):
    os.mkfifo(copy.parent / "fifo")
    before = sorted(copy.parent.rglob("*"))
    code = main(["reconcile", str(copy), "--html", str(copy.parent / named) if named else ""])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("--html = ")
    assert err.count("\n") == 1
    assert sorted(copy.parent.rglob("*")) == before
    assert (copy.parent / "fifo").is_fifo()


# Figures


def test_a_run_has_the_charts_of_its_data(run_dir):
    assert [each.title for each in figures(read_run(run_dir))] == [
        "Memory over one step, predicted", "Memory over one step, measured", "Loss", "Step time", "Time by phase",
        "Forecast: where the time goes",
    ]  # fmt: skip


def test_the_memory_charts_show_the_peak_of_both_sides(run_dir):
    record = read_run(run_dir)
    for chart in figures(record)[:2]:
        (area,) = marks(chart, Area)
        assert max(list(area.sums())[-1]) == pytest.approx(record.forecast.peak_nbytes / 1e3)


def test_the_loss_chart_has_the_unigram_entropy(run_dir):
    chart = loss_curve(read_run(run_dir))
    assert [each.name for each in marks(chart, Line)] == ["training", "validation"]
    assert "3.900" in marks(chart, Band)[0].text


def test_the_steps_are_all_counted_in_the_distribution(run_dir):
    record = read_run(run_dir)
    (bars,) = marks(step_time_distribution(record), Bars)
    assert sum(bars.ends) == len(record.steps)


def test_a_run_without_steps_has_no_curves(copy):
    (copy / "metrics.jsonl").write_text("")
    assert "Loss" not in [each.title for each in figures(read_run(copy))]


# The page


def test_text_of_the_run_cannot_become_markup(copy):
    evil = '</script><img src="http://example.com/x">'
    (copy / "state.json").write_text(json.dumps({"state": evil}))
    page = html(read_run(copy))
    assert evil not in page
    assert "<b>machine" not in page
    assert "&lt;b&gt;machine" in page


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here, so the page was not looked at")


@needs_chromium
def test_the_page_opens_offline_and_draws(run_dir, tmp_path):
    page = tmp_path / "report.html"
    write_html(read_run(run_dir), page)
    shown, asked = opened(page, tmp_path / "profile")
    assert asked == []
    body = shown.partition("</table>")[2]
    assert body.count("<figure>") == 6
    assert body.count("<svg") == 12
    assert body.count("<summary>Every operation of the ") == 2
    assert all(escape(each.name) in body for each in read_run(run_dir).predicted_ledger)
    assert "unigram entropy" in body


@needs_chromium
def test_a_page_that_asks_the_network_would_be_seen_and_the_policy_stops_it(run_dir, tmp_path):
    guarded = html(read_run(run_dir)).replace("</body>", '<img src="http://elsewhere.test/x.png"></body>')
    page = tmp_path / "report.html"
    page.write_text(guarded.replace("Content-Security-Policy", "no-policy"))
    assert any("elsewhere.test" in each for each in opened(page, tmp_path / "first")[1])
    page.write_text(guarded)
    assert opened(page, tmp_path / "second")[1] == []


def test_a_run_that_broke_off_does_not_lack_what_its_end_writes(tmp_path):
    folder = tmp_path / "one"
    folder.mkdir()
    record = read_run(folder, ledgers=False)
    assert "measured.json is not there" in record.missing
    assert "measured.json" not in str(runs.page(tmp_path, [record]).data())
    ended = replace(record, state={"state": "finished"})
    assert "measured.json is not there" in str(runs.page(tmp_path, [ended]).data())
