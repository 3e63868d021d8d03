"""Heads normed once they are turned, and chunks, with Llama 4 of transformers as the witness (dense layers alone)."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import transformers

from trainledger.engine.nn.cache import Cache
from trainledger.engine.nn.transformer import Transformer
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields
from trainledger.spec.problem import InvalidInput

SPEC = {
    "vocab_size": 31, "d_model": 24, "n_layers": 4, "max_seq_len": 32, "attention.n_heads": 4,
    "attention.n_kv_heads": 2, "attention.head_dim": 8, "attention.window": 5, "attention.chunked": True,
    "attention.global_every": 4, "positions.skip_every": 4, "positions.interleaved": True, "feed_forward.d_ff": 20,
}  # fmt: skip


@pytest.mark.parametrize("normed", [True, False])
@torch.no_grad()
def test_logits_are_those_of_transformers(normed: bool) -> None:
    torch.manual_seed(0)
    config = transformers.Llama4TextConfig(
        vocab_size=31, hidden_size=24, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        attention_chunk_size=5, intermediate_size_mlp=20, moe_layers=[], use_qk_norm=normed, pad_token_id=None,
        attn_temperature_tuning=False, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    theirs = transformers.Llama4ForCausalLM._from_config(config, attn_implementation="eager").eval()
    for parameter in theirs.parameters():
        parameter.normal_(0, 1 / 3 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5)
    ours = Transformer(from_fields(ModelSpec, SPEC | {"attention.qk_norm": "turned" if normed else None})).eval()
    renamed = {name.removeprefix("model."): tensor for name, tensor in theirs.state_dict().items()}
    ours.load_state_dict({name.replace("feed_forward", "mlp"): tensor for name, tensor in renamed.items()})
    ids = torch.randint(31, (2, 17))
    torch.testing.assert_close(ours(ids), theirs(input_ids=ids).logits, atol=1e-5, rtol=1e-5)


def test_chunks_are_not_decoded_beyond_the_first() -> None:
    spec = from_fields(ModelSpec, SPEC)
    Cache(spec, torch.empty(0), 1, 5)
    with pytest.raises(InvalidInput, match="not decoded beyond its first chunk"):
        Cache(spec, torch.empty(0), 1, 6)
