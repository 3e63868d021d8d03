"""Models of transformers, small: as their configurations build them, without weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from zoo import Setup, Specimen, adamw, tokens

V, D, B, T = 1000, 128, 4, 64
"""Words, width, sequences and tokens of each."""

BLOCKS = {"hidden_size": D, "intermediate_size": 3 * D, "num_hidden_layers": 2, "num_attention_heads": 4}
HALF = {**BLOCKS, "num_key_value_heads": 2, "vocab_size": V, "max_position_embeddings": 2 * T, "use_cache": False}


def made(kind: str, head: str, **sizes: Any) -> nn.Module:
    """A model of a configuration, by the names of both classes, ready to be trained."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**sizes)
    model: nn.Module = getattr(transformers, f"{kind}{head}")(config)
    return model.train()


def causal(kind: str, **sizes: Any) -> Setup:
    model, ids = made(kind, "ForCausalLM", **sizes), tokens(V, B, T)
    return Setup(model, adamw(model), {"input_ids": ids, "labels": ids})


def llama() -> Setup:
    return causal("Llama", **HALF)


def gpt2() -> Setup:
    model = made("GPT2", "LMHeadModel", vocab_size=V, n_positions=T, n_embd=D, n_layer=2, n_head=4, use_cache=False)
    ids = tokens(V, B, T)
    return Setup(model, adamw(model), {"input_ids": ids, "labels": ids})


def qwen3() -> Setup:
    return causal("Qwen3", **HALF, head_dim=32)


def gemma2() -> Setup:
    return causal("Gemma2", **HALF, head_dim=32, sliding_window=16)


def gemma3() -> Setup:
    model, ids = made("Gemma3Text", "Model", **HALF, head_dim=32, sliding_window=16), tokens(V, B, T)
    return Setup(
        model, adamw(model, foreach=True), {"input_ids": ids}, lambda out: out.last_hidden_state.square().mean()
    )


def bloom() -> Setup:
    return causal("Bloom", vocab_size=V, hidden_size=D, n_layer=2, n_head=4, use_cache=False)


def padded_llama() -> Setup:
    """Sequences of different lengths, with a mask for what is padding."""
    model, ids = made("Llama", "ForCausalLM", **HALF), tokens(V, B, T)
    mask = (torch.arange(T) < torch.tensor([[T], [T - 5], [T - 20], [T // 2]])).long()
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    return Setup(model, adamw(model), batch)


def bert() -> Setup:
    model, ids = made("Bert", "ForMaskedLM", **BLOCKS, vocab_size=V, max_position_embeddings=T), tokens(V, B, T)
    return Setup(model, adamw(model), {"input_ids": ids, "labels": ids})


def modernbert() -> Setup:
    sizes = {"global_attn_every_n_layers": 2, "local_attention": 16, "pad_token_id": 0}
    model = made("ModernBert", "ForMaskedLM", **BLOCKS, vocab_size=V, max_position_embeddings=T, **sizes)
    ids = tokens(V, B, T)
    return Setup(model, adamw(model), {"input_ids": ids, "labels": ids})


def t5() -> Setup:
    sizes = {"d_model": D, "d_kv": 32, "d_ff": 3 * D, "num_layers": 2, "num_heads": 4, "use_cache": False}
    model = made("T5", "ForConditionalGeneration", vocab_size=V, decoder_start_token_id=0, **sizes)
    return Setup(model, adamw(model, fused=True), {"input_ids": tokens(V, B, T), "labels": tokens(V, B, T // 2)})


def bart() -> Setup:
    sizes = {f"{side}_{what}": size for side in ("encoder", "decoder") for what, size in _BART.items()}
    model = made("Bart", "ForConditionalGeneration", vocab_size=V, d_model=D, max_position_embeddings=T, **sizes)
    return Setup(model, adamw(model), {"input_ids": tokens(V, B, T), "labels": tokens(V, B, T // 2)})


_BART = {"layers": 2, "attention_heads": 4, "ffn_dim": 3 * D}


def vit() -> Setup:
    model = made("ViT", "ForImageClassification", **BLOCKS, image_size=64, patch_size=8, num_labels=10)
    return Setup(model, adamw(model), {"pixel_values": torch.randn(B, 3, 64, 64), "labels": tokens(10, B)})


def swin() -> Setup:
    sizes = {"embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "num_labels": 10}
    model = made("Swin", "ForImageClassification", image_size=64, patch_size=4, **sizes)
    return Setup(model, adamw(model), {"pixel_values": torch.randn(B, 3, 64, 64), "labels": tokens(10, B)})


def clip() -> Setup:
    text = {**BLOCKS, "vocab_size": V, "max_position_embeddings": T, "eos_token_id": V - 1}
    vision = {**BLOCKS, "image_size": 64, "patch_size": 16}
    model = made("CLIP", "Model", text_config=text, vision_config=vision, projection_dim=64)
    batch = {"input_ids": tokens(V, B, T), "pixel_values": torch.randn(B, 3, 64, 64), "return_loss": True}
    return Setup(model, adamw(model), batch)


def whisper() -> Setup:
    sizes = {f"{side}_{what}": size for side in ("encoder", "decoder") for what, size in _BART.items()}
    model = made(
        "Whisper", "ForConditionalGeneration", vocab_size=V, d_model=D, num_mel_bins=40, max_source_positions=100,
        max_target_positions=T, decoder_start_token_id=1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        **sizes | {"encoder_ffn_dim": 3 * D},
    )  # fmt: skip
    return Setup(model, adamw(model), {"input_features": torch.randn(B, 40, 200), "labels": tokens(V, B, T // 2)})


def wav2vec2() -> Setup:
    model = made(
        "Wav2Vec2", "ForSequenceClassification", **BLOCKS, conv_dim=(64, 64, 64), conv_stride=(5, 4, 4),
        conv_kernel=(10, 8, 4), num_feat_extract_layers=3, num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4, num_labels=5, apply_spec_augment=False, layerdrop=0.0,
    )  # fmt: skip
    return Setup(model, adamw(model), {"input_values": torch.randn(B, 8000), "labels": tokens(5, B)})


def convnext() -> Setup:
    model = made("ConvNext", "ForImageClassification", depths=[1, 1, 2], hidden_sizes=[32, 64, 128], num_stages=3,
                 image_size=64, num_labels=10)  # fmt: skip
    return Setup(model, adamw(model), {"pixel_values": torch.randn(B, 3, 64, 64), "labels": tokens(10, B)})


def segformer() -> Setup:
    model = made(
        "Segformer", "ForSemanticSegmentation", depths=[1, 1], num_encoder_blocks=2, sr_ratios=[4, 2],
        hidden_sizes=[32, 64], num_attention_heads=[1, 2], patch_sizes=[7, 3], strides=[4, 2], mlp_ratios=[2, 2],
        decoder_hidden_size=64, num_labels=6, drop_path_rate=0.0,
    )  # fmt: skip
    return Setup(model, adamw(model), {"pixel_values": torch.randn(B, 3, 64, 64), "labels": tokens(6, B, 64, 64)})


def mixtral() -> Setup:
    return causal("Mixtral", **HALF, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)


def deepseek_v3() -> Setup:
    latent = {"q_lora_rank": 48, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32}
    experts = {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    groups = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    return causal("DeepseekV3", **HALF | {"num_key_value_heads": 4}, **latent, **experts, **groups)


def mamba() -> Setup:
    return causal("Mamba", vocab_size=V, hidden_size=D, num_hidden_layers=2, state_size=8, use_cache=False)


def mamba2() -> Setup:
    return causal(
        "Mamba2", vocab_size=V, hidden_size=D, num_hidden_layers=2, state_size=16, num_heads=8, head_dim=32, n_groups=1,
        chunk_size=32, use_cache=False,
    )  # fmt: skip


def rwkv() -> Setup:
    return causal("Rwkv", vocab_size=V, hidden_size=D, num_hidden_layers=2, context_length=T, use_cache=False)


def recurrent_gemma() -> Setup:
    sizes = {"block_types": ["recurrent", "attention"], "attention_window_size": 32, "head_dim": 32, "lru_width": D}
    sizes |= {"conv1d_width": 4}
    return causal("RecurrentGemma", **{k: v for k, v in HALF.items() if k != "max_position_embeddings"}, **sizes)


def peft_lora() -> Setup:
    from peft import LoraConfig, get_peft_model

    base: Any = made("Llama", "ForCausalLM", **HALF)
    config = LoraConfig(r=8, lora_dropout=0.05, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    model: nn.Module = get_peft_model(base, config)
    ids = tokens(V, B, T)
    return Setup(model.train(), adamw(model), {"input_ids": ids, "labels": ids})


def checkpointed_llama() -> Setup:
    setup = causal("Llama", **HALF)
    model: Any = setup.model
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return setup


SPECIMENS = (
    Specimen("llama", "decoder", llama),
    Specimen("llama, padded", "decoder", padded_llama),
    Specimen("gpt2", "decoder", gpt2),
    Specimen("qwen3", "decoder", qwen3),
    Specimen("gemma2", "decoder", gemma2),
    Specimen("gemma3", "decoder", gemma3),
    Specimen("bloom", "decoder", bloom),
    Specimen("llama, checkpointed", "decoder", checkpointed_llama),
    Specimen("llama with LoRA (peft)", "LoRA", peft_lora),
    Specimen("bert", "encoder", bert),
    Specimen("modernbert", "encoder", modernbert),
    Specimen("t5", "encoder-decoder", t5),
    Specimen("bart", "encoder-decoder", bart),
    Specimen("vit", "vision transformer", vit),
    Specimen("swin", "vision transformer", swin),
    Specimen("segformer", "vision transformer", segformer),
    Specimen("clip", "two towers", clip),
    Specimen("whisper", "speech", whisper),
    Specimen("wav2vec2", "speech", wav2vec2),
    Specimen("convnext", "convolutions", convnext),
    Specimen("mixtral", "mixture of experts", mixtral),
    Specimen("deepseek_v3", "mixture of experts", deepseek_v3),
    Specimen("mamba", "state space", mamba),
    Specimen("mamba2", "state space", mamba2),
    Specimen("rwkv", "linear attention", rwkv),
    Specimen("recurrent_gemma", "recurrent", recurrent_gemma),
)
