"""Quantized checkpoints: what a trained model is in 8 or 4 bits, for `sample`, `evaluate` and `export`.

A directory holds

- ``quantized.safetensors``: of each quantized matrix ``NAME.codes`` and ``NAME.scales``, all else by its name
- ``model.toml``: the model's spec; ``source_run.toml``: the run that trained it; ``tokenizer.json``, if known
- ``manifest.json``: bits and group size, the source, and size and SHA-256 of each file above

docs/training.md describes the formats of codes and scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainledger.engine.nn.huggingface import TOKENIZER
from trainledger.engine.nn.quantization import (
    BITS,
    GROUP_SIZES,
    Quantization,
    Quantized,
    dequantize,
    is_quantized,
    stored_shapes,
)
from trainledger.engine.nn.transformer import Transformer
from trainledger.engine.nn.weights import MODEL_FILE, assemble, read_spec, refuse, shapes, whole_directory, write_spec
from trainledger.engine.train.checkpoint import MANIFEST, other_file
from trainledger.spec.durable import parse_json, sha256, write_json
from trainledger.spec.model import ModelSpec
from trainledger.spec.problem import InvalidInput, Problem, shown

FORMAT = 1
FILE = "quantized.safetensors"
SOURCE_RUN = "source_run.toml"
WRITTEN = frozenset({FILE, MODEL_FILE, SOURCE_RUN, TOKENIZER, MANIFEST})
CODES, SCALES = ".codes", ".scales"


@dataclass(frozen=True)
class Source:
    """What was quantized: where its weights were found, its spec as it is served, and, where known, the text of its run
    file and of its tokenizer."""

    weights: Path
    spec: ModelSpec
    run_file: str | None = None
    tokenizer: str | None = None


def is_quantized_checkpoint(path: Path) -> bool:
    """Whether a directory is what `write_quantized` writes."""
    return (path / FILE).is_file()


def write_quantized(
    directory: Path, source: Source, quantized: Mapping[str, Quantized], whole: Mapping[str, Tensor],
    quantization: Quantization, *, force: bool = False,
) -> None:  # fmt: skip
    """Write a quantized checkpoint; the directory appears whole or not at all."""
    tensors = {name: each.detach().contiguous() for name, each in whole.items()}
    for name, each in quantized.items():
        tensors |= {name + CODES: each.codes, name + SCALES: each.scales}
    with whole_directory(directory, force=force, ours=WRITTEN) as partial:
        save_file(tensors, partial / FILE)
        write_spec(source.spec, partial)
        for name, text in ((SOURCE_RUN, source.run_file), (TOKENIZER, source.tokenizer)):
            if text is not None:
                (partial / name).write_text(text, encoding="utf-8")
        files = {
            each.name: {"nbytes": each.stat().st_size, "sha256": sha256(each)} for each in sorted(partial.iterdir())
        }
        facts = {"bits": quantization.bits, "group_size": quantization.group_size, "source": str(source.weights)}
        write_json(partial / MANIFEST, {"format": FORMAT, **facts, "files": files})


def read_quantized(directory: Path) -> tuple[Transformer, Path]:
    """The model of a quantized checkpoint with its weights in fp32, and their file; raises InvalidInput where a file is
    not as it was written."""
    quantization, spec = _looked_at(directory), read_spec(directory)
    try:
        found = load_file(directory / FILE)
    except (SafetensorError, OSError) as error:
        raise _refusal(directory, f"has a {FILE} that cannot be read: {error}") from None
    wanted = _wanted(spec, quantization)
    refuse(_faults(wanted, found), str(directory / FILE))
    weights = {}
    for name, shape in shapes(spec).items():
        if name in wanted:
            weights[name] = found[name].float()
        else:
            weights[name] = dequantize(Quantized(found[name + CODES], found[name + SCALES], shape), quantization)
    return assemble(spec, weights), directory / FILE


def _looked_at(directory: Path) -> Quantization:
    """How the weights are quantized, once each file has its hash."""
    try:
        manifest: dict[str, Any] = parse_json((directory / MANIFEST).read_text(encoding="utf-8"))
        quantization = Quantization(manifest["bits"], manifest["group_size"])
        wrong = _wrong(directory, manifest, quantization)
    except FileNotFoundError as error:
        wrong = f"lacks {Path(error.filename).name}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        wrong = f"cannot be read ({type(error).__name__}: {error})"
    if wrong is not None:
        raise _refusal(directory, wrong)
    return quantization


def _wrong(directory: Path, manifest: Mapping[str, Any], quantization: Quantization) -> str | None:
    """What is wrong with the files and with what the manifest says, as the rest of a sentence."""
    if manifest["format"] != FORMAT:
        return f"has format {manifest['format']}, and this version reads {FORMAT}"
    sizes = GROUP_SIZES if quantization.bits == 4 else (None,)
    if quantization.bits not in BITS or quantization.group_size not in sizes:
        return f"has {quantization.bits} bits in groups of {quantization.group_size}, which is not read here"
    if not {FILE, MODEL_FILE} <= manifest["files"].keys() <= WRITTEN:
        return "has a manifest that lacks a file, or names another"
    return other_file(directory, manifest["files"])


def _wanted(spec: ModelSpec, quantization: Quantization) -> dict[str, tuple[tuple[int, ...], torch.dtype | None]]:
    """The shape and format of everything that the file must hold; of what is not quantized any format."""
    wanted: dict[str, tuple[tuple[int, ...], torch.dtype | None]] = {}
    for name, shape in shapes(spec).items():
        if is_quantized(name, torch.empty(shape, device="meta")):
            codes, scales = stored_shapes(shape, quantization)
            wanted[name + CODES] = codes, torch.int8 if quantization.bits == 8 else torch.uint8
            wanted[name + SCALES] = scales, torch.bfloat16
        else:
            wanted[name] = shape, None
    return wanted


def _faults(
    wanted: Mapping[str, tuple[tuple[int, ...], torch.dtype | None]], found: Mapping[str, Tensor]
) -> list[Problem]:
    problems = [Problem(shown(name), None, "has no place in this model") for name in found if name not in wanted]
    for name, (shape, dtype) in wanted.items():
        if name not in found:
            problems.append(Problem(name, None, f"is missing; the model needs it with shape {list(shape)}"))
        elif tuple(found[name].shape) != shape:
            rule = f"has shape {list(found[name].shape)}; the model needs {list(shape)}"
            problems.append(Problem(name, None, rule))
        elif dtype is not None and found[name].dtype != dtype:
            problems.append(Problem(name, None, f"is stored as {found[name].dtype}; {dtype} is read"))
    return problems


def _refusal(directory: Path, rule: str) -> InvalidInput:
    return InvalidInput([Problem("", None, rule, where=str(directory))])
