"""The published runs most like a run, each with what was measured of it and what is predicted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from math import log2
from typing import Any

from trainledger import catalog
from trainledger.ledger.model.parameters import parameters
from trainledger.spec.frozen import frozen
from trainledger.spec.layout import Layout
from trainledger.spec.run import Run

FARTHEST = 8.0  # the distance above which runs say too little of each other
_SAME_MAKER, _GENERATION, _UNKNOWN_GENERATION = 1.0, 2.0, 4.0
# Compared in addition to device and active parameters: the weight of the square of a difference of logarithms, and of
# a difference. The columns of the table begin with device, maker, capability, active parameters and these.
_SIZES = {
    "devices": 1.0,
    "seq_len": 1.0,
    "tokens_per_device": 1.0,
    "tensor": 0.25,
    "pipeline": 0.25,
    "context": 0.25,
    "micro_batch": 0.25,
}
_KINDS = {"bits": 4.0, "experts": 4.0, "adapters": 4.0, "recomputation": 1.0}
_COMPARED = len(_SIZES) + len(_KINDS)
_WORDS = {
    "active_parameters": "parameters",
    "seq_len": "tokens of a sequence",
    "tokens_per_device": "tokens for each device",
    "tensor": "tensor ranks",
    "pipeline": "pipeline stages",
    "context": "context ranks",
    "micro_batch": "sequences of a micro-batch",
}
_NAMED = 2  # differences that a sentence names


@frozen(kw_only=True)
class PublishedRun:
    """A published run: what its source says of it, what was measured, and what is predicted.

    ``step_seconds`` and ``peak_nbytes`` are measured, ``predicted_step_seconds`` and ``predicted_peak_nbytes`` are
    ours; None where nothing is published. ``tokens_per_second_per_device`` and ``mfu`` are as the source prints them.
    No predicted time rests on the run itself: where constants of the device are ``fitted`` on it, the prediction is by
    constants fitted on all other sources. ``peak_is`` says which memory was measured: driver, reserved or allocated.
    ``tokens_per_device`` are those of a step, ``micro_batch`` and ``global_batch`` count sequences, ``adapters`` names
    the format of the frozen weights and is empty where all weights are trained.
    """

    device: str
    maker: str
    compute_capability: float | None
    active_parameters: int
    devices: int
    seq_len: int
    tokens_per_device: int
    tensor: int
    pipeline: int
    context: int
    micro_batch: int
    bits: int
    experts: bool
    adapters: str
    recomputation: str
    id: str
    source: str
    model: str
    parameters: int
    layout: str
    global_batch: int
    precision: str
    step_seconds: float | None
    tokens_per_second_per_device: float | None
    mfu: float | None
    predicted_step_seconds: float | None
    fitted: bool
    peak_nbytes: int | None
    peak_is: str
    predicted_peak_nbytes: int | None

    @property
    def error(self) -> float | None:
        """Predicted over measured seconds of a step, less one; None where no time is published."""
        return _error(self.predicted_step_seconds, self.step_seconds)

    @property
    def memory_error(self) -> float | None:
        """Predicted over measured peak memory, less one; None where no memory is published."""
        return _error(self.predicted_peak_nbytes, self.peak_nbytes)


def _error(predicted: float | None, measured: float | None) -> float | None:
    return None if predicted is None or measured is None else predicted / measured - 1


@frozen
class Resemblance:
    """A published run, its distance from the run that was asked about, and in words what differs most."""

    published: PublishedRun
    distance: float
    differs: str


def nearest(run: Run, n: int = 3) -> tuple[Resemblance, ...]:
    """The ``n`` published runs most like a run, nearest first; fewer or none where no others are near.

    The distance is a sum. The device adds 0 where it is the same, else 1 and twice the difference of the compute
    capabilities (4 where these are not known); devices of other makers are not compared. Active parameters, devices,
    tokens of a sequence, and tokens of a step for each device add the square of the difference of binary logarithms: 1
    for a size twice as large, 4 for four times. Tensor, pipeline and context ranks and the micro-batch count a quarter
    of that. Matmuls in other bits, experts against a dense model and other adapters add 4 each, another kind of
    recomputation 1. Runs farther away than `FARTHEST` are left out.

    >>> from trainledger.answers.load import load
    >>> recipe = {"seq_len": 8192, "global_batch": 32, "micro_batch": 2, "steps": 1, "precision": "bf16-sharded",
    ...           "activation_checkpointing": "selective"}
    >>> run = load({"model": {"preset": "llama-3-8b"}, "recipe": recipe, "layout": {"shard": 16},
    ...             "cluster": {"device": "h100-sxm", "count": 16}})
    >>> found = nearest(run, 1)[0]
    >>> found.published.id, found.distance, found.differs
    ('R0002', 2.0, 'h100-sxm-96gb-500w, not h100-sxm; 0.5 times the devices')
    """
    if run.cluster.device not in catalog.device_names():
        return ()
    asked = described(run)
    own = log2(asked["active_parameters"])
    sizes = [(place, log2(asked[name]), weight) for place, (name, weight) in enumerate(_SIZES.items())]
    kinds = [(place, written(asked[name]), weight) for place, (name, weight) in enumerate(_KINDS.items(), len(_SIZES))]
    devices: dict[str, float] = {}
    near = []
    for line in catalog.published_runs()[1:]:
        device, maker, capability, count, rest = line.split("\t", 4)
        if maker != asked["maker"]:
            continue
        if device not in devices:
            devices[device] = _of_device(asked, device, _READ["float | None"](capability))
        distance = devices[device] + (own - log2(int(count))) ** 2
        if distance > FARTHEST:
            continue
        cells = rest.split("\t", _COMPARED)
        for place, logarithm, weight in sizes:
            distance += weight * (logarithm - log2(int(cells[place]))) ** 2
            if distance > FARTHEST:
                break
        else:
            distance += sum(weight for place, text, weight in kinds if cells[place] != text)
            if distance <= FARTHEST:
                near.append((distance, line))
    near.sort(key=lambda each: each[0])
    found = [(_published(line), distance) for distance, line in near[:n]]
    return tuple(
        Resemblance(published_run, distance, _differs(asked, published_run)) for published_run, distance in found
    )


def described(run: Run) -> dict[str, Any]:
    """The fields of `PublishedRun` that follow from a run on a device of the catalog."""
    device, recipe, layout = catalog.device(run.cluster.device), run.recipe, run.layout
    count = parameters(run.model)
    in_8_bits = recipe.precision.float8 is not None
    return {
        "parameters": count.total,
        "active_parameters": count.active,
        "experts": run.model.experts is not None,
        "adapters": "" if recipe.lora is None else recipe.lora.base_format or recipe.precision.compute,
        "device": device.name,
        "maker": device.title.partition(" ")[0],
        "compute_capability": device.compute_capability,
        "devices": run.cluster.count,
        "layout": layout_text(layout),
        "tensor": layout.tensor,
        "pipeline": layout.pipeline,
        "context": layout.context,
        "micro_batch": run.device_batch,
        "global_batch": recipe.global_batch,
        "seq_len": recipe.seq_len,
        "tokens_per_device": max(1, recipe.tokens_per_step // run.cluster.count),
        "precision": recipe.precision.kind,
        "bits": 8 if in_8_bits else 16 if recipe.precision.compute in ("bf16", "fp16") else 32,
        "recomputation": recipe.activation_checkpointing.kind,
    }


def layout_text(layout: Layout) -> str:
    """The ranks of each kind that a layout has more than one of.

    >>> layout_text(Layout(shard=8, zero=1, tensor=4)), layout_text(Layout())
    ('shard 8 (ZeRO-1), tensor 4', '')
    """
    names = ("replicate", "shard", "context", "expert", "tensor", "pipeline")
    zero = {"shard": f" (ZeRO-{layout.zero})"} if 0 < layout.zero < 3 else {}
    return ", ".join(
        f"{name} {getattr(layout, name)}{zero.get(name, '')}" for name in names if getattr(layout, name) > 1
    )


def _of_device(asked: dict[str, Any], device: str, capability: float | None) -> float:
    """What another device of the same maker adds to the distance."""
    if device == asked["device"]:
        return 0.0
    if capability is None or asked["compute_capability"] is None:
        return _UNKNOWN_GENERATION
    return _SAME_MAKER + _GENERATION * abs(capability - float(asked["compute_capability"]))


def _differs(asked: dict[str, Any], published: PublishedRun) -> str:
    """The two largest differences, in words."""
    apart = sorted(_differences(asked, published), key=lambda difference: -difference[0])
    return "; ".join(words for _, words in apart[:_NAMED]) or "the same in all that is compared"


def _differences(asked: dict[str, Any], published: PublishedRun) -> Iterator[tuple[float, str]]:
    """What each difference adds to the distance, with its words."""
    if published.device != asked["device"]:
        added = _of_device(asked, published.device, published.compute_capability)
        yield added, f"{published.device}, not {asked['device']}"
    for name, weight in _KINDS.items():
        its, own = getattr(published, name), asked[name]
        if its != own:
            yield weight, _KIND_WORDS[name](its, own)
    for name, weight in ("active_parameters", 1.0), *_SIZES.items():
        its, own = getattr(published, name), asked[name]
        if its != own:
            yield weight * log2(its / own) ** 2, f"{its / own:.2g} times the {_WORDS.get(name, name)}"


_KIND_WORDS: dict[str, Callable[[Any, Any], str]] = {
    "bits": lambda its, own: f"matmuls in {its} bits, not {own}",
    "experts": lambda its, own: "experts, not dense" if its else "dense, without experts",
    "adapters": lambda its, own: (
        f"{f'adapters on {its} weights' if its else 'all weights trained'}, not "
        f"{f'adapters on {own} weights' if own else 'all'}"
    ),
    "recomputation": lambda its, own: f"{'no' if its == 'none' else its} recomputation, not {own}",
}

_READ: dict[str, Callable[[str], Any]] = {
    "str": str,
    "int": int,
    "bool": lambda text: text == "yes",
    "int | None": lambda text: int(text) if text else None,
    "float | None": lambda text: float(text) if text else None,
}


def written(value: Any) -> str:
    """A field of `PublishedRun` as the catalog's table has it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else str(value)


def _published(line: str) -> PublishedRun:
    cells = zip(fields(PublishedRun), line.split("\t"), strict=True)
    values = {each.name: _READ[str(each.type)](cell) for each, cell in cells}
    return PublishedRun(**{**values, "source": catalog.published_sources()[values["source"]]})
