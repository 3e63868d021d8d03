"""What memory is for, by the stack that allocated it: the frames say which part of a program ran."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

PARAMETERS, GRADIENTS, STATE, ACTIVATIONS = "parameters", "gradients", "optimizer state", "activations"
LOSS, BACKWARD, BATCH, OTHER = "logits and loss", "backward", "batch", "other"

_OF_OPTIMIZERS = re.compile(r"/torch/optim/|/(apex|bitsandbytes|torchao|deepspeed)/.*(optim|adam)")
_STATES = ("_init_group", "init_state", "_init_state")
_OF_LOSSES = re.compile(r"cross_entropy|nll_loss|log_softmax|_loss$|loss_fn|^loss$", re.IGNORECASE)
_OF_MODULES = re.compile(r"/torch/nn/modules/")
_MADE = ("__init__", "reset_parameters", "_apply", "to_empty", "_initialize_affine_weight")
_RUN = ("forward", "_call_impl", "_wrapped_call_impl")
_OF_DATA = re.compile(r"pin_memory|/utils/data/|send_to_device|_prepare_input", re.IGNORECASE)
_SITES = re.compile(r"/(site|dist)-packages/(?!transformers/)|/lib/python3|^<|^\?\?")


class Origin(NamedTuple):
    """A category of memory, and the line of the program that asked for it, "" where none is known."""

    category: str
    line: str


def origin_of(frames: Sequence[Mapping[str, Any]]) -> Origin:
    """The category of memory that was allocated under these frames, the innermost first.

    Autograd's own threads have no frames of Python: memory without any is what backward made.
    """
    if not frames:
        return Origin(BACKWARD, "")
    files = [str(each.get("filename", "")) for each in frames]
    names = [str(each.get("name", "")) for each in frames]
    return Origin(_category(files, names), _line(frames, files))


def _category(files: Sequence[str], names: Sequence[str]) -> str:
    for file, name in zip(files, names, strict=True):
        if _OF_OPTIMIZERS.search(file):
            return STATE if name in _STATES or any(each in _STATES for each in names) else OTHER
        if _OF_LOSSES.search(name):
            return LOSS
        if name in _RUN:
            return ACTIVATIONS
        if name in _MADE and (_OF_MODULES.search(file) or any(map(_OF_MODULES.search, files))):
            return PARAMETERS
        if name in ("backward", "_engine_run_backward"):
            return BACKWARD
        if _OF_DATA.search(file) or _OF_DATA.search(name):
            return BATCH
    return OTHER


def _line(frames: Sequence[Mapping[str, Any]], files: Sequence[str]) -> str:
    """The innermost line that is no library's, as the last two parts of its path and its number."""
    for each, file in zip(frames, files, strict=True):
        if not _SITES.search(file):
            return f"{'/'.join(file.split('/')[-2:])}:{each.get('line', 0)}"
    return ""
