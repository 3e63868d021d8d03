"""Write a trained model as a directory that Hugging Face transformers opens with equal logits."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from trainledger.cli.arguments import add_json, print_json
from trainledger.spec.problem import printable
from trainledger.units import format_count


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="RUN", help="a run directory, a checkpoint, or what import wrote")
    parser.add_argument("out", type=Path, metavar="OUT_DIR", help="the directory to write; it appears whole or not")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="format of the weights (fp32)")
    parser.add_argument("--model-type", metavar="TYPE", help="the model type of transformers, where several would do")
    parser.add_argument("--force", action="store_true", help="replace an earlier export in OUT_DIR")
    add_json(parser)


def execute(args: argparse.Namespace) -> int:
    from trainledger.ledger.model.parameters import parameters
    from trainledger.nn.huggingface import export_model
    from trainledger.train.trained import load_trained, tokenizer_text

    trained = load_trained(args.model, lambda sentence: print(printable(sentence), file=sys.stderr))
    tokenizer = None if trained.tokenizer is None else tokenizer_text(trained.tokenizer)
    model_type = export_model(
        trained.model, args.out, args.dtype, tokenizer=tokenizer, force=args.force, model_type=args.model_type
    )
    if trained.model.spec.unserved:
        print(f"{trained.model.spec.unserved}, as transformers leaves them out", file=sys.stderr)
    result = {
        "directory": args.out,
        "weights": trained.weights,
        "model_type": model_type,
        "dtype": args.dtype,
        "parameters": parameters(trained.model.spec.served).total,
        "tokenizer": trained.tokenizer is not None,
    }
    if args.json:
        print_json(result)
    else:
        size = f"{format_count(result['parameters'])} parameters in {args.dtype}"
        print(printable(f"{args.out}: {result['model_type']}, {size},\n  from {trained.weights}"))
        print(f"open it with transformers:\n  AutoModelForCausalLM.from_pretrained({str(args.out)!r})")
    return 0
