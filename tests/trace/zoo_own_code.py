"""Mixtures, tables, graphs and adversaries in plain torch, and the turns that people's own code takes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zoo import Phase, Setup, Specimen, adamw, tokens
from zoo_torch import B, D, T, V, cross_entropy

# Mixtures, tables, graphs


class Experts(nn.Module):
    """Places for tokens in each expert, the rest dropped: routing by one-hot products."""

    def __init__(self, n_experts: int = 4, places: int = 32) -> None:
        super().__init__()
        self.router, self.places = nn.Linear(D, n_experts, bias=False), places
        self.up = nn.Parameter(torch.randn(n_experts, D, 2 * D) / 10)
        self.down = nn.Parameter(torch.randn(n_experts, 2 * D, D) / 10)

    def forward(self, x_ND: Tensor) -> Tensor:
        weight_NE = self.router(x_ND).float().softmax(-1)
        top_NK, which_NK = weight_NE.topk(2)
        hit_NE = F.one_hot(which_NK, weight_NE.shape[-1]).sum(1)
        place_NE = hit_NE.cumsum(0) - 1
        put_NEP = F.one_hot(place_NE.clamp(0, self.places - 1), self.places) * (
            hit_NE * (place_NE < self.places)
        ).unsqueeze(-1)
        put_NEP = put_NEP.to(x_ND.dtype)
        in_EPD = torch.einsum("nd,nep->epd", x_ND, put_NEP)
        out_EPD = F.silu(in_EPD @ self.up) @ self.down
        share_NE = torch.zeros_like(weight_NE).scatter(1, which_NK, top_NK)
        return torch.einsum("epd,nep,ne->nd", out_EPD, put_NEP, share_NE)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(V, D), nn.Linear(D, V)
        self.layers, self.norms = nn.ModuleList([Experts(), Experts()]), nn.ModuleList([nn.LayerNorm(D)] * 2)

    def forward(self, ids_BT: Tensor) -> Tensor:
        x_ND = self.embed(ids_BT).flatten(0, 1)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x_ND = x_ND + layer(norm(x_ND))
        return self.head(x_ND)


def mixture() -> Setup:
    model, ids = Mixture(), tokens(V, 2, 32)
    return Setup(model, adamw(model), ids, cross_entropy(ids))


class Clicks(nn.Module):
    """Tables of bags and their products, as advertisements are ranked; gradients of the tables are sparse or dense."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(size, 64, mode="sum", sparse=sparse) for size in (2000, 500, 100))
        self.bottom = nn.Sequential(nn.Linear(13, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(64 + 6, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, numbers_BF: Tensor, *bags_BK: Tensor) -> Tensor:
        x_BE = self.bottom(numbers_BF)
        all_BGE = torch.stack([x_BE, *(table(bag) for table, bag in zip(self.tables, bags_BK, strict=True))], 1)
        pairs_BGG = torch.bmm(all_BGE, all_BGE.transpose(1, 2))
        i, j = torch.tril_indices(4, 4, -1)
        return self.top(torch.cat([x_BE, pairs_BGG[:, i, j]], 1)).squeeze(1)


def clicks(sparse: bool = False) -> Setup:
    torch.manual_seed(0)
    model, n = Clicks(sparse), 256
    bags = [torch.randint(0, size, (n, 5)) for size in (2000, 500, 100)]
    wanted = torch.rand(n).round()
    kind = torch.optim.SGD if sparse else torch.optim.Adagrad
    optimizer = kind(model.parameters(), lr=0.1)
    return Setup(model, optimizer, (torch.randn(n, 13), *bags), lambda y: F.binary_cross_entropy_with_logits(y, wanted))


def sparse_clicks() -> Setup:
    return clicks(sparse=True)


class Messages(nn.Module):
    """A graph network: along each edge a message, summed and maximized where it arrives."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(16, 64), nn.ModuleList(nn.Linear(128, 64) for _ in range(3))
        self.last = nn.Linear(64, 8)

    def forward(self, x_NF: Tensor, edges_2E: Tensor) -> Tensor:
        source_E, target_E = edges_2E
        x_ND = self.first(x_NF)
        for layer in self.layers:
            sent_ED = F.relu(layer(torch.cat([x_ND[source_E], x_ND[target_E]], -1)))
            added_ND = torch.zeros_like(x_ND).index_add(0, target_E, sent_ED.to(x_ND.dtype))
            place_ED = target_E[:, None].expand_as(sent_ED)
            most_ND = torch.zeros_like(x_ND).scatter_reduce(0, place_ED, sent_ED.to(x_ND.dtype), "amax")
            x_ND = x_ND + added_ND + most_ND
        return self.last(x_ND)


def messages() -> Setup:
    model = Messages()
    return Setup(
        model, adamw(model), (torch.randn(300, 16), torch.randint(0, 300, (2, 2000))), cross_entropy(tokens(8, 300))
    )


# Turns that people's own code takes


class Squared(torch.autograd.Function):
    """x^2 with a backward of its own, which keeps the input in the context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.twice = x * 2
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad * (ctx.twice + x - x)


class Own(nn.Module):
    """An own Function, hooks both ways, tied weights, changes in place, a buffer that the forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)
        self.head = nn.Linear(D, V, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(V, dtype=torch.int64))
        self.up.register_forward_hook(lambda module, args, out: out.clamp(-4, 4))
        self.down.register_full_backward_hook(lambda module, grads, outs: (grads[0] * 0.5,))

    def forward(self, ids_BT: Tensor) -> Tensor:
        self.seen.index_add_(0, ids_BT.flatten(), torch.ones_like(ids_BT.flatten()))
        x_BTD = self.embed(ids_BT)
        y_BTD = self.down(Squared.apply(self.up(x_BTD)))
        y_BTD = y_BTD + 1
        y_BTD.register_hook(lambda grad: grad.clamp(-1, 1))
        y_BTD.mul_(0.5).add_(x_BTD)
        y_BTD[:, ::2] = 0
        return self.head(F.dropout(y_BTD, 0.1, self.training))


def own() -> Setup:
    model, ids = Own(), tokens(V, B, T)
    return Setup(
        model, torch.optim.SGD(model.parameters(), lr=0.1, nesterov=True, momentum=0.9), ids, cross_entropy(ids)
    )


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.mlp = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D), nn.Dropout(0.1))

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in self.qkv(self.norm(x_BTD)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(mixed.transpose(1, 2).flatten(2))
        return x_BTD + self.mlp(x_BTD)


class Saving(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(V, D), nn.ModuleList(Block() for _ in range(3))
        self.head, self.reentrant = nn.Linear(D, V), reentrant

    def forward(self, ids_BT: Tensor) -> Tensor:
        x_BTD = self.embed(ids_BT)
        for block in self.blocks:
            x_BTD = checkpoint(block, x_BTD, use_reentrant=self.reentrant)
        return self.head(x_BTD)


def saving(reentrant: bool) -> Setup:
    model, ids = Saving(reentrant), tokens(V, B, T)
    return Setup(model, adamw(model, foreach=True), ids, cross_entropy(ids))


def saving_reentrant() -> Setup:
    return saving(True)


def saving_not_reentrant() -> Setup:
    return saving(False)


class LowRank(nn.Module):
    """A linear map held still, and a product of two narrow ones that learns."""

    def __init__(self, held: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.held = held.requires_grad_(False)
        self.narrow = nn.Linear(held.in_features, rank, bias=False)
        self.wide = nn.Linear(rank, held.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.held(x) + 2.0 * self.wide(self.narrow(F.dropout(x, 0.05, self.training)))


def low_rank() -> Setup:
    model: Any = Saving(False)
    model.requires_grad_(False)
    for block in model.blocks:
        block.qkv, block.mlp[1] = LowRank(block.qkv), LowRank(block.mlp[1])
    model.forward = lambda ids: model.head(nn.Sequential(*model.blocks)(model.embed(ids)))
    ids = tokens(V, B, T)
    return Setup(model, adamw(model), ids, cross_entropy(ids))


class Ragged(nn.Module):
    """Sequences of different lengths without padding, as a nested tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(V, D), nn.LayerNorm(D)
        self.up, self.down, self.head = nn.Linear(D, 4 * D), nn.Linear(4 * D, D), nn.Linear(D, V)

    def forward(self, words_N: Tensor, offsets_B: Tensor) -> Tensor:
        x = torch.nested.nested_tensor_from_jagged(self.embed(words_N), offsets_B)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return self.head(x).values()


def ragged() -> Setup:
    model, words = Ragged(), tokens(V, 200)
    return Setup(model, adamw(model), (words, torch.tensor([0, 40, 64, 190, 200])), cross_entropy(words))


# Two models in one step


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.ConvTranspose2d(64, 128, 4, bias=False), nn.BatchNorm2d(128), nn.ReLU(True),
            nn.ConvTranspose2d(128, 64, 4, 2, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(True),
            nn.ConvTranspose2d(64, 3, 4, 2, 1, bias=False), nn.Tanh(),
        )  # fmt: skip

    def forward(self, noise_BZ: Tensor) -> Tensor:
        return self.body(noise_BZ[:, :, None, None])


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 64, 4, 2, 1), nn.LeakyReLU(0.2, True), nn.Conv2d(64, 128, 4, 2, 1), nn.BatchNorm2d(128),
            nn.LeakyReLU(0.2, True), nn.Conv2d(128, 1, 4), nn.Flatten(),
        )  # fmt: skip

    def forward(self, image_BCHW: Tensor) -> Tensor:
        return self.body(image_BCHW)


def gan() -> Setup:
    """Two models and two optimizers: the critic learns from real and made images, then the generator from it."""
    made, judge = Generator(), Critic()
    first, second = (torch.optim.Adam(each.parameters(), lr=2e-4, betas=(0.5, 0.999)) for each in (judge, made))
    models = nn.ModuleDict({"generator": made, "critic": judge})

    def step(batch: Any, phase: Phase) -> None:
        image_BCHW, noise_BZ = batch
        score = F.binary_cross_entropy_with_logits
        with phase("forward"):
            fake_BCHW = made(noise_BZ)
            real, other = judge(image_BCHW), judge(fake_BCHW.detach())
            loss = score(real, torch.ones_like(real)) + score(other, torch.zeros_like(other))
            del real, other
        with phase("backward"):
            loss.backward()
        with phase("optimizer"):
            first.step()
            first.zero_grad()
        with phase("forward"):
            wrong = judge(fake_BCHW)
            loss = score(wrong, torch.ones_like(wrong))
            del wrong
        with phase("backward"):
            loss.backward()
        with phase("optimizer"):
            second.step()
            second.zero_grad()

    return Setup(models, (first, second), (torch.randn(16, 3, 16, 16), torch.randn(16, 64)), step=step)


SPECIMENS = (
    Specimen("gan", "adversarial", gan),
    Specimen("experts by one-hot", "mixture of experts", mixture),
    Specimen("dlrm", "tables", clicks),
    Specimen("dlrm, sparse gradients", "tables", sparse_clicks),
    Specimen("graph network", "graph", messages),
    Specimen("own function, hooks, in place", "own code", own),
    Specimen("checkpointed, reentrant", "own code", saving_reentrant),
    Specimen("checkpointed", "own code", saving_not_reentrant),
    Specimen("LoRA by hand", "LoRA", low_rank),
)

# What a trace cannot follow to the end, or not in all its memory, and says so.
BEYOND = (Specimen("nested tensor", "own code", ragged),)
