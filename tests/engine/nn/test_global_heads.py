"""Global layers with other heads than local ones: Gemma 4 and MiMo-V2 of transformers as the witnesses."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"

from typing import Any

import pytest
import torch
import transformers

from trainledger.engine.nn.cache import Cache
from trainledger.engine.nn.transformer import Transformer
from trainledger.spec.convert.huggingface import from_config

SIZES = {
    "vocab_size": 31, "hidden_size": 24, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 20,
    "max_position_embeddings": 32, "pad_token_id": None,
}  # fmt: skip
GEMMA4 = SIZES | {
    "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1,
    "attention_k_eq_v": True, "sliding_window": 5, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0,
}  # fmt: skip
EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 12}
MIMO = SIZES | {
    "num_key_value_heads": 1, "head_dim": 12, "v_head_dim": 8, "sliding_window": 5, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 12,
}  # fmt: skip
BESIDE_EXPERTS = {
    "mlp.": "mlp.shared_experts.", "router.proj.": "mlp.router.", "router.scale": "mlp.router.norm.weight",
    "router.per_expert_scale": "mlp.router.expert_scale", "experts.": "mlp.experts.",
    "pre_feedforward_layernorm.": "mlp.shared_norm.", "post_feedforward_layernorm_1.": "mlp.shared_out_norm.",
    "pre_feedforward_layernorm_2.": "mlp.experts_norm.", "post_feedforward_layernorm_2.": "mlp.experts_out_norm.",
}  # fmt: skip


def renamed(name: str, names: dict[str, str]) -> str:
    """Our name of a parameter of a layer: the first beginning that the table has is replaced."""
    head, layer, inner = name.removeprefix("model.").split(".", 2) if ".layers." in name else ("", "", "")
    if not head:
        return name.removeprefix("model.")
    begin = next((begin for begin in names if inner.startswith(begin)), "")
    return f"{head}.{layer}.{names.get(begin, '')}{inner.removeprefix(begin)}"


@pytest.mark.parametrize(
    ("model_type", "config", "names"),
    [
        ("gemma4_text", GEMMA4, {}),
        ("gemma4_text", GEMMA4 | EXPERTS, BESIDE_EXPERTS),
        ("mimo_v2_flash", MIMO, {"mlp.gate.weight": "mlp.router.weight", "mlp.gate.e_score_correction_bias": ""}),
    ],
)
@torch.no_grad()
def test_logits_are_those_of_transformers(model_type: str, config: dict[str, Any], names: dict[str, str]) -> None:
    torch.manual_seed(0)
    kind = transformers.AutoConfig.for_model(model_type, **config)
    theirs = transformers.AutoModelForCausalLM.from_config(kind, attn_implementation="eager").eval()
    for parameter in theirs.parameters():
        parameter.normal_(0, 1 / 3 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5)
    ours = Transformer(from_config({"model_type": model_type} | config)).eval()
    known = ours.state_dict()
    weights = {renamed(name, names): tensor for name, tensor in theirs.state_dict().items()}
    assert {name for name, _ in ours.named_parameters()} <= set(weights)
    ours.load_state_dict({name: weights.get(name, tensor) for name, tensor in known.items()})
    ids = torch.randint(31, (2, 17))
    logits = theirs(input_ids=ids).logits
    torch.testing.assert_close(ours(ids), logits, atol=2e-5, rtol=2e-5)
    cache = Cache(ours.spec, torch.empty(0), 2, 17)
    ours(ids[:, :9], cache=cache)
    for at in range(9, 17):
        torch.testing.assert_close(ours(ids[:, at : at + 1], cache=cache), logits[:, at], atol=2e-5, rtol=2e-5)
