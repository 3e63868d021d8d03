"""Experts against a loop over tokens, against transformers' blocks, and what capacity and balance do."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from models import sizes as model_fields
from trainledger.engine.nn.feed_forward import Dispatching, Experts, activate, gated
from trainledger.engine.nn.loss import weighing
from trainledger.engine.nn.routing import GroupedLinear, Router, capacity, dispatch, grouped_mm
from trainledger.engine.nn.transformer import Transformer
from trainledger.engine.nn.weights import read_weights, write_weights
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields, with_fields
from trainledger.trace.operators.table import operator_of

torch.set_num_threads(1)

SPEC = from_fields(
    ModelSpec,
    {
        **model_fields(V=16, D=12, L=1, H=2, F=20, T=16),
        "feed_forward": "experts",
        "feed_forward.n_experts": 6,
        "feed_forward.per_token": 2,
        "feed_forward.expert_d_ff": 7,
    },
)
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "plain": {
        "feed_forward.gated": False,
        "feed_forward.activation": "gelu",
        "feed_forward.per_token": 1,
        "feed_forward.router.normalize": False,
    },
    "gpt-oss": {
        "feed_forward.bias": True,
        "feed_forward.router.bias": True,
        "feed_forward.activation": "clamped_swish",
        "feed_forward.router.scores": "softmax-of-chosen",
    },
    "deepseek-v3": {
        "feed_forward.n_shared": 2,
        "feed_forward.router.scores": "sigmoid",
        "feed_forward.router.correction": True,
        "feed_forward.router.groups": 3,
        "feed_forward.router.top_groups": 2,
        "feed_forward.router.scale": 2.5,
    },
    "latent": {
        "feed_forward.expert_d_model": 8,
        "feed_forward.bias": True,
        "feed_forward.n_shared": 1,
        "feed_forward.router.scores": "sigmoid",
    },
    "qwen2": {"feed_forward.n_shared": 1, "feed_forward.shared_gate": True, "feed_forward.router.normalize": False},
}


def experts(kind: str, dispatching: Dispatching | None = None, **fields: Any) -> Experts:
    torch.manual_seed(0)
    return Experts(with_fields(SPEC, {**KINDS[kind], **fields}), dispatching or Dispatching()).double()


def one_by_one(module: Experts, x_ND: Tensor) -> Tensor:
    """What the experts make of each token, in a loop over tokens and their experts."""
    spec, stack = module.spec, module.experts
    routes = module.router.route(x_ND[None])

    def linear(name: str, expert: int, x: Tensor) -> Tensor:
        y: Tensor = getattr(stack, name)[expert] @ x
        return y + getattr(stack, f"{name}_bias")[expert] if spec.feed_forward.bias else y

    rows = []
    for token, x in enumerate(x_ND):
        total = torch.zeros_like(x if module.latent_in is None else module.latent_in(x))
        for choice in range(spec.experts.per_token):
            expert = int(routes.chosen_NK[token, choice])
            h = linear(stack.inward, expert, x if module.latent_in is None else module.latent_in(x))
            gate, up = h[: len(h) // 2], h[len(h) // 2 :]
            h = (
                gated(gate, up, spec.feed_forward.activation)
                if spec.feed_forward.gated
                else activate(h, spec.feed_forward.activation)
            )
            total = total + routes.weights_NK[token, choice] * linear("down_proj", expert, h)
        total = total if module.latent_out is None else module.latent_out(total)
        if module.shared_experts is not None:
            shared = module.shared_experts(x)
            gate = module.shared_expert_gate
            total = total + (shared if gate is None else gate(x).sigmoid() * shared)
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("dispatching", [Dispatching(), Dispatching(6.0)], ids=["dropless", "capacity"])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_those_of_a_loop_over_tokens(kind: str, dispatching: Dispatching) -> None:
    module = experts(kind, dispatching)
    x_BTD = torch.randn(2, 5, 12, dtype=torch.float64, requires_grad=True)
    g_BTD = torch.randn_like(x_BTD)
    wanted = [x_BTD, *module.parameters()]
    y_BTD, expected = module(x_BTD), one_by_one(module, x_BTD.flatten(0, 1)).view(2, 5, 12)
    torch.testing.assert_close(y_BTD, expected)
    torch.testing.assert_close(
        torch.autograd.grad((y_BTD * g_BTD).sum(), wanted), torch.autograd.grad((expected * g_BTD).sum(), wanted)
    )


def test_parameters_have_the_names_and_shapes_of_the_ledger() -> None:
    from trainledger.ledger.model import parameters as shapes

    for kind, fields in KINDS.items():
        mine = [(name, tuple(each.shape)) for name, each in experts(kind).named_parameters()]
        assert mine == list(shapes.experts(with_fields(SPEC, fields)))


# transformers


def their(kind: str) -> tuple[nn.Module, ModelSpec]:
    """A block of transformers and the spec of the same."""
    import transformers as hf
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    sizes: dict[str, Any] = {"hidden_size": 12, "num_experts_per_tok": 2, "num_attention_heads": 2}
    deepseek = {
        **sizes,
        "moe_intermediate_size": 7,
        "n_routed_experts": 6,
        "n_group": 3,
        "topk_group": 2,
        "n_shared_experts": 2,
        "routed_scaling_factor": 2.5,
    }
    shared = {
        "feed_forward.n_shared": 2,
        "feed_forward.router.groups": 3,
        "feed_forward.router.top_groups": 2,
        "feed_forward.router.scale": 2.5,
    }
    match kind:
        case "mixtral":
            block: nn.Module = MixtralSparseMoeBlock(
                hf.MixtralConfig(**sizes, intermediate_size=7, num_local_experts=6)
            )
            return block, SPEC
        case "qwen3_moe" | "qwen3_moe normalized":
            normalize = kind.endswith("normalized")
            config = hf.Qwen3MoeConfig(**sizes, moe_intermediate_size=7, num_experts=6, norm_topk_prob=normalize)
            return Qwen3MoeSparseMoeBlock(config), with_fields(SPEC, {"feed_forward.router.normalize": normalize})
        case "deepseek_v2":
            block = DeepseekV2Moe(hf.DeepseekV2Config(**deepseek, topk_method="group_limited_greedy"))
            return block, with_fields(SPEC, {**shared, "feed_forward.router.normalize": False})
        case "deepseek_v3":
            block = DeepseekV3MoE(hf.DeepseekV3Config(**deepseek, norm_topk_prob=True))
            return block, with_fields(
                SPEC, {**shared, "feed_forward.router.scores": "sigmoid", "feed_forward.router.correction": True}
            )
        case "gpt_oss":
            block = GptOssMLP(hf.GptOssConfig(**sizes, intermediate_size=7, num_local_experts=6))
            return block, with_fields(SPEC, KINDS["gpt-oss"])
    raise AssertionError(kind)


def ours_from(theirs: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    """Their tensors under our names and in our layout."""
    found = {}
    for name, each in theirs.items():
        name = name.replace("gate.", "router.", 1) if name.startswith("gate.") else name
        name = name.replace("e_score_correction_bias", "correction")
        if kind == "gpt_oss" and name.startswith("experts."):
            if name.startswith("experts.gate_up"):  # gate and up are neighbours there, halves here
                each = torch.cat((each[..., ::2], each[..., 1::2]), dim=-1)
            each = each if name.endswith("bias") else each.transpose(1, 2)
        found[name] = each
    return found


@pytest.mark.parametrize(
    "kind", ["mixtral", "qwen3_moe", "qwen3_moe normalized", "deepseek_v2", "deepseek_v3", "gpt_oss"]
)
def test_outputs_are_those_of_transformers(kind: str) -> None:
    torch.manual_seed(0)
    block, spec = their(kind)
    with torch.no_grad():
        for tensor in block.state_dict().values():
            tensor.normal_(std=0.5)
    ours = Experts(spec, Dispatching())
    ours.load_state_dict(ours_from(block.state_dict(), kind))
    x_BTD = torch.randn(3, 9, 12)
    out = block(x_BTD)
    torch.testing.assert_close(ours(x_BTD), out[0] if isinstance(out, tuple) else out, rtol=1e-4, atol=1e-5)


# The choice


def test_the_correction_changes_the_choice_but_not_the_weights() -> None:
    router = Router(
        with_fields(
            SPEC,
            {
                "feed_forward.router.scores": "sigmoid",
                "feed_forward.router.correction": True,
                "feed_forward.router.normalize": False,
            },
        )
    )
    x_ND = torch.randn(20, 12)
    before = router.route(x_ND[None])
    assert router.correction is not None
    router.correction[4] = 100.0
    after = router.route(x_ND[None])
    assert (after.chosen_NK[:, 0] == 4).all()
    torch.testing.assert_close(after.weights_NK[:, 0], before.scores_NE[:, 4])
    assert "correction" not in dict(router.named_parameters())
    assert "correction" in router.state_dict()


def test_only_experts_of_the_best_groups_are_chosen() -> None:
    spec = with_fields(
        SPEC,
        {
            "feed_forward": "experts",
            "feed_forward.n_experts": 12,
            "feed_forward.router.scores": "sigmoid",
            "feed_forward.router.groups": 4,
            "feed_forward.router.top_groups": 2,
            "feed_forward.per_token": 4,
        },
    )
    routes = Router(spec).route(torch.randn(1, 50, 12))
    assert max(len(set(row.tolist())) for row in routes.chosen_NK // 3) == 2
    best_two = routes.scores_NE.view(50, 4, 3).topk(2, dim=-1).values.sum(-1).topk(2).indices
    for chosen, groups in zip(routes.chosen_NK // 3, best_two, strict=True):
        assert set(chosen.tolist()) <= set(groups.tolist())


# Capacity


def test_an_expert_takes_first_choices_first_and_then_earlier_tokens() -> None:
    chosen_NK = torch.tensor([[0, 1], [2, 0], [0, 1], [0, 2], [1, 0]])  # five tokens: expert 0 is sent 5 of 10 routes
    where = dispatch(chosen_NK, 3, places=3)
    assert where.dropped_R is not None
    assert where.empty_S is not None
    first, second = where.dropped_R.view(2, 5).tolist()
    assert first == [False] * 5  # tokens 0, 2 and 3 have expert 0 as their first choice and fill it
    assert second == [False, True, False, False, True]
    places = zip(where.route_S.tolist(), where.empty_S.tolist(), strict=True)
    held = [None if empty else route for route, empty in places]
    assert held == [0, 2, 3, 4, 5, 7, 1, 8, None]  # route = choice * 5 + token, expert by expert


def test_a_dropped_token_gets_nothing_from_that_expert() -> None:
    module = experts("plain", Dispatching(0.5))
    with torch.no_grad():
        module.router.weight.zero_()
        module.router.weight[3] = 1.0
    x_BTD = torch.rand(1, 8, 12, dtype=torch.float64)  # positive, so that all tokens go to expert 3
    y_TD = module(x_BTD)[0]
    assert capacity(8, 1, 6, Fraction(1, 2)) == 1
    assert y_TD[0].abs().sum() > 0
    assert (y_TD[1:] == 0).all()
    torch.testing.assert_close(y_TD[0], one_by_one(module, x_BTD[0, :1])[0])


def test_gradients_of_capacity_are_those_of_what_was_kept() -> None:
    module = experts("gpt-oss", Dispatching(0.75))
    x_BTD = torch.randn(2, 6, 12, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: module(x), (x_BTD,))
    stack = dict(module.experts.named_parameters())
    for each in stack.values():
        each.requires_grad_(False)
    values = tuple(each.clone().requires_grad_() for each in stack.values())

    def of_weights(*values: Tensor) -> Tensor:
        named = {f"experts.{name}": value for name, value in zip(stack, values, strict=True)}
        out: Tensor = torch.func.functional_call(module, named, (x_BTD.detach(),))
        return out.sum(dim=(0, 1))

    assert torch.autograd.gradcheck(of_weights, values, fast_mode=True)


# The load-balance loss


def balance(module: Experts, x_BTD: Tensor) -> Tensor:
    """Switch, equations 4 to 6, written out anew."""
    routes = module.router.route(x_BTD)
    n_experts = module.n_experts
    share = torch.stack([(routes.chosen_NK == each).double().mean() for each in range(n_experts)])
    scores = module.router(x_BTD.flatten(0, 1))
    if module.spec.experts.router.scores == "sigmoid":
        probabilities = scores.sigmoid() / scores.sigmoid().sum(-1, keepdim=True)
    else:
        probabilities = scores.softmax(-1)
    return n_experts * (share * probabilities.mean(0)).sum()


@pytest.mark.parametrize("kind", ["mixtral", "gpt-oss", "deepseek-v3"])
@pytest.mark.parametrize("factor", [None, 0.5])
def test_the_balance_loss_joins_on_the_way_back(kind: str, factor: float | None) -> None:
    module, plain = experts(kind, Dispatching(factor, 0.3)), experts(kind, Dispatching(factor))
    x_BTD = torch.randn(2, 5, 12, dtype=torch.float64)
    scale = torch.tensor(8.0)
    with weighing(scale, 4):
        y_BTD = module(x_BTD)
    torch.testing.assert_close(y_BTD, plain(x_BTD))
    y_BTD.square().sum().backward()
    (plain(x_BTD).square().sum() + 8 / 4 * 0.3 * balance(plain, x_BTD)).backward()
    for mine, other in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_the_balance_loss_of_equal_shares_is_one() -> None:
    module = experts("plain", Dispatching(), **{"feed_forward": "experts", "feed_forward.n_experts": 4})
    module.router.weight.data.zero_()
    module.router.weight.data[:, :4] = 1e-9 * torch.eye(4)
    x_BTD = torch.eye(12, dtype=torch.float64)[None, :4]  # token t prefers expert t, by next to nothing
    torch.testing.assert_close(balance(module, x_BTD), torch.tensor(1.0, dtype=torch.float64), rtol=1e-8, atol=0)


def test_evaluation_has_no_balance_loss() -> None:
    module = experts("mixtral", Dispatching(None, 0.3)).eval()
    x_BTD = torch.randn(1, 4, 12, dtype=torch.float64)
    module(x_BTD).sum().backward()
    plain = experts("mixtral")
    plain(x_BTD).sum().backward()
    torch.testing.assert_close(module.router.weight.grad, plain.router.weight.grad)


# Matmuls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("width_in", "width_out"), [(8, 16), (7, 33)])
def test_grouped_matmuls_in_every_format_and_size(dtype: torch.dtype, width_in: int, width_out: int) -> None:
    torch.manual_seed(0)
    ends_E = torch.tensor([4, 4, 9])  # the second expert has no rows
    x_RD = torch.randn(9, width_in, dtype=dtype, requires_grad=True)
    w_EMD = torch.randn(3, width_out, width_in, dtype=dtype, requires_grad=True)
    y_RM = GroupedLinear.apply(x_RD, w_EMD, None, torch.tensor([0] * 4 + [2] * 5), ends_E)
    expected = torch.cat((x_RD[:4] @ w_EMD[0].T, x_RD[4:] @ w_EMD[2].T))
    torch.testing.assert_close(y_RM, expected)
    g_RM = torch.randn_like(y_RM)
    torch.testing.assert_close(
        torch.autograd.grad(y_RM, (x_RD, w_EMD), g_RM), torch.autograd.grad(expected, (x_RD, w_EMD), g_RM)
    )


def test_grouped_flops_are_what_the_flop_counter_counts_expert_by_expert() -> None:
    ends_E = torch.tensor([4, 4, 9])
    a, b = torch.randn(9, 5), torch.randn(3, 5, 6)
    rows, weights = FlopCounterMode(display=False), FlopCounterMode(display=False)
    with rows:
        for first, end, matrix in ((0, 4, b[0]), (4, 9, b[2])):
            torch.mm(a[first:end], matrix)
    with weights:
        for first, end in ((0, 4), (4, 9)):
            torch.mm(a[first:end].T, a[first:end])
    operator = operator_of(torch.ops.trainledger.grouped_mm.default)
    assert operator.counted((a, b, ends_E), {}, grouped_mm(a, b, ends_E)) == (rows.get_total_flops(),) * 2
    assert operator.counted((a.T, a, ends_E), {}, grouped_mm(a.T, a, ends_E)) == (weights.get_total_flops(),) * 2
    assert operator_of(torch.ops.aten._grouped_mm.default).flops((a, b), None) == rows.get_total_flops()


def test_the_model_flops_of_padded_matmuls_are_those_of_the_routed_rows() -> None:
    a, b = torch.randn(4, 3, 5), torch.randn(4, 5, 6)
    counter = FlopCounterMode(display=False)
    with counter:
        torch.bmm(a, b)
    operator = operator_of(torch.ops.trainledger.padded_mm.default)
    flops, model_flops = operator.counted((a, b, 10, 12), {}, torch.bmm(a, b))
    assert flops == counter.get_total_flops()
    assert model_flops * 12 == flops * 10


def test_the_same_bits_twice() -> None:
    def once() -> list[Tensor]:
        module = Experts(with_fields(SPEC, KINDS["deepseek-v3"]), Dispatching())
        torch.manual_seed(1)
        for each in module.parameters():
            nn.init.normal_(each)
        module(torch.randn(2, 40, 12)).square().sum().backward()
        return [each.grad for each in module.parameters() if each.grad is not None]

    assert all(torch.equal(a, b) for a, b in zip(once(), once(), strict=True))


def test_a_file_of_weights_holds_the_corrections(tmp_path: Path) -> None:
    spec = with_fields(
        SPEC, {**KINDS["deepseek-v3"], "n_layers": 2, "feed_forward.n_dense_layers": 1, "n_mtp_layers": 1}
    )
    model = Transformer(spec)
    router = model.layers[1].mlp.router
    router.correction.normal_()
    write_weights(model, tmp_path / "weights.safetensors")
    again = read_weights(spec, tmp_path / "weights.safetensors")
    assert torch.equal(again.layers[1].mlp.router.correction, router.correction)
    ids_BT = torch.randint(0, 16, (1, 6))
    assert torch.equal(again.eval()(ids_BT), model.eval()(ids_BT))
