"""The model calculator against the command line, and what it refuses."""

import json
from pathlib import Path

import pytest

import trainledger as tl
from drawn import Drawn, corners
from trainledger.cli import main
from trainledger.spec.problem import InvalidInput
from trainledger.web import answers
from trainledger.web.calculators.model import MODEL_CALCULATOR, completed
from trainledger.web.field import read_query
from trainledger.web.run import words_of

QUERIES = {
    **MODEL_CALCULATOR.presets,
    "another depth": {"run": "gpt2", "model.n_layers": "7", "recipe.seq_len": "300"},
    "a longer context": {"run": "gpt2", "recipe.seq_len": "4096"},
    "local layers": {"run": "gemma-2-2b", "recipe.seq_len": "2048", "recipe.attention": "flash"},
    "more experts": {"run": "mixtral-8x7b", "model.feed_forward.n_experts": "16"},
}


def told(capsys: pytest.CaptureFixture[str], words: list[str]) -> dict:
    """What the command line says as JSON."""
    main([*words, "--json"])
    found: dict = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("name", QUERIES)
@pytest.mark.long
def test_the_numbers_are_those_of_the_commands(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sympy")
    found = answers.answer("model", QUERIES[name])
    command = found["paste"]["command"].split()[1:]
    data, headlines = found["data"], {each["name"]: each["value"] for each in found["headlines"]}
    said = told(capsys, command)
    assert said["forward_flops"] == data["forward_flops"]
    matmuls = said["parts"][0]
    assert matmuls["title"] == "matmuls and attention"
    by_phase = dict.fromkeys(data["matmul_flops"], 0)
    for each in matmuls["lines"]:
        by_phase[each["what"].rpartition(", ")[2]] += each["flops"]
    assert by_phase == data["matmul_flops"]
    assert sum(data["forward_flops"].values()) == headlines["forward"] == by_phase["forward"]
    shapes = told(capsys, ["explain", "parameters", *command[2:]])
    assert sum(part["parameters"] for part in shapes["parts"]) == data["parameters"]["total"] == headlines["total"]
    assert data["run"] == shapes["run"]


def test_forward_and_backward_are_those_of_the_account() -> None:
    run = tl.load({"model": {"preset": "gpt2"}, "recipe": {"seq_len": 512, "global_batch": 1, "steps": 1}})
    found = answers.answer("model", {"run": "gpt2", "recipe.seq_len": "512"})
    ledger = tl.account(run, backend="cuda")
    assert sum(found["data"]["forward_flops"].values()) == ledger.by("phase", "model_flops")["forward"]
    ratio = next(each for each in found["headlines"] if each["name"] == "backward_to_forward")
    assert ratio["value"] == 2
    assert "kernels run 2.0" in ratio["formula"]


def test_the_sizes_of_a_preset_come_back_and_a_changed_one_is_an_override() -> None:
    seen = answers.view("model", {"run": "mixtral-8x7b"})
    texts = {name: each["text"] for name, each in seen["fields"].items()}
    assert (texts["model.n_layers"], texts["model.feed_forward.n_experts"]) == ("32", "8")
    assert (texts["model.attention.head_dim"], texts["model.feed_forward.expert_d_ff"]) == ("128", "14336")
    assert texts["model.attention.kv_rank"] == ""
    halved = answers.view("model", {"run": "mixtral-8x7b", "model.n_layers": "16"})
    assert halved["fields"]["model.n_layers"]["text"] == "16"
    assert "--set model.n_layers=16" in halved["paste"]["command"]


def test_a_pasted_config_and_a_pasted_run_file_are_models(tmp_path: Path) -> None:
    fields = {
        "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 128, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    }  # fmt: skip
    of_config = answers.answer("model", {"config": json.dumps(fields)})
    assert of_config["data"]["parameters"]["total"] == 2 * 512 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64
    text = 'layout = "auto"\n[model]\npreset = "gpt2"\n[recipe]\nseq_len = 512\nglobal_batch = 64\nsteps = 10\n'
    of_file = answers.answer("model", {"file": text})
    assert of_file["data"]["tokens"] == 512
    assert of_file["data"]["run"]["cluster"]["count"] == 1


def test_the_shares_of_every_drawing_sum_to_all() -> None:
    found = answers.answer("model", {"run": "deepseek-v2-lite"})
    bars, *areas = (Drawn(each) for each in found["figures"].values())
    scale = bars.scale("x")
    assert {round(scale.value(max(each.right for each in bars.boxes)))} == {100}
    assert len(areas) == 3
    for drawn in areas:
        percent, tops = drawn.scale("y"), [style for _, style in drawn.of("path") if style["fill"] != "none"]
        first = corners(tops[0]["d"])[:-2]  # the uppermost layer, without its floor
        assert all(percent.value(y) == pytest.approx(100, abs=percent.pixel) for _, y in first)


def test_scores_are_half_where_it_says() -> None:
    found = answers.answer("model", {"run": "llama-3-8b"})
    half = next(each["value"] for each in found["headlines"] if each["name"] == "half_at")
    there = answers.answer("model", {"run": "llama-3-8b", "recipe.seq_len": str(half)})
    share = next(each["value"] for each in there["headlines"] if each["name"] == "scores_share")
    assert share == pytest.approx(0.5, abs=1e-4)


@pytest.mark.parametrize(
    "query",
    [
        {"model.d_model": "4097"}, {"model.attention.n_kv_heads": "5"}, {"model.n_layers": "none"},
        {"model.feed_forward.n_experts": "8"}, {"recipe.seq_len": "0"},
    ],
    ids=str,
)  # fmt: skip
def test_a_wrong_size_has_the_sentences_of_the_command_line(query, capsys):
    with pytest.raises(InvalidInput) as found:
        answers.view("model", query)
    asked = completed(read_query(MODEL_CALCULATOR.fields, query, any_of_run=True))
    error = told(capsys, [*words_of("explain flops", asked)])["error"]
    assert [str(each) for each in found.value.problems] == [each["sentence"] for each in error]
