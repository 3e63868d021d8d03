"""Weights in safetensors files, and directories that are written whole or not at all. Pickles are never read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from errno import ENOSPC
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from trainledger.engine.nn.positions import Masks, Rotary
from trainledger.engine.nn.transformer import Transformer
from trainledger.spec.durable import held as holding
from trainledger.spec.durable import is_full, parse_json, sync
from trainledger.spec.layers import rotary_modules
from trainledger.spec.model import ModelSpec
from trainledger.spec.problem import InvalidInput, Problem, shown
from trainledger.spec.runfile import parse, read_table, resolved

FILE = "model.safetensors"
# The key of a file's metadata that says where parts of tensors begin (torch.distributed.checkpoint.hf_storage).
OFFSETS = "DCP_SHARDING_INFO"
EXACT_IN_FP32 = {"F32": 32, "BF16": 16, "F16": 16}  # safetensors' names of formats that fp32 holds without rounding
_MOST_PROBLEMS = 20


@dataclass(frozen=True)
class Part:
    """A part of a tensor in a file, and where it begins in the whole, dim by dim."""

    path: Path
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def place(self) -> tuple[slice, ...]:
        return tuple(slice(at, at + size) for at, size in zip(self.offset, self.shape, strict=True))


@dataclass(frozen=True)
class Stored:
    """Where a tensor is stored, whole or in parts, its shape, and its number format by safetensors' name."""

    name: str
    parts: tuple[Part, ...]
    format: str

    @property
    def path(self) -> Path:
        return self.parts[0].path

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(max, zip(*([each.stop for each in part.place] for part in self.parts), strict=True)))

    def read(self, dim: int = 0, begin: int = 0, end: int | None = None) -> Tensor:
        """The tensor (or its part from ``begin`` to ``end`` along ``dim``) as fp32 with its own memory."""
        if len(self.parts) > 1:
            whole = torch.empty(self.shape, dtype=torch.float32)
            for part in self.parts:
                whole[part.place] = self._read_of(part.path, ())
            return whole if end is None else whole.narrow(dim, begin, end - begin).clone()
        taken = () if end is None else (*(slice(None),) * dim, slice(begin, end))
        return self._read_of(self.path, taken).to(torch.float32, copy=True)

    def _read_of(self, path: Path, taken: tuple[slice, ...]) -> Tensor:
        try:
            with safe_open(path, framework="pt") as file:
                tensor: Tensor = file.get_slice(self.name)[taken] if taken else file.get_tensor(self.name)
        except (SafetensorError, OSError) as error:
            raise _damaged(path, error) from error
        return tensor


def stored_in(paths: Iterable[Path]) -> dict[str, Stored]:
    """Everything that safetensors files hold, by name, parts of a tensor put together; only headers are read."""
    storeds: dict[str, Stored] = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                offsets = offsets_in(file.metadata())
                for name in file.keys():  # noqa: SIM118 (no dict)
                    stored = file.get_slice(name)
                    shape = tuple(stored.get_shape())
                    part = Part(path, tuple(offsets.get(name, [0] * len(shape))), shape)
                    earlier = storeds[name].parts if name in storeds else ()
                    if any(each.offset == part.offset or name not in offsets for each in earlier):
                        rule = f"is also in {storeds[name].path.name}; one of the two files does not belong here"
                        raise InvalidInput([Problem(shown(name), None, rule)], str(path))
                    storeds[name] = Stored(name, (*earlier, part), stored.get_dtype())
        except (SafetensorError, OSError) as error:
            raise _damaged(path, error) from error
    return storeds


def offsets_in(metadata: dict[str, str] | None) -> dict[str, list[int]]:
    """Where the parts of tensors in a file begin, by name; tensors that are not named are whole."""
    stored = parse_json((metadata or {}).get(OFFSETS, "{}"))
    return {name: each["saved_offsets"] for name, each in stored.items()}


def faults(wanted: Mapping[str, tuple[int, ...]], storeds: Mapping[str, Stored]) -> Iterator[Problem]:
    """A problem for each tensor that is missing, surplus, of another shape, or in a format that fp32 would round."""
    for name, shape in wanted.items():
        if name not in storeds:
            yield Problem(name, None, f"is missing; the model needs it with shape {list(shape)}")
        elif storeds[name].shape != shape:
            yield Problem(name, None, f"has shape {list(storeds[name].shape)}; the model needs {list(shape)}")
        elif storeds[name].format not in EXACT_IN_FP32:
            rule = f"is stored as {storeds[name].format}; " + ", ".join(EXACT_IN_FP32) + " are read"
            yield Problem(name, None, rule)
    for name in storeds:
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
    return {name: tuple(tensor.shape) for name, tensor in held(_on_meta(spec)).items()}


def held(model: nn.Module) -> dict[str, Tensor]:
    """What a file of a model holds: its parameters, a tied one once, and what else it learns (routers' corrections)."""
    lasting = model.state_dict(keep_vars=True)
    return dict(model.named_parameters()) | {name: buffer for name, buffer in model.named_buffers() if name in lasting}


def assemble(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> Transformer:
    """The model of a spec on the CPU with the given tensors (exactly those that `shapes` names)."""
    model = _on_meta(spec)
    tensors = dict(tensors)
    for name, _ in model.named_parameters():
        tensors[name] = nn.Parameter(tensors[name])
    if spec.tie_embeddings:
        tensors["lm_head.weight"] = tensors["embed_tokens.weight"]
    model.load_state_dict(tensors, assign=True)
    for name, of_layers in rotary_modules(spec).items():
        setattr(model, name, Rotary(of_layers))
    if spec.positions.kind == "alibi":
        model.masks.slopes_H = Masks(spec, "sdpa", 0.0).slopes_H
    return model


def write_weights(model: nn.Module, path: Path) -> None:
    """A safetensors file of a model's parameters under our names, a tied parameter once."""
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in held(model).items()}, path)


def read_weights(spec: ModelSpec, *paths: Path) -> Transformer:
    """The model of a spec from files under our names; `InvalidInput` names each tensor that does not fit."""
    for path in paths:
        if not path.is_file():
            raise InvalidInput([Problem(path.name, None, "is missing; it has the weights")], str(path.parent))
    storeds, where = stored_in(paths), str(paths[0] if len(paths) == 1 else paths[0].parent)
    if spec.n_layers > len(storeds):
        refuse([Problem("model.n_layers", spec.n_layers, f"the file holds only {len(storeds)} tensors")], where)
    refuse(faults(shapes(spec), storeds), where)
    return assemble(spec, {name: stored.read() for name, stored in storeds.items()})


def _on_meta(spec: ModelSpec) -> Transformer:
    with torch.device("meta"):
        return Transformer(spec)


def _damaged(path: Path, error: Exception) -> InvalidInput:
    return InvalidInput([Problem(path.name, None, f"cannot be read as safetensors: {error}")], str(path.parent))


@contextmanager
def whole_directory(directory: Path, *, force: bool = False, ours: frozenset[str] = frozenset()) -> Iterator[Path]:
    """An empty directory to write into; on leaving the block it becomes ``directory``, after an error it is gone.

    A ``directory`` with something in it is refused, before the block runs. With ``force`` it is replaced,
    but only if it holds no other names than ``ours``, so that no other files are lost.
    """
    directory = directory.resolve()
    refuse_occupied(directory, force=force, ours=ours)
    partial, former = (directory.with_name(f".{directory.name}.{each}") for each in ("partial", "former"))
    with ExitStack() as stack:
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
            partial.mkdir(exist_ok=True)
            stack.enter_context(holding(partial, wait=False))
            # What a process left that was killed: nobody else holds it.
            if former.is_dir() and not directory.exists():
                former.rename(directory)
            for path in (former, *partial.iterdir()):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        except BlockingIOError:
            raise _refusal(directory, "is being written by another process") from None
        except OSError as error:
            if is_full(error):
                raise
            raise _refusal(directory, f"cannot be made here: {error.strerror}") from error
        try:
            refuse_occupied(directory, force=force, ours=ours)
            yield partial
            readable = partial.stat().st_mode & 0o666  # what the umask leaves
            for path in partial.iterdir():
                path.chmod(readable)  # safetensors makes files that only their owner may read
                sync(path)
            sync(partial)
            refuse_occupied(directory, force=force, ours=ours)
            _put(partial, directory, former)
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)  # not after success: it is then perhaps another process's
            if isinstance(error, SafetensorError) and is_full(error):
                raise OSError(ENOSPC, os.strerror(ENOSPC), str(partial)) from error
            raise


def refuse_occupied(directory: Path, *, force: bool, ours: frozenset[str]) -> None:
    """Raise `InvalidInput` where writing ``directory`` would destroy a foreign file."""
    if not os.path.lexists(directory):
        return
    if not directory.is_dir():
        raise _refusal(directory, "exists and is not a directory")
    names = sorted(path.name for path in directory.iterdir())
    strangers = [name for name in names if name not in ours]
    if names and not force:
        raise _refusal(directory, "exists and is not empty; --force replaces it")
    if strangers:
        rule = f"holds {shown(strangers[0])}, which this command did not write; it replaces only what it wrote itself"
        raise _refusal(directory, rule)


def _put(partial: Path, directory: Path, former: Path) -> None:
    """Give ``partial`` its name; what had the name before goes only after that worked."""
    if directory.is_dir():
        directory.rename(former)
    try:
        partial.rename(directory)
    except OSError:
        if former.is_dir():
            former.rename(directory)
        raise
    sync(directory.parent)
    shutil.rmtree(former, ignore_errors=True)


def _refusal(directory: Path, rule: str) -> InvalidInput:
    return InvalidInput([Problem(directory.name, None, rule)], str(directory.parent))


# The spec beside weights that no run here has trained, or that are not as it left them.


MODEL_FILE = "model.toml"
_ANY_RECIPE = {"seq_len": 1, "global_batch": 1, "steps": 1}  # a run file cannot do without


def write_spec(spec: ModelSpec, directory: Path) -> None:
    """Write a model's spec as the [model] of a run file."""
    import tomli_w

    run = parse({"model": spec, "recipe": _ANY_RECIPE})
    (directory / MODEL_FILE).write_text(tomli_w.dumps({"model": resolved(run)["model"]}), encoding="utf-8")


def read_spec(directory: Path) -> ModelSpec:
    """The spec in a directory's model.toml; raises InvalidInput where it is none."""
    path = directory / MODEL_FILE
    table = {"model": read_table(path).get("model", {}), "recipe": _ANY_RECIPE}
    return parse(table, where=str(path)).model
