"""A step described in words, as on a command line or in a lock: what it names is found, built and traced."""

from __future__ import annotations

import json
import shlex
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainledger.ledger.ledger import Ledger
from trainledger.spec.convert.huggingface import no_model_type
from trainledger.spec.durable import content_of
from trainledger.spec.problem import InvalidInput, Problem, nearest_text
from trainledger.trace import target as targets
from trainledger.trace.distributed import trace_rank
from trainledger.trace.loss import check_optimizer, loss_named, optimizer_named
from trainledger.trace.patches import names
from trainledger.trace.script import program_of
from trainledger.trace.target import Inputs, as_wrong_input, input_of, inputs_of, load_target, trace_target

_A_LOSS = "--loss mean, --loss package.module:function, or a loss function that the program returns"


def trace_named(
    module: str = "",
    *,
    hf: str | None = None,
    input: Sequence[str] = (),
    label: str | None = None,
    loss: str | None = None,
    step: str | None = None,
    dtype: str | None = None,
    autocast: str | None = None,
    kernels: str = "cpu",
    checkpointing: Sequence[str] = (),
    grad_accum: int = 1,
    first_step: bool = False,
    assume: Sequence[str] = (),
    world_size: int | None = None,
    rank: int = 0,
    args: str = "",
    blocks: str = "auto",
    field: str = "RUN",
) -> tuple[Ledger, str]:
    """The ledger of a step, and what to call it.

    It is that of ``module`` (``package.module:build``) or of ``hf``, a config.json of Hugging Face; with a
    ``world_size`` that of one ``rank`` of a program, or of a script that is run with ``args``. The rest is as in
    `target.trace_target`, by name. Of a model of transformers the first input without a name is its main one, and a
    loss of its own gets labels. Raises `InvalidInput`, of what is wrong with ``module`` by the name of ``field``.
    """
    target: Any
    of_label = None if label is None else input_of(label, "--label")[1]
    of_dtype = None if dtype is None else targets.floating_dtype_named(dtype, "--dtype")
    of_autocast = None if autocast is None else targets.autocast_dtype_named(autocast, "--autocast")
    of_loss: str | Callable[..., Tensor] | None = loss
    if loss and ":" in loss:
        found: Any = load_target(loss, "--loss")
        of_loss = found
    shared: dict[str, Any] = {"step": step, "loss": of_loss, "label": of_label, "kernels": kernels, "field": field}
    shared |= {"first_step": first_step, "assume": assume}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the trace is partial", RuntimeWarning)  # the ledger says it
        if world_size is not None:
            _refuse_in_a_world(
                hf=hf, autocast=autocast, dtype=dtype, grad_accum=grad_accum, checkpointing=tuple(checkpointing)
            )
            is_script = module.endswith(".py") and ":" not in module
            target = program_of(module, shlex.split(args)) if is_script else load_target(module, field)
            ledger = trace_rank_target(
                target, world_size=world_size, rank=rank, inputs=inputs_of(input), named=module, **shared
            )
            return ledger, f"rank {rank} of {world_size:,} of {module}"
        if args:
            rule = "are those of a script that runs as a rank of a world"
            raise InvalidInput([Problem("--args", args, rule, "--world-size 8")])
        notes: tuple[str, ...] = ()
        if hf is not None:
            target = model = model_of_config(hf, dtype=of_dtype)
            given = inputs_of(input, main=getattr(model, "main_input_name", "input_ids"))
            inputs, title = completed(model, given), f"{type(model).__name__} of {hf}"
            if isinstance(inputs, dict) and "labels" in inputs and "labels" not in given:
                notes += (f"labels of shape {list(inputs['labels'].shape)} are given to it, as it is trained",)
        else:
            target, title, inputs = load_target(module, field), module, inputs_of(input)
        of_model: dict[str, Any] = {"dtype": of_dtype, "autocast": of_autocast, "blocks": blocks}
        shared |= {"named": title if hf is None else "", "checkpointing": checkpointing, "grad_accum": grad_accum}
        ledger = trace_target(target, inputs=inputs, **of_model, **shared)
    return replace(ledger, notes=(*notes, *ledger.notes)), title


def _refuse_in_a_world(**asked: object) -> None:
    """Raise InvalidInput for what a program of many ranks says itself."""
    for name, value in asked.items():
        if value not in (None, 1, ()):
            rule = "cannot be given with a world: the program does it itself, as under torchrun"
            raise InvalidInput([Problem("--" + name.replace("_", "-"), value, rule)])


def trace_rank_target(
    program: Any,
    *,
    world_size: int,
    rank: int = 0,
    inputs: Inputs = (),
    step: str | None = None,
    loss: str | Callable[..., Tensor] | None = None,
    label: Tensor | None = None,
    field: str = "RUN",
    named: str = "",
    **options: Any,
) -> Ledger:
    """The ledger of one rank's step (`trace_rank`), with words for what the program does not return.

    ``inputs``, ``loss`` and ``step``, the name of an optimizer, are as in `target.trace_target`; the other options
    those of `trace_rank`. Raises InvalidInput.
    """
    if label is not None:
        rule = "cannot be given with a world: let the program return a loss that has its labels"
        raise InvalidInput([Problem("--label", str(tuple(label.shape)), rule)])
    if step == "forward":
        rule = "a rank of a world takes a whole step"
        raise InvalidInput([Problem("--step", step, rule, "backward, or an optimizer such as adamw")])
    if not callable(program):
        raise InvalidInput(
            [Problem(field, named or type(program).__name__, "must be a function that is called without arguments")]
        )
    optimizer = None
    if step not in (None, "", "backward"):
        name = step
        check_optimizer(name)

        def optimizer(parameters: Any) -> torch.optim.Optimizer:
            return optimizer_named(name, parameters)

    with as_wrong_input(field, "the program", _A_LOSS):
        options |= {"batch": inputs or None, "loss": loss_named(loss, None), "optimizer": optimizer}
        return trace_rank(program, world_size=world_size, rank=rank, **options)


_LONGEST_DEFAULT = 2048  # tokens of a sequence where nothing is said
# Sizes under the names that families have for them, each at least one.
_SIZES = names("""
    hidden_size d_model n_embd vocab_size num_hidden_layers num_layers n_layer n_layers num_decoder_layers
    encoder_layers decoder_layers num_attention_heads num_heads n_head n_heads num_key_value_heads
    max_position_embeddings n_positions
""")
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
        config_json: Any = json.loads(content_of(file))
    except OSError as error:
        raise InvalidInput([Problem("--hf", path, f"cannot be read: {error.strerror or error}")]) from error
    except ValueError as error:
        raise InvalidInput([Problem("--hf", path, f"is no JSON: {error}")]) from error
    except RecursionError:
        raise InvalidInput([Problem("--hf", path, "is no configuration: it is nested without end")]) from None
    if isinstance(config_json, dict) and (other := no_model_type(config_json)) is not None:
        raise InvalidInput([other], str(file))
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
