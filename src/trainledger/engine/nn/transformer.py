"""The decoder: embedding, blocks, final norm, head. Parameter names follow Hugging Face Llama.

Shapes: B sequences, T tokens, D d_model, V vocab_size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainledger.engine.nn.attention import Attention, LatentAttention, Shared, usual
from trainledger.engine.nn.cache import Cache
from trainledger.engine.nn.checkpointing import again, own_checkpoints, run_layers
from trainledger.engine.nn.feed_forward import DROPLESS, MLP, Dispatching, Experts
from trainledger.engine.nn.loss import HeadLoss, next_token_loss, with_loss
from trainledger.engine.nn.mixers import mixer_of
from trainledger.engine.nn.norm import compute_dtype, norm_of, normed
from trainledger.engine.nn.positions import Angles, Masks, Rotary
from trainledger.engine.nn.sparse import Choice
from trainledger.spec.block import Learned
from trainledger.spec.layers import LayerKind, angles_of, kind_of, mtp_kind, rotary_modules
from trainledger.spec.model import ModelSpec
from trainledger.spec.recipe import Recipe
from trainledger.spec.savings import ChunkedLoss

MTP = "mtp."  # names of parameters of these modules begin so

RunBlock = Callable[[nn.Module, Tensor], Tensor]


class MTPModule(nn.Module):
    """What the module before it made of each token, and the embedding of the next one, through a block."""

    def __init__(self, spec: ModelSpec, block: nn.Module, *, upcast: bool) -> None:
        super().__init__()
        self.enorm = norm_of(spec)
        self.hnorm = norm_of(spec)
        self.eh_proj = nn.Linear(2 * spec.d_model, spec.d_model, bias=False)
        self.block = block
        self.norm = norm_of(spec)
        self.loss = MTPLoss(upcast=upcast)

    def forward(self, h_BSD: Tensor, e_BSD: Tensor, run: RunBlock) -> Tensor:
        """[B, S, D] twice in, and once out; ``run`` runs the block."""
        return run(self.block, self.eh_proj(_joined(self.enorm(e_BSD), self.hnorm(h_BSD))))


def _joined(*parts: Tensor) -> Tensor:
    """Both along the last dim, in the wider format: autocast copies to it on a CPU, and CUDA's kernel reads two."""
    wide = torch.promote_types(parts[0].dtype, parts[1].dtype)
    return torch.cat([part.to(wide) for part in parts], dim=-1)


class MTPLoss(nn.Module):
    """The mean loss of one module's predictions, with the model's own head."""

    def __init__(self, *, upcast: bool) -> None:
        super().__init__()
        self.upcast = upcast

    def forward(self, x_BSD: Tensor, targets_BS: Tensor, head: nn.Module) -> Tensor:
        """A scalar in nats."""
        return next_token_loss(head(x_BSD), targets_BS, upcast=self.upcast)


class MultiTokenPrediction(nn.ModuleList):
    """Further tokens, each predicted by a block of its own (DeepSeek-V3, section 2.2); the mean of their losses is
    added, times ``weight``, to that of the next token. S tokens of a module: T - 1 less how far it looks ahead.
    """

    def __init__(self, spec: ModelSpec, block: Callable[[], nn.Module], *, weight: float, upcast: bool) -> None:
        super().__init__(MTPModule(spec, block(), upcast=upcast) for _ in range(spec.n_mtp_layers))
        self.weight = weight

    def with_losses(self, h_BTD: Tensor, e_BTD: Tensor, ids_BT: Tensor, head: nn.Module, run: RunBlock) -> Tensor:
        """The hidden states after the last layer, and with them the losses over tokens that the sequence itself holds.

        The first module says of token t, whose hidden state it reads with the embedding of t + 1, what t + 2 is; each
        further one looks one token further. ``run`` runs a block.
        """
        return with_loss(h_BTD, self._total(h_BTD, e_BTD, ids_BT, head, run) * (self.weight / len(self)))

    def _total(self, h_BTD: Tensor, e_BTD: Tensor, ids_BT: Tensor, head: nn.Module, run: RunBlock) -> Tensor:
        total: Tensor | None = None
        for ahead, module in enumerate(self, start=1):
            each: Any = module
            n_tokens = ids_BT.shape[1] - 1 - ahead
            h_BTD = each(h_BTD[:, :n_tokens], e_BTD[:, ahead : ahead + n_tokens], run)
            loss = each.loss(each.norm(h_BTD), ids_BT[:, ahead + 1 :], head)
            total = loss if total is None else total + loss
        assert total is not None, "there is no module"
        return total


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
    """One block: the spec says where its norms are and how its two branches join.

    serial: x + attention, then x + MLP. parallel: x + (attention + MLP), both of the block's input. A norm
    is before a branch (pre), on its output (post), on both (sandwich) or on the sum (after-add).
    """

    def __init__(
        self,
        spec: ModelSpec,
        kind: LayerKind,
        attention: str,
        dropout: float,
        attention_dropout: float,
        dispatching: Dispatching,
    ) -> None:
        super().__init__()
        before, after = spec.norm_place in ("pre", "sandwich"), spec.norm_place != "pre"
        self.parallel = spec.block != "serial"
        self.after_add = spec.norm_place == "after-add"
        mixes = kind.attends or kind.mixes
        between = kind.feeds if spec.norm_place == "pre" else mixes
        self.input_layernorm = norm_of(spec) if before and mixes else None
        attend = LatentAttention if spec.latent else Attention
        self.self_attn: Any = attend(spec, kind, attention, attention_dropout) if kind.attends else None
        self.mixer = mixer_of(spec) if kind.mixes else None
        self.post_attention_layernorm = norm_of(spec) if spec.block != "parallel" and between else None
        reads = not kind.experts or spec.experts is None or not spec.experts.own_norms  # what is normed before
        self.pre_feedforward_layernorm = norm_of(spec) if before and after and kind.feeds and reads else None
        feed = Experts(spec, dispatching) if kind.experts else MLP(spec, spec.feed_forward.d_ff) if kind.feeds else None
        self.mlp: Any = feed
        self.post_feedforward_layernorm = norm_of(spec) if after and kind.feeds else None
        self.norm_place = spec.norm_place
        self.dropout = Dropout(dropout)
        self.checkpoint: dict[str, Any] | None = None  # its options, where the whole block is recomputed

    def forward(self, x_BTD: Tensor, shared: Shared) -> Tensor:
        """[B, T, D] in and out."""
        if self.checkpoint is None or not torch.is_grad_enabled():
            return self._run(x_BTD, shared)
        y_BTD: Tensor = checkpoint(self._run, x_BTD, shared, **self.checkpoint)
        return y_BTD

    def _run(self, x_BTD: Tensor, shared: Shared) -> Tensor:
        if self.parallel:
            return self._both(x_BTD, shared)
        if self.norm_place == "pre":
            before_mlp, after_attention = self.post_attention_layernorm, None
        else:
            before_mlp, after_attention = self.pre_feedforward_layernorm, self.post_attention_layernorm
        if self.self_attn is not None or self.mixer is not None:
            mixed_BTD = self._mixed(normed(self.input_layernorm, x_BTD), shared)
            x_BTD = self._joined(x_BTD, mixed_BTD, after_attention)
            del mixed_BTD
        if self.mlp is None:
            return x_BTD
        return self._joined(x_BTD, self.mlp(normed(before_mlp, x_BTD)), self.post_feedforward_layernorm)

    def _mixed(self, n_BTD: Tensor, shared: Shared) -> Any:
        """Attention, a mixer, or the sum of both."""
        a_BTD = None if self.self_attn is None else self.self_attn(n_BTD, shared)
        m_BTD = None if self.mixer is None else self.mixer(n_BTD)
        if a_BTD is None or m_BTD is None:
            return a_BTD if m_BTD is None else m_BTD
        return a_BTD + m_BTD

    def _both(self, x_BTD: Tensor, shared: Shared) -> Tensor:
        """Attention and MLP side by side, through one norm or through two."""
        n_BTD = normed(self.input_layernorm, x_BTD)
        a_BTD = self.dropout(self.self_attn(n_BTD, shared))
        if self.post_attention_layernorm is not None:
            n_BTD = self.post_attention_layernorm(x_BTD)
        y_BTD: Tensor = x_BTD + (a_BTD + self.dropout(self.mlp(n_BTD)))
        return y_BTD

    def _joined(self, x_BTD: Tensor, y_BTD: Tensor, norm: nn.Module | None) -> Tensor:
        """The stream and a branch's output, with the norm after the branch."""
        if self.after_add:
            return normed(norm, x_BTD + self.dropout(y_BTD))
        sum_BTD: Tensor = x_BTD + self.dropout(normed(norm, y_BTD))
        return sum_BTD


class Head(nn.Linear):
    """The projection to logits, scaled and capped where the spec says so."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec.d_model, spec.head_rows, bias=spec.head_bias)
        self.scale = spec.logit_scale
        self.cap = spec.logit_softcap

    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D] to logits [B, T, V], or to scores [B, T, 1]."""
        logits_BTV = super().forward(x_BTD)
        if self.scale != 1:
            logits_BTV = logits_BTV * self.scale
        return logits_BTV if self.cap is None else softcap(logits_BTV, self.cap)


class Transformer(nn.Module):
    """A decoder-only Transformer of one `ModelSpec`.

    ``attention`` is one of a recipe's (absent: `usual`); ``checkpointing`` is the recipe that says what a forward
    keeps for its backward (absent: everything). With a ``loss`` the model takes it itself. With ``documents`` attention
    stops at them, once `masks.end_id` is set. ``reference`` is a frozen copy that preferences are compared with; no
    checkpoint has it.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        attention: str | None = None,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        checkpointing: Recipe | None = None,
        dispatching: Dispatching = DROPLESS,
        mtp_loss: float = 1.0,
        loss: HeadLoss | None = None,
        documents: bool = False,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.checkpointing = checkpointing
        kinds = [kind_of(spec, layer) for layer in range(spec.n_layers)]
        angles = rotary_modules(spec)
        self.embed_tokens = nn.Embedding(spec.padded_vocab, spec.d_model)
        self.embed_positions = None
        self.unused_rows = 0
        if isinstance(spec.positions, Learned):
            self.unused_rows = spec.positions.extra_rows
            self.embed_positions = nn.Embedding(spec.max_seq_len + self.unused_rows, spec.d_model)
        self.embed_norm = norm_of(spec) if spec.embedding_norm else None
        self.rotary = Rotary(angles["rotary"]) if "rotary" in angles else None
        self.rotary_local = Rotary(angles["rotary_local"]) if "rotary_local" in angles else None
        attention = usual(spec) if attention is None else attention
        self.masks = Masks(spec, attention, attention_dropout, documents=documents)
        self.dropout = Dropout(dropout)

        scores_again = checkpointing is not None and checkpointing.activation_checkpointing.kind == "attention"

        def block(kind: LayerKind) -> Block:
            made = Block(spec, kind, attention, dropout, attention_dropout, dispatching)
            if made.self_attn is not None:
                made.self_attn.scores_in_training = replace(made.self_attn.scores_in_training, again=scores_again)
            return made

        self.layers = nn.ModuleList(block(kind) for kind in kinds)
        for layer, options in zip(self.layers, own_checkpoints(spec, checkpointing), strict=True):
            cast(Block, layer).checkpoint = options
        self.norm = norm_of(spec) if spec.norm_place != "after-add" else None
        self.lm_head = Head(spec)
        if spec.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.mtp = None
        if spec.n_mtp_layers:
            upcast = checkpointing is None or checkpointing.loss.upcast
            self.mtp = MultiTokenPrediction(spec, lambda: block(mtp_kind(spec)), weight=mtp_loss, upcast=upcast)
        self.loss = loss
        self.reference: Transformer | None = None

    def forward(self, ids_BT: Tensor, targets_BT: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """Token ids [B, T] to logits [B, T, V], or with targets to their mean loss (a model with a ``loss``).

        With a ``cache`` the tokens follow those in it and are put there; logits are of the last one, [B, V].
        """
        if cache is not None:
            return self._behind(cache, ids_BT)
        x_BTD = self.embed(ids_BT)
        mtp = self.mtp if self.training and torch.is_grad_enabled() else None
        e_BTD = x_BTD if mtp is not None else None
        shared = self.shared(range(self.spec.n_layers), x_BTD, ids_BT.shape[1], ids_BT=ids_BT)
        first = [x_BTD]  # no name here keeps the first block's input alive while the others run
        del x_BTD
        x_BTD = run_layers(list(self.layers), shared, first.pop(), self.spec, self.checkpointing)
        del shared
        if mtp is not None and e_BTD is not None:
            x_BTD = mtp.with_losses(x_BTD, e_BTD, ids_BT, self.lm_head, self._run_mtp_block)
            del e_BTD
        x_BTD = normed(self.norm, x_BTD)
        if targets_BT is not None:
            assert self.loss is not None, "this model's loss reads its logits"
            return self.loss.whole(x_BTD, targets_BT, self.lm_head)
        logits_BTV: Tensor = self.lm_head(x_BTD)
        return logits_BTV

    def _behind(self, cache: Cache, ids_BT: Tensor) -> Tensor:
        """The next tokens of sequences whose keys and values are in a cache."""
        n_tokens, past = ids_BT.shape[1], cache.past
        x_BTD = self.embed(ids_BT, past)
        shared = self.shared(range(self.spec.n_layers), x_BTD, n_tokens, past, ids_BT)
        with cache.used_by(self.layers):
            for block, each in zip(self.layers, shared, strict=True):
                x_BTD = block(x_BTD, each)
        logits_B1V: Tensor = self.lm_head(normed(self.norm, x_BTD[:, -1:]))
        return logits_B1V[:, 0]

    def shared(
        self, layers: Iterable[int], x_BTD: Tensor, n_tokens: int, past: int = 0, ids_BT: Tensor | None = None
    ) -> list[Shared]:
        """What these layers share with others of their kind; of the tokens x may have only this rank's."""
        dtype = compute_dtype(x_BTD)
        angles: dict[str | None, Angles | None] = {None: None}
        if self.rotary is not None:
            angles["rotary"] = self.rotary(n_tokens, dtype, past)
        if self.rotary_local is not None:
            angles["rotary_local"] = self.rotary_local(n_tokens, dtype, past)
        tokens, device = past + n_tokens, x_BTD.device
        masks = self.masks.of_last(tokens, dtype, device) if past else self.masks(tokens, dtype, device, ids_BT)
        shared: list[Shared] = []
        choice, shares = Choice(), self.spec.indexer is not None and self.spec.indexer.every > 1
        for kind in (kind_of(self.spec, layer) for layer in layers):
            choice = Choice() if kind.chooses else choice
            shared.append((angles[angles_of(self.spec, kind)], choice if shares else masks.get(kind.window)))
        return shared

    def _run_mtp_block(self, block: nn.Module, x_BSD: Tensor) -> Tensor:
        recipe = self.checkpointing
        (shared,) = self.shared([self.spec.n_layers - 1], x_BSD, x_BSD.shape[1])
        if recipe is None or recipe.activation_checkpointing.kind != "full":
            y_BSD: Tensor = block(x_BSD, shared)
            return y_BSD
        random = recipe.dropout > 0 or recipe.attention_dropout > 0
        return again(lambda x_BSD: block(x_BSD, shared), x_BSD, random=random)

    def embed(self, ids_BT: Tensor, past: int = 0) -> Tensor:
        """Token ids [B, T] after ``past`` others to the input of the first block, [B, T, D]."""
        x_BTD = self.embed_tokens(ids_BT)
        if self.spec.embedding_scale != 1:
            x_BTD = x_BTD * self.spec.embedding_scale
        if self.embed_positions is not None:
            first = self.unused_rows + past
            x_BTD = x_BTD + self.embed_positions.weight[first : first + ids_BT.shape[1]]
        y_BTD: Tensor = self.dropout(normed(self.embed_norm, x_BTD))
        return y_BTD


def softcap(x: Tensor, cap: float) -> Tensor:
    """cap tanh(x / cap): bounded, and x itself where it is small (Bello et al. 2016)."""
    return cap * torch.tanh(x / cap)


# 50,257 rows of a head keep Hopper's kernels away (rows must begin at multiples of 16 bytes): its three matmuls ran at
# 95 to 152 TFLOP/s on an H200, with 50,304 rows at 611 to 684 (`model.vocab_multiple`).
def build(spec: ModelSpec, recipe: Recipe) -> Transformer:
    """The model of a run on torch's current default device, not yet initialized for training."""
    by_sequence = recipe.objective.answers > 0
    return Transformer(
        spec,
        attention=recipe.attention,
        dropout=recipe.dropout,
        attention_dropout=recipe.attention_dropout,
        checkpointing=recipe,
        dispatching=Dispatching(recipe.expert_dispatch.factor, recipe.load_balance_loss),
        mtp_loss=recipe.mtp_loss,
        loss=HeadLoss(recipe.loss, by_sequence=by_sequence) if isinstance(recipe.loss, ChunkedLoss) else None,
        documents=recipe.documents is not None,
    )
