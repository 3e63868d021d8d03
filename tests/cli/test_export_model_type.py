"""`import` and `export` from the command line, for model types beside the first of the list."""

import json
import os

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers

from trainledger.cli import main

SIZES = {
    "vocab_size": 29, "hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 20,
    "num_key_value_heads": 2, "pad_token_id": None, "sliding_window": 5,
}  # fmt: skip


def test_a_model_goes_in_and_out_as_the_type_it_came(tmp_path, capsys):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("phi3", **SIZES)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "hf")
    assert main(["import", str(tmp_path / "hf"), str(tmp_path / "start")]) == 0
    capsys.readouterr()
    written = {}
    for kind in (None, "phi3"):
        out = tmp_path / f"out-{kind}"
        asked = [] if kind is None else ["--model-type", kind]
        assert main(["export", str(tmp_path / "start"), str(out), "--json", *asked]) == 0
        written[kind] = json.loads(capsys.readouterr().out)["model_type"]
        assert json.loads((out / "config.json").read_text())["model_type"] == written[kind]
    assert written == {None: "mistral", "phi3": "phi3"}
    assert (tmp_path / "hf/model.safetensors").stat().st_size == (
        tmp_path / "out-phi3/model.safetensors"
    ).stat().st_size


def test_a_type_that_does_not_express_the_model_is_refused(tmp_path, capsys):
    config = transformers.AutoConfig.for_model("phi3", **SIZES)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "hf")
    assert main(["import", str(tmp_path / "hf"), str(tmp_path / "start")]) == 0
    capsys.readouterr()
    assert main(["export", str(tmp_path / "start"), str(tmp_path / "out"), "--model-type", "llama"]) == 2
    said = capsys.readouterr().err
    assert "llama is no such model" in said
    assert "model.attention.window = 5: here a llama has none" in said
    assert not (tmp_path / "out").exists()
