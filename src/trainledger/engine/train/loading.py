"""Reading a checkpoint into the ranks of a layout, whatever layout has written it.

torch.distributed.checkpoint puts the parts together: it reads the files' headers, and of their bytes those that this
rank holds. Nothing is pickled.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as read_parts

from trainledger.engine.nn.weights import stored_in
from trainledger.engine.train.checkpoint import read_facts
from trainledger.engine.train.guard import GuardRecord
from trainledger.engine.train.mixed_precision import StandIns
from trainledger.engine.train.observer import TrainingState
from trainledger.engine.train.saving import model_tensors
from trainledger.engine.train.tensor_file import FORMATS


def restore(state: TrainingState, path: Path, say: Callable[[str], None]) -> None:
    """Put a checkpoint's tensors and figures in place of those of a run, which may be in the midst of it."""
    _forget_states(state.optimizer)
    facts = load(path, state.model, state.optimizer)
    _take_figures(state, facts)
    if facts["threads"] != torch.get_num_threads():
        threads = f"{facts['threads']} threads and goes on with {torch.get_num_threads()}"
        say(f"{path.name} was made with {threads}: the last bits may differ.")


def take_from(
    model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], facts: Mapping[str, Any], state: TrainingState
) -> None:
    """Put the tensors and figures of another process, which has the whole model as well, in place of those of a run."""
    _forget_states(state.optimizer)
    with torch.no_grad():
        for name, each in model_tensors(state.model).items():
            each.copy_(model[name])
    states: dict[str, dict[str, Tensor]] = {}
    for key, value in optimizer.items():
        kind, _, name = key.partition("/")
        states.setdefault(name, {})[kind] = value
    _put_states(state.model, state.optimizer, states)
    _take_figures(state, facts)


def _take_figures(state: TrainingState, facts: Mapping[str, Any]) -> None:
    if state.scaler is not None:
        state.scaler.restore(facts["loss_scale"])
    for name in ("step", "loss", "validation_loss", "seconds"):
        setattr(state, name, facts[name])
    state.initial_weights = facts.get("initial_weights")
    state.guard = GuardRecord(**facts["guard"])


def _forget_states(optimizer: torch.optim.Optimizer) -> None:
    """Free an optimizer's states, so that they are not in memory twice."""
    optimizer.state.clear()
    if isinstance(optimizer, StandIns):
        optimizer.inner.state.clear()


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Put this rank's part of a valid checkpoint's weights and optimizer state in place, and give its facts."""
    read_into(path, model_tensors(model))
    states = _states(path, _like(model, optimizer))
    read_into(path, {f"{key}/{name}": each for name, own in states.items() for key, each in own.items()})
    _put_states(model, optimizer, states)
    return read_facts(path)


def _put_states(model: nn.Module, optimizer: torch.optim.Optimizer, states: Mapping[str, dict[str, Tensor]]) -> None:
    """Give an optimizer its states, by parameter and state."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    in_order = [names[each] for group in optimizer.param_groups for each in group["params"]]
    by_number = {number: states[name] for number, name in enumerate(in_order) if name in states}
    optimizer.load_state_dict({"state": by_number, "param_groups": optimizer.state_dict()["param_groups"]})


def read_into(path: Path, tensors: dict[str, Tensor]) -> None:
    """Fill tensors by name from the safetensors files of a directory; of a DTensor this rank's part."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        read_parts(dict(tensors), storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)


def _like(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """By parameter, a tensor of which this rank stores as much as of its states."""
    named = dict(model.named_parameters())
    if isinstance(optimizer, StandIns):
        return {name: optimizer.like(each) for name, each in named.items() if each in optimizer.stand_ins}
    return dict(named)


def _states(path: Path, own: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Empty tensors for the stored optimizer state of this rank's parameters, by parameter and state.

    A state with the shape of its parameter is divided among ranks as ``own`` is; others are whole.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for key, stored in stored_in(sorted(path.glob("optimizer*.safetensors"))).items():
        state, _, name = key.partition("/")
        if name not in own:
            continue
        parameter, dtype = own[name].detach(), FORMATS[stored.format]
        alike = tuple(parameter.shape) == stored.shape
        made = torch.empty_like(parameter, dtype=dtype) if alike else torch.empty(stored.shape, dtype=dtype)
        found.setdefault(name, {})[state] = made
    return found
