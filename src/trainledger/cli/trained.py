"""Verbs of a trained model: its text, its loss on documents, exchange with transformers, and 8 or 4 bits."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainledger.cli.arguments import count, flag, option, takes
from trainledger.cli.asking import lines, say, while_waiting
from trainledger.ledger.model.parameters import parameters
from trainledger.report.document import Document
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.runfile import vocabulary_problem
from trainledger.spec.units import format_count

if TYPE_CHECKING:
    from trainledger.engine.data.losses import Losses, TokenizedDocument
    from trainledger.engine.train.quantized import Quantization
    from trainledger.engine.train.trained import Trained

EMA = flag("--ema", "the moving average of the weights (recipe.ema) instead of the weights")


@takes(
    option("model RUN", "a run directory, a checkpoint or a Hugging Face one", type=Path),
    option("--prompt", "the text to continue (none: the start of a document)", default=""),
    count("--tokens N", "tokens to write (200)", least=0, default=200),
    option("--temperature X", "0 takes the likeliest token (0.8)", type=float, default=0.8),
    count("--top-k K", "draw from the K likeliest tokens only", default=None),
    count("--seed N", "seed of the draws (0)", least=0, most=2**63 - 1, default=0),
    EMA,
)
def sample(args: Namespace) -> Document:
    """Continue a prompt with a trained model. The same seed writes the same text."""
    asked = {name: getattr(args, name) for name in ("tokens", "temperature", "top_k", "seed")}
    written, weights = continued(args.model, args.prompt, **asked, averaged=args.ema)
    text = args.prompt + written
    return lines(visible(text), {"text": text, "prompt": args.prompt, **asked, "weights": weights})


def continued(
    model: Path, prompt: str, *, tokens: int, temperature: float, top_k: int | None, seed: int, averaged: bool = False
) -> tuple[str, Path]:
    """What a trained model writes after a prompt, and the file of its weights; raises InvalidInput."""
    from trainledger.engine.nn.sample import generate
    from trainledger.engine.train.trained import load_trained

    trained = load_trained(model, say, averaged=averaged)
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


TEXT = (
    option(
        "--text PATH", "files, directories or globs (none: the text that the run held out)", action="append", default=[]
    ),
    option("--text-field NAME", "field of a JSONL or Parquet record with the text (text)", default="text"),
    count("--documents N", "the first N only, of each source of a mixture", default=None),
    count(
        "--context N", "tokens the model sees at once (the run's seq_len, else the model's max_seq_len)", default=None
    ),
    count("--stride N", "tokens predicted in each window of a longer document (the context)", default=None),
)
BACKEND = option("--backend", "cpu, cuda or mps (the first that is there)", default="auto")


@takes(
    option("model RUN", "a run directory, a checkpoint, what import wrote or a Hugging Face directory", type=Path),
    *TEXT,
    option("--dtype", "format of the weights and the arithmetic (fp32)", choices=("fp32", "bf16"), default="fp32"),
    BACKEND,
    EMA,
)
def evaluate(args: Namespace) -> Document:
    """The loss and perplexity of a trained model on documents: those its run held out, or those of other text.

    Each document is read separately, after an end token.
    """
    from trainledger.answers.pages.perplexity import page
    from trainledger.engine.train.trained import load_trained

    trained = load_trained(args.model, say, averaged=args.ema)
    losses, read = losses_on_text(trained, args, args.dtype)
    return page(losses, {**read, "dtype": args.dtype, "weights": trained.weights})


def losses_on_text(trained: Trained, args: Namespace, dtype: str) -> tuple[Losses, dict[str, Any]]:
    """The losses of a model on the text of the arguments, and with which windows of what text."""
    from itertools import chain, islice

    from trainledger.engine.data.losses import Losses, documents_of, held_out_documents
    from trainledger.engine.data.mixture import open_mixture
    from trainledger.engine.train.device import find_device
    from trainledger.engine.train.evaluation import document_losses
    from trainledger.engine.train.precision import TORCH

    device = find_device(args.backend)
    tokenizer, run, spec = trained.tokenizer, trained.run, trained.model.spec
    if tokenizer is None:
        raise InvalidInput([Problem(args.model.name, None, "has no tokenizer.json, so no text can be read")])
    if problem := vocabulary_problem(spec.vocab_size, tokenizer.vocab_size, f"the tokenizer of {args.model}"):
        raise InvalidInput([problem])
    context = args.context or min(spec.max_seq_len, spec.max_seq_len if run is None else run.recipe.seq_len)
    stride = args.stride or context
    _check_windows(context, stride, spec.max_seq_len)
    documents: Iterator[TokenizedDocument]
    if args.text:
        cache = Path("cache" if run is None else run.data.cache)
        documents = islice(documents_of(args.text, tokenizer, args.text_field, cache), args.documents)
        of, in_all = ", ".join(args.text), args.documents
    elif run is None:
        rule = f"{args.model} is not a run with held-out text; name files, directories or globs"
        raise InvalidInput([Problem("--text", None, rule)])
    else:
        sources = open_mixture(run.data, vocab_size=spec.vocab_size, progress=True).sources
        most, of = args.documents, "the text that the run held out"
        documents = chain.from_iterable(islice(held_out_documents(each.store, each.name), most) for each in sources)
        counts = (each.store.validation.documents for each in sources)
        in_all = sum(each if most is None else min(each, most) for each in counts)
    show, found = while_waiting(), []
    for each in document_losses(
        trained.model.to(device, TORCH[dtype]),
        documents,
        end_id=tokenizer.end_id,
        context=context,
        stride=stride,
    ):
        found.append(each)
        show(f"{len(found):,} documents{'' if in_all is None else f' of {in_all:,}'}, the last one {each.place}")
    show("")
    return Losses(tuple(found)), {"context": context, "stride": stride, "text": of}


def _check_windows(context: int, stride: int, max_seq_len: int) -> None:
    problems = []
    if context > max_seq_len:
        problems.append(Problem("--context", context, f"the model takes at most {max_seq_len} tokens", max_seq_len))
    if stride > context:
        problems.append(Problem("--stride", stride, f"must be at most the context of {context}", context))
    if problems:
        raise InvalidInput(problems)


_OUT_DIR = option("out OUT_DIR", "the directory to write; it appears whole or not", type=Path)


@takes(
    option("model RUN", "a run directory, a checkpoint, or what import wrote", type=Path),
    _OUT_DIR,
    option("--dtype", "format of the weights (fp32)", choices=("fp32", "bf16"), default="fp32"),
    option("--model-type TYPE", "the model type of transformers, where several would do", default=None),
    flag("--force", "replace an earlier export in OUT_DIR"),
    EMA,
)
def export(args: Namespace) -> Document:
    """Write a trained model as a directory that Hugging Face transformers opens with equal logits."""
    from trainledger.engine.nn.huggingface import export_model
    from trainledger.engine.train.trained import load_trained, tokenizer_text

    trained = load_trained(args.model, say, averaged=args.ema)
    tokenizer = None if trained.tokenizer is None else tokenizer_text(trained.tokenizer)
    model_type = export_model(
        trained.model, args.out, args.dtype, tokenizer=tokenizer, force=args.force, model_type=args.model_type
    )
    if trained.model.spec.unserved:
        say(f"{trained.model.spec.unserved}, as transformers leaves them out")
    size = parameters(trained.model.spec.served).total
    return lines(
        f"{args.out}: {model_type}, {format_count(size)} parameters in {args.dtype},\n  from {trained.weights}\n"
        f"open it with transformers:\n  AutoModelForCausalLM.from_pretrained({str(args.out)!r})",
        {
            "directory": args.out,
            "weights": trained.weights,
            "model_type": model_type,
            "dtype": args.dtype,
            "parameters": size,
            "tokenizer": trained.tokenizer is not None,
        },
    )


@takes(
    option("model HF_DIR", "a directory with config.json and safetensors", type=Path),
    _OUT_DIR,
    flag("--force", "replace an earlier import in OUT_DIR"),
)
def import_(args: Namespace) -> Document:
    """Read a Hugging Face directory (of any model type that is known here) and write a model that training can start
    from: model.toml, model.safetensors and, where there is one, tokenizer.json."""
    from trainledger.engine.nn.huggingface import import_model
    from trainledger.engine.train.trained import config_notes, tokenizer_json_in, write_start

    model, notes, tokenizer = import_model(args.model), config_notes(args.model), tokenizer_json_in(args.model)
    for each in notes:
        say(each)
    write_start(model, args.out, tokenizer_json=tokenizer, force=args.force)
    size = sum(each.numel() for each in model.parameters())
    kept = "with its tokenizer" if tokenizer is not None else "without a tokenizer.json"
    return lines(
        f"{args.out}: {model.spec.name}, {format_count(size)} parameters, {kept}\n"
        f"train from it: --set recipe.initial_weights={args.out}, with the [model] of its model.toml",
        {"directory": args.out, "parameters": size, "tokenizer": tokenizer is not None, "notes": notes},
    )


@takes(
    option("model RUN", "a run directory, a checkpoint, what import wrote or a Hugging Face directory", type=Path),
    count("--bits B", "of a weight: 8 with a scale per row, 4 with a scale per group", required=True),
    option("--to DIR", "the directory to write; it appears whole or not", type=Path, required=True),
    count("--group-size N", "weights of a row that share a scale, of 4 bits: 128, 64 or 32 (128)", default=None),
    option("--dtype", "format of embeddings, head, routers, norms and biases (bf16)", choices=("fp32", "bf16"),
           default="bf16"),
    flag("--force", "replace an earlier quantized checkpoint in DIR"),
    *TEXT,
    BACKEND,
    EMA,
)  # fmt: skip
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
    size = 128 if group_size is None else group_size
    if size not in GROUP_SIZES:
        rule = f"must be one of {', '.join(map(str, GROUP_SIZES))}"
        raise InvalidInput([Problem("--group-size", size, rule, _nearest(size, GROUP_SIZES))])
    return Quantization(4, size)


def _nearest(value: int, known: Sequence[int]) -> int:
    return min(known, key=lambda each: abs(each - value))
