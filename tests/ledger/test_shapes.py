"""The list of names and shapes is that of the modules, in their order, whatever the architecture."""

from collections.abc import Iterator
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainledger.engine.nn.transformer import Transformer
from trainledger.ledger.core.graph import component_of
from trainledger.ledger.model import parameters as shapes
from trainledger.ledger.model.parameters import leaves_of, parameters
from trainledger.spec.layers import kind_of
from trainledger.spec.model import NORM_PLACES, ModelSpec
from trainledger.spec.parts import from_fields
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
            "attention": "latent",
            "attention.kv_rank": pick(4, 6),
            "attention.q_rank": pick(None, 5),
            "attention.nope_head_dim": 4,
            "attention.rope_head_dim": 2,
            "attention.v_head_dim": 3,
            "attention.n_heads": 2,
        }
    else:
        positions = pick("rope", "learned", "alibi", "none")
        attend = {
            "attention.n_heads": 4,
            "attention.n_kv_heads": pick(None, 1, 2),
            "attention.head_dim": pick(None, 6),
            "attention.qk_norm": pick(None, "head", "width"),
            "attention.sinks": draw(flag),
            "attention.window": pick(None, 3),
        }
    sparse = {
        "feed_forward": "experts",
        "feed_forward.n_experts": 4,
        "feed_forward.expert_d_ff": pick(None, 5),
        "feed_forward.n_shared": pick(0, 1, 2),
        "feed_forward.n_dense_layers": pick(0, 1),
        "feed_forward.every": pick(1, 2),
        "feed_forward.router.scores": pick("softmax", "sigmoid"),
        "feed_forward.router.bias": draw(flag),
        "feed_forward.router.correction": draw(flag),
    }
    experts = sparse if draw(flag) else {}
    if experts.get("feed_forward.n_shared"):
        experts["feed_forward.shared_gate"] = draw(flag)
    if experts:
        experts["feed_forward.expert_d_model"] = pick(None, 4)
    return from_fields(
        ModelSpec,
        {
            "vocab_size": 13,
            "vocab_multiple": pick(1, 8),
            "d_model": 8,
            "n_layers": n_layers,
            "feed_forward.d_ff": 12,
            "max_seq_len": 7,
            "norm": norm,
            "norm.weight": weight,
            "norm.bias": norm == "layernorm" and weight and draw(flag),
            "block": block,
            "norm.plus_one": norm == "rmsnorm" and draw(flag),
            "norm_place": pick(*NORM_PLACES) if block == "serial" else "pre",
            "positions": positions,
            "positions.extra_rows": pick(0, 2) if positions == "learned" else None,
            "embedding_norm": draw(flag),
            "head_bias": draw(flag),
            "tie_embeddings": draw(flag),
            "attention.bias": draw(flag),
            "attention.output_bias": pick(None, True, False),
            "feed_forward.bias": draw(flag),
            "feed_forward.gated": draw(flag),
            "n_mtp_layers": pick(0, 0, 1, 2),
            **attend,
            **experts,
        },
    )


def layer_by_layer(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The parameters of a whole model, the blocks written out."""
    yield from shapes.before_blocks(spec)
    for layer in range(spec.n_layers):
        for name, shape in shapes.block(spec, kind_of(spec, layer)):
            yield f"layers.{layer}.{name}", shape
    yield from shapes.after_blocks(spec)
    for module in range(spec.n_mtp_layers):
        for name, shape in shapes.mtp_module(spec, kind_of(spec, spec.n_layers - 1)):
            yield f"mtp.{module}.{name}", shape


@settings(max_examples=300)
@given(models())
def test_names_shapes_and_order_are_those_of_the_modules(spec: ModelSpec) -> None:
    assert not list(model_problems(spec))
    with torch.device("meta"):
        model = Transformer(spec)
    built = [(name, tuple(each.shape)) for name, each in model.named_parameters()]
    assert list(layer_by_layer(spec)) == built


@settings(max_examples=100)
@given(models())
def test_counts_are_the_sums_of_the_shapes(spec: ModelSpec) -> None:
    sizes = {name: torch.Size(shape).numel() for name, shape in layer_by_layer(spec)}
    counted = parameters(spec)
    assert counted.total == sum(sizes.values())
    ahead = sum(size for name, size in sizes.items() if name.startswith("mtp"))
    by_component: dict[str, int] = {}
    for name, size in sizes.items():
        part = "multi-token prediction" if name.startswith("mtp") else component_of(name)
        by_component[part] = by_component.get(part, 0) + size
    assert {part: count for part, count in counted.by_component.items() if count} == by_component
    idle = 0
    if spec.experts is not None:
        idle = (
            by_component.get("experts", 0) * (spec.experts.n_experts - spec.experts.per_token) // spec.experts.n_experts
        )
    assert counted.active == counted.total - ahead - idle
    if not spec.n_mtp_layers:
        assert leaves_of(spec).elements() == counted.total
        assert leaves_of(spec).tensors() == len(sizes)
