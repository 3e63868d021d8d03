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
from trainledger.web.calculator import BAD, GOOD, UNKNOWN, Calculator, Drawing, Headline, Progress, Remedy, Reply
from trainledger.web.field import Field, Query, of_run, one_of, powers, size_of
from trainledger.web.run import CLUSTER, MODEL, PASTED, of_pasted, python_of, settings_of, source_of, words_of

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


def _headlines(served: Inference) -> list[Headline]:
    weights, serving, layers = served.weights, served.serving, served.run.model.n_layers
    held = (
        f"{format_nbytes(weights.codes)} in {serving.weights} + {format_nbytes(weights.scales)} of scales + "
        f"{format_nbytes(weights.whole)} not quantized"
        if weights.codes
        else f"{served.ledger.parameters:,} parameters in {serving.weights} = {weights.nbytes:,} bytes"
    )
    headlines = [
        Headline(
            name="weights_nbytes", title="weights of a device", value=weights.nbytes, unit="nbytes", formula=held,
            basis="exact", source="the format's bits and scales",
        ),
        Headline(
            name="cache_nbytes", title="KV cache of a device", value=served.cache_nbytes, unit="nbytes", basis="exact",
            formula=f"{counted(serving.batch, 'sequence')} x {serving.context:,} tokens x {served.token_nbytes:,} "
                    f"bytes a token over {layers} layers" + _windowed(served) + _of_all(served),
            source="keys and values of each layer, or its latent",
        ),
    ]  # fmt: skip
    if served.memory is not None:
        rest = served.memory.nbytes - weights.nbytes - served.cache_nbytes
        headlines.append(
            Headline(
                name="device_nbytes",
                title="memory of a device",
                value=served.memory.nbytes,
                unit="nbytes",
                formula=f"{format_nbytes(weights.nbytes)} weights + {format_nbytes(served.cache_nbytes)} KV cache + "
                f"{format_nbytes(rest)} activations, buffers, and what lies outside the tensors",
                basis="bound" if served.memory.tensors_alone else "assumed",
                source="live bytes at each operation, and what the driver and libraries take",
            )
        )
    return [*headlines[2:], *headlines[:2], *_speed(served)]


def _of_all(served: Inference) -> str:
    """The caches of all tensor ranks together."""
    ranks = served.run.layout.tensor
    return "" if ranks == 1 else f"; {ranks} tensor ranks: {format_nbytes(ranks * served.cache_nbytes)} in all"


def _windowed(served: Inference) -> str:
    return "" if served.run.model.attention.window is None else "; layers with a window keep at most that"


def _speed(served: Inference) -> list[Headline]:
    """Latency, tokens per second and intensity, where the device's rates are known."""
    moved, flops = sum(served.moved_nbytes.values()), served.ledger.matmul_flops
    ridge = "" if served.ridge is None else f"; the ridge of {served.device} is {served.ridge:.4g}"
    intensity = Headline(
        name="intensity",
        title="FLOPs per byte",
        value=served.intensity,
        unit="ratio",
        basis="exact",
        formula=f"{format_flops(flops)} / {format_nbytes(moved)} moved{ridge}",
        source="Williams et al. 2009, Roofline (doi 10.1145/1498765.1498785)",
    )
    time = served.time
    if time is None:
        return [intensity]
    parts = ", ".join(f"{name} {format_seconds(each)}" for name, each in time.bound_seconds_by_limit.items() if each)
    seconds = time.expected_seconds or time.bound_seconds
    rate = served.expected_tokens_per_second or served.bound_tokens_per_second
    tokens = served.serving.batch * (served.serving.context if served.serving.phase == "prefill" else 1)
    expected = time.expected_seconds is not None
    said = "the sum of all operations at calibrated rates" if expected else f"the {time.limit} bound"
    return [
        Headline(
            name="latency", title="time of a forward", value=seconds, unit="seconds",
            formula=f"{said}; the bound is {format_seconds(time.bound_seconds)} ({parts})",
            basis="assumed" if expected else time.basis,
            source="Pope et al. 2022, Efficiently Scaling Transformer Inference (arXiv 2211.05102), section 2.1",
        ),
        Headline(
            name="tokens_per_second", title="tokens per second", value=rate, unit="tokens_per_second",
            formula=f"{counted(tokens, 'token')} / {shown(seconds, 'seconds')}",
            basis="assumed" if expected else time.basis, source="all sequences of the batch together",
        ),
        intensity,
    ]  # fmt: skip


SERVING = Calculator(
    name="serving",
    title="Serving",
    question="What does a trained model take to serve, and what does a larger batch cost in latency?",
    fields=(
        MODEL,
        *PASTED,
        CLUSTER[0],
        of_run("layout.tensor", "tensor ranks", default="1", group="Cluster", stops=powers(1, 16)),
        Field(name="phase", title="phase", default="decode", group="Question", strict=True,
              choices=(("decode", "decode: one more token"), ("prefill", "prefill: the prompt"))),
        Field(name="batch", title="sequences at once", default="16", group="Question", stops=powers(1, 4096)),
        Field(name="context", title="tokens of each", default="8192", group="Question", stops=powers(128, 131072),
              about="the context that the cache holds"),
        Field(name="weights", title="weights in", default="bf16", group="Formats", choices=one_of(WEIGHT_FORMATS)),
        Field(name="cache", title="KV cache in", default="bf16", group="Formats", choices=one_of(CACHE_FORMATS)),
        Field(name="compute", title="compute in", group="Formats", choices=one_of(["bf16", "fp16", "fp32"]),
              about="matmuls, and what is not quantized"),
    ),
    reply=_reply,
    presets={
        "Llama 3 8B, 16 sequences": {},
        "Llama 3.1 70B in int4 on one H100": {"run": "llama-3.1-70b", "weights": "int4", "batch": "4"},
        "Llama 3.1 405B in fp8 on 8 H100": {"run": "llama-3.1-405b", "weights": "fp8", "layout.tensor": "8"},
        "DeepSeek-V3's latent cache": {"run": "deepseek-v3", "weights": "fp8", "layout.tensor": "16", "batch": "64"},
        "A prompt of 8,192 tokens": {"phase": "prefill", "batch": "1"},
    },
    any_of_run=True,
)  # fmt: skip
