"""`trainledger explain` and `trainledger rules` as a person calls them."""

import json
import re

import pytest

from trainledger.answers.cost import account
from trainledger.answers.plan import plan
from trainledger.cli import main
from trainledger.spec.units import format_nbytes, format_seconds


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("what", ["memory", "flops", "parameters"])
def test_lines_fit_a_terminal_and_name_formula_and_source(capsys: pytest.CaptureFixture[str], what: str) -> None:
    out = printed(capsys, "explain", what, "llama-3-8b", "--full")
    assert max(len(line) for line in out.splitlines()) <= 80
    assert "hidden size (model.d_model)" in out
    assert " exact" in out
    told_as_json = json.loads(printed(capsys, "explain", what, "llama-3-8b", "--json"))
    assert told_as_json["symbols"]["L"] == 32
    part = told_as_json["parts"][0]
    assert part["lines"][0]["formula"]
    unit = {"memory": "nbytes"}.get(what, what)
    assert part[unit] == sum(each[unit] for each in part["lines"]) > 0
    assert not {"value", "total"} & {*part, *part["lines"][0]}


@pytest.mark.parametrize("what", ["memory", "time"])
def test_a_step_that_xla_compiles_says_whose_names_its_operations_have(
    capsys: pytest.CaptureFixture[str], what: str
) -> None:
    says = [
        "mm is a dot of XLA" in " ".join(printed(capsys, "explain", what, "gpt2", "--device", device).split())
        for device in ("tpu-v5p", "h100-sxm")
    ]
    assert says == [True, False]


def test_time_on_a_device_and_where_nothing_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "explain", "time", "llama-3-8b", "--set", "cluster.device=h100-sxm", "--full")
    assert re.search(r"FLOPs / rate = [\d.]+ [GTP]FLOP / [\d.]+ TFLOP/s, bound by compute", out)
    assert re.search(r"bytes / rate = [\d.]+ [kMGT]?B / [\d.]+ [MGT]B/s, bound by memory", out)


def test_the_longest_operations_are_reported_and_how_many_more_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["explain", "time", "llama-3-8b", "--device", "h100-sxm"]
    parts = json.loads(printed(capsys, *words, "--json"))["parts"][1:]
    seconds = sorted((line["seconds"] for part in parts for line in part["lines"]), reverse=True)
    for asked, top in ((["--top", "3"], 3), ([], 15)):
        out = printed(capsys, *words, *asked, "--full")
        operations = out.split("\nforward ")[1]
        assert len(re.findall(r"\d+ (?:m|u)?s  assumed$", operations, re.MULTILINE)) == top
        others = f"{len(seconds) - top} others, {format_seconds(sum(seconds[top:]))} in all"
        assert f"\n{others}: --top {len(seconds)} lists every one.\n" in out
        assert all(part["title"] in out for part in parts)
    assert "others" not in printed(capsys, *words, "--full", "--top", str(len(seconds)))
    assert main([*words[:1], "memory", *words[2:], "--top", "3"]) == 2
    assert capsys.readouterr().err == "--top = 3: is of time; of memory every line is printed\n"


def test_what_is_explained_is_named_first_and_a_shared_source_stands_once(capsys: pytest.CaptureFixture[str]) -> None:
    out = " ".join(printed(capsys, "explain", "memory", "gpt2", "--full").split())
    assert out.startswith(
        "2.741 GB of tensors at the peak. gpt2 on this-machine, with the kernels of a CPU: 1 sequence"
    )
    assert out.count("what autograd saves for the backward") == 1
    on = printed(capsys, "rules", "gpt2", "--device", "h100-sxm", "--count", "8")
    assert "\n\ngpt2 on 8 x h100-sxm: 256 sequences" in on


def test_waiting_for_the_program_is_no_unknown_operation(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "explain", "time", "gpt2", "--device", "h100-sxm")
    assert max(len(line) for line in out.splitlines()) <= 80
    row = next(line for line in out.splitlines() if line.startswith("waiting"))
    assert row.split()[:3] == ["waiting", "0", "overhead"]
    assert "unknown" not in out


def test_a_free_size_and_the_memory_that_must_hold_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["explain", "memory", "gpt2-xl", "--symbolic", "B", "--memory", "80GB", "--set", "recipe.precision=fp32",
             "--set", "recipe.attention=math"]  # fmt: skip
    out = printed(capsys, *words)
    assert "peak = " in out
    assert "So at most B = 5 in 80 GB" in out
    assert json.loads(printed(capsys, *words, "--json"))["largest"] == 5
    tokens = printed(capsys, *words[:3], "--symbolic", "T", "--memory", "80GB", *words[7:])
    assert "All 1,024 positions of the model fit in 80 GB" in " ".join(tokens.split())
    none = printed(capsys, *words[:6], "8GB", *words[7:])
    assert "Not even B = 1 fits in 8 GB." in none


@pytest.mark.parametrize(
    ("model", "size", "words"),
    [
        ("gpt2-xl", "B", ["recipe.precision=fp32", "recipe.attention=math"]),
        ("llama-3-8b", "D", []),
        ("gpt2", "B", ["recipe.micro_batch=2", "recipe.global_batch=8", "recipe.activation_checkpointing=full"]),
    ],
)
def test_the_peak_beside_the_sum_of_all(
    capsys: pytest.CaptureFixture[str], model: str, size: str, words: list[str]
) -> None:
    command = ["explain", "memory", model, "--symbolic", size, *(part for each in words for part in ("--set", each))]
    out = " ".join(printed(capsys, *command).split())
    assert not re.search(rf"\d {size}\b", out)  # which would read as a unit

    def value(formula: str, at: int = 65_536) -> int:
        return int(eval(formula.replace(",", "").replace(" x ", "*"), {size: at}))

    peak = re.findall(rf"peak = ([\d,x{size} +]+) \(", out)[-1]
    (whole,) = re.findall(rf"sum = ([\d,x{size} +]+) \(", out)
    (steps,) = re.findall(r"peak = sum(.*?): what is", out)
    parts = re.findall(rf" ([+-]) [a-z ]+ ([\d,]+(?: x {size})?(?: \+ [\d,]+)?)", steps)
    assert value(peak) == value(whole) + sum({"+": 1, "-": -1}[sign] * value(part) for sign, part in parts)
    names = "parameters|optimizer state|batch|buffers|gradients|micro-batches|activations|logits and loss"
    held = re.findall(rf"(?:{names}) = ([\d,]+(?: x {size})?(?: \+ [\d,]+)?)", out)
    assert value(whole) == sum(map(value, held))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["flops", "gpt2", "--symbolic", "B"], "explains memory, not flops"),
        (["memory", "gpt2", "--memory", "80GB"], "goes with --symbolic"),
        (["memory", "gpt2", "--symbolic", "B", "--memory", "80 apples"], "--memory"),
        (["memory", "gpt2", "--symbolic", "B", "--memory", "-5GB"], "must be at least 1;"),
        (["memory", "gpt2", "--symbolic", "b"], "must be one of B, A, T, L, D, F, V"),
        (["colour", "gpt2"], "must be one of memory"),
        (["memory", "gpt7"], "gpt7"),
    ],
)
def test_wrong_words_are_reported(capsys: pytest.CaptureFixture[str], words: list[str], sentence: str) -> None:
    assert main(["explain", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_rules_have_errors_and_conventions_have_sources(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "rules", "llama-3-8b")
    assert max(len(line) for line in out.splitlines()) <= 80
    assert "12 d^2 L + V d" in out
    assert "6nd+attention" in out
    rows = json.loads(printed(capsys, "rules", "llama-3-8b", "--json"))
    assert {"6nd", "6nd+attention", "dense", "causal", "kernels"} == {each["name"] for each in rows["conventions"]}
    assert all(each["source"] for each in rows["conventions"])


def test_time_of_a_layout_names_its_collectives(capsys: pytest.CaptureFixture[str]) -> None:
    """A stage sends 8,192 x 4,096 x 2 bytes; with split_sends a quarter of that, which tensor ranks gather."""
    layout = [f"--set=layout.{each}" for each in ("tensor=4", "pipeline=4", "shard=2")]
    recipe = [f"--set=recipe.{each}" for each in ("global_batch=8", "micro_batch=1", "precision=bf16-sharded")]
    words = ["explain", "time", "llama-3-8b", "--device", "h100-sxm", "--count", "32", *layout, *recipe]
    out = printed(capsys, *words, "--full", "--top", "1e3")
    assert max(len(line) for line in out.splitlines()) <= 80
    joined = " ".join(out.split())
    assert re.search(r"forward recv, between stages [\d.]+ [mu]s assumed times x time of one = 4 x 67.11 MB in", joined)
    split = " ".join(printed(capsys, *words, "--full", "--top", "1e3", "--set", "layout.split_sends=true").split())
    assert re.search(r"forward recv, between stages [\d.]+ [mu]s assumed times x time of one = 4 x 16.78 MB in", split)
    gathers = r"forward all_gather, tensor, 4 ranks [\d.]+ [mu]s assumed times x time of one = 4 x 67.11 MB in"
    assert re.search(gathers, split)
    assert not re.search(gathers, joined)
    parts = json.loads(printed(capsys, *words, "--json"))["parts"]
    sent = next(each for each in parts if each["title"].startswith("communication"))
    assert sent["seconds"] == pytest.approx(sum(each["seconds"] for each in sent["lines"]))
    assert "communication of that rank" not in printed(capsys, "explain", "time", "gpt2", "--device", "h100-sxm")


@pytest.mark.parametrize(
    "words",
    [
        ["llama-3-8b", "--device", "h100-sxm"],
        ["llama-3-8b", "--device", "h100-sxm", "--count", "8", "--set", "layout.pipeline=8",
         "--set", "layout.stage_layers=[3,3,4,4,4,4,5,5]"],
    ],
)  # fmt: skip
def test_memory_is_that_of_the_plan_with_what_is_outside_the_tensors(capsys, words):
    planned = plan(words[0], _sets(words))
    parts = json.loads(printed(capsys, "explain", "memory", *words, "--json"))["parts"]
    peak, outside = (each["nbytes"] for each in parts[-2:])
    assert parts[-1]["title"] == "outside the tensors"
    assert peak + outside == planned.forecast.device_nbytes
    out = printed(capsys, "explain", "memory", *words)
    assert f"In all: {format_nbytes(peak + outside)}, {format_nbytes(peak)} of tensors at the peak and" in out
    if planned.run.layout.pipeline > 1:
        first = json.loads(printed(capsys, "explain", "memory", *words, "--stage", "0", "--json"))["parts"]
        assert first[-2]["nbytes"] <= peak


def _sets(words: list[str]) -> list[str]:
    short = {"--device": "cluster.device=", "--count": "cluster.count=", "--set": ""}
    return [short[flag] + value for flag, value in zip(words[1::2], words[2::2], strict=True)]


def test_the_flops_of_attention_are_those_of_the_account_and_their_convention_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["llama-3-8b", "--device", "h100-sxm", "--set", "recipe.seq_len=8192"]
    rows = json.loads(printed(capsys, "explain", "time", *words, "--json"))["roofline"]
    timed = next(each["flops_per_second"] * each["seconds"] for each in rows if each["kind"] == "attention")
    ledger = account("llama-3-8b", {"recipe.seq_len": 8192}, device="h100-sxm")
    dense = sum(each.flops * each.times for each in ledger if each.kind == "attention")
    assert timed == pytest.approx(dense, rel=1e-9)
    said = "The FLOPs of attention are dense, as in explain flops"
    page = printed(capsys, "explain", "time", *words)
    assert page.startswith("A step takes ")
    assert said in page
    assert said not in printed(capsys, "explain", "time", *words, "--set", "recipe.attention=math")
