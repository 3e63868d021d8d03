"""From a trained model of any kind to a quantized checkpoint, and what that takes in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from trainledger.engine.nn.quantization import Quantization, quantize
from trainledger.engine.nn.weights import held, refuse_occupied, shapes
from trainledger.engine.train.precision import TORCH
from trainledger.engine.train.quantized import WRITTEN, Source, is_quantized_checkpoint, write_quantized
from trainledger.engine.train.trained import Trained
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.runfile import to_toml


@dataclass(frozen=True)
class QuantizedBytes:
    """Bytes of a model's weights before (in fp32) and after, and how many matrices were quantized."""

    matrices: int
    before: int
    codes: int
    scales: int
    whole: int

    @property
    def after(self) -> int:
        return self.codes + self.scales + self.whole


def refuse_target(model: Path, directory: Path, *, force: bool) -> None:
    """Raise `InvalidInput` where a directory cannot be written, or the model is a quantized one already."""
    if is_quantized_checkpoint(model):
        rule = "holds quantized weights already; quantize the checkpoint that they were made of"
        raise InvalidInput([Problem("", None, rule, where=str(model))])
    refuse_occupied(directory.resolve(), force=force, ours=WRITTEN)


def write(
    trained: Trained, directory: Path, quantization: Quantization, dtype: str, *, force: bool = False
) -> QuantizedBytes:
    """Write the model as it is served with its linear layers quantized and the rest in ``dtype``.

    Raises ModuleNotFoundError where torchao is missing.
    """
    spec = trained.model.spec.served
    served = shapes(spec)
    weights = {name: each.detach().cpu() for name, each in held(trained.model).items() if name in served}
    quantized = quantize(weights, quantization)
    parameters = dict(trained.model.named_parameters())
    whole = {
        # What routers correct their scores with is no weight: it stays fp32, and the account counts it with buffers.
        name: each.to(TORCH[dtype]) if name in parameters else each
        for name, each in weights.items()
        if name not in quantized
    }
    run, tokenizer = trained.run, trained.tokenizer
    source = Source(
        trained.weights,
        spec,
        None if run is None else to_toml(run),
        None if tokenizer is None else tokenizer.definition,
    )
    write_quantized(directory, source, quantized, whole, quantization, force=force)
    return QuantizedBytes(
        matrices=len(quantized),
        before=sum(each.numel() * torch.float32.itemsize for name, each in weights.items() if name in parameters),
        codes=sum(each.codes.nbytes for each in quantized.values()),
        scales=sum(each.scales.nbytes for each in quantized.values()),
        whole=sum(each.nbytes for name, each in whole.items() if name in parameters),
    )
