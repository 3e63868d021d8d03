"""A decode step of transformers' own modules on fake tensors: matmuls and attention cost what the closed form says."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers_compared import config_of

from trainledger.ledger.ledger import Ledger
from trainledger.ledger.serving import account_serving
from trainledger.spec.convert.huggingface import from_config
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run
from trainledger.spec.serving import Serving
from trainledger.trace.fakes.rules import as_if_real
from trainledger.trace.recorder.recorder import Recorder

pytestmark = pytest.mark.agreement

torch.set_num_threads(1)


def theirs(config, B: int, context: int, phase: str) -> Ledger:
    """Prefill, or one token behind others, with their cache."""
    from transformers import AutoModelForCausalLM, DynamicCache

    past = context - 1 if phase == "decode" else 0
    with FakeTensorMode(), torch.no_grad(), as_if_real():
        model = AutoModelForCausalLM.from_config(config).eval()
        cache = DynamicCache(config=config)
        if past:
            model(input_ids=torch.zeros(B, past, dtype=torch.int64), past_key_values=cache, use_cache=True)
        ids = torch.zeros(B, context - past, dtype=torch.int64)
        recorder = Recorder(model)
        with recorder, recorder.phase("forward"):
            model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return recorder.ledger(tokens=ids.numel(), writer="trace")


def weights_read(ledger: Ledger) -> list[tuple[int, int, int]]:
    """FLOPs and bytes of every matmul with a weight, in order of size."""
    rows = [(each.flops, each.read, each.written) for each in ledger for _ in range(each.times)
            if each.name in ("mm", "addmm")]  # fmt: skip
    return sorted(rows)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize(
    "kind", ["llama", "qwen2", "qwen3", "gemma", "olmo2", "mistral", "starcoder2", "smollm3", "olmo"]
)
def test_matmuls_and_attention(kind, phase):
    config = config_of(kind)
    config.use_cache = True
    B, context = 3, 13
    traced, spec = theirs(config, B, context, phase), from_config(config.to_dict())
    serving = Serving(phase=phase, batch=B, context=context, weights="fp32", cache="fp32", compute="fp32")
    ours = account_serving(Run(model=spec, recipe=Recipe(seq_len=1, global_batch=1, steps=1)), serving)
    assert weights_read(ours) == weights_read(traced)
    assert ours.by("kind").get("attention") == traced.by("kind").get("attention") != 0
    assert ours.matmul_flops == traced.matmul_flops
