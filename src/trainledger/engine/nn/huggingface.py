"""Hugging Face directories in and out: config.json and safetensors that ``transformers`` opens with equal logits.

Only names and layouts differ: names are in the family's record, layouts here.

Shapes: H query heads, G key-value heads, K head width, E experts, F their inner width, D d_model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from trainledger.engine.nn.transformer import MTP, Transformer
from trainledger.engine.nn.weights import (
    FILE,
    Stored,
    assemble,
    faults,
    held,
    refuse,
    shapes,
    stored_in,
    whole_directory,
)
from trainledger.spec.convert.huggingface import FAMILIES, from_config, read_json, to_config
from trainledger.spec.convert.huggingface.family import ExpertNames, Names
from trainledger.spec.model import ModelSpec
from trainledger.spec.problem import InvalidInput, Problem, shown

Tensors = list[Tensor]


@dataclass(frozen=True)
class Form:
    """How some tensors of ours become some of theirs, and the other way."""

    theirs: Callable[[Tensors], Tensors]
    ours: Callable[[Tensors], Tensors]


@dataclass(frozen=True)
class Piece:
    """Tensors of theirs that hold the same numbers as tensors of ours."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    form: Form


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")


def as_modules(names: Names) -> Names:
    """The same where the experts are stacked, as the modules of transformers 5 have them; files rarely do."""
    block = {our: their.replace("block_sparse_moe", "mlp") for our, their in names.block.items()}
    return replace(names, block=block, experts=ExpertNames(each=None, interleaved=names.experts.interleaved))


def pieces(names: Names, spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Piece]:
    """Every tensor of ours (by name, with its shape), once; their names without the prefix."""
    done: set[str] = set()
    for name in shapes:
        if name in done:
            continue
        piece = _piece(names, spec, name, shapes)
        done.update(piece.ours)
        yield piece


def shapes_in_files(piece: Piece, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The shapes of their tensors of a piece, from those of ours."""
    tensors = piece.form.theirs([torch.empty(shapes[name], device="meta") for name in piece.ours])
    return {name: tuple(tensor.shape) for name, tensor in zip(piece.theirs, tensors, strict=True)}


def _piece(names: Names, spec: ModelSpec, name: str, shapes: Mapping[str, tuple[int, ...]]) -> Piece:
    if not name.startswith("layers."):
        module, _, kind = name.rpartition(".")
        if module == "lm_head":
            return Piece((f"{names.head}.{kind}",), (name,), SAME)
        return Piece((f"{names.top.get(module, module)}.{kind}",), (name,), SAME)
    _, layer, inner = name.split(".", 2)
    before, module, kind = f"{names.layers}.{layer}.", *inner.rpartition(".")[::2]
    if module in _QKV and names.qkv is not None:
        ours = tuple(f"layers.{layer}.{each}.{kind}" for each in _QKV)
        if names.grouped:
            return Piece((f"{before}{names.qkv}.{kind}",), ours, grouped(spec.kv_heads, spec.head_size))
        form = joined([shapes[each][0] for each in ours], names.transposed)
        return Piece((f"{before}{names.qkv}.{kind}",), ours, form)
    if module in _GATE_UP and names.gate_up is not None:
        ours = tuple(f"layers.{layer}.{each}.{kind}" for each in _GATE_UP)
        return Piece((f"{before}{names.gate_up}.{kind}",), ours, joined([shapes[each][0] for each in ours]))
    if module == "mlp.experts":
        return _experts(names.experts, before, name, kind, shapes[name][0])
    if names.correction_rows and kind == "correction":
        return Piece((before + _renamed(names.block, inner),), (name,), ROW)
    turned = names.transposed and kind == "weight" and module.endswith("_proj")
    return Piece((before + _renamed(names.block, inner),), (name,), TRANSPOSED if turned else SAME)


def _experts(experts: ExpertNames, before: str, name: str, kind: str, n_experts: int) -> Piece:
    if experts.each is None:
        form = SAME
        if experts.interleaved:
            form = ALTERNATING if kind.startswith("gate_up") else SAME if kind.endswith("bias") else TRANSPOSED
        return Piece((f"{before}{experts.at}.{kind}",), (name,), form)
    gate, up, down = experts.each
    parts = (gate, up) if kind == "gate_up_proj" else (up,) if kind == "up_proj" else (down,)
    theirs = tuple(f"{before}{experts.at}.{e}.{part}.weight" for e in range(n_experts) for part in parts)
    return Piece(theirs, (name,), per_expert(n_experts, len(parts)))


def _renamed(table: Mapping[str, str], inner: str) -> str:
    """A name with its longest part that the table knows replaced."""
    known = [each for each in table if inner == each or inner.startswith(f"{each}.")]
    if not known:
        return inner
    longest = max(known, key=len)
    return table[longest] + inner[len(longest) :]


SAME = Form(lambda ours: ours, lambda theirs: theirs)
ROW = Form(lambda ours: [ours[0][None]], lambda theirs: [theirs[0][0]])
TRANSPOSED = Form(lambda ours: [ours[0].mT], lambda theirs: [theirs[0].mT])


def _alternate(ours: Tensors) -> Tensors:
    """[E, 2 F, D], gate first, to [E, D, 2 F] with gate and up in turn; biases have no D."""
    stack = ours[0]
    mixed = stack.reshape(stack.shape[0], 2, -1, *stack.shape[2:]).transpose(1, 2).flatten(1, 2)
    return [mixed.mT if mixed.ndim == 3 else mixed]


def _apart(theirs: Tensors) -> Tensors:
    mixed = theirs[0].mT if theirs[0].ndim == 3 else theirs[0]
    return [mixed.reshape(mixed.shape[0], -1, 2, *mixed.shape[2:]).transpose(1, 2).flatten(1, 2)]


ALTERNATING = Form(_alternate, _apart)


def joined(sizes: list[int], turned: bool = False) -> Form:
    """One after the other along the rows; ``turned``: along the columns of transposed matrices."""

    def theirs(ours: Tensors) -> Tensors:
        whole = torch.cat(ours)
        return [whole.mT if turned and whole.ndim == 2 else whole]

    def ours(theirs: Tensors) -> Tensors:
        whole = theirs[0].mT if turned and theirs[0].ndim == 2 else theirs[0]
        return list(whole.split_with_sizes(sizes))

    return Form(theirs, ours)


def grouped(groups: int, width: int) -> Form:
    """Queries [H K, ...], keys and values [G K, ...] to [G, H / G + 2, K, ...]: each group's queries, key and value."""

    def theirs(ours: Tensors) -> Tensors:
        return [
            torch.cat([tensor.reshape(groups, -1, width, *tensor.shape[1:]) for tensor in ours], dim=1).flatten(0, 2)
        ]

    def ours(theirs: Tensors) -> Tensors:
        whole = theirs[0].reshape(groups, -1, width, *theirs[0].shape[1:])
        parts = whole.split_with_sizes([whole.shape[1] - 2, 1, 1], dim=1)
        return [part.flatten(0, 2) for part in parts]

    return Form(theirs, ours)


def per_expert(n_experts: int, parts: int) -> Form:
    """A stack [E, parts F, ...] to E x parts matrices."""

    def theirs(ours: Tensors) -> Tensors:
        return [part for tensor in ours[0].unbind() for part in tensor.chunk(parts)]

    def ours(theirs: Tensors) -> Tensors:
        each = [torch.cat(theirs[first : first + parts]) for first in range(0, len(theirs), parts)]
        assert len(each) == n_experts
        return [torch.stack(each)]

    return Form(theirs, ours)


CONFIG, INDEX = "config.json", "model.safetensors.index.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
WRITTEN = frozenset({CONFIG, FILE, TOKENIZER, TOKENIZER_CONFIG})  # all that an export writes
STACKED = ("experts.gate_up_proj", "experts.up_proj")  # experts as the modules of transformers 5 have them
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# Tables that older versions saved and newer ones compute: causal masks, rotary frequencies.
_COMPUTED = re.compile(
    r"h\.\d+\.attn\.(masked_)?bias|layers\.\d+\.attention\.(masked_)?bias|"
    r"(layers\.\d+\.(self_attn|attention)\.)?rotary_emb\.inv_freq"
)


@dataclass(frozen=True)
class TokenizerText:
    """A tokenizer as an export carries it: the text of tokenizer.json, and the token that ends a document."""

    definition: str
    end_id: int
    end_token: str


def export_model(
    model: Transformer,
    directory: Path,
    dtype: str = "fp32",
    *,
    tokenizer: TokenizerText | None = None,
    force: bool = False,
    model_type: str | None = None,
) -> str:
    """Write a directory that ``transformers`` opens, and give its model type.

    It holds config.json, model.safetensors, and the tokenizer if given; it appears whole or not at all.
    ``dtype`` is fp32 or bf16 (rounded to nearest). ``force`` replaces an earlier export. ``model_type`` chooses
    among several that express the model. Modules of multi-token prediction are left out: transformers' models have
    none. `InvalidInput` where transformers has no such model or the directory is in use.
    """
    kind = DTYPES[dtype]
    config = to_config(model.spec.served, str(kind).removeprefix("torch."), model_type)
    with whole_directory(directory, force=force, ours=WRITTEN) as partial:
        save_file(_their_tensors(model, kind, config["model_type"]), partial / FILE, metadata={"format": "pt"})
        if tokenizer is not None:
            config["eos_token_id"] = tokenizer.end_id
            (partial / TOKENIZER).write_text(tokenizer.definition, encoding="utf-8")
            settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.end_token}
            write_json(partial / TOKENIZER_CONFIG, settings | {"model_max_length": model.spec.max_seq_len})
        write_json(partial / CONFIG, config)
    return str(config["model_type"])


def import_model(directory: Path) -> Transformer:
    """The model of a Hugging Face directory, in fp32 on the CPU; `InvalidInput` says all that does not fit."""
    if not directory.is_dir():
        rule = f"is not a directory with {CONFIG} and {FILE}"
        raise InvalidInput([Problem(directory.name, None, rule)], str(directory.parent))
    config = read_json(directory / CONFIG)
    spec, model_type = from_config(config, str(directory / CONFIG), for_weights=True), config["model_type"]
    if spec.name == model_type and directory.resolve().name.isprintable():
        spec = replace(spec, name=directory.resolve().name[:100])
    names = FAMILIES[model_type].names.of(spec)
    storeds = _bare(stored_in(_files(directory)), names, str(directory))
    if spec.n_layers > len(storeds):
        rule = f"is more than the {len(storeds)} tensors in the directory"
        raise InvalidInput([Problem("number of layers", spec.n_layers, rule)], str(directory))
    if any(name.endswith(STACKED) for name in storeds):
        names = as_modules(names)
    head = storeds.pop(f"{names.head}.weight", None) if spec.tie_embeddings else None
    ours = shapes(spec)
    parts = list(pieces(names, spec, ours))
    wanted = {name: shape for part in parts for name, shape in shapes_in_files(part, ours).items()}
    if _predicts_ahead(config):
        storeds = {
            name: stored for name, stored in storeds.items() if name in wanted or not _is_ahead(name, names, spec)
        }
    refuse(faults(wanted, storeds), str(directory))
    tensors = {name: tensor for part in parts for name, tensor in _our_tensors(part, storeds)}
    if head is not None and not torch.equal(head.read(), tensors["embed_tokens.weight"]):
        rule = "differs from the input embedding, though config.json says tie_word_embeddings = true"
        raise InvalidInput([Problem(head.name, None, rule)], str(directory))
    return assemble(spec, tensors)


def write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _their_tensors(model: Transformer, dtype: torch.dtype, model_type: str) -> dict[str, Tensor]:
    names = FAMILIES[model_type].names.of(model.spec)
    ours = {name: each for name, each in held(model).items() if not name.startswith(MTP)}
    tensors: dict[str, Tensor] = {}
    for piece in pieces(names, model.spec, {name: tuple(tensor.shape) for name, tensor in ours.items()}):
        found = piece.form.theirs([ours[name].detach().to("cpu", dtype) for name in piece.ours])
        for name, tensor in zip(piece.theirs, found, strict=True):
            tensors[full_name(name, names)] = tensor.contiguous()
    return tensors


def _our_tensors(piece: Piece, storeds: Mapping[str, Stored]) -> Iterator[tuple[str, Tensor]]:
    ours = piece.form.ours([storeds[name].read() for name in piece.theirs])
    alone = len(ours) == 1
    for name, tensor in zip(piece.ours, ours, strict=True):
        yield name, tensor.contiguous() if alone else tensor.clone(memory_format=torch.contiguous_format)


def full_name(name: str, names: Names) -> str:
    """Their name with the prefix, which the head alone is without."""
    return name if name.startswith(f"{names.head}.") else names.prefix + name


def _predicts_ahead(config: Mapping[str, object]) -> bool:
    return bool(config.get("num_nextn_predict_layers") or config.get("num_mtp_layers"))


def _is_ahead(name: str, names: Names, spec: ModelSpec) -> bool:
    """Whether a tensor belongs to a module of multi-token prediction, which follow the last layer."""
    parts = name.split(".")
    return parts[0] == names.layers and len(parts) > 1 and parts[1].isdigit() and int(parts[1]) >= spec.n_layers


def _bare(storeds: dict[str, Stored], names: Names, where: str) -> dict[str, Stored]:
    """The tensors by their names without the prefix, which some files leave out; computed tables dropped."""
    bare: dict[str, Stored] = {}
    outer = names.prefix.partition(".")[2]  # older files of some families leave out the first part only
    for name, stored in storeds.items():
        short = name.removeprefix(names.prefix)
        if short == name and outer:
            short = name.removeprefix(outer)
        if names.other_head is not None and short.startswith(f"{names.other_head}."):
            short = names.head + short.removeprefix(names.other_head)
        if _COMPUTED.fullmatch(short):
            continue
        if short in bare:
            raise InvalidInput([Problem(shown(name), None, f"is also there as {bare[short].name}")], where)
        bare[short] = stored
    return bare


def _files(directory: Path) -> list[Path]:
    """The safetensors files of a directory: the one, or the shards of the index."""
    if (directory / FILE).is_file():
        return [directory / FILE]
    if (directory / INDEX).is_file():
        return sorted(_shards(directory))
    pickles = sorted(path.name for path in directory.glob("*.bin"))
    if pickles:
        rule = f"is a pickle, which can run code and is never opened; convert it to {FILE} (safetensors)"
        raise InvalidInput([Problem(pickles[0], None, rule)], str(directory))
    raise InvalidInput([Problem(FILE, None, f"is not there, and no {INDEX} either")], str(directory))


def _shards(directory: Path) -> Iterator[Path]:
    where = str(directory / INDEX)
    names = read_json(directory / INDEX).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise InvalidInput([Problem("weight_map", names, "must say in which file each tensor is")], where)
    if not all(isinstance(each, str) for each in names.values()):
        raise InvalidInput([Problem("weight_map", None, "must hold file names")], where)
    for name in sorted(set(names.values())):
        if Path(name).name != name or not name.endswith(".safetensors"):
            rule = "must be the name of a .safetensors file in the same directory"
            raise InvalidInput([Problem("weight_map", name, rule)], where)
        if not (directory / name).is_file():
            raise InvalidInput([Problem(name, None, "is a file of the index and is not there")], where)
        yield directory / name
