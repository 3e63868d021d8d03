"""Hugging Face directories in and out: config.json and safetensors that ``transformers`` opens with equal logits.

Shapes: D d_model. Only names and layouts differ: GPT-2 stores its matrices transposed and joins the
query, key and value projections to one of [D, 3 D].
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from trainledger.nn.atomic import whole_directory
from trainledger.nn.transformer import Transformer
from trainledger.nn.weights import FILE, Stored, assemble, faults, refuse, shapes, stored_in
from trainledger.spec.huggingface import family_of, from_config, read_json, to_config
from trainledger.spec.huggingface_keys import GPT2
from trainledger.spec.problem import InvalidInput, Problem, shown

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
WRITTEN = frozenset({CONFIG, FILE, TOKENIZER, TOKENIZER_CONFIG})  # all that an export writes
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

_PREFIX = {"llama": "model.", "gpt2": "transformer."}  # of every name but the head's
_HEAD = "lm_head.weight"
# Tables that older versions saved and newer ones compute: causal masks, rotary frequencies.
_COMPUTED = re.compile(r"h\.\d+\.attn\.(masked_)?bias|(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_GPT2_TOP = {"embed_tokens": "wte", "embed_positions": "wpe", "norm": "ln_f", "lm_head": "lm_head"}
_GPT2_BLOCK = {
    "input_layernorm": "ln_1",
    "self_attn.o_proj": "attn.c_proj",
    "post_attention_layernorm": "ln_2",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}
_GPT2_JOINED = {"self_attn.q_proj": 0, "self_attn.k_proj": 1, "self_attn.v_proj": 2}


@dataclass(frozen=True)
class TokenizerText:
    """A tokenizer as an export carries it: the text of tokenizer.json, and the token that ends a document."""

    definition: str
    end_id: int
    end_token: str


@dataclass(frozen=True)
class Place:
    """Where one of our parameters stands in a Hugging Face file: part ``part`` of ``parts`` along their last dim."""

    ours: str
    theirs: str  # without the prefix
    transposed: bool = False
    part: int = 0
    parts: int = 1

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of their whole tensor, from that of ours."""
        turned = ours[::-1] if self.transposed else ours
        return (*turned[:-1], turned[-1] * self.parts)


def place(ours: str, model_type: str) -> Place:
    """The place of a parameter by our name."""
    if model_type != GPT2.model_type:
        return Place(ours, ours)
    module, _, kind = ours.rpartition(".")
    if not module.startswith("layers."):
        return Place(ours, f"{_GPT2_TOP[module]}.{kind}")
    _, layer, inner = module.split(".", 2)
    matrix = kind == "weight" and inner.endswith("_proj")
    if inner in _GPT2_JOINED:
        return Place(ours, f"h.{layer}.attn.c_attn.{kind}", matrix, _GPT2_JOINED[inner], 3)
    return Place(ours, f"h.{layer}.{_GPT2_BLOCK[inner]}.{kind}", matrix)


def export_model(
    model: Transformer,
    directory: Path,
    dtype: str = "fp32",
    *,
    tokenizer: TokenizerText | None = None,
    force: bool = False,
) -> None:
    """Write a directory that ``transformers`` opens: config.json, model.safetensors, and the tokenizer if given.

    It appears whole or not at all. ``dtype`` is fp32 or bf16 (rounded to nearest). ``force`` replaces an
    earlier export. `InvalidInput` where transformers has no such model or the directory is in use.
    """
    kind = DTYPES[dtype]
    config = to_config(model.spec, str(kind).removeprefix("torch."))
    with whole_directory(directory, force=force, ours=WRITTEN) as partial:
        save_file(_their_tensors(model, kind), partial / FILE, metadata={"format": "pt"})
        if tokenizer is not None:
            config["eos_token_id"] = tokenizer.end_id
            (partial / TOKENIZER).write_text(tokenizer.definition, encoding="utf-8")
            told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.end_token}
            _write_json(partial / TOKENIZER_CONFIG, told | {"model_max_length": model.spec.max_seq_len})
        _write_json(partial / CONFIG, config)


def import_model(directory: Path) -> Transformer:
    """The model of a Hugging Face directory, in fp32 on the CPU; `InvalidInput` says all that does not fit."""
    if not directory.is_dir():
        rule = f"is not a directory with {CONFIG} and {FILE}"
        raise InvalidInput([Problem(directory.name, None, rule)], str(directory.parent))
    config = read_json(directory / CONFIG)
    spec, model_type = from_config(config, str(directory / CONFIG)), config["model_type"]
    if spec.name == model_type and directory.resolve().name.isprintable():
        spec = replace(spec, name=directory.resolve().name[:100])
    found = _bare(stored_in(_files(directory)), _PREFIX[model_type], str(directory))
    if spec.n_layers > len(found):
        rule = f"is more than the {len(found)} tensors in the directory"
        raise InvalidInput([Problem("number of layers", spec.n_layers, rule)], str(directory))
    head = found.pop(_HEAD, None) if spec.tie_embeddings else None
    ours = shapes(spec)
    places = {name: place(name, model_type) for name in ours}
    refuse(faults({each.theirs: each.shape(ours[name]) for name, each in places.items()}, found), str(directory))
    tensors = {name: _our_tensor(each, found[each.theirs]) for name, each in places.items()}
    if head is not None and not torch.equal(head.read(), tensors["embed_tokens.weight"]):
        rule = "differs from the input embedding, though config.json says tie_word_embeddings = true"
        raise InvalidInput([Problem(head.name, None, rule)], str(directory))
    return assemble(spec, tensors)


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _their_tensors(model: Transformer, dtype: torch.dtype) -> dict[str, Tensor]:
    model_type = family_of(model.spec).model_type
    parts: dict[str, list[tuple[int, Tensor]]] = {}
    for name, parameter in model.named_parameters():
        each = place(name, model_type)
        ours = parameter.detach().to("cpu", dtype)
        parts.setdefault(each.theirs, []).append((each.part, ours.T if each.transposed else ours))
    tensors = {}
    for name, found in parts.items():
        whole = torch.cat([ours for _, ours in sorted(found, key=lambda each: each[0])], dim=-1)
        tensors[name if name == _HEAD else _PREFIX[model_type] + name] = whole.contiguous()
    return tensors


def _our_tensor(where: Place, theirs: Stored) -> Tensor:
    dim = len(theirs.shape) - 1
    size = theirs.shape[dim] // where.parts
    part = theirs.read(dim, where.part * size, (where.part + 1) * size) if where.parts > 1 else theirs.read()
    return part.T.contiguous() if where.transposed else part


def _bare(found: dict[str, Stored], prefix: str, where: str) -> dict[str, Stored]:
    """The tensors by their names without the prefix, which some files leave out; computed tables dropped."""
    bare: dict[str, Stored] = {}
    for name, each in found.items():
        short = name.removeprefix(prefix)
        if _COMPUTED.fullmatch(short):
            continue
        if short in bare:
            raise InvalidInput([Problem(shown(name), None, f"is also there as {bare[short].name}")], where)
        bare[short] = each
    return bare


def _files(directory: Path) -> list[Path]:
    """The safetensors files of a directory: the one, or the shards of the index."""
    if (directory / FILE).is_file():
        return [directory / FILE]
    if (directory / INDEX).is_file():
        return sorted(_shards(directory))
    pickles = sorted(each.name for each in directory.glob("*.bin"))
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
