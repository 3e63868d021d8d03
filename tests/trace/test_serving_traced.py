"""The closed form of a forward with a cache, and the same forward traced on fake tensors, operation by operation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from agreement import unrolled
from torch._subclasses.fake_tensor import FakeTensorMode

from cached_models import KINDS, SIZES
from trainledger.engine.nn.cache import Cache
from trainledger.engine.nn.transformer import Transformer
from trainledger.ledger.entry import Entry
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.serving import account_serving
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run
from trainledger.spec.serving import Serving
from trainledger.trace.recorder.recorder import Recorder

pytestmark = pytest.mark.agreement

torch.set_num_threads(1)


def traced(spec: ModelSpec, B: int, context: int, phase: str, dtype: torch.dtype) -> Ledger:
    """One forward of the model on fake tensors."""
    with FakeTensorMode(), torch.no_grad():
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        model = Transformer(spec).eval()
        torch.set_default_dtype(before)
        cache = Cache(model.spec, model.embed_tokens.weight, B, context)
        past = context - 1 if phase == "decode" else 0
        if past:
            model(torch.zeros(B, past, dtype=torch.int64), cache=cache)
        ids = torch.zeros(B, context - past, dtype=torch.int64)
        recorder = Recorder(model.requires_grad_(False))
        recorder.resident([ids], "batch")
        recorder.resident([part for layer in cache.layers for kept in layer.values() for part in kept.tensors], "cache")
        with recorder, recorder.phase("forward"):
            model(ids, cache=cache)
        return recorder.ledger(tokens=ids.numel(), writer="trace")


def closed_form(spec: ModelSpec, B: int, context: int, phase: str, compute: str) -> Ledger:
    serving = Serving(phase=phase, batch=B, context=context, weights=compute, cache=compute, compute=compute)
    run = Run(model=spec, recipe=Recipe(seq_len=1, global_batch=1, steps=1))
    return account_serving(run, serving, all_experts=True)


def facts(each: Entry) -> tuple[object, ...]:
    path = ".".join("*" if part.isdigit() else part for part in each.path.split("."))
    amounts = (each.flops, each.model_flops, each.read, each.written, dict(each.allocated))
    return each.name, path, each.kind, each.dtype, *amounts


def moved(ledger: Ledger) -> Iterator[tuple[object, ...]]:
    return (facts(each) for each in unrolled(ledger) if each.kind != "allocate")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize(("dtype", "compute"), [(torch.float32, "fp32"), (torch.bfloat16, "bf16")])
def test_operation_by_operation(kind, phase, dtype, compute):
    spec = from_fields(ModelSpec, SIZES | KINDS[kind])
    for B, context in ((3, 17),) if compute == "fp32" else ((2, 4),):
        theirs, ours = traced(spec, B, context, phase, dtype), closed_form(spec, B, context, phase, compute)
        assert theirs.uncounted == ()
        for mine, other in zip(moved(ours), moved(theirs), strict=False):
            assert mine == other
        assert len(list(moved(ours))) == len(list(moved(theirs)))
        assert ours.flops == theirs.flops
        assert ours.total("read") == theirs.total("read")
        assert dict(ours.resident) == dict(theirs.resident)
        assert abs(ours.peak().nbytes - theirs.peak().nbytes) <= 0.01 * theirs.peak().nbytes
