"""Megatron-LM's experts: ranks of their own (parallel folding), how tokens get there, and what is kept of them.

What ranks send and keep is set against a layer written in PyTorch from Megatron-LM's source
(core/transformer/moe/token_dispatcher.py, experts.py; commit d98e8a64) and traced on fake ranks.

Sizes: N tokens of a rank, D width, E experts, K of them for a token, F inner width, X ranks that split an expert,
P ranks that divide the experts.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from trainledger.answers.load import load
from trainledger.ledger.core.graph import component_of
from trainledger.ledger.entry import TO_EXPERTS, Entry
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.parallel.rank_plan import rank_plan
from trainledger.ledger.step import follow
from trainledger.spec.convert.megatron import from_arguments
from trainledger.spec.convert.megatron.arguments import Arguments
from trainledger.spec.problem import InvalidInput
from trainledger.spec.run import Run
from trainledger.spec.run_text import overrides
from trainledger.trace.distributed import trace_rank

pytestmark = pytest.mark.sweep

D, EXPERTS, K, WIDTH, T, LENGTH = 32, 8, 2, 48, 2, 64
N = LENGTH // T
FOLDS = [(1, 4, "copies"), (2, 2, "copies"), (1, 4, "all"), (2, 2, "all"), (1, 1, "copies"), (4, 1, "copies")]


def run_of(split: int | None, expert: int, send: str = "copies", *, tensor: int = T, **fields: Any) -> Run:
    count = fields.pop("count", 4)
    model = fields.pop("model", {})
    layout = {"tensor": tensor, "shard": count // tensor, "zero": 1, "expert": expert, "expert_send": send}
    layout |= {"expert_tensor": split} if split else {}
    layout |= {"sequence_parallel": True, "sequence_gather": "again"} if tensor > 1 else {}
    table: dict[str, Any] = {
        "model": {
            "vocab_size": 128, "d_model": D, "n_layers": 1, "max_seq_len": LENGTH, "attention": {"n_heads": 4},
            "feed_forward": {
                "kind": "experts", "d_ff": 64, "expert_d_ff": WIDTH, "n_experts": EXPERTS, "per_token": K,
                "activation": "gelu", "gated": False,
            }, **model,
        },
        "recipe": {
            "seq_len": LENGTH, "micro_batch": 1, "global_batch": count // tensor, "steps": 1, "attention": "flash",
            "framework": "megatron-core",
            "precision": {"kind": "bf16", "master_weights": True, "gradient_dtype": "fp32"},
        } | fields,
        "layout": layout | fields.pop("layout", {}),
        "cluster": {"device": "h100-sxm", "count": count},
    }  # fmt: skip
    return load(table)


def ledger_of(run: Run) -> Ledger:
    return follow(rank_plan(run), backend="cuda")


# The same layer in PyTorch


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        out = x.new_empty(x.shape[0] * group.size(), x.shape[1])
        dist.all_gather_into_tensor(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        out = g.new_empty(g.shape[0] // ctx.group.size(), g.shape[1])
        dist.reduce_scatter_tensor(out, g.contiguous(), group=ctx.group)
        return out, None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        out = x.new_empty(x.shape[0] // group.size(), x.shape[1])
        dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        out = g.new_empty(g.shape[0] * ctx.group.size(), g.shape[1])
        dist.all_gather_into_tensor(out, g.contiguous(), group=ctx.group)
        return out, None


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        out = torch.empty_like(g)
        dist.all_to_all_single(out, g.contiguous(), group=ctx.group)
        return out, None


def over(how: Any, x: Tensor, group: Any) -> Tensor:
    return x if group.size() == 1 else how.apply(x, group)


def summed(into: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """Without determinism: unlike index_add, scatter_add does not save the rows."""
    return into.scatter_add(0, index[:, None].expand(-1, rows.shape[1]), rows)


class Experts(nn.Module):
    """The experts of a rank as grouped matmuls: the weights of tokens before the last one (TEGroupedMLP)."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(count, D, width, dtype=torch.bfloat16))
        self.down = nn.Parameter(torch.empty(count, width, D, dtype=torch.bfloat16))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        count, _, width = self.up.shape
        y = F.gelu(torch.bmm(x.view(count, -1, D), self.up)).view(-1, width)
        return torch.bmm((y * weights[:, None]).view(count, -1, width), self.down).view(-1, D)


class Layer(nn.Module):
    """MoELayer with one of two dispatchers, and the same number of tokens for each expert."""

    def __init__(self, split: int, expert: int, send: str) -> None:
        super().__init__()
        ranks = range(dist.get_world_size())
        own = dist.get_rank()
        block = own // (split * expert) * split * expert
        tensor = [block + (own - block) // split * split + index for index in range(split)]
        across = [block + (own - block) % split + split * index for index in range(expert)]
        self.tensor, self.expert = dist.new_group(tensor), dist.new_group(across)
        self.every = dist.new_group([rank for rank in ranks if block <= rank < block + split * expert])
        self.send, self.local = send, EXPERTS // expert
        self.router = nn.Linear(D, EXPERTS, bias=False, dtype=torch.bfloat16)
        self.experts = Experts(self.local, WIDTH // split)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.router(x)[:, :K].float(), -1).to(x.dtype)
        sent = N * K
        here = sent * self.tensor.size()
        along = weights.reshape(-1).index_select(0, torch.arange(here, device=x.device) % sent)
        if self.send == "all":
            whole = over(_Gathered, x, self.every)
            index = torch.arange(here, device=x.device) % whole.shape[0]
            y = self.experts(whole.index_select(0, index), along)
            return x + over(_Scattered, summed(torch.zeros_like(whole), index, y), self.every)
        index = torch.arange(sent, device=x.device) % N
        rows = over(_Exchanged, x.index_select(0, index), self.expert)
        order = torch.arange(here, device=x.device)
        y = self.experts(over(_Gathered, rows, self.tensor).index_select(0, order), along)
        y = over(_Exchanged, over(_Scattered, y.index_select(0, order), self.tensor), self.expert)
        return x + summed(torch.zeros_like(x), index, y)


def traced(split: int, expert: int, send: str) -> Ledger:
    def program() -> None:
        dist.init_process_group("nccl")
        layer = Layer(split, expert, send).to("cuda")
        optimizer = torch.optim.AdamW(layer.parameters())
        for _ in range(3):
            layer(torch.randn(N, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    return trace_rank(program, world_size=4)


def collectives(entries: Any) -> Counter[tuple[str, str, int, int]]:
    """Of tokens by name, phase, ranks and payload; their numbers go in 64 bits and are left out."""
    return Counter(
        (each.name, each.phase, int(each.ranks), int(each.payload))
        for each in entries
        if each.kind == "collective" and each.payload > 8 * EXPERTS
    )


def of_experts(ledger: Ledger) -> list[Entry]:
    return [each for each in ledger if each.group in TO_EXPERTS and each.ranks > 1]


@pytest.mark.parametrize(("split", "expert", "send"), [fold for fold in FOLDS if fold[1] > 1])
def test_ranks_send_what_the_layer_in_pytorch_sends(split: int, expert: int, send: str) -> None:
    account, witness = ledger_of(run_of(split, expert, send)), traced(split, expert, send)
    assert collectives(of_experts(account)) == collectives(witness)


@pytest.mark.parametrize(("split", "expert", "send"), [fold for fold in FOLDS if fold[1] > 1])
def test_experts_compute_and_keep_what_the_layer_in_pytorch_does(split: int, expert: int, send: str) -> None:
    account, witness = ledger_of(run_of(split, expert, send)), traced(split, expert, send)

    def flops(ledger: Ledger) -> int:
        return sum(each.flops for each in ledger if each.kind == "matmul" and each.path.endswith("experts"))

    assert flops(account) == flops(witness)
    rows, width = N * K * split, WIDTH // split
    kept = sum(int(each.kept) for each in account if each.path.endswith("experts") and each.name != "sort")
    by_hand = 2 * rows * (3 * width + (0 if send == "all" else D))  # up's output, its GELU, the product; what came in
    numbers = 8 * rows * 4
    assert by_hand <= kept <= by_hand + numbers
    kept = sum(int(each.kept) for each in witness if each.path.endswith("experts"))
    assert by_hand - 2 * rows * (0 if send == "all" else D) == kept


def test_deterministic_sums_keep_their_rows() -> None:
    """torch.index_add saves what it adds, torch.scatter_add does not (torch 2.13)."""
    kept: dict[bool, int] = {}
    for deterministic in (False, True):
        ledger = ledger_of(run_of(1, 4, deterministic=deterministic))
        kept[deterministic] = sum(int(each.kept) for each in ledger if "mlp" in each.path)
    x, rows = torch.zeros(2, 3, requires_grad=True), torch.ones(4, 3, requires_grad=True)
    index, saved = torch.tensor([0, 1, 0, 1]), []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel() * tensor.is_floating_point())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        summed(x, index, rows)
        assert sum(saved) == 0
        x.index_add(0, index, rows)
        assert sum(saved) == rows.numel()
    assert kept[True] - kept[False] == 2 * N * K * D


# Conservation: all ranks together have one model and compute one step


@pytest.mark.parametrize(("split", "expert", "send"), FOLDS)
def test_all_ranks_together_have_each_expert_once_for_each_replica(split: int, expert: int, send: str) -> None:
    run = run_of(split, expert, send)
    plan, whole = rank_plan(run), rank_plan(run_of(None, 1, tensor=1, count=1))

    def elements(leaves: Any) -> int:
        return int(leaves.trained().among(lambda leaf: component_of(leaf.path) == "experts").elements)

    held = sum(elements(chunk.leaves) for chunk in plan.chunks)
    assert held * split * expert == elements(whole.owned) == EXPERTS * 2 * D * WIDTH
    assert elements(plan.owned) * 4 == EXPERTS * 2 * D * WIDTH  # no state is held twice, whatever the ranks
    assert plan.expert_group.ranks == 4 // (split * expert)


@pytest.mark.parametrize(("split", "expert", "send"), FOLDS)
@pytest.mark.parametrize("ahead", [0, 1])
def test_all_ranks_together_compute_what_one_does(split: int, expert: int, send: str, ahead: int) -> None:
    """Also with a module of multi-token prediction, whose projection is split by columns."""
    alone = ledger_of(run_of(None, 1, tensor=1, count=1, model={"n_mtp_layers": ahead}))
    ranks = ledger_of(run_of(split, expert, send, model={"n_mtp_layers": ahead}))
    assert ranks.matmul_flops * T == alone.matmul_flops
    assert sum(each.path.startswith("mtp") for each in ranks) >= 20 * ahead


def test_more_ranks_that_split_an_expert_than_tensor_ranks() -> None:
    ledger = ledger_of(run_of(2, 2, tensor=1))
    gathers = [each for each in of_experts(ledger) if each.name == "all_gather"]
    assert [int(each.payload) for each in gathers] == 2 * [2 * 2 * LENGTH * K * D]


# What is refused, and what Megatron-LM's arguments say


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"framework": "torch", "precision": "bf16-mixed", "layout": {"zero": 3}},
            r"needs recipe.framework = 'megatron-core' .*, layout.zero below 3; nearest that works: 2",
        ),
        ({"layout": {"sequence_parallel": False, "sequence_gather": "kept"}}, "needs layout.sequence_parallel"),
        ({"layout": {"zero": 3}}, "other than layout.tensor needs layout.zero below 3; nearest that works: 2"),
        ({"layout": {"expert_tensor": 5}}, "layout.expert_tensor = 5: must divide an expert's width = 48"),
        ({"tensor": 1, "count": 1, "layout": {"expert_tensor": 5}}, "must divide an expert's width = 48"),
        ({"layout": {"expert": 8}}, "must divide n_experts = 8 and the 4 ranks of shard x context x tensor"),
    ],
)
def test_folds_that_are_not_accounted_for_are_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        run_of(1, 4, **fields)


def test_arguments_of_megatron_are_read_and_kept_in_a_run_file() -> None:
    given = {
        "num-layers": "2", "hidden-size": "64", "num-attention-heads": "4", "seq-length": "64", "num-experts": "8",
        "micro-batch-size": "1", "tensor-model-parallel-size": "2", "sequence-parallel": "true", "bf16": "true",
        "expert-model-parallel-size": "4", "expert-tensor-parallel-size": "1", "vocab-size": "128",
        "use-distributed-optimizer": "true", "moe-token-dispatcher-type": "alltoall",
    }  # fmt: skip
    read = from_arguments(Arguments(given), devices=4)
    run = load(read.table)
    assert (run.layout.expert_tensor, run.layout.expert, run.layout.expert_send) == (1, 4, "copies")
    assert read.notes == ()
    assert run.layout.expert_replicas == 1
    plain = load({**read.table, "layout": {}})
    assert "layout.expert_tensor=1" in overrides(plain, run)
    as_tensor = from_arguments(Arguments({**given, "expert-tensor-parallel-size": "2"}), devices=8)
    assert "expert_tensor" not in as_tensor.table["layout"]
