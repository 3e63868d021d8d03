"""Models of transformers from their configuration alone: the class itself, without weights, and what a step takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import trainledger as tl
from trainledger.spec.problem import InvalidInput
from trainledger.trace.command import completed, model_of_config
from trainledger.trace.target import inputs_of, trace_target

pytestmark = pytest.mark.torch

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
    "max_position_embeddings": 64,
}  # fmt: skip


def written(directory: Path, **fields: Any) -> str:
    path = directory / "config.json"
    path.write_text(json.dumps(fields))
    return str(path)


def test_a_decoder_is_that_of_its_class(tmp_path: Path) -> None:
    model = model_of_config(written(tmp_path, **LLAMA))
    inputs = completed(model, inputs_of(["int64[2,16]"]))
    assert isinstance(inputs, dict)
    assert set(inputs) == {"input_ids", "labels"}
    traced = trace_target(model, inputs=inputs, step="adamw")
    real = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, use_cache=False))  # type: ignore[arg-type]
    batch = {name: torch.zeros(each.shape, dtype=torch.int64) for name, each in inputs.items()}
    with tl.meter(real) as meter:
        real(**batch).loss.backward()
    matmuls = [each for each in traced if each.phase in ("forward", "backward")]
    assert sum(each.flops for each in matmuls) == meter.ledger.flops
    assert traced.kept_nbytes == meter.ledger.kept_nbytes
    assert traced.parameters == sum(each.numel() for each in real.parameters())
    assert traced.partial == ""
    assert any(each.line.startswith("transformers/models/llama/modeling_llama.py:") for each in traced)


def test_what_is_taken_where_nothing_is_said(tmp_path: Path) -> None:
    model = model_of_config(str(Path(written(tmp_path, **LLAMA)).parent), dtype=torch.bfloat16)
    inputs = completed(model, ())
    assert isinstance(inputs, dict)
    assert tuple(inputs["input_ids"].shape) == (1, 64)
    assert model.training
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}


def test_models_of_other_kinds(tmp_path: Path) -> None:
    t5 = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 16, "d_kv": 4, "d_ff": 32,
          "num_layers": 2, "num_heads": 4, "vocab_size": 50}  # fmt: skip
    model = model_of_config(written(tmp_path, **t5))
    both = completed(model, inputs_of(["input_ids=int64[2,8]", "decoder_input_ids=int64[2,5]"]))
    assert isinstance(both, dict)
    assert tuple(both["labels"].shape) == (2, 5)
    assert trace_target(model, inputs=both).partial == ""
    vit = {"model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 16, "image_size": 16,
           "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 8}  # fmt: skip
    model = model_of_config(written(tmp_path, **vit))
    with pytest.raises(InvalidInput, match="ViTForImageClassification takes pixel_values, whose shape is not known"):
        completed(model, ())
    named = completed(model, inputs_of(["pixel_values=fp32[2,3,16,16]", "labels=int64[2]"]))
    assert trace_target(model, inputs=named, step="sgd").partial == ""
    without_class = {key: value for key, value in LLAMA.items() if key != "architectures"}
    assert type(model_of_config(written(tmp_path, **without_class))).__name__ == "LlamaForCausalLM"


def test_configurations_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"is no type of model that transformers .* nearest that works: llama"):
        model_of_config(written(tmp_path, **{**LLAMA, "model_type": "lama"}))
    with pytest.raises(InvalidInput, match="transformers cannot build it"):
        model_of_config(written(tmp_path, **{**LLAMA, "hidden_size": "many"}))
    with pytest.raises(InvalidInput, match="cannot be read"):
        model_of_config(str(tmp_path / "missing.json"))
    (tmp_path / "torn.json").write_text('{"model_type": ')
    with pytest.raises(InvalidInput, match="is no JSON"):
        model_of_config(str(tmp_path / "torn.json"))
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(InvalidInput, match="is no type of model"):
        model_of_config(str(tmp_path / "list.json"))


def test_code_that_a_configuration_points_to_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "modeling_evil.py").write_text("raise SystemExit('ran')")
    auto = {"AutoModelForCausalLM": "modeling_evil.Evil", "AutoConfig": "modeling_evil.EvilConfig"}
    model = model_of_config(written(tmp_path, **LLAMA, auto_map=auto))
    assert type(model).__module__.startswith("transformers.models.llama")


@pytest.mark.parametrize(("field", "value"), [
    ("num_hidden_layers", -1), ("num_hidden_layers", 0), ("hidden_size", -32), ("vocab_size", 0),
    ("num_attention_heads", 0), ("num_key_value_heads", -2), ("max_position_embeddings", 0), ("intermediate_size", -64),
])  # fmt: skip
def test_sizes_that_are_none(tmp_path: Path, field: str, value: int) -> None:
    with pytest.raises(InvalidInput, match=f"{field} = {value}: must "):
        model_of_config(written(tmp_path, **{**LLAMA, field: value}))


def test_sizes_that_are_none_inside_a_configuration_of_several(tmp_path: Path) -> None:
    inner = {**LLAMA, "num_hidden_layers": -1}
    with pytest.raises(InvalidInput, match=r"text_config\.num_hidden_layers = -1: must be at least 1"):
        model_of_config(written(tmp_path, model_type="llava", text_config=inner))


def test_a_file_that_is_nested_without_end(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(InvalidInput, match="nested without end"):
        model_of_config(str(tmp_path / "deep.json"))
