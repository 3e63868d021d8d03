"""Modules whose identical blocks are traced once, beside all of them; and blocks that only look identical."""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from blocks_compared import same_ledger
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainledger.ledger.ledger import Ledger
from trainledger.trace import trace

pytestmark = pytest.mark.agreement

torch.set_num_threads(1)


class Block(nn.Module):
    """x + an MLP of its norm; ``place`` is where it stands."""

    def __init__(self, place: int, d_model: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.place = place
        self.norm = nn.LayerNorm(d_model)
        self.up = nn.Linear(d_model, 2 * d_model)
        self.down = nn.Linear(2 * d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))
        return y


class Deep(nn.Module):
    """Blocks between an embedding and a head; ``around`` calls them one after the other."""

    def __init__(self, make: Callable[[int], nn.Module] = Block, depth: int = 10) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(make(place) for place in range(depth))
        self.head = nn.Linear(8, 20)

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.around(self.embed(ids))
        logits: Tensor = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())

    def around(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


IDS = torch.zeros(2, 6, dtype=torch.int64)


def both(model: nn.Module, batch: Any = IDS, **options: Any) -> tuple[Ledger, Ledger]:
    options.setdefault("optimizer", torch.optim.AdamW(model.parameters(), foreach=True))
    return trace(model, batch, **options), trace(model, batch, blocks="all", **options)


def multiplies(model: nn.Module, batch: Any = IDS, **options: Any) -> Ledger:
    once, whole = both(model, batch, **options)
    same_ledger(once, whole)
    return once


def is_traced_whole(model: nn.Module, why: str, batch: Any = IDS, **options: Any) -> None:
    """That nothing is multiplied, the ledger is the whole one, and its notes say why."""
    ledger, whole = both(model, batch, **options)
    assert ledger.entries == whole.entries
    assert [each for each in ledger.notes if why in each], ledger.notes


# What multiplies


@pytest.mark.parametrize("way", ["foreach", "fused", "loop"])
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_every_way_of_an_optimizer(optimizer: str, way: str) -> None:
    model = Deep()
    options: dict[str, Any] = {"foreach": False} if way == "loop" else {way: True}
    if optimizer == "SGD":
        options["momentum"] = 0.9
    multiplies(model, optimizer=getattr(torch.optim, optimizer)(model.parameters(), **options))


def test_the_note_says_what_was_multiplied() -> None:
    once = multiplies(Deep())
    assert once.notes == ("layers.0 to layers.9 are alike: traced once and multiplied by 10",)
    assert once.tensors == ()


def test_the_first_step_and_a_forward_alone() -> None:
    model = Deep()
    multiplies(model, first_step=True)
    multiplies(model, backward=False, optimizer=None)
    multiplies(model, autocast=torch.bfloat16)


def test_micro_batches() -> None:
    once = multiplies(Deep(), grad_accum=9)
    assert once.micro_batches == 9
    multiplies(Deep(depth=2), grad_accum=8)
    multiplies(Deep(), grad_accum=3)


def test_a_group_of_the_optimizer_for_each_block() -> None:
    model = Deep()
    groups = [{"params": list(each.parameters()), "lr": 0.1 * 0.9**at} for at, each in enumerate(model.layers)]
    groups += [{"params": list(model.embed.parameters())}, {"params": list(model.head.parameters()), "weight_decay": 0}]
    for way in ({"foreach": True}, {"foreach": False}):
        multiplies(model, optimizer=torch.optim.AdamW(groups, **way))


def test_named_parameters_and_states_from_before() -> None:
    model = Deep()
    optimizer = torch.optim.AdamW(list(model.named_parameters()), foreach=True)
    model(IDS).backward()
    optimizer.step()
    state, groups = optimizer.state, optimizer.param_groups
    layers, attributes = dict(model.layers._modules), {id(each): dict(vars(each)) for each in model.modules()}
    multiplies(model, optimizer=optimizer)
    assert optimizer.state is state
    assert optimizer.param_groups is groups
    assert len(groups[0]["params"]) == len(list(model.parameters()))
    assert model.layers._modules == layers
    assert attributes == {id(each): dict(vars(each)) for each in model.modules()}
    assert Block.__dict__.get("place") is None


def test_one_group_of_blocks_in_a_row_and_one_by_name() -> None:
    class Rows(Deep):
        def __init__(self) -> None:
            super().__init__(depth=1)
            self.layers = nn.Sequential(*(Block(each) for each in range(9)))  # type: ignore[assignment]
            self.more = nn.ModuleDict({str(each): Block(each) for each in range(11)})

        def around(self, x: Tensor) -> Tensor:
            x = self.layers(x)
            for layer in self.more.values():
                x = layer(x)
            return x

    once = multiplies(Rows())
    assert len(once.notes) == 2


def test_a_pattern_of_blocks_with_a_rest() -> None:
    once = multiplies(Deep(lambda place: Block(place, dropout=0.1 * (place % 3 == 2)), depth=29))
    assert once.notes == ("layers.0 to layers.26 are alike in rounds of 3: traced once and multiplied by 9",)


def test_other_blocks_before_and_behind() -> None:
    class Wide(Block):
        def __init__(self, place: int) -> None:
            super().__init__(place, dropout=0.1)

    once = multiplies(Deep(lambda place: Wide(place) if place in (0, 1, 12) else Block(place), depth=13))
    assert once.notes == ("layers.2 to layers.11 are alike: traced once and multiplied by 10",)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks(reentrant: bool) -> None:
    class Again(Deep):
        def around(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x

    multiplies(Again())


def test_all_hidden_states_are_read_behind() -> None:
    class All(Deep):
        def around(self, x: Tensor) -> Tensor:
            states = [x]
            for layer in self.layers:
                states.append(layer(states[-1]))
            return torch.stack(states).mean(0)

    multiplies(All())


def test_one_module_in_every_place() -> None:
    same = Block(0)
    multiplies(Deep(lambda place: same))


def test_one_weight_in_every_block() -> None:
    shared = nn.Parameter(torch.randn(16, 8))

    def make(place: int) -> Block:
        block = Block(place)
        block.up.weight = shared
        return block

    multiplies(Deep(make))


def test_the_same_hook_on_every_block() -> None:
    def twice(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * 2

    model = Deep()
    for each in model.layers:
        each.register_forward_hook(twice)
    multiplies(model)


# What only looks alike


def hooked(model: Deep) -> None:
    model.layers[5].register_forward_hook(lambda module, args, output: output * 2)


def frozen(model: Deep) -> None:
    for each in model.layers[5].parameters():
        each.requires_grad_(False)


def with_dropout(model: Deep) -> None:
    model.layers[5].dropout.p = 0.1  # type: ignore[union-attr]


def asleep(model: Deep) -> None:
    model.layers[5].eval()


def tied(model: Deep) -> None:
    model.layers[7].up.weight = model.layers[4].up.weight  # type: ignore[union-attr]


@pytest.mark.parametrize("change", [hooked, frozen, with_dropout, asleep, tied])
def test_one_block_is_unlike_the_others(change: Callable[[Deep], None]) -> None:
    model = Deep(lambda place: Block(place, dropout=0.0))
    change(model)
    ledger, whole = both(model)
    assert ledger == whole
    deeper = Deep(depth=16)
    change(deeper)
    same_ledger(*both(deeper))


def test_another_weight_decay_of_one_block() -> None:
    model = Deep()
    odd = {id(each) for each in model.layers[5].parameters()}
    groups = [
        {"params": [each for each in model.parameters() if id(each) not in odd]},
        {"params": list(model.layers[5].parameters()), "weight_decay": 0.0},
    ]
    ledger, whole = both(model, optimizer=torch.optim.AdamW(groups, foreach=False))
    assert ledger == whole


def test_code_around_that_treats_one_block_differently() -> None:
    class Once(Deep):
        def around(self, x: Tensor) -> Tensor:
            for place, layer in enumerate(self.layers):
                x = layer(x)
                if place == 6:
                    x = x * 2
            return x

    is_traced_whole(Once(), "does not treat them alike")


def test_code_around_that_leaves_one_out() -> None:
    class Skips(Deep):
        def around(self, x: Tensor) -> Tensor:
            for place, layer in enumerate(self.layers):
                x = x if place == 6 else layer(x)
            return x

    is_traced_whole(Skips(), "does not treat them alike")


def test_code_inside_that_looks_at_its_place() -> None:
    class Looks(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y * 2 if self.place == 6 else y

    is_traced_whole(Deep(Looks), "runs other operations")

    class Reads(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / (self.place + 1)

    multiplies(Deep(Reads))


def test_code_that_knows_how_many_blocks_there_are() -> None:
    class Counts(Deep):
        def around(self, x: Tensor) -> Tensor:
            for place in range(10):
                x = self.layers[place](x)
            return x

    is_traced_whole(Counts(), "with fewer, IndexError")


def test_blocks_that_somebody_else_holds() -> None:
    class Holds(Deep):
        def __init__(self) -> None:
            super().__init__()
            self.held = [list(self.layers)]

        def around(self, x: Tensor) -> Tensor:
            for layer in self.held[0]:
                x = layer(x)
            return x

    is_traced_whole(Holds(), "code outside of layers refers to them and calls them")


def test_what_one_block_does_is_left_to_chance() -> None:
    class Chance(Deep):
        def around(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                if random.random() < 2:
                    x = layer(x)
            return x

    is_traced_whole(Chance(), "random numbers")


def test_blocks_that_read_more_and_more() -> None:
    class Dense(Deep):
        def around(self, x: Tensor) -> Tensor:
            states = [x]
            for layer in self.layers:
                states.append(layer(torch.stack(states).sum(0)))
            return states[-1]

    is_traced_whole(Dense(), "does not treat them alike")


def test_two_stacks_that_belong_together() -> None:
    class UNet(Deep):
        def __init__(self) -> None:
            super().__init__()
            self.back = nn.ModuleList(Block(each) for each in range(10))

        def around(self, x: Tensor) -> Tensor:
            states = []
            for layer in self.layers:
                x = layer(x)
                states.append(x)
            for layer in self.back:
                x = layer(x + states.pop())
            return x

    is_traced_whole(UNet(), "layers and back traced one by one")


def test_what_is_let_go_only_after_some_blocks() -> None:
    class Window(Deep):
        def around(self, x: Tensor) -> Tensor:
            last: deque[Tensor] = deque(maxlen=3)
            for layer in self.layers:
                x = layer(x)
                last.append(x)
            return x + last[0]

    ledger, whole = both(Window(), backward=False, optimizer=None)
    assert ledger.peak().nbytes == whole.peak().nbytes
    assert ledger.flops == whole.flops


def test_what_cannot_be_called_so() -> None:
    with pytest.raises(ValueError, match="blocks must be one of auto, once, all, not 'some'"):
        trace(Deep(), IDS, blocks="some")


def test_few_blocks_multiply_where_it_is_asked_for() -> None:
    model = Deep(depth=5)
    assert not any(each.loop for each in trace(model, IDS))
    same_ledger(trace(model, IDS, blocks="once"), trace(model, IDS, blocks="all"))


# transformers


def families() -> dict[str, tuple[str, dict[str, Any]]]:
    small = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    decoder = {**small, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 32, "use_cache": False}
    return {
        "Llama": ("CausalLM", {**decoder, "num_hidden_layers": 9}),
        "Qwen3": ("CausalLM", {**decoder, "num_hidden_layers": 9}),
        "Mixtral": ("CausalLM", {**decoder, "num_hidden_layers": 8, "num_local_experts": 4}),
        "Gemma2": ("CausalLM", {**decoder, "num_hidden_layers": 16, "sliding_window": 4}),
        "GPT2": ("LMHeadModel", {"vocab_size": 50, "n_embd": 16, "n_layer": 9, "n_head": 2, "use_cache": False}),
        "Bert": ("MaskedLM", {**small, "num_hidden_layers": 9, "max_position_embeddings": 32}),
        "T5": (
            "ConditionalGeneration",
            {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 9, "num_decoder_layers": 9,
             "num_heads": 2, "use_cache": False, "decoder_start_token_id": 0, "pad_token_id": 0},
        ),
    }  # fmt: skip


@pytest.mark.parametrize("family", families())
def test_models_of_transformers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    kind, sizes = families()[family]
    with torch.device("meta"):
        model = getattr(transformers, f"{family}For{kind}" if kind != "LMHeadModel" else f"{family}{kind}")(
            getattr(transformers, f"{family}Config")(**sizes)
        )
    model.train()
    batch = {"input_ids": torch.zeros(2, 8, dtype=torch.int64), "labels": torch.zeros(2, 8, dtype=torch.int64)}
    once = multiplies(model, batch)
    assert all(" are alike" in each for each in once.notes)


def test_a_cache_that_is_told_the_place() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {**families()["Llama"][1], "use_cache": True}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).train()
    multiplies(model, {"input_ids": IDS, "labels": IDS})


@pytest.mark.slow
@pytest.mark.parametrize("layers", [32, 80])
def test_llama_as_it_is(layers: int) -> None:
    transformers = pytest.importorskip("transformers")
    wide = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
    sizes = wide if layers == 80 else {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
    config = transformers.LlamaConfig(
        **sizes, vocab_size=128256, num_hidden_layers=layers, num_key_value_heads=8, use_cache=False
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).train()
    ids = torch.empty(1, 8192, dtype=torch.int64, device="meta")
    multiplies(model, {"input_ids": ids, "labels": ids}, kernels="cuda")
