"""Weights in safetensors files: what a file holds, and a model made of it. Pickles are never read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from trainledger.nn.rotary import Rotary
from trainledger.nn.transformer import Transformer
from trainledger.spec.model import ModelSpec
from trainledger.spec.problem import InvalidInput, Problem, shown

FILE = "model.safetensors"
EXACT_IN_FP32 = {"F32": 32, "BF16": 16, "F16": 16}  # safetensors' names of formats that fp32 holds without rounding
_MOST_PROBLEMS = 20


@dataclass(frozen=True)
class Stored:
    """Where a tensor is stored, its shape, and its number format by safetensors' name."""

    path: Path
    name: str
    shape: tuple[int, ...]
    format: str

    def read(self, dim: int = 0, begin: int = 0, end: int | None = None) -> Tensor:
        """The tensor (or its part from ``begin`` to ``end`` along ``dim``) as fp32 with memory of its own."""
        try:
            with safe_open(self.path, framework="pt") as file:
                if end is None:
                    part = file.get_tensor(self.name)
                else:
                    part = file.get_slice(self.name)[(*(slice(None),) * dim, slice(begin, end))]
        except (SafetensorError, OSError) as error:
            raise _damaged(self.path, error) from error
        whole: Tensor = part.to(torch.float32, copy=True)
        return whole


def stored_in(paths: Iterable[Path]) -> dict[str, Stored]:
    """Everything that safetensors files hold, by name; only headers are read."""
    found: dict[str, Stored] = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (no dict)
                    if name in found:
                        rule = f"is also in {found[name].path.name}; one of the two files does not belong here"
                        raise InvalidInput([Problem(shown(name), None, rule)], str(path))
                    part = file.get_slice(name)
                    found[name] = Stored(path, name, tuple(part.get_shape()), part.get_dtype())
        except (SafetensorError, OSError) as error:
            raise _damaged(path, error) from error
    return found


def faults(wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, Stored]) -> Iterator[Problem]:
    """A problem for each tensor that is missing, surplus, of another shape, or in a format that fp32 would round."""
    for name, shape in wanted.items():
        if name not in found:
            yield Problem(name, None, f"is missing; the model needs it with shape {list(shape)}")
        elif found[name].shape != shape:
            yield Problem(name, None, f"has shape {list(found[name].shape)}; the model needs {list(shape)}")
        elif found[name].format not in EXACT_IN_FP32:
            rule = f"is stored as {found[name].format}; " + ", ".join(EXACT_IN_FP32) + " are read"
            yield Problem(name, None, rule)
    for name in found:
        if name not in wanted:
            yield Problem(shown(name), None, "has no place in this model")


def refuse(problems: Iterable[Problem], where: str) -> None:
    """Raise `InvalidInput` if there are problems, with the first twenty of them."""
    found = list(problems)
    rest = len(found) - _MOST_PROBLEMS
    if rest > 0:
        found = [*found[:_MOST_PROBLEMS], Problem("and more", None, f"{rest} further tensors")]
    if found:
        raise InvalidInput(found, where)


def shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter of a model by our name, a tied one once; takes no memory."""
    return {name: tuple(each.shape) for name, each in _on_meta(spec).named_parameters()}


def assemble(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> Transformer:
    """The model of a spec on the CPU with the given parameters (exactly those that `shapes` names)."""
    model = _on_meta(spec)
    parameters = {name: nn.Parameter(tensors[name]) for name, _ in model.named_parameters()}
    if spec.tie_embeddings:
        parameters["lm_head.weight"] = parameters["embed_tokens.weight"]
    model.load_state_dict(parameters, assign=True)
    if spec.positions == "rope":
        model.rotary = Rotary(spec)
    return model


def write_weights(model: nn.Module, path: Path) -> None:
    """A safetensors file of a model's parameters under our own names, a tied one once."""
    save_file({name: each.detach().cpu().contiguous() for name, each in model.named_parameters()}, path)


def read_weights(spec: ModelSpec, path: Path) -> Transformer:
    """The model of a spec from a file of `write_weights`; `InvalidInput` names each tensor that does not fit."""
    if not path.is_file():
        raise InvalidInput([Problem(path.name, None, "is not there; it holds the weights")], str(path.parent))
    found = stored_in([path])
    if spec.n_layers > len(found):
        refuse([Problem("model.n_layers", spec.n_layers, f"the file holds only {len(found)} tensors")], str(path))
    refuse(faults(shapes(spec), found), str(path))
    return assemble(spec, {name: each.read() for name, each in found.items()})


def _on_meta(spec: ModelSpec) -> Transformer:
    with torch.device("meta"):
        return Transformer(spec)


def _damaged(path: Path, error: Exception) -> InvalidInput:
    return InvalidInput([Problem(path.name, None, f"cannot be read as safetensors: {error}")], str(path.parent))
