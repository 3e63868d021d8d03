"""With a cache a model writes what it writes without: prompt first, then token by token."""

from __future__ import annotations

import pytest
import torch

from trainledger.ledger.model.kv_cache import kv_cache
from trainledger.nn.cache import Cache
from trainledger.nn.init import initialize
from trainledger.nn.transformer import Transformer
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields

SIZES = {
    "vocab_size": 31,
    "d_model": 32,
    "n_layers": 3,
    "attention.n_heads": 4,
    "feed_forward.d_ff": 48,
    "max_seq_len": 24,
}
LATENT = {
    "attention": "latent",
    "attention.kv_rank": 12,
    "attention.q_rank": 10,
    "attention.nope_head_dim": 6,
    "attention.rope_head_dim": 4,
    "attention.v_head_dim": 8,
}
KINDS = {
    "multi-head": {},
    "grouped": {"attention.n_kv_heads": 2, "attention.qk_norm": "head"},
    "multi-query": {"attention.n_kv_heads": 1, "block": "parallel"},
    "latent": LATENT,
    "latent without query rank": LATENT | {"attention.q_rank": None, "positions.interleaved": True},
    "attention.window": {"attention.window": 5},
    "local and global": {"attention.window": 5, "attention.global_every": 2, "positions.local_theta": 100.0},
    "capped": {"attention.softcap": 5.0, "logit_softcap": 5.0, "attention.window": 7, "attention.global_every": 3},
    "sinks": {"attention.sinks": True, "attention.n_kv_heads": 2},
    "alibi": {"positions": "alibi"},
    "learned": {"positions": "learned", "norm": "layernorm", "norm.bias": True, "positions.extra_rows": 2},
    "experts": {
        "feed_forward": "experts",
        "feed_forward.n_experts": 4,
        "feed_forward.per_token": 2,
        "feed_forward.n_shared": 1,
    },
}


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
    with pytest.raises(ValueError, match="behind 2 tokens one more is taken at a time, not 2"):
        model(ids, cache=cache)
