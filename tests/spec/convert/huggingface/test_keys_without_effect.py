"""Keys that a family does not read: taken where they say off or what the model has anyway, refused elsewhere."""

from typing import Any

import pytest

from trainledger.ledger.model.parameters import parameters
from trainledger.spec.convert.huggingface import from_config
from trainledger.spec.problem import InvalidInput

PHI4_MINI: dict[str, Any] = {
    "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "hidden_size": 3072, "num_hidden_layers": 32,
    "num_attention_heads": 24, "num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 200064,
    "tie_word_embeddings": True, "hidden_act": "silu", "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096, "rope_theta": 10000.0, "rms_norm_eps": 1e-05, "sliding_window": 262144,
    "partial_rotary_factor": 0.75, "attention_bias": False, "full_attn_mod": 1, "interpolate_factor": 1,
    "lm_head_bias": False, "mlp_bias": False,
}  # fmt: skip
SMALL = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
         "max_position_embeddings": 64, "num_key_value_heads": 2}  # fmt: skip


def problems(kind: str, key: str, value: Any) -> list[str]:
    try:
        from_config({"model_type": kind, **SMALL, key: value})
    except InvalidInput as error:
        return [problem.field for problem in error.problems]
    return []


def test_phi_4_mini_is_read_with_the_parameters_of_its_card() -> None:
    """And transformers' own model on the meta device is the witness."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**PHI4_MINI, pad_token_id=0)
        )
    assert parameters(from_config(PHI4_MINI)).total == 3_836_021_760 == sum(each.numel() for each in model.parameters())


@pytest.mark.parametrize(
    ("kind", "key", "value", "is_read"),
    [
        ("qwen3_moe", "use_qk_norm", True, True),
        ("qwen3_moe", "use_qk_norm", False, False),
        ("qwen3_moe", "shared_expert_intermediate_size", 0, True),
        ("qwen3_moe", "shared_expert_intermediate_size", 64, False),
        ("qwen2", "qkv_bias", True, True),
        ("qwen2", "attention_bias", False, False),
        ("mistral", "use_qk_norm", True, False),
        ("cohere", "use_parallel_block", True, True),
        ("cohere", "use_parallel_block", False, False),
        ("mistral", "use_parallel_block", False, True),
        ("llama", "lm_head_bias", False, True),
        ("llama", "lm_head_bias", True, False),
        ("llama", "embedding_multiplier", 1.0, True),
        ("llama", "embedding_multiplier", 12.0, False),
        ("llama", "num_nextn_predict_layers", 0, True),
        ("llama", "num_nextn_predict_layers", 1, False),
        ("mistral", "a_new_thing", None, True),
        ("mistral", "use_rope", False, False),
        ("mistral", "causal", False, False),
    ],
)
def test_an_unread_key_is_taken_only_where_it_changes_nothing(kind: str, key: str, value: Any, is_read: bool) -> None:
    assert problems(kind, key, value) == ([] if is_read else [key])
