"""Fine-tuning runs: adapters over frozen weights, and whole small models. They are reported beside pretraining."""

from __future__ import annotations

from published_case import Case, Row, Source

from trainledger import catalog
from trainledger.spec.cluster import Cluster
from trainledger.spec.layout import Layout
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields, with_fields
from trainledger.spec.precision import BF16
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run
from trainledger.spec.savings import ChunkedLoss, Lora
from trainledger.spec.units import GIB

LITGPT = Source(
    reason="bitsandbytes 0.41 kept the inputs of frozen matmuls in 4 bits (MatMul4Bit.forward: ctx.tensors = (A, B)), "
    "up to a third of these peaks; newer versions do not, and the product accounts for those",
    name="Lightning-AI/litgpt:tutorials/resource-tables.md",
    title="litgpt LoRA, A100 40 GB",
    group="fine-tuning",
    figure="allocated",
    unit=10**9,
    unit_why="finetune/lora.py prints torch.cuda.max_memory_allocated() / 1e9",
    assumed=(
        "LoRA of rank 8 on queries and values with dropout 0.05, all in bf16 (bf16-true), AdamW without clipping",
        "flash attention; logits in chunks of 128 tokens, modelled as a chunked loss",
        "the longest sequence of the data is the peak's",
        "nf4-dq is 4 bits with double quantization; plain nf4 is modelled like it",
        "litgpt's further saved tensors are not modelled: RMSNorm in fp32, adapters put among zeros as wide as "
        "queries, keys "
        "and values together, inputs of frozen 4-bit matmuls (bitsandbytes 0.41, MatMul4Bit.forward)",
    ),
)
QWEN = Source(
    name="QwenLM/Qwen:README.md (Profiling of Memory and Speed)",
    title="Qwen LoRA, QLoRA and full, A100 80 GB",
    group="fine-tuning",
    figure="driver",
    unit=GIB,
    unit_why="printed as G; what was read is not said: assuming nvidia-smi in GiB",
    assumed=(
        "LoRA of rank 64 on all linear layers with dropout 0.05 (finetune.py), weights and adapters in bf16",
        "Q-LoRA: nf4 with double quantization, in place of GPTQ's int4",
        "adapters of Q-LoRA are in fp32 there (PEFT leaves them so next to integers), which is not modelled",
        "full: bf16 parameters with an fp32 master copy (DeepSpeed ZeRO-3)",
        "flash attention, every block recomputed, logits upcast to fp32",
    ),
)
CHUNK = 128


def _chunks(tokens: int) -> int:
    """As many chunks as come nearest to litgpt's size and divide the tokens."""
    return min(
        (each for each in range(1, tokens + 1) if tokens % each == 0), key=lambda each: abs(tokens / each - CHUNK)
    )


def litgpt_case(row: Row) -> Case:
    llama = "Llama2" in row["model_family"]
    model = from_fields(
        ModelSpec,
        {
            "vocab_size": int(row["vocab"]),
            "d_model": int(row["d_model"]),
            "n_layers": int(row["n_layers"]),
            "attention.n_heads": int(row["n_heads"]),
            "feed_forward.d_ff": int(row["d_ff"]),
            "max_seq_len": 4096,
        },
    )
    if not llama:
        model = with_fields(
            model,
            {
                "norm": "layernorm",
                "norm.bias": True,
                "feed_forward.activation": "gelu_tanh",
                "feed_forward.gated": False,
                "feed_forward.bias": True,
                "attention.bias": True,
                "block": "parallel",
                "positions.dim": 32,
                "head_bias": True,
            },
        )
    length, batch = int(row["seq_len"]), int(row["micro_batch_per_device"])
    recipe = Recipe(
        seq_len=length, micro_batch=batch, global_batch=int(row["global_batch_seqs"]), steps=1, precision=BF16(),
        attention="flash", loss=ChunkedLoss(chunks=_chunks(length * batch)),
        lora=Lora(rank=8, dropout=0.05, targets=("q_proj", "v_proj"),
        base_format="nf4" if "nf4" in row["model_family"] else None),
        grad_clip=None,
    )  # fmt: skip
    run = Run(model=model, recipe=recipe, cluster=Cluster(device="a100-sxm-40gb"))
    return Case(row, LITGPT, run, catalog.device("a100-sxm-40gb"))


def qwen_case(row: Row) -> Case:
    devices, full = int(row["n_devices"]), "Full" in row["model_family"]
    model = from_fields(
        ModelSpec,
        {
            "vocab_size": int(row["vocab"]),
            "d_model": int(row["d_model"]),
            "n_layers": int(row["n_layers"]),
            "attention.n_heads": int(row["n_heads"]),
            "feed_forward.d_ff": int(row["d_ff"]),
            "max_seq_len": 8192,
            "attention.bias": True,
            "attention.output_bias": False,
        },
    )
    base = "nf4" if "Q-LoRA" in row["model_family"] else None
    method = (
        {"precision.master_weights": True, "framework": "deepspeed"}
        if full
        else {"lora.rank": 64, "lora.dropout": 0.05, "lora.base_format": base}
    )
    recipe = from_fields(Recipe, {
        "seq_len": int(row["seq_len"]), "micro_batch": 1, "global_batch": int(row["global_batch_seqs"]), "steps": 1,
        "precision": "bf16", "attention": "flash", "activation_checkpointing": "full", **method,
    })  # fmt: skip
    layout = Layout(shard=devices, zero=3)
    run = Run(model=model, recipe=recipe, layout=layout, cluster=Cluster(device="a100-sxm-80gb", count=devices))
    return Case(row, QWEN, run, catalog.device("a100-sxm-80gb"))
