"""Read a Hugging Face directory (of any model type that is known here) and write a model that training can start from:
model.toml, model.safetensors and, where there is one, tokenizer.json."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from trainledger.cli.arguments import add_json, print_json
from trainledger.spec.problem import printable
from trainledger.units import format_count


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="HF_DIR", help="a directory with config.json and safetensors")
    parser.add_argument("out", type=Path, metavar="OUT_DIR", help="the directory to write; it appears whole or not")
    parser.add_argument("--force", action="store_true", help="replace an earlier import in OUT_DIR")
    add_json(parser)


def execute(args: argparse.Namespace) -> int:
    from trainledger.nn.huggingface import import_model
    from trainledger.train.trained import config_notes, tokenizer_json_in, write_start

    model = import_model(args.model)
    notes = config_notes(args.model)
    for each in notes:
        print(printable(each), file=sys.stderr)
    tokenizer_json = tokenizer_json_in(args.model)
    write_start(model, args.out, tokenizer_json=tokenizer_json, force=args.force)
    result = {
        "directory": args.out,
        "parameters": sum(each.numel() for each in model.parameters()),
        "tokenizer": tokenizer_json is not None,
        "notes": notes,
    }
    if args.json:
        print_json(result)
    else:
        kept = "with its tokenizer" if tokenizer_json is not None else "without a tokenizer.json"
        print(printable(f"{args.out}: {model.spec.name}, {format_count(result['parameters'])} parameters, {kept}"))
        print(printable(f"train from it: --set recipe.initial_weights={args.out}, with the [model] of its model.toml"))
    return 0
