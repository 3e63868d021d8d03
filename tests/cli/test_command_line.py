"""The command line as a person or a program meets it: exit codes, streams, and what is not imported."""

import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from trainledger import __version__, catalog
from trainledger.answers.load import load, model
from trainledger.answers.pages.plain_data import error_json
from trainledger.cli import main
from trainledger.cli.asking import lines
from trainledger.cli.command_line import COMMANDS, question_named
from trainledger.ledger.model.parameters import parameters
from trainledger.report.show import show
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.units import format_count

NAPKIN = ["napkin", "--params", "70B", "--tokens", "15T", "--device", "h100-sxm", "--count", "1024", "--mfu", "0.5"]


def call(capsys, *words):
    code = main(list(words))
    out, err = capsys.readouterr()
    return code, out, err


def test_help_lists_every_verb(capsys):
    code, out, err = call(capsys)
    assert (code, err) == (0, "")
    assert all(f"  {verb:<16} {does}" in out for verb, (_, does, _) in COMMANDS.items())
    assert max(len(line) for line in out.splitlines()) <= 80
    assert call(capsys, "--help") == (0, out, "")
    assert call(capsys, "--version") == (0, f"trainledger {__version__}\n", "")


@pytest.mark.parametrize(
    ("verb", "nearest"), [("napkn", "; nearest: napkin"), ("trian", "; nearest: train"), ("xyzzy", "")]
)
def test_an_unknown_verb_brings_the_nearest(capsys, verb, nearest):
    code, out, err = call(capsys, verb)
    assert (code, out) == (2, "")
    assert err.splitlines()[0] == f"trainledger has no verb '{verb}'{nearest}"


def answer_of(out):
    """What a program reads: one JSON document and nothing else."""
    return json.loads(out, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


@pytest.mark.parametrize(
    "words",
    [["--version", "--json"], ["--json", "--version"], ["--json"], ["--help", "--json"], ["plan", "-h", "--json"]],
)
def test_what_is_no_verb_is_json_as_well(capsys, words):
    code, out, err = call(capsys, *words)
    assert (code, err) == (0, "")
    answer = answer_of(out)
    assert answer == {"version": __version__} or "usage" in answer["help"] or "Exit codes" in answer["help"]


@pytest.mark.parametrize("words", [["napkn", "--json"], ["--json", "napkn", "--params", "1B"]])
def test_an_unknown_verb_is_json_as_well(capsys, words):
    code, out, err = call(capsys, *words)
    assert code == 2
    (problem,) = answer_of(out)["error"]
    assert problem["sentence"] == "trainledger has no verb 'napkn'; nearest: napkin" == err.splitlines()[0]


def test_a_failure_of_the_system_is_json_as_well(capsys, tmp_path):
    name = tmp_path / ("x" * 300)  # longer than any file system takes
    code, out, err = call(capsys, "init", str(name), "--json")
    assert code == 1
    (problem,) = answer_of(out)["error"]
    assert "File name too long" in problem["sentence"]
    assert problem["sentence"] == err.strip()


def test_json_comes_before_or_after_the_verb(capsys):
    assert answer_of(call(capsys, "--json", *NAPKIN)[1]) == answer_of(call(capsys, *NAPKIN, "--json")[1])


def test_numbers_that_json_has_no_word_for_are_null(capsys):
    show(lines("", {"a": [float("inf"), 1.5], "b": {"c": float("nan")}, "d": Path("x")}), as_json=True)
    assert answer_of(capsys.readouterr().out) == {"a": [None, 1.5], "b": {"c": None}, "d": "x"}


@pytest.mark.parametrize("verb", ["napkin", "init", "catalog"])
def test_each_verb_explains_itself(capsys, verb):
    with pytest.raises(SystemExit) as caught:
        main([verb, "--help"])
    assert caught.value.code == 0
    assert "--json" in capsys.readouterr().out


# napkin


def test_napkin_prints_the_answer_with_its_formulas(capsys):
    code, out, err = call(capsys, *NAPKIN, "--full")
    assert (code, err) == (0, "")
    assert max(len(line) for line in out.splitlines()) <= 80
    flat = " ".join(out.split())
    for part in (
        "143.9 days", "C = 6 N D", "6 x 7e10 x 1.5e13 = 6.3e24 FLOP", "6.3e24 / (1024 x 9.895e14 x 0.5) /",
        "1024 x 143.9 x 24", "4 + 4 + 4 + 4 = 16 1,120 GB 14", "arXiv 2001.08361", "x 80 GB",
    ):  # fmt: skip
        assert part in flat, part


def test_napkin_as_json(capsys):
    code, out, _ = call(capsys, *NAPKIN, "--json", "--price", "2")
    answer = json.loads(out)
    assert code == 0
    assert {"flops", "days", "device_hours", "static_nbytes", "devices_for_static"} <= set(answer)
    assert answer["flops"] == 63 * 10**23
    assert round(answer["days"], 1) == 143.9
    assert answer["static_nbytes"]["fp32-adamw"] == 1120 * 10**9
    assert answer["devices_for_static"]["fp32-adamw"] == 14
    assert answer["bytes_per_parameter"]["fp32-adamw"] == 16
    assert answer["money"] == pytest.approx(2 * answer["device_hours"])
    assert {"flops", "days", "device_hours", "money"} <= set(answer["formulas"])
    assert all(each["numbers"] and each["source"] for each in answer["formulas"].values())


def test_wrong_input_is_a_sentence_and_code_2(capsys):
    code, out, err = call(capsys, *NAPKIN[:-1], "1.5")
    assert (code, out) == (2, "")
    assert err == "mfu = '1.5': is a share of the peak, above 0 and at most 1; nearest that works: 1\n"


def test_wrong_input_for_a_program_is_json_as_well(capsys):
    code, out, err = call(capsys, *NAPKIN[:-1], "1.5", "--json")
    assert code == 2
    (problem,) = json.loads(out)["error"]
    assert problem["sentence"] == err.strip()
    assert str(Problem(*(problem[name] for name in ("field", "value", "rule", "nearest")))) == problem["sentence"]
    assert (problem["field"], problem["value"], problem["nearest"], problem["where"]) == ("mfu", "1.5", 1, "")


def test_the_nearest_is_a_number_where_it_is_one(capsys):
    (problem,) = json.loads(call(capsys, "explain", "memory", "gpt2", "--stage", "3", "--json")[1])["error"]
    rule = "must be below layout.pipeline = 1, counted from 0"
    assert problem == {
        "field": "--stage", "value": 3, "rule": rule, "nearest": 0,
        "sentence": f"--stage = 3: {rule}; nearest that works: 0", "where": "",
    }  # fmt: skip


def test_any_value_of_an_input_is_reported_as_json(capsys):
    for value, found in (
        ({1: "a"}, "a table"), (10**9999, "a number of about 9999 digits"), ((2, [3]), [2, "[3]"]), (object, None),
        (float("nan"), "nan"),
    ):  # fmt: skip
        show(lines("", error_json(InvalidInput([Problem("field", value, "is wrong")]))), as_json=True)
        (problem,) = json.loads(capsys.readouterr().out)["error"]
        assert problem["value"] == (found if value is not object else "<class 'object'>")
        assert problem["nearest"] is None


@pytest.mark.parametrize("words", [["--parms", "70B"], ["--param", "70B"], ["--params"], ["--device", "t4", "extra"]])
def test_wrong_arguments_are_a_sentence_that_points_to_the_help(capsys, words):
    code, out, err = call(capsys, "napkin", *words)
    assert (code, out) == (2, "")
    assert err.startswith("trainledger napkin: ")
    assert err.endswith("trainledger napkin --help lists its arguments\n")
    assert err.count("\n") == 1


def test_a_negative_number_is_read_as_the_value_of_its_flag(capsys):
    code, out, err = call(capsys, "napkin", "--params", "-70B", *NAPKIN[3:])
    assert (code, out) == (2, "")
    assert err == "params = '-70B': must be at least 1; nearest that works: 1\n"
    code, _, err = call(capsys, "napkin", "--params", "-x", *NAPKIN[3:])
    assert (code, "expected one argument" in err) == (2, True)


@pytest.mark.parametrize(
    ("words", "expected"),
    [(["--params", "1e18", "--tokens", "1e18", "--count", "1e18", "--mfu", "1e-6"], 0),
     (["--params", "1e18", "--tokens", "1e18", "--days", "1e-6", "--mfu", "1e-6", "--price", "1e18"], 0),
     (["--params", "1e18", "--tokens", "1e18", "--days", "1e-6", "--count", "1"], 2)],
)  # fmt: skip
def test_napkin_at_its_extremes_fits_80_columns(capsys, words, expected):
    code, out, err = call(capsys, "napkin", "--device", "h100-sxm", *words)
    assert (code, bool(err)) == (expected, expected == 2)
    assert max(len(line) for line in out.splitlines()) <= 80


# init


def test_init_writes_a_file_that_is_a_run(capsys, tmp_path):
    path = tmp_path / "run.toml"
    code, out, _ = call(capsys, "init", str(path))
    assert (code, out) == (0, f"wrote {path}; next: trainledger plan {path}\n")
    run = load(path)
    assert (run.model.name, run.recipe.seq_len, run.data.tokenizer) == ("teach-10m", 256, "bpe")
    assert run.model.tie_embeddings
    assert os.listdir(tmp_path) == ["run.toml"]


@pytest.mark.parametrize("preset", ["gpt2", "llama-3-70b", "teach-gpt-1m"])
def test_init_from_any_preset(capsys, tmp_path, preset):
    path = tmp_path / "run.toml"
    assert call(capsys, "init", str(path), "--preset", preset, "--json")[0] == 0
    assert load(path) == load(tomllib.loads(path.read_text()))
    assert load(path).model.name == preset


def test_init_never_overwrites_unless_forced(capsys, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("precious")
    code, _, err = call(capsys, "init", str(path))
    assert code == 2
    assert "exists already; --force overwrites it" in err
    assert path.read_text() == "precious"
    assert call(capsys, "init", str(path), "--force")[0] == 0
    assert load(path).model.name == "teach-10m"
    assert os.listdir(tmp_path) == ["run.toml"]


def test_init_into_what_is_no_file(capsys, tmp_path):
    code, _, err = call(capsys, "init", str(tmp_path))
    assert code == 2
    assert "is a directory" in err
    code, _, err = call(capsys, "init", str(tmp_path / "no" / "where.toml"))
    assert code == 2
    assert f"there is no directory '{tmp_path / 'no'}'" in err
    code, _, err = call(capsys, "init", "")
    assert (code, err) == (2, "path = '': must not be empty\n")
    assert call(capsys, "init", str(tmp_path / "x.toml"), "--preset", "gtp2")[2].endswith("nearest that works: gpt2\n")
    assert os.listdir(tmp_path) == []


def test_init_by_force_leaves_alone_what_is_no_regular_file(capsys, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    code, out, err = call(capsys, "init", str(fifo), "--force")
    assert (code, out) == (2, "")
    assert "is not a regular file" in err
    assert fifo.is_fifo()
    link = tmp_path / "link"
    link.symlink_to(fifo)
    assert call(capsys, "init", str(link), "--force")[0] == 2
    assert link.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["fifo", "link"]


# catalog


def test_catalog_fits_80_columns_and_names_everything(capsys):
    code, out, _ = call(capsys, "catalog")
    assert code == 0
    assert max(len(line) for line in out.splitlines()) <= 80
    assert "llama-3-8b" in out
    assert "989.5 TFLOP/s" in out


def test_the_catalog_has_active_parameters_where_they_are_fewer(capsys):
    lines = [line.split() for line in call(capsys, "catalog", "models")[1].replace("T max", "T").splitlines()]
    rows: list[list[str]] = []
    for words in lines:
        if len(words) == 1 and rows:  # the rest of a long name
            rows[-1][0] += words[0]
        elif words:
            rows.append(words)
    header = next(words for words in rows if words[:1] == ["model"])
    active = {words[0]: words[header.index("active")] for words in rows if len(words) == len(header)}
    active = {name: count for name, count in active.items() if name.strip("-") and name != "model"}
    counts = {name: parameters(model(name)) for name in catalog.model_names()}
    assert active == {name: format_count(count.active) for name, count in counts.items() if count.active < count.total}


def test_catalog_as_json_has_sources(capsys):
    everything = json.loads(call(capsys, "catalog", "--json")[1])
    assert everything["models"]["gpt2"]["parameters"] == 124439808
    assert all(each["source"] and each["date"] for kind in everything.values() for each in kind.values())
    assert set(json.loads(call(capsys, "catalog", "devices", "--json")[1])) == {"devices"}


def test_catalog_of_one_name(capsys):
    code, out, _ = call(capsys, "catalog", "h100-sxm")
    assert code == 0
    assert "9.895e14" in out
    assert "stas00/ml-engineering" in out
    assert json.loads(call(capsys, "catalog", "gpt2", "--json")[1])["gpt2"]["model"]["d_model"] == 768
    assert list(json.loads(call(capsys, "catalog", "H200", "--json")[1])) == ["h200"]
    assert list(json.loads(call(capsys, "catalog", "H100", "--json")[1])) == ["h100-sxm"]
    assert list(json.loads(call(capsys, "catalog", "meta-llama/Llama-3.1-8B", "--json")[1])) == ["llama-3.1-8b"]
    assert "(a100-sxm-40gb, a100-sxm-80gb)" not in call(capsys, "catalog", "a100-sxm")[2]
    assert "(a100-pcie-40gb, a100-pcie-80gb)" in call(capsys, "catalog", "a100-p")[2]
    assert call(capsys, "catalog", "gpt-2")[2] == "name = 'gpt-2': is not in the catalog; nearest that works: gpt2\n"


# Processes


def python(*words, **options):
    command = [sys.executable, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options)


def test_the_module_is_the_command():
    done = python("-m", "trainledger", *NAPKIN, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert round(json.loads(done.stdout)["days"], 1) == 143.9


def test_a_reader_that_goes_away_is_no_traceback():
    command = [sys.executable, "-c", "from trainledger.cli import main; raise SystemExit(main(['catalog', '--json']))"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
    process.stdout.close()
    errors = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(timeout=60) == 141
    assert errors == ""


def test_a_closed_output_is_no_traceback():
    code = "import os, sys; os.close(1); os.execv(sys.executable, [sys.executable, '-m', 'trainledger', '--version'])"
    done = python("-c", code)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_interrupt_is_one_line_and_code_130():
    code = (
        "import time, trainledger.cli.command_line as cli, sys\n"
        "import trainledger.answers.catalog as verbs\n"
        "from trainledger.answers.question import question\n"
        "@question()\n"
        "def waiting():\n"
        "    print('waiting', flush=True)\n"
        "    time.sleep(60)\n"
        "verbs.catalog = waiting\n"
        "sys.exit(cli.main(['catalog']))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "\ninterrupted\n"


def test_every_verb_has_its_function():
    assert all(question_named(verb).ask.__doc__ for verb in COMMANDS)


@pytest.mark.parametrize("words", [["trace", "gpt2"], ["measure", "machine"], ["measure", "step", "RUN"]])
@pytest.mark.parametrize("output", ["", "no/such.json"])
def test_where_nothing_can_be_written_is_said_before_any_work(capsys, tmp_path, words, output):
    run = tmp_path / "run.toml"
    call(capsys, "init", str(run))
    words = [str(run) if each == "RUN" else each for each in words]
    code, out, err = call(capsys, *words, "--output", str(tmp_path / output) if output else "")
    assert (code, out) == (2, "")
    assert err.startswith("--output = ")
    assert os.listdir(tmp_path) == ["run.toml"]
