"""Let a trained model go on from a prompt. The same seed writes the same text."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from trainledger.cli.arguments import add_count, add_json, print_json
from trainledger.spec.problem import InvalidInput, Problem, printable


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="RUN", help="a run directory, a checkpoint or a Hugging Face one")
    parser.add_argument("--prompt", default="", help="the text to go on from (none: the start of a document)")
    add_count(parser, "--tokens", least=0, default=200, metavar="N", help="tokens to write (200)")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="X", help="0 takes the likeliest token (0.8)")
    add_count(parser, "--top-k", metavar="K", help="draw from the K likeliest tokens only")
    add_count(parser, "--seed", least=0, most=2**63 - 1, default=0, metavar="N", help="seed of the draws (0)")
    add_json(parser)


def execute(args: argparse.Namespace) -> int:
    written, weights = continue_text(
        args.model, args.prompt, tokens=args.tokens, temperature=args.temperature, top_k=args.top_k, seed=args.seed
    )
    text = args.prompt + written
    if args.json:
        print_json({
            "text": text, "prompt": args.prompt, "tokens": args.tokens, "temperature": args.temperature,
            "top_k": args.top_k, "seed": args.seed, "weights": weights,
        })  # fmt: skip
    else:
        print(visible(text))
    return 0


def continue_text(
    model: Path, prompt: str, *, tokens: int, temperature: float, top_k: int | None, seed: int
) -> tuple[str, Path]:
    """What a trained model writes after a prompt, and the file of its weights; raises InvalidInput."""
    from trainledger.nn.sample import generate
    from trainledger.train.trained import load_trained

    trained = load_trained(model, lambda sentence: print(printable(sentence), file=sys.stderr))
    tokenizer = trained.tokenizer
    if tokenizer is None:
        raise InvalidInput([Problem(model.name, None, "has no tokenizer.json, so no text can be read or written")])
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise InvalidInput([Problem("--prompt", prompt, "is not UTF-8 text")]) from None
    ids = tokenizer.encode([prompt])[0].tolist() or [tokenizer.end_id]
    written = generate(
        trained.model, ids, tokens, temperature=temperature, top_k=top_k, n_known=tokenizer.vocab_size, seed=seed
    )
    return tokenizer.decode(written)[len(tokenizer.decode(ids)) :], trained.weights


def visible(text: str) -> str:
    """Text that a terminal shows and does not obey: control characters but line ends and tabs become U+FFFD."""
    return "".join(each if each.isprintable() or each in "\n\t" else "\ufffd" for each in text)
