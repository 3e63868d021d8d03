"""The verb that writes a trained model in 8 or 4 bits."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainledger.cli.arguments import count, flag, option, takes
from trainledger.cli.asking import say
from trainledger.cli.trained import BACKEND, EMA, TEXT, losses_on_text
from trainledger.report.document import Document
from trainledger.spec.problem import InvalidInput, Problem

if TYPE_CHECKING:
    from trainledger.engine.train.quantized import Quantization

_GROUP_SIZE = 128


@takes(
    option("model RUN", "a run directory, a checkpoint, what import wrote or a Hugging Face directory", type=Path),
    count("--bits B", "of a weight: 8 with a scale per row, 4 with a scale per group", required=True),
    option("--to DIR", "the directory to write; it appears whole or not", type=Path, required=True),
    count("--group-size N", "weights of a row that share a scale, of 4 bits: 128, 64 or 32 (128)", default=None),
    option(
        "--dtype",
        "format of embeddings, head, routers, norms and biases (bf16)",
        choices=("fp32", "bf16"),
        default="bf16",
    ),
    flag("--force", "replace an earlier quantized checkpoint in DIR"),
    *TEXT,
    BACKEND,
    EMA,
)
def quantize(args: Namespace) -> Document:
    """Write a trained model with its blocks' linear layers in 8 or 4 bits, and say what that changes in perplexity.

    Weights alone are quantized, by torchao: sample, evaluate and export read them back as fp32. Both perplexities are
    of the same documents: those its run held out, or those of other text.
    """
    from trainledger.answers.pages.quantization import page
    from trainledger.engine.data.losses import PairedLosses
    from trainledger.engine.train.quantized import import_torchao
    from trainledger.engine.train.trained import load_trained, refuse_target, write

    quantization = _asked(args.bits, args.group_size)
    import_torchao()  # missing, it is said before anything is read
    refuse_target(args.model, args.to, force=args.force)
    trained = load_trained(args.model, say, averaged=args.ema)
    if trained.model.spec.unserved:
        say(f"{trained.model.spec.unserved}: a served model has none")
    before, read = losses_on_text(trained, args, "fp32")
    nbytes = write(trained, args.to, quantization, args.dtype, force=args.force)
    after, _ = losses_on_text(load_trained(args.to, say), args, "fp32")
    asked = {
        "directory": args.to, "weights": trained.weights, "bits": args.bits, "group_size": quantization.group_size,
        "format": quantization.format, "matrices": nbytes.matrices, "dtype": args.dtype, **read,
    }  # fmt: skip
    sizes = {name: getattr(nbytes, name) for name in ("before", "after", "codes", "scales", "whole")}
    return page(PairedLosses(before, after), sizes, asked)


def _asked(bits: int, group_size: int | None) -> Quantization:
    """What the arguments ask for; raises InvalidInput where there is no such format."""
    from trainledger.engine.train.quantized import BITS, GROUP_SIZES, Quantization

    if bits not in BITS:
        raise InvalidInput([Problem("--bits", bits, "must be 8 or 4", _nearest(bits, BITS))])
    if bits == 8:
        if group_size is not None:
            rule = "is of 4 bits; of 8 bits a whole row has one scale"
            raise InvalidInput([Problem("--group-size", group_size, rule)])
        return Quantization(8)
    size = _GROUP_SIZE if group_size is None else group_size
    if size not in GROUP_SIZES:
        rule = f"must be one of {', '.join(map(str, GROUP_SIZES))}"
        raise InvalidInput([Problem("--group-size", size, rule, _nearest(size, GROUP_SIZES))])
    return Quantization(4, size)


def _nearest(value: int, known: Sequence[int]) -> int:
    return min(known, key=lambda each: abs(each - value))
