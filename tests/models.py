"""Small models that tests share, written in one line each by the letters of docs/style.md."""

from typing import Any

from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields

LETTERS = {
    "V": "vocab_size", "D": "d_model", "L": "n_layers", "H": "attention.n_heads", "KV": "attention.n_kv_heads",
    "K": "attention.head_dim", "F": "feed_forward.d_ff", "T": "max_seq_len",
}  # fmt: skip
# The fields in which GPT-2 differs from the defaults, which are those of Llama.
GPT2: dict[str, Any] = {
    "norm": "layernorm", "norm.bias": True, "feed_forward.activation": "gelu_tanh", "feed_forward.gated": False,
    "feed_forward.bias": True, "attention.bias": True, "positions": "learned", "tie_embeddings": True,
}  # fmt: skip


def sizes(**fields: Any) -> dict[str, Any]:
    """The fields of a model: letters stand for their names, all else stays as it is.

    >>> sizes(V=64, D=32, H=4, norm="layernorm")
    {'vocab_size': 64, 'd_model': 32, 'attention.n_heads': 4, 'norm': 'layernorm'}
    """
    return {LETTERS.get(name, name): value for name, value in fields.items()}


def spec_of(**fields: Any) -> ModelSpec:
    """A model with these fields."""
    return from_fields(ModelSpec, sizes(**fields))
