"""The memory calculator against the command line, and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from drawn import Drawn
from trainledger.cli import main
from trainledger.spec.problem import InvalidInput
from trainledger.web import answers
from trainledger.web.calculators.memory import MEMORY, completed
from trainledger.web.field import read_query
from trainledger.web.run import words_of

QUERIES = {
    "one device": {"run": "gpt2", "recipe.seq_len": "1024"},
    "sharded": {"run": "llama-3.2-1b", "layout.shard": "8", "recipe.activation_checkpointing": "selective"},
    "tensor and pipeline": {"run": "llama-3.2-1b", "layout.tensor": "2", "layout.pipeline": "2", "accumulation": "4"},
    "flags": {
        "run": "llama-3.2-1b",
        "layout.tensor": "2",
        "layout.sequence_parallel": "true",
        "recipe.compile": "true",
    },
    "experts": {"run": "mixtral-8x7b", "layout.shard": "8", "layout.expert": "8", "recipe.optimizer": "lion"},
}
ERROR = ("error", "where")
MODEL = '[model]\npreset = "gpt2"\n[recipe]\nseq_len = 512\nglobal_batch = 16\nmicro_batch = 2\nsteps = 10\n'


def told(capsys: pytest.CaptureFixture[str], words: list[str]) -> dict:
    """What the command line says as JSON; of a run that does not fit it says so beside the plan."""
    code = main([*words, "--json"])
    found: dict = json.loads(capsys.readouterr().out)
    return found if "forecast" not in found or code == 0 else {name: found[name] for name in found if name not in ERROR}


@pytest.mark.parametrize("name", QUERIES)
def test_the_numbers_are_those_of_the_command_to_paste(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = answers.answer("memory", QUERIES[name])
    assert told(capsys, found["paste"]["command"].split()[1:]) == found["data"]
    headlines = {each["name"]: each["value"] for each in found["headlines"]}
    forecast = found["data"]["forecast"]
    for number in ("device_nbytes", "usable_nbytes", "step_seconds", "mfu"):
        assert headlines[number] == forecast[number]
    assert headlines["headroom_nbytes"] == forecast["usable_nbytes"] - forecast["device_nbytes"]


def test_states_and_saved_activations_are_those_of_the_ledger() -> None:
    query = {"run": "llama-3.2-1b", "layout.shard": "8"}
    found = answers.answer("memory", query)
    headlines = {each["name"]: each for each in found["headlines"]}
    elements = -(-found["data"]["parameters"]["total"] // 8)
    assert headlines["parameters_nbytes"]["value"] == 4 * elements
    assert headlines["parameters_nbytes"]["formula"] == f"elements x bytes each = {elements:,} x 4"
    assert headlines["gradients_nbytes"]["value"] == 4 * elements
    assert headlines["optimizer_state_nbytes"]["value"] >= 8 * elements
    assert headlines["saved_activations_nbytes"]["value"] == found["data"]["forecast"]["kept_nbytes"]


def test_a_pasted_run_file_keeps_its_own_fields(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    text = f'{MODEL}[cluster]\ndevice = "a100-sxm-40gb"\n'
    file.write_text(text)
    found = answers.answer("memory", {"file": text})
    assert found["data"] == told(capsys, ["plan", str(file)])
    seen = answers.view("memory", {"file": text})["fields"]
    assert (seen["cluster.device"]["text"], seen["recipe.seq_len"]["text"]) == ("a100-sxm-40gb", "512")
    spread = answers.answer("memory", {"file": text, "layout.shard": "4"})
    assert spread["data"]["run"]["cluster"]["count"] == 4
    with pytest.raises(InvalidInput, match="a model without a run file"):
        answers.view("memory", {"file": text, "accumulation": "4"})


def test_a_pasted_config_is_a_model() -> None:
    fields = {
        "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 128, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    }  # fmt: skip
    seen = answers.view("memory", {"config": json.dumps(fields)})
    assert seen["tone"] == "good"
    assert seen["fields"]["recipe.seq_len"]["text"] == "256"


def test_a_run_that_does_not_fit_is_an_answer_with_the_numbers_of_the_command_line(capsys):
    query = {"run": "llama-3.1-405b"}
    seen = answers.view("memory", query)
    assert seen["tone"] == "bad"
    assert "trainledger" not in seen["verdict"]  # what to change are buttons
    assert main([*seen["paste"]["command"].split()[1:], "--json"]) == 2
    numbers = "a device needs 6.666 TB and has 85.02 GB usable"
    assert seen["verdict"].startswith(f"Does not fit: {numbers}")
    assert numbers in " ".join(capsys.readouterr().err.split())


def test_the_precision_that_shard_ranks_bring_is_said() -> None:
    def notes(**query: str) -> str:
        return " ".join(
            answers.view("memory", {name.replace("__", "."): text for name, text in query.items()})["notes"]
        )

    assert "The precision is bf16-sharded because there are shard ranks" in notes(layout__shard="8")
    assert "The precision is" not in notes()
    assert "The precision is" not in notes(layout__shard="8", recipe__precision="bf16-mixed")


WRONG = (
    {"layout.tensor": "3"},
    {"recipe.micro_batch": "3", "recipe.global_batch": "4"},
    {"recipe.precision": "bf17", "recipe.seq_len": "many"},
    {"layout.pipeline": "5"},
    {"cluster.device": "h101"},
    {"recipe.optimizer": "muon", "layout.shard": "8", "layout.zero": "1"},
    {"model.n_layers": "0"},
)


@pytest.mark.parametrize("query", WRONG, ids=str)
def test_a_wrong_input_has_the_sentences_of_the_command_line(query, capsys):
    with pytest.raises(InvalidInput) as found:
        answers.view("memory", query)
    asked = completed(read_query(MEMORY.fields, query, any_of_run=True))
    error = told(capsys, [*words_of("plan", asked)])["error"]
    assert [str(each) for each in found.value.problems] == [each["sentence"] for each in error]


def test_micro_batches_of_a_step_are_a_number() -> None:
    with pytest.raises(InvalidInput, match="accumulation = 'many'"):
        answers.view("memory", {"accumulation": "many"})
    with pytest.raises(InvalidInput, match="accumulation = '0': must be between 1 and"):
        answers.view("memory", {"accumulation": "0"})


def test_nothing_is_searched_for() -> None:
    with pytest.raises(InvalidInput, match="ask the calculator of layouts"):
        answers.view("memory", {"layout.auto": "true"})
    with pytest.raises(InvalidInput, match="ask the calculator of layouts"):
        answers.view("memory", {"file": 'layout = "auto"\n' + MODEL})


def test_the_largest_micro_batch_is_that_of_fit() -> None:
    query = {"run": "gpt2", "recipe.seq_len": "1024", "cluster.device": "rtx-4090"}
    seen = answers.view("memory", query | {"largest": "yes"})
    largest = next(each for each in seen["headlines"] if each["name"] == "largest_micro_batch")
    views = [answers.view("memory", query | {"recipe.micro_batch": str(largest["value"] + more)}) for more in (0, 1)]
    assert "(chance 8" in views[0]["verdict"]
    assert views[1]["verdict"].startswith("May fit (chance 6")


def test_a_device_of_unknown_memory_has_no_verdict() -> None:
    seen = answers.view("memory", {"run": "gpt2", "cluster.device": "this-machine", "recipe.seq_len": "1024"})
    assert seen["tone"] == "unknown"
    assert "is not known" in seen["verdict"]


def test_the_table_beside_the_bar_sums_to_what_the_device_needs() -> None:
    drawn = answers.answer("memory", {"run": "gpt2", "recipe.seq_len": "1024"})
    needed = next(each["value"] for each in drawn["headlines"] if each["name"] == "device_nbytes")
    bars = Drawn(drawn["figures"]["Memory of a device at the peak"])
    scale = bars.scale("x")
    assert scale.value(max(each.right for each in bars.boxes)) == pytest.approx(needed / 1e9, abs=scale.pixel)


def test_each_preset_is_answered_without_sympy_and_numpy() -> None:
    code = (
        "import sys; from trainledger.web import answers; from trainledger.web.calculators.memory import MEMORY\n"
        "for query in MEMORY.presets.values(): answers.view('memory', query)\n"
        "print(*{each.split('.')[0] for each in sys.modules})"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"sympy", "numpy", "torch"} & set(found)


def test_the_presets_show_what_fits_and_what_does_not() -> None:
    tones = {answers.view("memory", query)["tone"] for query in MEMORY.presets.values()}
    assert tones == {"good", "bad"}


def test_a_longer_context_gives_the_model_as_many_positions(capsys: pytest.CaptureFixture[str]) -> None:
    found = answers.answer("memory", {"run": "llama-3-8b", "recipe.seq_len": "32768"})
    assert found["data"]["run"]["model"]["max_seq_len"] == 32768
    assert "The model was made for fewer tokens; here it has 32,768 positions." in found["notes"]
    assert told(capsys, found["paste"]["command"].split()[1:]) == found["data"]


def test_the_memory_and_the_nearest_published_runs_stand_first() -> None:
    titles = [each["title"] for each in answers.view("memory", {"layout.shard": "8"})["sections"]]
    assert titles[:3] == ["Memory of the distinct ranks", "Memory line by line", "Nearest published runs"]
