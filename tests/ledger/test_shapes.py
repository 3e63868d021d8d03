"""The list of names and shapes is that of the modules, in their order, whatever the architecture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainledger.ledger.core.leaves import component_of
from trainledger.ledger.model import shapes
from trainledger.ledger.model.parameters import leaves_of, parameters
from trainledger.nn.transformer import Transformer
from trainledger.spec.layers import kind_of
from trainledger.spec.model import NORM_PLACES, ModelSpec
from trainledger.spec.rules.model import model_problems

flag = st.booleans()


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    """Any architecture: ordinary or latent attention, dense or with experts, any norms and ends."""

    def pick(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    norm, block, positions = pick("rmsnorm", "layernorm"), pick("serial", "parallel", "parallel-two-norms"), "rope"
    weight = norm == "rmsnorm" or draw(flag)
    n_layers = pick(1, 2, 5)
    if draw(flag):
        attend = {
            "kv_rank": pick(4, 6), "q_rank": pick(None, 5), "nope_head_dim": 4, "rope_head_dim": 2, "v_head_dim": 3,
            "n_heads": 2,
        }  # fmt: skip
    else:
        positions = pick("rope", "learned", "alibi", "none")
        attend = {
            "n_heads": 4, "n_kv_heads": pick(None, 1, 2), "head_dim": pick(None, 6),
            "qk_norm": pick(None, "head", "width"), "attention_sinks": draw(flag), "window": pick(None, 3),
        }  # fmt: skip
    sparse = {
        "n_experts": 4, "expert_d_ff": pick(None, 5), "n_shared_experts": pick(0, 1, 2), "n_dense_layers": pick(0, 1),
        "expert_every": pick(1, 2), "router": pick("softmax", "sigmoid"), "router_bias": draw(flag),
        "router_correction": draw(flag),
    }  # fmt: skip
    experts = sparse if draw(flag) else {}
    if experts.get("n_shared_experts"):
        experts["shared_expert_gate"] = draw(flag)
    return ModelSpec(
        vocab_size=13, vocab_multiple=pick(1, 8), d_model=8, n_layers=n_layers, d_ff=12, max_seq_len=7, norm=norm,
        norm_weight=weight, norm_bias=norm == "layernorm" and weight and draw(flag), block=block,
        norm_plus_one=norm == "rmsnorm" and draw(flag), norm_place=pick(*NORM_PLACES) if block == "serial" else "pre",
        positions=positions, extra_positions=pick(0, 2) if positions == "learned" else 0, embedding_norm=draw(flag),
        head_bias=draw(flag), tie_embeddings=draw(flag), attention_bias=draw(flag),
        attention_output_bias=pick(None, True, False), mlp_bias=draw(flag), gated=draw(flag),
        n_predict_ahead=pick(0, 0, 1, 2), **attend, **experts,
    )  # fmt: skip


def layer_by_layer(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The parameters of a whole model, the blocks written out."""
    yield from shapes.before_blocks(spec)
    for layer in range(spec.n_layers):
        for name, shape in shapes.block(spec, kind_of(spec, layer)):
            yield f"layers.{layer}.{name}", shape
    yield from shapes.after_blocks(spec)
    for module in range(spec.n_predict_ahead):
        for name, shape in shapes.predict_ahead(spec, kind_of(spec, spec.n_layers - 1)):
            yield f"predict_ahead.{module}.{name}", shape


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(models())
def test_names_shapes_and_order_are_those_of_the_modules(spec: ModelSpec) -> None:
    assert not list(model_problems(spec))
    with torch.device("meta"):
        model = Transformer(spec)
    built = [(name, tuple(each.shape)) for name, each in model.named_parameters()]
    assert list(layer_by_layer(spec)) == built


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(models())
def test_counts_are_the_sums_of_the_shapes(spec: ModelSpec) -> None:
    sizes = {name: torch.Size(shape).numel() for name, shape in layer_by_layer(spec)}
    counted = parameters(spec)
    assert counted.total == sum(sizes.values())
    ahead = sum(size for name, size in sizes.items() if name.startswith("predict_ahead"))
    by_component: dict[str, int] = {}
    for name, size in sizes.items():
        part = "prediction ahead" if name.startswith("predict_ahead") else component_of(name)
        by_component[part] = by_component.get(part, 0) + size
    assert {part: count for part, count in counted.by_component.items() if count} == by_component
    idle = 0
    if spec.n_experts is not None:
        idle = by_component.get("experts", 0) * (spec.n_experts - spec.experts_per_token) // spec.n_experts
    assert counted.active == counted.total - ahead - idle
    if not spec.n_predict_ahead:
        assert leaves_of(spec).elements() == counted.total
        assert leaves_of(spec).tensors() == len(sizes)
