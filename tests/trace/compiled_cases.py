"""Compiled training steps of small models: what the trace says of them, and what the compiled run on this CPU does."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from random_runs import GPT2, LLAMA
from torch import Tensor, nn

from trainledger.engine.nn.loss import next_token_loss
from trainledger.engine.nn.transformer import build
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.step import account
from trainledger.observe.measure.meter import AllocatorPeak
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run
from trainledger.trace.step import trace


@dataclass(frozen=True)
class Case:
    """A compiled step: which model, what of it is compiled, and in which format it runs.

    ``compiled`` is ``model`` (all of it with its loss), ``blocks`` (each block, the rest eager) or ``nothing``. Of ours
    what is checkpointed may keep what a policy says (``selective``, a recipe's own).
    """

    model: str = "llama"
    compiled: str = "model"
    vocab_size: int = 256
    precision: str = "fp32"
    checkpointing: bool = False
    selective: bool = False
    width: int = 64
    layers: int = 2
    sequences: int = 4
    tokens: int = 64

    @property
    def autocast(self) -> torch.dtype | None:
        return torch.bfloat16 if self.precision == "bf16" else None

    def __str__(self) -> str:
        again = " selective" if self.selective else " checkpointed" if self.checkpointing else ""
        return f"{self.model} {self.compiled} V={self.vocab_size} {self.precision}{again}"


@dataclass(frozen=True)
class Measured:
    """A real step.

    ``kept`` are bytes that a forward leaves allocated and ``peak`` the most live at once, both by the allocator's
    events; ``saved`` are those of the tensors that the nodes of its graph hold, each piece of memory once.
    """

    kept: int
    saved: int
    peak: int


class WithLoss(nn.Module):
    """Token ids and targets [B, T] to the mean cross entropy of a model's logits, as the engine takes it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
        return next_token_loss(_logits(self.model(ids_BT)), targets_BT)


def _logits(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else out.logits


def made(case: Case) -> tuple[nn.Module, tuple[Tensor, ...], torch.optim.Optimizer]:
    """The model with what is compiled of it, its batch and its optimizer."""
    torch.manual_seed(0)
    model = WithLoss(_ours(case) if case.model in ("llama", "gpt") else _of_transformers(case))
    if case.compiled == "blocks":
        for block in blocks_of(model.model):
            block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    whole = torch.compile(model) if case.compiled == "model" else model
    tokens = [torch.randint(0, case.vocab_size, (case.sequences, case.tokens)) for _ in range(2)]
    return whole, tuple(tokens), optimizer


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model, ours or one of transformers."""
    return list(next(each for each in model.modules() if isinstance(each, nn.ModuleList)))


def run_of_ours(case: Case) -> Run:
    """The run file of a case of ours."""
    parts: dict[str, Any] = dict(LLAMA if case.model == "llama" else GPT2)
    spec = from_fields(
        ModelSpec,
        {
            "vocab_size": case.vocab_size,
            "d_model": case.width,
            "n_layers": case.layers,
            "attention.n_heads": 4,
            "feed_forward.d_ff": 3 * case.width,
            "max_seq_len": case.tokens,
            **parts,
        },
    )
    recipe = from_fields(Recipe, {
        "seq_len": case.tokens, "global_batch": case.sequences, "steps": 1, "grad_clip": None,
        "compile": case.compiled == "blocks" or case.selective,
        "activation_checkpointing": "selective" if case.selective else "full" if case.checkpointing else "none",
        "precision": "bf16-mixed" if case.precision == "bf16" else "fp32", "optimizer.implementation": "loop",
    })  # fmt: skip
    return Run(model=spec, recipe=recipe)


def _ours(case: Case) -> nn.Module:
    run = run_of_ours(case)
    return build(run.model, run.recipe)


def closed_form(case: Case) -> Ledger | None:
    """The closed form of a case, where it has one: our models, whose blocks are compiled."""
    if case.model not in ("llama", "gpt") or case.compiled != "blocks":
        return None
    return account(run_of_ours(case))


def _of_transformers(case: Case) -> nn.Module:
    import transformers

    shared: dict[str, Any] = {"vocab_size": case.vocab_size, "use_cache": False}
    if case.model == "hf-llama":
        config: Any = transformers.LlamaConfig(
            hidden_size=case.width, intermediate_size=3 * case.width, num_hidden_layers=case.layers,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=case.tokens, **shared,
        )  # fmt: skip
        model: nn.Module = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.GPT2Config(
            n_embd=case.width, n_layer=case.layers, n_head=4, n_positions=case.tokens, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, **shared,
        )  # fmt: skip
        model = transformers.GPT2LMHeadModel(config)
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    return model.train()


def traced(case: Case) -> Ledger:
    """The ledger of the step, nothing run."""
    model, batch, optimizer = made(case)
    return trace(model, batch, optimizer=optimizer, autocast=case.autocast)


def measured(case: Case) -> Measured:
    """The third of three real steps: its peak by the allocator's events, and what the graph of a fourth holds."""
    model, batch, optimizer = made(case)
    cast: Callable[[], AbstractContextManager[Any]] = nullcontext
    if case.autocast is not None:
        cast = lambda: torch.autocast("cpu", dtype=case.autocast)  # noqa: E731
    torch._dynamo.reset()

    def forward() -> Tensor:
        with cast():
            loss: Tensor = model(*batch)
        return loss

    def step() -> None:
        forward().backward()
        optimizer.step()

    for _ in range(2):
        step()
        optimizer.zero_grad(set_to_none=True)
    gc.collect()  # what is freed below must have been allocated below
    standing = [*model.parameters(), *model.buffers(), *batch, *_held(optimizer)]
    there = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in standing}
    with AllocatorPeak(torch.device("cpu"), live_nbytes=sum(there.values())) as peak:
        step()
    assert peak.nbytes is not None
    optimizer.zero_grad(set_to_none=True)
    left = AllocatorPeak(torch.device("cpu"))
    with left:
        loss = forward()
    kept = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in saved_of(loss)}
    saved = sum(size for key, size in kept.items() if key not in there)
    torch._dynamo.reset()
    return Measured(net_nbytes(left), saved, peak.nbytes)


def net_nbytes(watched: AllocatorPeak) -> int:
    """What was allocated inside and not freed, by the allocator's own events."""
    return sum(watched.changes)


def _held(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from (each for each in state.values() if isinstance(each, Tensor))


def saved_of(loss: Tensor) -> Iterator[Tensor]:
    """The tensors that the nodes of a graph hold for backward, of compiled and of eager nodes, and the loss."""
    yield loss
    waiting: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [each for each, _ in node.next_functions]
        held = list(getattr(node, "saved_tensors", ()))
        held += [getattr(node, each) for each in dir(node) if each.startswith("_saved_")]
        for each in held:
            yield from (one for one in (each if isinstance(each, (list, tuple)) else [each]) if isinstance(one, Tensor))
