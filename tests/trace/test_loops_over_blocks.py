"""Loops over equal blocks that depend on how many there are or on their places: once or all, the same ledger."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from blocks_compared import same_ledger
from test_blocks_once import Block, Deep
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

from trainledger.trace import trace

pytestmark = pytest.mark.agreement

torch.set_num_threads(1)

IDS = torch.zeros(2, 6, dtype=torch.int64)
MM, GELU = torch.ops.aten.addmm.default, torch.ops.aten.gelu.default
Loop = Callable[[Deep, Tensor], Tensor]


class Looped(Deep):
    """Sixteen blocks that a loop calls."""

    def __init__(self, loop: Loop, make: Callable[[int], nn.Module] = Block) -> None:
        super().__init__(make, depth=16)
        self.loop = loop

    def around(self, x: Tensor) -> Tensor:
        return self.loop(self, x)


def segments(size: int, model: Deep, x: Tensor, reentrant: bool = False) -> Tensor:
    def run(start: int, x: Tensor) -> Tensor:
        for layer in model.layers[start : start + size]:
            x = layer(x)
        return x

    for start in range(0, len(model.layers), size):
        x = checkpoint(run, start, x, use_reentrant=reentrant)
    return x


def sequential(model: Deep, x: Tensor) -> Tensor:
    out: Tensor = checkpoint_sequential(list(model.layers), 2, x, use_reentrant=False)
    return out


def first_half_checkpointed(model: Deep, x: Tensor) -> Tensor:
    for place, layer in enumerate(model.layers):
        x = checkpoint(layer, x, use_reentrant=False) if place < 8 else layer(x)
    return x


def another_policy_from_the_middle_on(model: Deep, x: Tensor) -> Tensor:
    for place, layer in enumerate(model.layers):
        contexts = partial(create_selective_checkpoint_contexts, [MM] if place < 8 else [MM, GELU])
        x = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
    return x


def one_policy(model: Deep, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = checkpoint(
            layer, x, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, [MM, GELU])
        )
    return x


def kept_in_16_bits(nbytes: int) -> Any:
    def pack(tensor: Tensor) -> Tensor:
        return tensor.bfloat16() if tensor.nbytes > nbytes else tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


def packed_from_the_middle_on(model: Deep, x: Tensor) -> Tensor:
    for place, layer in enumerate(model.layers):
        with kept_in_16_bits(600 if place >= 8 else 10_000):
            x = layer(x)
    return x


def offloaded_from_the_middle_on(model: Deep, x: Tensor) -> Tensor:
    for place, layer in enumerate(model.layers):
        with save_on_cpu() if place >= 8 else nullcontext():
            x = layer(x)
    return x


def autocast_from_the_middle_on(model: Deep, x: Tensor) -> Tensor:
    for place, layer in enumerate(model.layers):
        with torch.autocast("cpu", torch.bfloat16, enabled=place >= 8):
            x = layer(x)
    return x


def first_half_frozen(model: Deep, x: Tensor) -> Tensor:
    for place, layer in enumerate(model.layers):
        with torch.set_grad_enabled(place >= 8):
            x = layer(x)
    return x


def across_eight(model: Deep, x: Tensor) -> Tensor:
    states = [x]
    for place, layer in enumerate(model.layers):
        states.append(layer(states[-1] + states[-8] if place >= 8 else states[-1]))
    return states[-1]


def u_shaped(model: Deep, x: Tensor) -> Tensor:
    half, states = len(model.layers) // 2, []
    for layer in model.layers[:half]:
        x = layer(x)
        states.append(x)
    for layer in model.layers[half:]:
        x = layer(x + states.pop() if states else x)
    return x


def early_exit(model: Deep, x: Tensor) -> Tensor:
    for place, layer in enumerate(model.layers):
        if place == 12:
            break
        x = layer(x)
    return x


def first_half_alone(model: Deep, x: Tensor) -> Tensor:
    for layer in model.layers[: (len(model.layers) + 1) // 2]:
        x = layer(x)
    return x


def all_twice(model: Deep, x: Tensor) -> Tensor:
    for _ in range(2):
        for layer in model.layers:
            x = layer(x)
    return x


def each_twice(model: Deep, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(layer(x))
    return x


def those_behind_twice(model: Deep, x: Tensor) -> Tensor:
    for place, layer in enumerate(model.layers):
        x = layer(layer(x)) if place >= 8 else layer(x)
    return x


def mode_set_in_the_loop(model: Deep, x: Tensor) -> Tensor:
    for place, layer in enumerate(model.layers):
        x = layer.train(place < 8)(x)
    return x


def hooks_of_results(model: Deep, x: Tensor) -> Tensor:
    for place, layer in enumerate(model.layers):
        x = layer(x)
        if place >= 8:
            x.register_hook(lambda gradient: gradient * 2)
    return x


def results_held_from_the_middle_on(model: Deep, x: Tensor) -> Tensor:
    model.held = []  # type: ignore[assignment]
    for place, layer in enumerate(model.layers):
        x = checkpoint(layer, x.detach().requires_grad_(), use_reentrant=False)
        if place >= 8:
            model.held.append(x)  # type: ignore[operator, union-attr]
    return x


def a_window_of_eight(model: Deep, x: Tensor) -> Tensor:
    last: deque[Tensor] = deque(maxlen=8)
    for layer in model.layers:
        x = layer(x)
        last.append(x)
    return x + last[0]


def one_after_another(model: Deep, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x)
    return x


NOTICED: dict[str, Loop] = {
    "segments of 8": partial(segments, 8),
    "reentrant segments of 8": partial(segments, 8, reentrant=True),
    "segments of 7": partial(segments, 7),
    **{each.__name__: each for each in (
        sequential, first_half_checkpointed, another_policy_from_the_middle_on, offloaded_from_the_middle_on,
        packed_from_the_middle_on,
        autocast_from_the_middle_on, first_half_frozen, across_eight, u_shaped, early_exit, first_half_alone,
        those_behind_twice, mode_set_in_the_loop, hooks_of_results, results_held_from_the_middle_on,
    )},
}  # fmt: skip


@pytest.mark.parametrize("loop", NOTICED)
def test_a_loop_that_is_not_the_same_for_every_block(loop: str) -> None:
    model = Looped(NOTICED[loop], partial(Block, dropout=0.1))
    ledger, whole = (trace(model, IDS, blocks=each) for each in ("auto", "all"))
    assert ledger.entries == whole.entries
    assert any("layers traced one by one: " in each for each in ledger.notes), ledger.notes


@pytest.mark.parametrize("loop", [one_after_another, all_twice, each_twice, one_policy, partial(segments, 1)])
def test_a_loop_that_is(loop: Loop) -> None:
    model = Looped(loop)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    same_ledger(*(trace(model, IDS, optimizer=optimizer, blocks=each) for each in ("auto", "all")))


def test_what_is_held_of_the_last_eight_in_a_forward_alone() -> None:
    ledger, whole = (trace(Looped(a_window_of_eight), IDS, backward=False, blocks=each) for each in ("auto", "all"))
    assert ledger.entries == whole.entries
    with torch.no_grad():
        ledger, whole = (trace(Looped(a_window_of_eight), IDS, backward=False, blocks=each) for each in ("auto", "all"))
    assert ledger.entries == whole.entries


def test_a_list_that_is_stored_twice() -> None:
    model = Looped(one_after_another)
    model.again = model.layers  # type: ignore[assignment]
    same_ledger(*(trace(model, IDS, blocks=each) for each in ("auto", "all")))
    copied = Looped(lambda model, x: one_after_another(model, nn.Sequential(*model.again)(x)))  # type: ignore[arg-type]
    copied.again = nn.ModuleList(copied.layers)  # type: ignore[assignment]
    ledger, whole = (trace(copied, IDS, blocks=each) for each in ("auto", "all"))
    assert (ledger.flops, ledger.kept_nbytes, ledger.peak()) == (whole.flops, whole.kept_nbytes, whole.peak())


class Told(Block):
    """What it runs is told by an object that all blocks are given."""

    def forward(self, x: Tensor, told: Any = None) -> Tensor:
        y = super().forward(x)
        return y * 2 if told is not None and told.place >= 8 else y


class Last(Block):
    """Runs more where it is the last in its list."""

    where: list[nn.Module]

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y.relu() if self is self.where[0][-1] and len(self.where[0]) > 10 else y  # type: ignore[index, arg-type]


def test_blocks_that_are_told_where_they_stand() -> None:
    def telling(model: Deep, x: Tensor) -> Tensor:
        told = SimpleNamespace(place=0)
        for told.place, layer in enumerate(model.layers):
            x = layer(x, told)
        return x

    ledger, whole = (trace(Looped(telling, Told), IDS, blocks=each) for each in ("auto", "all"))
    assert ledger.entries == whole.entries


def test_a_block_that_asks_how_many_there_are() -> None:
    model = Looped(one_after_another, Last)
    for layer in model.layers:
        layer.where = (model.layers,)  # type: ignore[assignment]
    ledger, whole = (trace(model, IDS, blocks=each) for each in ("auto", "all"))
    assert ledger.entries == whole.entries


def encoder() -> tuple[nn.Module, Any]:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 16, enable_nested_tensor=False), torch.zeros(2, 6, 8)


def of_transformers(name: str, checkpointing: bool, **sizes: Any) -> tuple[nn.Module, Any]:
    transformers = pytest.importorskip("transformers")
    model = getattr(transformers, name)(getattr(transformers, name).config_class(vocab_size=50, **sizes)).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    return model, {"input_ids": IDS, "labels": IDS}


GPT2 = {"n_embd": 16, "n_layer": 9, "n_head": 2, "use_cache": False}
LLAMA = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 9}


def libraries() -> Iterator[Any]:
    yield pytest.param(encoder, id="TransformerEncoder")
    for checkpointing in (False, True):
        name = "checkpointed" if checkpointing else "plain"
        yield pytest.param(partial(of_transformers, "GPT2LMHeadModel", checkpointing, **GPT2), id=f"GPT2 {name}")
        llama = partial(of_transformers, "LlamaForCausalLM", checkpointing, **LLAMA, use_cache=False)
        yield pytest.param(llama, id=f"Llama {name}")


@pytest.mark.parametrize("made", list(libraries()))
def test_loops_of_libraries(made: Callable[[], tuple[nn.Module, Any]]) -> None:
    model, batch = made()
    loss = (lambda out: out.square().mean()) if isinstance(batch, Tensor) else None
    same_ledger(*(trace(model, batch, loss=loss, blocks=each) for each in ("auto", "all")))
