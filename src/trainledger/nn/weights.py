"""Weights in safetensors files: what a file holds, and a model made of it. Pickles are never read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from trainledger.nn.mask import Masks
from trainledger.nn.rotary import Rotary
from trainledger.nn.transformer import Transformer
from trainledger.spec.layers import local_angles
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
    """The shape of everything that a model's file holds by our name, a tied parameter once; takes no memory."""
    return {name: tuple(each.shape) for name, each in held(_on_meta(spec)).items()}


def held(model: nn.Module) -> dict[str, Tensor]:
    """What a file of a model holds: its parameters, a tied one once, and what else it learns (routers' corrections)."""
    lasting = model.state_dict(keep_vars=True)
    return dict(model.named_parameters()) | {name: each for name, each in model.named_buffers() if name in lasting}


def assemble(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> Transformer:
    """The model of a spec on the CPU with the given tensors (exactly those that `shapes` names)."""
    model = _on_meta(spec)
    tensors = dict(tensors)
    for name, _ in model.named_parameters():
        tensors[name] = nn.Parameter(tensors[name])
    if spec.tie_embeddings:
        tensors["lm_head.weight"] = tensors["embed_tokens.weight"]
    model.load_state_dict(tensors, assign=True)
    if model.rotary is not None:
        model.rotary = Rotary(spec)
    if model.rotary_local is not None:
        model.rotary_local = Rotary(local_angles(spec))
    if spec.positions.kind == "alibi":
        model.masks.slopes_H = Masks(spec, "sdpa", 0.0).slopes_H
    return model


def write_weights(model: nn.Module, path: Path) -> None:
    """A safetensors file of what a model holds under our own names, a tied parameter once."""
    save_file({name: each.detach().cpu().contiguous() for name, each in held(model).items()}, path)


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
