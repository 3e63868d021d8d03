"""The decoder: embedding, pre-norm blocks, final norm, head. Parameter names follow Hugging Face Llama.

Shapes: B sequences, T tokens, D d_model, V vocab_size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainledger.nn.attention import Angles, Attention
from trainledger.nn.mlp import MLP
from trainledger.nn.rotary import Rotary
from trainledger.spec.model import ModelSpec
from trainledger.spec.recipe import Recipe


def norm_of(spec: ModelSpec) -> nn.Module:
    """The normalization of a spec over the last dim."""
    if spec.norm == "rmsnorm":
        return nn.RMSNorm(spec.d_model, eps=spec.norm_eps)
    return nn.LayerNorm(spec.d_model, eps=spec.norm_eps, bias=spec.norm_bias)


class Dropout(nn.Module):
    """Dropout whose mask is one byte per element on every device (F.dropout keeps a full-width one on CPUs)."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.probability == 0:
            return x
        kept: Tensor = torch.native_dropout(x, self.probability, True)[0]
        return kept


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, spec: ModelSpec, attention: str, dropout: float) -> None:
        super().__init__()
        self.input_layernorm = norm_of(spec)
        self.self_attn = Attention(spec, attention)
        self.post_attention_layernorm = norm_of(spec)
        self.mlp = MLP(spec)
        self.dropout = Dropout(dropout)

    def forward(self, x_BTD: Tensor, angles: Angles | None) -> Tensor:
        """[B, T, D] in and out."""
        x_BTD = x_BTD + self.dropout(self.self_attn(self.input_layernorm(x_BTD), angles))
        y_BTD: Tensor = x_BTD + self.dropout(self.mlp(self.post_attention_layernorm(x_BTD)))
        return y_BTD


class Transformer(nn.Module):
    """A decoder-only Transformer of one `ModelSpec`.

    ``attention`` is ``sdpa`` or ``math``; ``checkpointing`` runs each block again in backward instead of
    keeping its activations (Chen et al. 2016, one segment per block).
    """

    def __init__(
        self, spec: ModelSpec, *, attention: str = "sdpa", dropout: float = 0.0, checkpointing: bool = False
    ) -> None:
        super().__init__()
        self.spec = spec
        self.checkpointing = checkpointing
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.d_model)
        self.embed_positions = nn.Embedding(spec.max_seq_len, spec.d_model) if spec.positions == "learned" else None
        self.rotary = Rotary(spec) if spec.positions == "rope" else None
        self.dropout = Dropout(dropout)
        self.layers = nn.ModuleList(Block(spec, attention, dropout) for _ in range(spec.n_layers))
        self.norm = norm_of(spec)
        self.lm_head = nn.Linear(spec.d_model, spec.vocab_size, bias=False)
        if spec.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Token ids [B, T] to logits [B, T, V]."""
        x_BTD = self.embed_tokens(ids_BT)
        if self.embed_positions is not None:
            x_BTD = x_BTD + self.embed_positions.weight[: ids_BT.shape[1]]
        x_BTD = self.dropout(x_BTD)
        angles = None
        if self.rotary is not None:
            angles = self.rotary(ids_BT.shape[1], compute_dtype(x_BTD))
        for layer in self.layers:
            if self.checkpointing and torch.is_grad_enabled():
                # Only dropout reads the generator's state; without it there is nothing to keep for the second run.
                random = self.dropout.probability > 0
                x_BTD = checkpoint(layer, x_BTD, angles, use_reentrant=False, preserve_rng_state=random)
            else:
                x_BTD = layer(x_BTD, angles)
        logits_BTV: Tensor = self.lm_head(self.norm(x_BTD))
        return logits_BTV


def compute_dtype(x: Tensor) -> torch.dtype:
    """What matmuls produce here: autocast's format where it is on, else the tensor's own."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def next_token_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean cross entropy in nats over all tokens, computed in fp32 whatever the logits' format."""
    return F.cross_entropy(logits_BTV.float().flatten(0, 1), targets_BT.flatten())


def build(spec: ModelSpec, recipe: Recipe) -> Transformer:
    """The model of a run on torch's current default device, not yet initialized for training."""
    return Transformer(
        spec,
        attention=recipe.attention,
        dropout=recipe.dropout,
        checkpointing=recipe.activation_checkpointing == "full",
    )
