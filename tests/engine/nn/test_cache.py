"""With a cache a model writes what it writes without: prompt first, then token by token."""

from __future__ import annotations

import pytest
import torch

from cached_models import KINDS, SIZES
from trainledger.engine.nn.cache import Cache
from trainledger.engine.nn.init import initialize
from trainledger.engine.nn.transformer import Transformer
from trainledger.ledger.model.attention import kv_cache
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields


def model_of(kind: str) -> Transformer:
    model = Transformer(from_fields(ModelSpec, SIZES | KINDS[kind]))
    initialize(model, seed=0)
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt", [1, 4, 12])
def test_token_by_token_gives_the_logits_of_the_whole(kind, prompt):
    model = model_of(kind)
    ids_BT = torch.randint(31, (2, 20), generator=torch.Generator().manual_seed(1))
    cache = Cache(model.spec, model.embed_tokens.weight, 2, 20)
    whole_BTV = model(ids_BT)
    logits_BV = model(ids_BT[:, :prompt], cache=cache)
    for at in range(prompt, 20):
        torch.testing.assert_close(logits_BV, whole_BTV[:, at - 1], rtol=1e-4, atol=1e-5)
        logits_BV = model(ids_BT[:, at : at + 1], cache=cache)
    torch.testing.assert_close(logits_BV, whole_BTV[:, -1], rtol=1e-4, atol=1e-5)
    assert cache.past == 20


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_a_cache_are_those_of_the_account(kind):
    model = model_of(kind)
    for n_tokens in (1, 5, 20):
        assert Cache(model.spec, model.embed_tokens.weight, 3, n_tokens).nbytes == kv_cache(model.spec, "fp32").nbytes(
            3, n_tokens
        )


@torch.no_grad()
def test_behind_others_tokens_come_one_at_a_time():
    model, ids = model_of("grouped"), torch.zeros(1, 2, dtype=torch.int64)
    cache = Cache(model.spec, model.embed_tokens.weight, 1, 9)
    model(ids, cache=cache)
    with pytest.raises(ValueError, match="after 2 cached tokens one token at a time is taken, not 2"):
        model(ids, cache=cache)
