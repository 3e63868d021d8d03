"""Serving: weights and cache of a trained model, and what a larger batch takes and gives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import trainledger as tl
from trainledger.answers.inference import largest
from trainledger.forecast.plan.serving import Inference
from trainledger.report.document import shown
from trainledger.spec.serving import CACHE_FORMATS, WEIGHT_FORMATS
from trainledger.spec.units import counted, format_flops, format_nbytes, format_seconds
from trainledger.web.calculator import (
    BAD,
    GOOD,
    UNKNOWN,
    Drawing,
    Headline,
    Progress,
    Remedy,
    Reply,
    calculator,
    headline,
)
from trainledger.web.field import Query, one_of, size_of
from trainledger.web.run import of_pasted, python_of, settings_of, source_of, words_of

_NODE = 8  # devices
_OPTIONS = ("phase", "batch", "context", "weights", "cache", "compute")


def _reply(query: Query, progress: Progress) -> Reply:
    options: dict[str, Any] = dict(query.chosen(*_OPTIONS))
    alone = replace(query, given={**query.given, "cluster.count": str(size_of(query["layout.tensor"]))})
    served = tl.inference(source_of(query), settings_of(alone), **options)
    document = served.document()
    tables = document.tables
    flags = [word for name, text in options.items() for word in (f"--{name}", text)]
    return Reply(
        document=document,
        headlines=tuple(_headlines(served)),
        verdict=_verdict(served),
        tone=UNKNOWN if served.fits is None else GOOD if served.fits else BAD,
        drawings=tuple(
            Drawing(chart=figure, table=tables["batches"] if served.batches else tables["memory"])
            for figure in document.figures()
        ),
        values={"context": str(served.serving.context), "compute": served.serving.compute},
        unused=of_pasted(query),
        remedies=tuple(_remedies(served)),
        words=words_of("plan", alone, *flags),
        python=python_of("inference", alone, **options),
        notes=served.notes,
    )


def _remedies(served: Inference) -> Iterator[Remedy]:
    """What needs less memory where the batch does not fit."""
    if served.fits is not False:
        return
    if served.largest_batch:
        yield Remedy(
            title=f"Serve {served.largest_batch:,} sequences at once", fields={"batch": str(served.largest_batch)}
        )
    ranks, serving = served.run.layout.tensor, served.serving
    if serving.weights == serving.compute:
        yield from (Remedy(title=f"Weights in {each}", fields={"weights": each}) for each in ("fp8", "int4"))
    if serving.cache == serving.compute:
        yield Remedy(title="KV cache in fp8", fields={"cache": "fp8"})
    if ranks < _NODE:
        yield Remedy(title=f"{_NODE} tensor ranks", fields={"layout.tensor": str(_NODE)})


def _verdict(served: Inference) -> str:
    """Whether the batch fits, and how fast it is at best."""
    fits = {True: "Fits", False: "Does not fit", None: "Its fit is not known"}[served.fits]
    nbytes = served.ledger.peak().nbytes if served.memory is None else served.memory.nbytes
    rate = served.expected_tokens_per_second or served.bound_tokens_per_second
    speed = (
        "" if rate is None else f"; {'about' if served.expected_tokens_per_second else 'at most'} {rate:,.0f} tokens/s"
    )
    most = "" if served.largest_batch is None else f" {largest(served.largest_batch)}"
    return f"{fits}: {format_nbytes(nbytes)} on a device{speed}.{most}"


def _headlines(served: Inference) -> Iterator[Headline]:
    weights, serving, layers = served.weights, served.serving, served.run.model.n_layers
    held = (
        f"{format_nbytes(weights.codes)} in {serving.weights} + {format_nbytes(weights.scales)} of scales + "
        f"{format_nbytes(weights.whole)} not quantized"
        if weights.codes
        else f"{served.ledger.parameters:,} parameters in {serving.weights} = {weights.nbytes:,} bytes"
    )
    if served.memory is not None:
        rest = served.memory.nbytes - weights.nbytes - served.cache_nbytes
        formula = (
            f"{format_nbytes(weights.nbytes)} weights + {format_nbytes(served.cache_nbytes)} KV cache + "
            f"{format_nbytes(rest)} activations, buffers, and what lies outside the tensors"
        )
        basis = "bound" if served.memory.tensors_alone else "assumed"
        yield headline("serving.device_nbytes", served.memory.nbytes, formula, basis=basis)
    yield headline("serving.weights_nbytes", weights.nbytes, held)
    batch = f"{counted(serving.batch, 'sequence')} x {serving.context:,} tokens"
    windowed = "" if served.run.model.attention.window is None else "; layers with a window keep at most that"
    formula = f"{batch} x {served.token_nbytes:,} bytes a token over {layers} layers{windowed}{_of_all(served)}"
    yield headline("serving.cache_nbytes", served.cache_nbytes, formula)
    yield from _speed(served)


def _of_all(served: Inference) -> str:
    """The caches of all tensor ranks together."""
    ranks = served.run.layout.tensor
    return "" if ranks == 1 else f"; {ranks} tensor ranks: {format_nbytes(ranks * served.cache_nbytes)} in all"


def _speed(served: Inference) -> Iterator[Headline]:
    """Latency, tokens per second and intensity, where the device's rates are known."""
    moved, flops = sum(served.moved_nbytes.values()), served.ledger.matmul_flops
    ridge = "" if served.ridge is None else f"; the ridge of {served.device} is {served.ridge:.4g}"
    formula = f"{format_flops(flops)} / {format_nbytes(moved)} moved{ridge}"
    intensity = headline("serving.intensity", served.intensity, formula)
    time = served.time
    if time is None:
        yield intensity
        return
    parts = ", ".join(f"{name} {format_seconds(each)}" for name, each in time.bound_seconds_by_limit.items() if each)
    seconds = time.expected_seconds or time.bound_seconds
    rate = served.expected_tokens_per_second or served.bound_tokens_per_second
    tokens = served.serving.batch * (served.serving.context if served.serving.phase == "prefill" else 1)
    expected = time.expected_seconds is not None
    said = "the sum of all operations at calibrated rates" if expected else f"the {time.limit} bound"
    basis = "assumed" if expected else time.basis
    formula = f"{said}; the bound is {format_seconds(time.bound_seconds)} ({parts})"
    yield headline("serving.latency", seconds, formula, basis=basis)
    formula = f"{counted(tokens, 'token')} / {shown(seconds, 'seconds')}"
    yield headline("serving.tokens_per_second", rate, formula, basis=basis)
    yield intensity


SERVING = calculator("serving", _reply, {"weights": one_of(WEIGHT_FORMATS), "cache": one_of(CACHE_FORMATS)})
