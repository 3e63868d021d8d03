"""Files and launch lines of TRL, Hugging Face's Trainer, Accelerate, DeepSpeed and others as runs."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import yaml

from trainledger.answers.load import resolve
from trainledger.answers.plan import plan
from trainledger.cli.train import init
from trainledger.ledger.model.parameters import parameters
from trainledger.spec.convert.trainers import files, from_values, tables
from trainledger.spec.durable import content_of
from trainledger.spec.problem import InvalidInput
from trainledger.spec.run import Run

TRL: dict[str, Any] = {
    "model_name_or_path": "meta-llama/Meta-Llama-3-8B",
    "torch_dtype": "bfloat16",
    "dataset_name": "d",
    "max_length": 2048,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_steps": 100,
}
ACCELERATE: dict[str, Any] = {"distributed_type": "FSDP", "mixed_precision": "bf16", "num_processes": 8}
DEEPSPEED: dict[str, Any] = {
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}},
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
}
TITAN: dict[str, Any] = {
    "job": {"dump_folder": "o"},
    "model": {"name": "llama3", "flavor": "8B"},
    "optimizer": {"name": "AdamW", "lr": 3e-4},
    "training": {"local_batch_size": 2, "seq_len": 8192, "steps": 100},
    "parallelism": {"data_parallel_shard_degree": -1, "tensor_parallel_degree": 2},
    "activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"},
}
TITAN_SAVED: dict[str, Any] = {
    "model_spec": {"name": "llama3", "flavor": "debugmodel"},
    "training": {"num_tokens_per_microbatch_per_dp_rank": 8192, "max_context_length": 2048, "steps": 100},
    "optimizer": {"param_groups": [{"optimizer_name": "AdamW", "optimizer_kwargs": {"betas": [0.9, 0.99]}}]},
    "activation_checkpoint": {"preserve_rng_state": True, "force_recompute_mm_shapes_by_fqns": ["moe.router.gate"]},
    "loss": {"num_chunks": 4},
}


def written(tmp_path: Path, values: Any, name: str = "run.yaml") -> str:
    file = tmp_path / name
    write = {"toml": tomli_w.dumps, "json": json.dumps}.get(name.rpartition(".")[2], yaml.safe_dump)
    file.write_text(values if isinstance(values, str) else write(values))
    return str(file)


def told(run: Run, *fields: str) -> tuple[Any, ...]:
    """Values of fields of a run by their path."""
    values = []
    for field in fields:
        value: Any = run
        for name in field.split("."):
            value = getattr(value, name)
        values.append(value)
    return tuple(values)


MEANINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a model in 16 bits is trained in them": (TRL, {"recipe.precision.kind": "bf16", "recipe.seq_len": 2048}),
    "a model in fp32 under autocast": (
        TRL | {"torch_dtype": "float32"},
        {"recipe.precision.kind": "bf16-mixed", "recipe.loss.kind": "chunked"},
    ),
    "defaults of TRL": (
        {"model_name_or_path": "gpt2", "dataset_name": "d"},
        {"recipe.micro_batch": 8, "recipe.seq_len": 1024, "recipe.activation_checkpointing.kind": "full"},
    ),
    "adapters": (
        TRL | {"use_peft": True, "lora_r": 8, "load_in_4bit": True},
        {"recipe.lora.rank": 8, "recipe.lora.targets": ("q_proj", "v_proj"), "recipe.lora.base_format": "nf4"},
    ),
    "arguments of the Trainer": (
        {
            "model_name_or_path": "gpt2",
            "per_device_train_batch_size": 2,
            "output_dir": "o",
            "fp16": True,
            "max_steps": -1,
        },
        {"recipe.precision.kind": "fp16-mixed", "recipe.seq_len": 1024, "recipe.total_steps": 1},
    ),
    "FSDP": (
        TRL | {"fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_activation_checkpointing": True}},
        {"recipe.precision.kind": "bf16-sharded"},
    ),
}


@pytest.mark.parametrize("case", MEANINGS)
def test_what_keys_mean(tmp_path: Path, case: str) -> None:
    values, expected = MEANINGS[case]
    run = resolve(written(tmp_path, values))
    assert dict(zip(expected, told(run, *expected), strict=True)) == expected


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        (ACCELERATE, {"shard": 8, "zero": 3}),
        (ACCELERATE | {"fsdp_config": {"fsdp_reshard_after_forward": False}}, {"reshard_after_forward": False}),
        (ACCELERATE | {"distributed_type": "MULTI_GPU"}, {"replicate": 8}),
        (
            ACCELERATE | {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2}},
            {"shard": 8, "zero": 2},
        ),
        (
            ACCELERATE
            | {"parallelism_config": {f"parallelism_config_{axis}_size": 2 for axis in ("dp_shard", "cp", "tp")}},
            {"shard": 2, "context": 2, "tensor": 2},
        ),
    ],
)
def test_a_launcher_says_how_devices_share_a_run(
    tmp_path: Path, config: dict[str, Any], layout: dict[str, Any]
) -> None:
    script, launcher = written(tmp_path, TRL), written(tmp_path, config, "launcher.yaml")
    run = resolve(
        f"accelerate launch --config_file {launcher} sft.py --config {script} --per_device_train_batch_size=2"
    )
    assert {name: getattr(run.layout, name) for name in layout} == layout
    assert (run.cluster.count, run.recipe.micro_batch) == (8, 2)
    assert resolve(written(tmp_path, TRL | {"accelerate_config": "launcher.yaml"})).layout == run.layout


def test_a_deepspeed_file_beside_a_model(tmp_path: Path) -> None:
    file = written(tmp_path, DEEPSPEED | {"train_batch_size": 32}, "ds.json")
    run = resolve(file, {"model.preset": "llama-3-8b"})
    expected = {
        "cluster.count": 4,
        "layout.zero": 2,
        "recipe.seq_len": 8192,
        "recipe.global_batch": 32,
        "recipe.precision.master_weights": True,
        "recipe.optimizer.beta2": 0.95,
    }
    assert dict(zip(expected, told(run, *expected), strict=True)) == expected
    assert "recipe.seq_len" in run.origin.assumed
    with pytest.raises(
        InvalidInput, match=r"train_batch_size = 32: must be 16: micro-batch 4 x accumulation 2 x 2 data"
    ):
        resolve(file, {"model.preset": "llama-3-8b", "cluster.count": 2})
    with pytest.raises(InvalidInput, match=r"is not named in a file of DeepSpeed.*model\.preset"):
        resolve(file)


TITANS: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "data ranks shard": (
        TITAN | {"model": {"name": "llama3", "flavor": "8B", "converters": ["float8"]}},
        8,
        {
            "layout.shard": 4,
            "layout.sequence_parallel": True,
            "recipe.global_batch": 8,
            "recipe.precision.kind": "fp8-tensorwise-sharded",
            "recipe.activation_checkpointing.kind": "selective",
        },
    ),
    "one device is autocast": (
        TITAN | {"parallelism": {}, "compile": {"enable": True, "components": ["loss"]}},
        1,
        {"recipe.precision.kind": "bf16-mixed", "recipe.compile": False, "recipe.loss.kind": "compiled"},
    ),
    "tables of 0.0": (
        TITAN
        | {"training": {"batch_size": 2, "seq_len": 2048, "tensor_parallel_degree": 2, "compile": True, "steps": 10}}
        | {"parallelism": {}, "experimental": {"pipeline_parallel_degree": 2}, "activation_checkpoint": {}},
        8,
        {"layout.shard": 2, "layout.pipeline": 2, "recipe.micro_batch": 1, "recipe.activation_checkpointing.every": 2},
    ),
    "the JSON that it saves": (
        TITAN_SAVED,
        2,
        {
            "model.n_layers": 6,
            "recipe.micro_batch": 4,
            "recipe.optimizer.beta2": 0.99,
            "recipe.loss.chunks": 4,
            "recipe.activation_checkpointing.kind": "selective",
        },
    ),
}


@pytest.mark.parametrize("case", TITANS)
def test_a_file_of_torchtitan(tmp_path: Path, case: str) -> None:
    values, count, expected = TITANS[case]
    run = resolve(
        written(tmp_path, values, "run.json" if "model_spec" in values else "run.toml"), {"cluster.count": count}
    )
    assert dict(zip(expected, told(run, *expected), strict=True)) == expected
    assert not any("not understood" in note for note in run.origin.notes)


NANO = "batch_size = 12\nblock_size = 1024\ngradient_accumulation_steps = 5 * 8\ndropout = 0.1\nmax_iters = 600\n"
LITGPT: dict[str, Any] = {
    "checkpoint_dir": "checkpoints/meta-llama/Llama-2-7b-hf",
    "precision": "bf16-true",
    "devices": 4,
    "train": {"global_batch_size": 64, "micro_batch_size": 4, "max_seq_length": 512, "max_steps": 10},
    "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 2e-4, "betas": [0.9, 0.95]}},
}
LITGPT_SIZES = {"n_layer": 6, "n_embd": 288, "n_head": 6, "padded_vocab_size": 32000, "block_size": 256}
RESEARCH: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "GPT-2 as nanoGPT has it": (
        "train_gpt2.py",
        NANO,
        {
            "model.vocab_size": 50304,
            "model.feed_forward.d_ff": 3072,
            "recipe.global_batch": 480,
            "recipe.attention_dropout": 0.1,
            "recipe.precision.kind": "bf16-mixed",
            "recipe.compile": True,
        },
    ),
    "GPT-2 of another size": (
        "small.py",
        NANO + "import time\nwandb_run_name = 'run' + str(time.time())\ndataset = 'mine'\nn_layer = 6\nn_embd = 384",
        {"model.n_layers": 6, "model.feed_forward.d_ff": 1536, "model.vocab_size": 50304},
    ),
    "GPT-2 trained further": (
        "tune.py",
        NANO + "init_from = 'gpt2-xl'",
        {"model.name": "gpt2-xl", "model.n_layers": 48},
    ),
    "all weights on several devices": (
        "full.yaml",
        LITGPT,
        {"layout.shard": 4, "recipe.precision.kind": "bf16", "recipe.activation_checkpointing.kind": "full"},
    ),
    "adapters on one": (
        "lora.yaml",
        LITGPT | {"devices": 1, "quantize": "bnb.nf4", "lora_r": 8, "lora_query": True, "lora_mlp": True},
        {"recipe.lora.targets": ("q_proj", "mlp"), "recipe.lora.base_format": "nf4", "recipe.global_batch": 64},
    ),
    "pretraining": (
        "pretrain.yaml",
        {
            "model_name": "x",
            "train": {"max_tokens": 10**9, "max_norm": 1.0, "global_batch_size": 8, "micro_batch_size": 8},
        }
        | {"model_config": LITGPT_SIZES | {"intermediate_size": 768}},
        {"model.d_model": 288, "recipe.tokens": 10**9, "recipe.compile": True, "recipe.seq_len": 256},
    ),
}


@pytest.mark.parametrize("case", RESEARCH)
def test_a_file_of_nanogpt_or_litgpt(tmp_path: Path, case: str) -> None:
    name, values, expected = RESEARCH[case]
    run = resolve(written(tmp_path, values, name))
    assert dict(zip(expected, told(run, *expected), strict=True)) == expected
    assert not any("not understood" in note for note in run.origin.notes)


def test_code_is_not_run(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"batch_size = .*int\('12'\).*: is not known until the program runs"):
        resolve(written(tmp_path, NANO.replace("12", "int('12')"), "config.py"))
    with pytest.raises(InvalidInput, match="is code, but a run file or a model is expected"):
        resolve(written(tmp_path, NANO + "def f():\n    pass\n", "train.py"))


def test_a_file_comes_before_those_that_it_names(tmp_path: Path) -> None:
    written(tmp_path, DEEPSPEED, "ds.json")
    run = resolve(written(tmp_path, TRL | {"deepspeed": "ds.json", "gradient_accumulation_steps": 8, "bf16": True}))
    assert (run.recipe.global_batch, run.recipe.optimizer.beta2) == (32, 0.95)
    assert any("gradient_accumulation_steps 2 of DeepSpeed is not taken" in note for note in run.origin.notes)


MAXTEXT: dict[str, Any] = {
    "base_config": "base.yml",
    "per_device_batch_size": 4.0,
    "max_target_length": 4096,
    "steps": 30,
}
MAXTEXT_SIZES: dict[str, Any] = {
    "decoder_block": "qwen3_moe",
    "base_emb_dim": 2048,
    "base_num_query_heads": 32,
    "base_num_kv_heads": 4,
    "base_mlp_dim": 768,
    "base_moe_mlp_dim": 768,
    "base_num_decoder_layers": 48,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
NANOTRON: dict[str, Any] = {
    "general": {"project": "p", "run": "r"},
    "model": {
        "dtype": "bfloat16",
        "model_config": {
            "is_llama_config": True,
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 128,
            "max_position_embeddings": 256,
            "tie_word_embeddings": True,
            "vocab_size": 1001,
        },
    },
    "optimizer": {"accumulate_grad_in_fp32": True, "zero_stage": 1, "optimizer_factory": {"name": "adamW"}},
    "parallelism": {"dp": 2, "tp": 2, "pp": 2, "pp_engine": "afab", "tp_mode": "REDUCE_SCATTER"},
    "tokens": {"micro_batch_size": 2, "batch_accumulation_per_replica": 4, "sequence_length": 256, "train_steps": 10},
}
PRETRAINERS: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "a named model of MaxText": (
        MAXTEXT | {"model_name": "mixtral-8x7b", "base_num_decoder_layers": 4, "remat_policy": "minimal_with_context"},
        8,
        {
            "model.n_layers": 4,
            "model.d_model": 4096,
            "layout.shard": 8,
            "recipe.precision.kind": "bf16-sharded",
            "recipe.activation_checkpointing.keep": ("mm", "addmm", "grouped_mm", "attention"),
            "recipe.framework": "jax",
        },
    ),
    "places of MaxText's experts": (
        MAXTEXT | {"model_name": "mixtral-8x7b", "sparse_matmul": False, "capacity_factor": 1.5},
        8,
        {"recipe.expert_dispatch.kind": "capacity", "recipe.expert_dispatch.factor": 1.5},
    ),
    "layers' inputs of MaxText in host memory": (
        MAXTEXT | {"decoder_layer_input": "offload", "query_proj": "offload", "remat_policy": "custom"},
        8,
        {
            "recipe.activation_checkpointing.keep": None,
            "recipe.activation_checkpointing.offload": ("q_proj",),
            "recipe.activation_checkpointing.inputs": "host",
        },
    ),
    "outputs that a policy of MaxText names": (
        MAXTEXT | {"remat_policy": "save_dot_except_mlp"},
        8,
        {"recipe.activation_checkpointing.keep": ("q_proj", "k_proj", "v_proj", "o_proj")},
    ),
    "inputs alone that a policy of MaxText offloads": (
        MAXTEXT | {"decoder_layer_input": "offload", "query_proj": "remat", "remat_policy": "custom"},
        8,
        {"recipe.activation_checkpointing.kind": "full", "recipe.activation_checkpointing.inputs": "host"},
    ),
    "nanotron": (
        NANOTRON,
        8,
        {
            "model.padded_vocab": 1002,
            "layout.zero": 1,
            "layout.schedule": "gpipe",
            "layout.sequence_gather": "again",
            "recipe.global_batch": 16,
            "recipe.precision.gradients": "fp32",
            "recipe.precision.master": "fp32",
        },
    ),
    "sizes of MaxText": (
        MAXTEXT | MAXTEXT_SIZES | {"ici_tensor_parallelism": 2},
        2,
        {"recipe.precision.kind": "bf16-mixed", "model.attention.qk_norm": "head", "recipe.seq_len": 4096},
    ),
}


@pytest.mark.parametrize("case", PRETRAINERS)
def test_a_file_of_a_program_that_pretrains(tmp_path: Path, case: str) -> None:
    values, count, expected = PRETRAINERS[case]
    run = resolve(written(tmp_path, values), {"cluster.count": count})
    assert dict(zip(expected, told(run, *expected), strict=True)) == expected
    assert not any("not understood" in note for note in run.origin.notes)


FACTORY_V1: dict[str, Any] = {
    "model": "Qwen/Qwen3-0.6B",
    "model_class": "llm",
    "kernel_config": {"name": "auto"},
    "dist_config": {"name": "fsdp2", "dcp_path": None},
    "train_dataset": "data.yaml",
    "micro_batch_size": 2,
    "learning_rate": 1e-4,
    "max_steps": 10,
    "sample_backend": "hf",
}
LORA_V1 = {"name": "lora", "r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": "all"}
FACTORIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all weights": ({}, {"kind": "bf16-sharded", "shard": 8, "zero": 3, "recompute": "full", "optimizer": "adamw"}),
    "replicas in fp32": ({"dist_config": None}, {"kind": "fp32", "replicate": 8, "recompute": "full"}),
    "adapters": ({"peft_config": LORA_V1}, {"kind": "bf16", "rank": 16, "base": None, "shard": 8}),
    "in 4 bits": (
        {"peft_config": LORA_V1, "quant_config": {"name": "bnb", "quantization_bit": 4}},
        {"kind": "bf16", "base": "nf4"},
    ),
    "muon": ({"optim_config": {"name": "muon", "wd": 0.1, "ns_steps": 5}}, {"optimizer": "muon"}),
    "nothing again": ({"enable_activation_checkpointing": False}, {"recompute": "none"}),
}


@pytest.mark.parametrize("case", FACTORIES)
def test_a_file_of_llama_factorys_second_version(tmp_path: Path, case: str) -> None:
    change, means = FACTORIES[case]
    run = resolve(written(tmp_path, FACTORY_V1 | change), ["cluster.device=h100-sxm", "cluster.count=8"])
    recipe, layout, lora = run.recipe, run.layout, run.recipe.lora
    found = {
        "kind": recipe.precision.kind, "shard": layout.shard, "zero": layout.zero, "replicate": layout.replicate,
        "recompute": recipe.activation_checkpointing.kind, "optimizer": recipe.optimizer.kind,
        "rank": lora and lora.rank, "base": lora and lora.base_format,
    }  # fmt: skip
    assert {name: found[name] for name in means} == means
    assert (recipe.seq_len, recipe.global_batch, recipe.schedule.kind) == (2048, 16, "constant")
    assert any("supervised" in note for note in run.origin.notes)
    assert not any(note.startswith("not understood") for note in run.origin.notes)


def test_what_llama_factorys_second_version_trains_otherwise_is_refused(tmp_path: Path) -> None:
    for change, field in (
        ({"peft_config": {"name": "freeze", "freeze_trainable_layers": 2}}, "peft_config.name"),
        ({"dist_config": {"name": "fsdpturbo"}}, "dist_config.name"),
        ({"cp_size": 2}, "cp_size"),
        ({"pref_loss": "sigmoid"}, "pref_loss"),
    ):
        with pytest.raises(InvalidInput) as caught:
            resolve(written(tmp_path, FACTORY_V1 | change))
        assert field in [problem.field for problem in caught.value.problems]


def test_a_config_of_megatron_bridge(tmp_path: Path) -> None:
    """Llama 3.2 1B on 8 ranks: Megatron-LM's own figure of weights and optimizer is 8,839.72 MiB."""
    sizes = {"num_layers": 16, "hidden_size": 2048, "num_attention_heads": 32, "num_query_groups": 8, "kv_channels": 64}
    model = sizes | {"ffn_hidden_size": 8192, "vocab_size": 128256, "seq_length": 131072, "normalization": "RMSNorm"}
    model |= {"activation_func": {"_target_": "torch.nn.functional.silu"}, "gated_linear_unit": True}
    model |= {"add_bias_linear": False, "share_embeddings_and_output_weights": True, "moe_router_topk": 2}
    model |= {"position_embedding_type": "rope", "attention_dropout": 0.0, "hidden_dropout": 0.0}
    values = {
        "model": model,
        "train": {"global_batch_size": 512, "micro_batch_size": 1, "train_iters": 10},
        "dataset": {"sequence_length": 1024},
        "mixed_precision": {"bf16": True, "grad_reduce_in_fp32": True},
        "optimizer": {"optimizer": "adam", "lr": 3e-4, "use_distributed_optimizer": True},
        "ddp": {"use_distributed_optimizer": True},
        "peft": None,
    }
    run = resolve(written(tmp_path, values), {"cluster.count": 8})
    fields = ("layout.shard", "layout.zero", "recipe.seq_len", "recipe.precision.gradients", "recipe.framework")
    assert told(run, *fields) == (8, 1, 1024, "fp32", "megatron-core")
    assert (2 + 4 + 12 / 8) * parameters(run.model).total / 2**20 == pytest.approx(8839.72, rel=1e-4)
    assert not any("not understood" in note for note in run.origin.notes)
    with pytest.raises(InvalidInput, match="overrides of a recipe are no run"):
        resolve(written(tmp_path, values | {"model": {"tensor_model_parallel_size": 2}}))
    with pytest.raises(InvalidInput, match="peft: trains adapters"):
        resolve(written(tmp_path, values | {"peft": {"_target_": "LoRA"}}))


def test_sizes_of_maxtext_are_the_models(tmp_path: Path) -> None:
    line = (
        "python3 -m maxtext.trainers.pre_train.train configs/base.yml model_name=qwen3-30b-a3b per_device_batch_size=4"
    )
    own, named = resolve(written(tmp_path, MAXTEXT | MAXTEXT_SIZES)).model, resolve(line).model
    assert parameters(own).total == parameters(named).total == 30532122624


SWIFT = """
nproc_per_node=2
CUDA_VISIBLE_DEVICES=0,1 \\
NPROC_PER_NODE=$nproc_per_node \\
swift sft --model Qwen/Qwen2.5-7B-Instruct --torch_dtype bfloat16 --max_length 2048 --target_modules all-linear \\
    --gradient_accumulation_steps $(expr 16 / $nproc_per_node) --system 'Be brief.' --deepspeed zero3 --tuner_type TYPE
"""


def test_a_script_of_ms_swift(tmp_path: Path) -> None:
    run = resolve(written(tmp_path, SWIFT.replace("TYPE", "full"), "train.sh"))
    fields = ("model.name", "cluster.count", "layout.zero", "recipe.global_batch", "recipe.precision.master_weights")
    assert told(run, *fields) == ("qwen2.5-7b", 2, 3, 16, True)
    alone = resolve("swift sft --model Qwen/Qwen2.5-7B")  # a batch of about 16
    assert told(alone, "recipe.global_batch", "recipe.micro_batch") == (16, 1)
    adapters = resolve(written(tmp_path, SWIFT.replace("TYPE", "lora").replace("--deepspeed zero3", ""), "lora.sh"))
    assert told(adapters, "recipe.lora.rank", "recipe.lora.alpha", "layout.replicate") == (8, 32.0, 2)
    assert not any("not understood" in note for note in (*run.origin.notes, *adapters.origin.notes))


@pytest.mark.parametrize(
    ("script", "rule"),
    [
        (SWIFT.replace("NPROC_PER_NODE=$nproc_per_node", ""), "puts layers on them in turn"),
        (SWIFT.replace("swift sft", "swift rlhf --rlhf_type grpo"), "rlhf_type = 'grpo': generates text"),
        (SWIFT.replace("swift sft", "megatron sft --fp8_format e4m3"), "fp8_format = 'e4m3': is not accounted for"),
        (SWIFT.replace("swift sft", "swift sft sft.yaml"), "names sft.yaml, which is no file here"),
        ("swift infer --model m", "trains nothing"),
    ],
)
def test_a_script_of_ms_swift_that_is_refused(tmp_path: Path, script: str, rule: str) -> None:
    with pytest.raises(InvalidInput, match=rule):
        resolve(written(tmp_path, script.replace("TYPE", "full"), "train.sh"))


def test_preferences_and_megatron_of_ms_swift() -> None:
    dpo = resolve("swift rlhf --rlhf_type dpo --model Qwen/Qwen2.5-7B-Instruct --beta 0.2 --tuner_type full")
    assert told(dpo, "recipe.objective.kind", "recipe.objective.beta", "recipe.micro_batch") == ("dpo", 0.2, 2)
    megatron = (
        "megatron sft --model Qwen/Qwen3-30B-A3B-Base --pipeline_model_parallel_size 2 --expert_model_parallel_size 8 "
        "--recompute_granularity full --max_length 8192 --sequence_parallel true --micro_batch_size 1 "
        "--cross_entropy_loss_fusion true --moe_permute_fusion true --no_save_optim true"
    )
    run = resolve(megatron)
    fields = (
        "cluster.count",
        "layout.shard",
        "layout.zero",
        "layout.expert",
        "recipe.global_batch",
        "recipe.framework",
    )
    assert told(run, *fields) == (16, 8, 1, 8, 16, "megatron-core")
    fields = ("recipe.precision.master_weights", "recipe.precision.gradient_dtype", "recipe.loss.kind")
    assert told(run, *fields) == (True, "fp32", "compiled")
    over_tensor = "--tensor_model_parallel_size 4 --pipeline"
    for within, said, expert in (("", 1, 8), (" 1", 1, 8), (" 2", 2, 8), (" 4", None, 4)):
        key = within and f"--expert_tensor_parallel_size{within} "
        words = megatron.replace("--pipeline", f"{key}{over_tensor}").replace("_size 8", f"_size {expert}")
        run = resolve(words, ["cluster.count=32"])
        assert told(run, "layout.expert_tensor", "layout.expert", "layout.shard") == (said, expert, 4)
    dense = resolve(megatron.replace("30B-A3B-Base", "8B").replace("--expert_model_parallel_size 8", over_tensor))
    assert dense.layout.expert_tensor is None
    adapters = resolve(f"{megatron.replace('30B-A3B-Base', '8B').partition('--pipeline')[0]} --tuner_type lora")
    assert told(adapters, "recipe.lora.rank", "recipe.framework") == (8, "torch")
    assert not any("not understood" in note for run in (dpo, run, adapters) for note in run.origin.notes)


@pytest.mark.parametrize("scale", [16, 32, 64, 128, 256, 512, 1024])
def test_the_scale_of_maxtext_is_billions_of_parameters(tmp_path: Path, scale: int) -> None:
    """Its scripts are named by them: 16b.sh to 1024b.sh of configs/tpu."""
    model = resolve(written(tmp_path, MAXTEXT | {"global_parameter_scale": scale})).model
    assert parameters(model).total / 1e9 == pytest.approx(scale, rel=0.03)


def test_a_file_without_a_device_is_of_an_accelerator(tmp_path: Path) -> None:
    file = written(tmp_path, TRL | {"attn_implementation": "flash_attention_2", "dataset_name": "a/b"})
    run = resolve(file)
    assert told(run, "cluster.device", "cluster.backend", "recipe.attention") == ("this-machine", "cuda", "flash")
    assert "cluster.backend" in run.origin.assumed
    assert plan(run).ledger.entries
    with pytest.raises(InvalidInput, match="is a kernel of accelerators"):
        plan(file, {"cluster.backend": "cpu"})


def test_what_a_run_cannot_have_is_said_of_the_files_key(tmp_path: Path) -> None:
    file = written(tmp_path, TRL | {"max_length": 10**6, "use_peft": True, "lora_target_modules": ["query_key_value"]})
    with pytest.raises(InvalidInput) as refused:
        resolve(file)
    fields = [problem.field for problem in refused.value.problems]
    assert "lora_target_modules (recipe.lora.targets)" in fields
    with pytest.raises(InvalidInput) as refused:
        resolve(file, {"recipe.lora.targets": ["other"]})
    assert "recipe.lora.targets" in [problem.field for problem in refused.value.problems]
    with pytest.raises(InvalidInput, match="model_name_or_path = 'org/unknown': is not in the catalog"):
        resolve(written(tmp_path, TRL | {"model_name_or_path": "org/unknown"}))


def test_a_script_is_read_and_not_run(tmp_path: Path) -> None:
    script = """
    STAGE=$1
    if [ "$STAGE" == "" ]; then STAGE=3; fi
    deepspeed --num_gpus 4 main.py --model_name_or_path facebook/opt-1.3b --data_path d --max_seq_len 512 \\
        --per_device_train_batch_size 8 --zero_stage $STAGE --deepspeed --gradient_checkpointing
    """
    run = resolve(written(tmp_path, script, "run.sh"))
    assert told(run, "layout.zero", "cluster.count", "recipe.global_batch") == (3, 4, 32)


@pytest.mark.parametrize(
    ("values", "field", "rule"),
    [
        (TRL | {"beta": 0.1}, "beta", "is of preferences: give the command"),
        (TRL | {"per_device_train_batch_sise": 2}, "per_device_train_batch_sise", "is no key of TRL"),
        (DEEPSPEED | {"optimizer": {"type": "OneBitAdam"}}, "optimizer.type", "is not accounted for"),
        (
            DEEPSPEED | {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            "zero_optimization.offload_param.device",
            "offloads to a disk",
        ),
        (
            TITAN_SAVED | {"activation_checkpoint": {"memory_budget": 0.5}},
            "activation_checkpoint.memory_budget",
            "budget",
        ),
        (MAXTEXT | {"remat_policy": "save_most"}, "remat_policy", "is not accounted for"),
        (MAXTEXT | {"remat_policy": "custom", "context": "disk"}, "context", "must be remat, device or offload"),
        (MAXTEXT | {"sparse_matmul": False}, "sparse_matmul", "computes experts densely"),
        (MAXTEXT | {"per_device_batch_size": 0.5}, "per_device_batch_size", "must be a whole number"),
        (
            NANOTRON | {"model": {"model_config": NANOTRON["model"]["model_config"] | {"moe_config": {"top_k": 2}}}},
            "model.model_config.moe_config",
            "has experts",
        ),
        (DEEPSPEED | {"autotuning": {"enabled": True}}, "autotuning.enabled", "by trials"),
        (ACCELERATE | {"distributed_type": "MEGATRON_LM"}, "distributed_type", "is not accounted for"),
    ],
)
def test_what_changes_numbers_is_not_passed_over(values: dict[str, Any], field: str, rule: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        from_values(values)
    assert rule in {each.field: each.rule for each in refused.value.problems}[field]


@pytest.mark.parametrize("line", ["trl grpo --model_name_or_path gpt2", "accelerate launch cpo.py --beta 0.1"])
def test_a_command_that_trains_otherwise_is_refused(line: str) -> None:
    with pytest.raises(InvalidInput, match="the command of TRL"):
        resolve(line)


def test_no_refusal_of_generated_text_hides_the_verb_that_plans_it() -> None:
    refusals = [
        rule for table in tables().values() for rule in (*table["refused"].values(), *table["commands"].values())
    ]
    silent = {rule for rule in refusals if "generates text between steps" in rule and "trainledger rl" not in rule}
    assert silent == {"generates text between steps, which is not accounted for"}  # distilling, and other methods


@pytest.mark.parametrize("program", tables())
def test_tables_name_only_what_a_run_has(program: str) -> None:
    table = tables()[program]
    said = {*table["fields"].values(), *table["always"], *table["products"]}
    said |= {path for words in table["words"].values() for meaning in words.values() for path in meaning}
    parts = ("run", "target", "recipe", "layout", "optimizer", "schedule", "lora", "model", "precision", "objective")
    parts = (*parts, "remat", "named", "rollout")
    assert all(path in ("note", "refuse") or path.partition(".")[0] in parts for path in said)


ODD = ([], {}, -1, float("inf"), True, [1, 2], {"a": 1}, "9" * 400)


@pytest.mark.parametrize("program", tables())
def test_odd_values_raise_nothing_else(program: str) -> None:
    table = tables()[program]
    for key in (*table["fields"], *list(table["words"])[:4], "optimizer", "training"):
        for odd in ODD:
            with suppress(InvalidInput):
                from_values({key: odd}, program=program)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("deep.py", "block_size = " + "1 + " * 5000 + "1\nbatch_size = 2\n"),
        ("large.py", f"block_size = {'9' * 400} / {'7' * 4}\nbatch_size = 2\n"),
        ("keys.py", "block_size = {[]: 1}\nbatch_size = 2\n"),
        ("self.yaml", "model_name_or_path: &a\n  x: *a\nlora_r: 2\n"),
        ("open.sh", "swift sft --model\ntrl sft --config\n"),
    ],
)
def test_odd_files_are_refused_in_words(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(InvalidInput):
        resolve(written(tmp_path, text, name))


def test_init_writes_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, made = written(tmp_path, DEEPSPEED | {"model": "x"}, "ds.json"), str(tmp_path / "run.toml")
    source = written(tmp_path, TRL | {"deepspeed": source})
    opened: list[str] = []
    monkeypatch.setattr(files, "content_of", lambda path, most: opened.append(str(path)) or content_of(path, most))
    init(made, source=source, count=8)
    assert opened.count(source) == 1
    assert resolve(made) == resolve(source, {"cluster.count": 8})


@pytest.mark.parametrize(
    ("values", "offload"),
    [
        (TRL | {"fsdp": "full_shard offload"}, "parameters"),
        (TITAN | {"training": {"enable_cpu_offload": True}}, "parameters"),
        (DEEPSPEED | {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, "optimizer"),
        (DEEPSPEED | {"zero_optimization": {"stage": 2, "cpu_offload": True}}, "optimizer"),
        (
            DEEPSPEED
            | {
                "zero_optimization": {
                    "stage": 3,
                    "offload_param": {"device": "cpu", "pin_memory": True},
                    "offload_optimizer": {"device": "cpu"},
                }
            },
            "parameters",
        ),
        (ACCELERATE | {"deepspeed_config": {"zero_stage": 3, "offload_optimizer_device": "cpu"}}, "optimizer"),
        (TRL | {"deepspeed": "ds_z2_offload_config.json"}, "optimizer"),
        (TRL | {"deepspeed": "ds_z3_offload_config.json"}, "parameters"),
        (TRL | {"deepspeed": "ds_z3_config.json"}, None),
        ({"base_model": "gpt2", "sequence_len": 512, "fsdp": ["full_shard", "offload"]}, "parameters"),
    ],
)
def test_states_on_the_host_are_read(values: dict[str, Any], offload: str | None) -> None:
    assert from_values(values, devices=8).table["recipe"].get("offload") == offload
