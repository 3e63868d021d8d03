"""Quantized checkpoints: what a trained model is in 8 or 4 bits, for `sample`, `evaluate` and `export`.

A directory holds

- ``quantized.safetensors``: of each quantized matrix ``NAME.codes`` and ``NAME.scales``, all else by its name
- ``model.toml``: the model's spec; ``source_run.toml``: the run that trained it; ``tokenizer.json``, if known
- ``manifest.json``: bits and group size, the source, and size and SHA-256 of each file above

docs/training.md describes the formats of codes and scales.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainledger.engine.nn.huggingface import TOKENIZER
from trainledger.engine.nn.transformer import Transformer
from trainledger.engine.nn.weights import MODEL_FILE, assemble, read_spec, refuse, shapes, whole_directory, write_spec
from trainledger.engine.train.run_directory import MANIFEST, other_file
from trainledger.spec.durable import content_of, parse_json, sha256, write_json
from trainledger.spec.model import ModelSpec
from trainledger.spec.problem import InvalidInput, Problem, shown
from trainledger.spec.savings import is_linear
from trainledger.spec.units import ceil_div

# A matrix [O, I] is symmetric integer codes and 16-bit scales: of 8 bits a scale per row, of 4 bits one per group of a
# row's columns. A weight is its code times its scale, which is exact in fp32. Shapes: O rows, I columns, G groups.


BITS, GROUP_SIZES = (8, 4), (128, 64, 32)


@dataclass(frozen=True)
class Quantization:
    """Bits of a code, and of 4 bits the columns that share a scale (None: a whole row does)."""

    bits: int
    group_size: int | None = None

    @property
    def format(self) -> str:
        """Its name among the formats of served weights (`spec.serving.WEIGHT_FORMATS`).

        >>> Quantization(8).format, Quantization(4, 32).format
        ('int8', 'int4-symmetric-g32')
        """
        if self.bits == 8:
            return "int8"
        return "int4-symmetric" + ("" if self.group_size == 128 else f"-g{self.group_size}")


@dataclass(frozen=True)
class Quantized:
    """The codes of a matrix or of a stack of them, int8 of 8 bits and two a byte of 4, and its bf16 scales."""

    codes: Tensor
    scales: Tensor
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


def is_quantized(name: str, weight: Tensor) -> bool:
    """Whether a parameter is a matrix of a block's linear layer or of experts; embeddings, head, router and norms stay.

    >>> matrix = torch.empty(4, 4)
    >>> is_quantized("layers.0.mlp.up_proj.weight", matrix), is_quantized("lm_head.weight", matrix)
    (True, False)
    """
    return (is_linear(name) and weight.ndim == 2) or ("experts" in name.split(".") and weight.ndim == 3)


# The codes are torchao's `IntxWeightOnlyConfig` (symmetric, scales in bf16) bit for bit; what is written here is read
# without torchao.
def quantize(weights: Mapping[str, Tensor], quantization: Quantization) -> dict[str, Quantized]:
    """Those of a model's weights that are quantized; ModuleNotFoundError where torchao is missing."""
    found = {}
    for name, weight in weights.items():
        if is_quantized(name, weight):
            theirs, columns = by_torchao(weight, quantization), weight.shape[-1]
            codes_OI = theirs.qdata[:, :columns].contiguous()
            codes = codes_OI if quantization.bits == 8 else pack(codes_OI)
            found[name] = Quantized(codes, theirs.scale, tuple(weight.shape))
    return found


def by_torchao(weight: Tensor, quantization: Quantization) -> Any:
    """torchao's tensor of a matrix or of a stack of them, its rows one under the other.

    The last group of a row is filled up with zeros, which take no part in its scale.
    """
    import_torchao()
    from torchao.quantization import IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerAxis, PerGroup

    rows_OI = weight.detach().float().reshape(-1, weight.shape[-1])
    size = quantization.group_size
    if size is not None:
        rows_OI = torch.nn.functional.pad(rows_OI, (0, -rows_OI.shape[1] % size))
    # torchao quantizes layers. Its own tensor for int8 is the same numbers with scales that stay fp32.
    layer = torch.nn.Linear(rows_OI.shape[1], rows_OI.shape[0], bias=False, device="meta")
    layer.weight = torch.nn.Parameter(rows_OI, requires_grad=False)
    config = IntxWeightOnlyConfig(
        weight_dtype=getattr(torch, f"int{quantization.bits}"),
        granularity=PerAxis(0) if size is None else PerGroup(size),
        scale_dtype=torch.bfloat16,
    )
    quantize_(layer, config)
    return layer.weight


def dequantize(quantized: Quantized, quantization: Quantization) -> Tensor:
    """The weights in fp32, each its code times its scale."""
    columns = quantized.shape[-1]
    codes_OI = quantized.codes if quantization.bits == 8 else unpack(quantized.codes, columns)
    size = columns if quantization.group_size is None else quantization.group_size
    scales_OI = quantized.scales.float().repeat_interleave(size, dim=1)[:, :columns]
    return (codes_OI.float() * scales_OI).reshape(quantized.shape)


def pack(codes_OI: Tensor) -> Tensor:
    """Codes of -8 to 7 as two a byte: the even column in the low four bits; an odd row ends with a 0.

    >>> pack(torch.tensor([[1, -1, 7]], dtype=torch.int8)).tolist()
    [[241, 7]]
    """
    even = torch.nn.functional.pad(codes_OI, (0, codes_OI.shape[1] % 2)).view(torch.uint8) & 0xF
    return even[:, 0::2] | even[:, 1::2] << 4


def unpack(packed: Tensor, columns: int) -> Tensor:
    """What `pack` has packed, as int8."""
    nibbles = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(1)[:, :columns].to(torch.int8)
    return torch.where(nibbles > 7, nibbles - 16, nibbles)


def stored_shapes(shape: tuple[int, ...], quantization: Quantization) -> tuple[tuple[int, int], tuple[int, int]]:
    """The shapes of the codes and of the scales of a matrix or of a stack of them.

    >>> stored_shapes((2, 3, 70), Quantization(4, 64))
    ((6, 35), (6, 2))
    """
    *stack, columns = shape
    rows, size = 1, columns if quantization.group_size is None else quantization.group_size
    for each in stack:
        rows *= each
    return (rows, ceil_div(columns * quantization.bits, 8)), (rows, ceil_div(columns, size))


def import_torchao() -> None:
    """Import torchao without its warnings of libraries for GPUs that this machine has not; ModuleNotFoundError where it
    is missing."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        import torchao.quantization  # noqa: F401
    finally:
        logging.disable(before)


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
    directory: Path,
    source: Source,
    quantized: Mapping[str, Quantized],
    whole: Mapping[str, Tensor],
    quantization: Quantization,
    *,
    force: bool = False,
) -> None:
    """Write a quantized checkpoint; the directory appears whole or not at all."""
    tensors = {name: tensor.detach().contiguous() for name, tensor in whole.items()}
    for name, each in quantized.items():
        tensors |= {name + CODES: each.codes, name + SCALES: each.scales}
    with whole_directory(directory, force=force, ours=WRITTEN) as partial:
        save_file(tensors, partial / FILE)
        write_spec(source.spec, partial)
        for name, text in ((SOURCE_RUN, source.run_file), (TOKENIZER, source.tokenizer)):
            if text is not None:
                (partial / name).write_text(text, encoding="utf-8")
        files = {
            path.name: {"nbytes": path.stat().st_size, "sha256": sha256(path)} for path in sorted(partial.iterdir())
        }
        facts = {"bits": quantization.bits, "group_size": quantization.group_size, "source": str(source.weights)}
        write_json(partial / MANIFEST, {"format": FORMAT, **facts, "files": files})


def read_quantized(directory: Path) -> tuple[Transformer, Path]:
    """The model of a quantized checkpoint with its weights in fp32, and their file; raises InvalidInput where a file is
    not as it was written."""
    quantization, spec = _looked_at(directory), read_spec(directory)
    try:
        tensors = load_file(directory / FILE)
    except (SafetensorError, OSError) as error:
        raise _refusal(directory, f"has a {FILE} that cannot be read: {error}") from None
    wanted = _wanted(spec, quantization)
    refuse(_faults(wanted, tensors), str(directory / FILE))
    weights = {}
    for name, shape in shapes(spec).items():
        if name in wanted:
            weights[name] = tensors[name].float()
        else:
            weights[name] = dequantize(Quantized(tensors[name + CODES], tensors[name + SCALES], shape), quantization)
    return assemble(spec, weights), directory / FILE


def _looked_at(directory: Path) -> Quantization:
    """How the weights are quantized, once each file has its hash."""
    try:
        manifest: dict[str, Any] = parse_json(content_of(directory / MANIFEST))
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
    wanted: Mapping[str, tuple[tuple[int, ...], torch.dtype | None]], tensors: Mapping[str, Tensor]
) -> list[Problem]:
    problems = [Problem(shown(name), None, "has no place in this model") for name in tensors if name not in wanted]
    for name, (shape, dtype) in wanted.items():
        if name not in tensors:
            problems.append(Problem(name, None, f"is missing; the model needs it with shape {list(shape)}"))
        elif tuple(tensors[name].shape) != shape:
            rule = f"has shape {list(tensors[name].shape)}; the model needs {list(shape)}"
            problems.append(Problem(name, None, rule))
        elif dtype is not None and tensors[name].dtype != dtype:
            problems.append(Problem(name, None, f"is stored as {tensors[name].dtype}; {dtype} is read"))
    return problems


def _refusal(directory: Path, rule: str) -> InvalidInput:
    return InvalidInput([Problem("", None, rule, where=str(directory))])
