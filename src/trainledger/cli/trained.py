"""Verbs of a trained model: its text, its loss on documents, exchange with transformers, and 8 or 4 bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, Unpack

from trainledger.answers.question import choice, count, number, question, text, word
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

Averaged = Annotated[
    bool, text("the moving average of the weights (recipe.ema) instead of the weights", flag="--ema", default=False)
]
Model = Annotated[
    str, word("a run directory, a checkpoint, what import wrote or a Hugging Face directory", metavar="RUN")
]
OutDir = Annotated[str, word("the directory to write; it appears whole or not", metavar="OUT_DIR")]
DTYPES = ("fp32", "bf16")


@question(plots=False)
def sample(
    model: Model,
    *,
    prompt: Annotated[str, text("the text to continue (none: the start of a document)")] = "",
    tokens: Annotated[int, count("tokens to write", least=0, most=10**6)] = 200,
    temperature: Annotated[float, number("0 takes the likeliest token", least=0, most=1e6, metavar="X")] = 0.8,
    top_k: Annotated[int | None, count("draw from the K likeliest tokens only")] = None,
    seed: Annotated[int, count("seed of the draws", least=0, most=2**63 - 1)] = 0,
    averaged: Averaged = False,
) -> Document:
    """Continue a prompt with a trained model. The same seed writes the same text."""
    drawn: dict[str, Any] = {"tokens": tokens, "temperature": temperature, "top_k": top_k, "seed": seed}
    written, weights = continued(Path(model), prompt, **drawn, averaged=averaged)
    whole = prompt + written
    return lines(visible(whole), {"text": whole, "prompt": prompt, **drawn, "weights": weights})


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


class OfText(TypedDict, total=False):
    """Documents that a model is evaluated on, by windows, and where."""

    text: Annotated[
        Sequence[str],
        text("files, directories or globs (none: the text that the run held out)", several=True, metavar="PATH"),
    ]
    text_field: Annotated[str, text("field of a JSONL or Parquet record with the text (text)", metavar="NAME")]
    documents: Annotated[int, count("the first N only, of each source of a mixture")]
    context: Annotated[int, count("tokens the model sees at once (the run's seq_len, else the model's max_seq_len)")]
    stride: Annotated[int, count("tokens predicted in each window of a longer document (the context)")]
    backend: Annotated[str, text("cpu, cuda or mps (the first that is there)")]


@question(plots=False)
def evaluate(
    model: Model,
    *,
    dtype: Annotated[str, choice("format of the weights and the arithmetic", DTYPES)] = "fp32",
    averaged: Averaged = False,
    **of_text: Unpack[OfText],
) -> Document:
    """The loss and perplexity of a trained model on documents: those its run held out, or those of other text.

    Each document is read separately, after an end token.
    """
    from trainledger.answers.pages.perplexity import page
    from trainledger.engine.train.trained import load_trained

    trained = load_trained(Path(model), say, averaged=averaged)
    losses, read = losses_on_text(trained, model, of_text, dtype)
    return page(losses, {**read, "dtype": dtype, "weights": trained.weights})


def losses_on_text(trained: Trained, named: str, of_text: OfText, dtype: str) -> tuple[Losses, dict[str, Any]]:
    """The losses of a model on the text of the arguments, and with which windows of what text."""
    from itertools import chain, islice

    from trainledger.engine.data.losses import Losses, documents_of, held_out_documents
    from trainledger.engine.data.mixture import open_mixture
    from trainledger.engine.train.device import find_device
    from trainledger.engine.train.evaluation import document_losses
    from trainledger.engine.train.precision import TORCH

    device = find_device(of_text.get("backend", "auto"))
    tokenizer, run, spec = trained.tokenizer, trained.run, trained.model.spec
    if tokenizer is None:
        raise InvalidInput([Problem(Path(named).name, None, "has no tokenizer.json, so no text can be read")])
    if problem := vocabulary_problem(spec.vocab_size, tokenizer.vocab_size, f"the tokenizer of {named}"):
        raise InvalidInput([problem])
    most, paths = of_text.get("documents"), of_text.get("text", ())
    context = of_text.get("context") or min(spec.max_seq_len, spec.max_seq_len if run is None else run.recipe.seq_len)
    stride = of_text.get("stride", context)
    _check_windows(context, stride, spec.max_seq_len)
    documents: Iterator[TokenizedDocument]
    if paths:
        cache = Path("cache" if run is None else run.data.cache)
        documents = islice(documents_of(paths, tokenizer, of_text.get("text_field", "text"), cache), most)
        of, in_all = ", ".join(paths), most
    elif run is None or run.recipe.objective.answers:
        rule = f"{named} is not a run with held-out text; name files, directories or globs"
        raise InvalidInput([Problem("--text", None, rule)])
    else:
        sources = open_mixture(run.data, vocab_size=spec.vocab_size, progress=True).sources
        of = "the text that the run held out"
        documents = chain.from_iterable(
            islice(held_out_documents(source.store, source.name), most) for source in sources
        )
        counts = (source.store.validation.documents for source in sources)
        in_all = sum(each if most is None else min(each, most) for each in counts)
    show, found = while_waiting(), []
    for document_loss in document_losses(
        trained.model.to(device, TORCH[dtype]), documents, end_id=tokenizer.end_id, context=context, stride=stride
    ):
        found.append(document_loss)
        show(
            f"{len(found):,} documents{'' if in_all is None else f' of {in_all:,}'}, the last one {document_loss.place}"
        )
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


@question(plots=False)
def export(
    model: Model,
    out: OutDir,
    *,
    dtype: Annotated[str, choice("format of the weights", DTYPES)] = "fp32",
    model_type: Annotated[str | None, text("the model type of transformers, where several would do")] = None,
    force: Annotated[bool, text("replace an earlier export in OUT_DIR")] = False,
    averaged: Averaged = False,
    adapters: Annotated[bool, text("adapters alone (recipe.lora), as PEFT loads them onto their model")] = False,
) -> Document:
    """Write a trained model, adapters merged, as a directory that Hugging Face transformers opens with equal logits."""
    from trainledger.engine.nn.huggingface import export_model
    from trainledger.engine.train.trained import load_trained, tokenizer_text, write_adapters

    if adapters:
        if averaged:
            raise InvalidInput([Problem("--ema", None, "is of merged weights; leave --adapters out")])
        kind, stored = write_adapters(Path(model), Path(out), say, force=force, model_type=model_type)
        layers = sum(".lora_a" in name for name in stored)
        says = f"{out}: adapters of {layers:,} layers of a {kind}\nload them with PEFT:\n"
        data = {"directory": Path(out), "model_type": kind, "adapters": len(stored)}
        return lines(f"{says}  PeftModel.from_pretrained(model, {out!r})", data)

    trained = load_trained(Path(model), say, averaged=averaged)
    tokenizer = None if trained.tokenizer is None else tokenizer_text(trained.tokenizer)
    written = export_model(trained.model, Path(out), dtype, tokenizer=tokenizer, force=force, model_type=model_type)
    if trained.model.spec.unserved:
        say(f"{trained.model.spec.unserved}, as transformers leaves them out")
    size = parameters(trained.model.spec.served).total
    return lines(
        f"{out}: {written}, {format_count(size)} parameters in {dtype},\n  from {trained.weights}\n"
        f"open it with transformers:\n  AutoModelForCausalLM.from_pretrained({out!r})",
        {
            "directory": Path(out),
            "weights": trained.weights,
            "model_type": written,
            "dtype": dtype,
            "parameters": size,
            "tokenizer": trained.tokenizer is not None,
        },
    )


@question(plots=False)
def import_(
    model: Annotated[str, word("a directory with config.json and safetensors", metavar="HF_DIR")],
    out: OutDir,
    *,
    force: Annotated[bool, text("replace an earlier import in OUT_DIR")] = False,
) -> Document:
    """Read a Hugging Face directory (of any model type that is known here) and write a model that training can start
    from: model.toml, model.safetensors and, where there is one, tokenizer.json."""
    from trainledger.engine.nn.huggingface import import_model
    from trainledger.engine.train.trained import config_notes, tokenizer_json_in, write_start

    path = Path(model)
    imported, notes, tokenizer = import_model(path), config_notes(path), tokenizer_json_in(path)
    for note in notes:
        say(note)
    write_start(imported, Path(out), tokenizer_json=tokenizer, force=force)
    size = sum(parameter.numel() for parameter in imported.parameters())
    kept = "with its tokenizer" if tokenizer is not None else "without a tokenizer.json"
    return lines(
        f"{out}: {imported.spec.name}, {format_count(size)} parameters, {kept}\n"
        f"train from it: --set recipe.initial_weights={out}, with the [model] of its model.toml",
        {"directory": Path(out), "parameters": size, "tokenizer": tokenizer is not None, "notes": notes},
    )


@question(plots=False)
def quantize(
    model: Model,
    *,
    bits: Annotated[int, count("of a weight: 8 with a scale per row, 4 with a scale per group", least=4, most=8)],
    to: Annotated[str, text("the directory to write; it appears whole or not", metavar="DIR")],
    group_size: Annotated[
        int | None, count("weights of a row that share a scale, of 4 bits: 128, 64 or 32 (128)")
    ] = None,
    dtype: Annotated[str, choice("format of embeddings, head, routers, norms and biases", DTYPES)] = "bf16",
    force: Annotated[bool, text("replace an earlier quantized checkpoint in DIR")] = False,
    averaged: Averaged = False,
    **of_text: Unpack[OfText],
) -> Document:
    """Write a trained model with its blocks' linear layers in 8 or 4 bits, and say what that changes in perplexity.

    Weights alone are quantized, by torchao: sample, evaluate and export read them back as fp32. Both perplexities are
    of the same documents: those its run held out, or those of other text.
    """
    from trainledger.answers.pages.quantization import page
    from trainledger.engine.data.losses import PairedLosses
    from trainledger.engine.train.quantized import import_torchao
    from trainledger.engine.train.trained import load_trained, refuse_target, write

    quantization, target = _asked(bits, group_size), Path(to)
    import_torchao()  # missing, it is said before anything is read
    refuse_target(Path(model), target, force=force)
    trained = load_trained(Path(model), say, averaged=averaged)
    if trained.model.spec.unserved:
        say(f"{trained.model.spec.unserved}: a served model has none")
    before, read = losses_on_text(trained, model, of_text, "fp32")
    nbytes = write(trained, target, quantization, dtype, force=force)
    after, _ = losses_on_text(load_trained(target, say), to, of_text, "fp32")
    asked = {
        "directory": target, "weights": trained.weights, "bits": bits, "group_size": quantization.group_size,
        "format": quantization.format, "matrices": nbytes.matrices, "dtype": dtype, **read,
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
