"""A model of Hugging Face transformers from its configuration alone: no weights, no network, no foreign code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainledger.spec.problem import InvalidInput, Problem, nearest_text
from trainledger.trace.inputs import Inputs

_LONGEST_DEFAULT = 2048  # tokens of a sequence where nothing is said
# Sizes under the names that families have for them, each at least one.
_SIZES = (
    "hidden_size", "d_model", "n_embd", "vocab_size", "num_hidden_layers", "num_layers", "n_layer", "n_layers",
    "num_decoder_layers", "encoder_layers", "decoder_layers", "num_attention_heads", "num_heads", "n_head", "n_heads",
    "num_key_value_heads", "max_position_embeddings", "n_positions",
)  # fmt: skip
_OF_TEXT = ("ForCausalLM", "ForMaskedLM", "LMHeadModel", "ForConditionalGeneration", "ForPreTraining")


def model_of_config(path: str, *, dtype: torch.dtype | None = None) -> nn.Module:
    """The model class that a config.json names, on the meta device, in training mode and without a cache of keys.

    Raises InvalidInput where the file is no configuration or its type is unknown to the installed transformers.
    Code that a configuration points to (``auto_map``) is not run.
    """
    import transformers
    from transformers import CONFIG_MAPPING

    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        config_json: Any = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput([Problem("--hf", path, f"cannot be read: {error.strerror or error}")]) from error
    except ValueError as error:
        raise InvalidInput([Problem("--hf", path, f"is no JSON: {error}")]) from error
    except RecursionError:
        raise InvalidInput([Problem("--hf", path, "is no configuration: it is nested without end")]) from None
    kind = config_json.get("model_type") if isinstance(config_json, dict) else None
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        known = list(CONFIG_MAPPING.keys())
        rule = f"is no type of model that transformers {transformers.__version__} knows"
        raise InvalidInput([Problem("model_type", kind, rule, nearest_text(str(kind), known), str(file))])
    problems = _invalid_sizes(config_json, str(file))
    if problems:
        raise InvalidInput(problems)
    try:
        config = CONFIG_MAPPING[kind].from_dict(config_json)
        config.use_cache = False
        named = (config_json.get("architectures") or [""])[0]
        chosen = getattr(transformers, str(named), None)
        make = chosen._from_config if chosen is not None else _auto(config)
        with torch.device("meta"):
            model: nn.Module = make(config, **({} if dtype is None else {"dtype": dtype}))
    except InvalidInput:
        raise
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InvalidInput([Problem("--hf", path, f"transformers cannot build it: {first}")]) from error
    return model.train()


def _invalid_sizes(config_json: dict[str, Any], file: str, inside: str = "") -> list[Problem]:
    """Problems of sizes below one, in a configuration and those nested in it."""
    problems = []
    for name, value in config_json.items():
        if isinstance(value, dict) and not inside:
            problems += _invalid_sizes(value, file, f"{name}.")
        elif name in _SIZES and isinstance(value, (int, float)) and value < 1:
            problems.append(Problem(inside + name, value, "must be at least 1", 1, file))
        # Where all is experts some say 0 for the width of an MLP.
        elif name == "intermediate_size" and isinstance(value, (int, float)) and value < 0:
            problems.append(Problem(inside + name, value, "must not be negative", 0, file))
    return problems


def _auto(config: Any) -> Any:
    import transformers

    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModel):
        if type(config) in auto._model_mapping:
            return auto.from_config
    raise InvalidInput([Problem("architectures", None, "the configuration names no class of transformers")])


def completed(model: nn.Module, inputs: Inputs) -> Inputs:
    """The inputs that a step of such a model takes, from what was given.

    Without any: one sequence of 2,048 tokens or as many as the model has positions. A single tensor without a name is
    the model's main input, and models of text get labels of its shape, as they are trained.
    """
    main = getattr(model, "main_input_name", "input_ids")
    config: Any = model.config
    if not inputs and main == "input_ids":
        positions = getattr(config.get_text_config(), "max_position_embeddings", None) or _LONGEST_DEFAULT
        length = min(_LONGEST_DEFAULT, positions)
        inputs = (torch.empty((1, length), dtype=torch.int64, device="meta"),)
    if not inputs:
        rule = f"{type(model).__name__} takes {main}, whose shape is not known"
        raise InvalidInput([Problem("--input", None, rule, f"{main}=fp32[8,3,224,224]")])
    if isinstance(inputs, tuple):
        if len(inputs) > 1:
            rule = "must have names where there are several"
            raise InvalidInput([Problem("--input", None, rule, f"{main}=int64[8,2048]")])
        inputs = {main: inputs[0]}
    tokens = inputs.get("decoder_input_ids", inputs.get("input_ids"))
    of_text = type(model).__name__.endswith(_OF_TEXT)
    if tokens is not None and of_text and "labels" not in inputs:
        inputs = {**inputs, "labels": torch.empty(tokens.shape, dtype=torch.int64, device="meta")}
    return inputs
