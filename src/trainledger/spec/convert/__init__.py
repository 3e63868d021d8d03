"""Readers and writers of what others write; here configuration files of other programs, recognized by their keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainledger.spec.problem import Problem

# Keys of each program's files, dots between a section and its key; two of them are its mark. Of programs whose files
# have keys in common the one with more keys of its own comes first.
_MARKS = {
    "LLaMA-Factory v1": "model_class dist_config train_dataset kernel_config peft_config.name sample_backend "
    "batching_strategy",
    "LLaMA-Factory": "finetuning_type cutoff_len template lora_target dataset_dir stage preprocessing_num_workers",
    "axolotl": "base_model sequence_len micro_batch_size sample_packing num_epochs val_set_size dataset_prepared_path "
    "adapter load_in_4bit load_in_8bit datasets lora_target_linear pad_to_sequence_len",
    "MaxText": "base_config per_device_batch_size max_target_length base_emb_dim base_num_decoder_layers decoder_block "
    "ici_fsdp_parallelism remat_policy use_sft use_dpo use_multimodal train_data_columns",
    "ms-swift": "tuner_type train_type attn_impl quant_bits target_modules sequence_parallel_size lora_rank "
    "split_dataset_ratio model_author",
    "DeepSpeed-Chat": "zero_stage data_split sft_only_data_path actor_model_name_or_path only_optimize_lora lora_dim "
    "num_padding_at_beginning data_path",
    "TRL": "model_name_or_path dataset_name dataset_mixture max_seq_length max_length packing use_peft lora_r "
    "lora_target_modules attn_implementation torch_dtype dataset_text_field assistant_only_loss load_in_4bit",
    "nanoGPT": "n_layer n_head n_embd block_size batch_size max_iters lr_decay_iters eval_iters dataset wandb_log "
    "init_from always_save_checkpoint",
    "litgpt pretrain": "model_name train.max_tokens train.max_norm",
    "litgpt": "checkpoint_dir train.max_seq_length train.lr_warmup_steps lora_query lora_mlp",
    "torchtune": "model._component_ tokenizer._component_ optimizer._component_ loss._component_ dataset._component_",
    "LLM Foundry": "device_train_microbatch_size max_duration train_loader eval_loader global_train_batch_size",
    "GPT-NeoX": "pipe_parallel_size model_parallel_size attention_config pos_emb no_weight_tying gpt_j_residual "
    "rotary_pct train_micro_batch_size_per_gpu norm init_method output_layer_init_method",
    "nanotron": "parallelism.dp parallelism.tp parallelism.pp tokens.micro_batch_size tokens.sequence_length "
    "model.model_config model.init_method data_stages general.project general.run",
    "Lightning": "model.class_path data.class_path optimizer.class_path model.init_args data.init_args seed_everything",
    "NeMo": "trainer.devices trainer.num_nodes trainer.precision trainer.max_steps exp_manager "
    "model.micro_batch_size model.global_batch_size model.tensor_model_parallel_size model.megatron_amp_O2",
    "Accelerate": "compute_environment distributed_type mixed_precision num_machines num_processes machine_rank "
    "main_training_function rdzv_backend same_network fsdp_config deepspeed_config use_cpu",
    "DeepSpeed": "zero_optimization train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps "
    "wall_clock_breakdown optimizer.type fp16.enabled bf16.enabled autotuning.enabled",
    "torchtitan's Trainer": "model_spec.name model_spec.flavor training.max_context_length",
    "torchtitan": "job training parallelism activation_checkpoint lr_scheduler model.flavor training.seq_len",
    "Hugging Face's Trainer": "per_device_train_batch_size output_dir num_train_epochs gradient_accumulation_steps "
    "max_steps save_strategy logging_steps save_steps lr_scheduler_type per_device_eval_batch_size model_name_or_path "
    "gradient_checkpointing deepspeed",
}
# Fields of a run by the keys that mean them.
_MEANT = {
    "layout.zero": "zero_optimization.stage",
    "recipe.seq_len": "training.seq_len sequence_len cutoff_len max_seq_length max_length tokens.sequence_length "
    "model.encoder_seq_length seq_length max_seq_len tokenizer.max_seq_len",
    "recipe.micro_batch": "training.local_batch_size train_micro_batch_size_per_gpu micro_batch_size "
    "per_device_train_batch_size tokens.micro_batch_size model.micro_batch_size batch_size",
    "recipe.global_batch": "train_batch_size model.global_batch_size global_train_batch_size "
    "training.global_batch_size",
    "recipe.steps": "training.steps max_steps tokens.train_steps trainer.max_steps train_iters",
    "layout.replicate": "parallelism.data_parallel_replicate_degree",
    "layout.shard": "parallelism.data_parallel_shard_degree",
    "layout.tensor": "parallelism.tensor_parallel_degree parallelism.tp model.tensor_model_parallel_size "
    "model_parallel_size",
    "layout.pipeline": "parallelism.pipeline_parallel_degree parallelism.pp model.pipeline_model_parallel_size "
    "pipe_parallel_size",
    "layout.context": "parallelism.context_parallel_degree parallelism.context_parallel_size "
    "model.context_parallel_size",
    "layout.expert": "parallelism.expert_parallel_degree parallelism.expert_parallel_size "
    "model.expert_model_parallel_size",
}
_DEEPEST = 4  # maps in one another


def foreign_problem(table: Mapping[Any, Any]) -> Problem | None:
    """The problem of a file of another program in place of ours; None for any other.

    >>> found = foreign_problem({"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 4})
    >>> found.rule, found.nearest
    ('is a config of DeepSpeed, not a run file', '--set layout.zero=2 --set recipe.micro_batch=4')
    """
    program = foreign_program(table)
    if program is None:
        return None
    sets = " ".join(f"--set {override}" for override in _meant(table))
    if program not in ("DeepSpeed", "torchtitan"):  # whose files say nothing of the model
        sets = f"trainledger plan MODEL {sets}".strip()
    aside = ", ".join(sorted(set(offloaded(table))))
    rule = f"is a config of {program}, not a run file"
    if aside:
        rule += f"; its offloading ({aside}) is recipe.offload here"
    return Problem("", None, rule, sets or "trainledger init")


def foreign_program(table: Mapping[Any, Any]) -> str | None:
    """The other program whose file a map is; None for our own files and a model's config.json."""
    if "model_type" in table and "base_model" not in table:
        return None
    found = (name for name, keys in _MARKS.items() if sum(_at(table, key) is not None for key in keys.split()) >= 2)
    return next(found, None)


def _meant(table: Mapping[Any, Any]) -> Iterator[str]:
    for field, keys in _MEANT.items():
        value = next((value for key in keys.split() if type(value := _at(table, key)) is int and value > 0), 0)
        if value > field.startswith("layout") - (field == "layout.zero"):
            yield f"{field}={value}"
    for name in ("bf16", "fp16"):
        own = table.get(name)
        if own is True or (isinstance(own, Mapping) and own.get("enabled") is True):
            # DeepSpeed keeps 16-bit parameters and an fp32 copy of them with the optimizer, as fp16 here always does.
            yield f"recipe.precision={name if isinstance(own, Mapping) else f'{name}-mixed'}"
            if name == "bf16" and isinstance(own, Mapping):
                yield "recipe.precision.master_weights=true"


def offloaded(table: Mapping[Any, Any], depth: int = 0) -> Iterator[str]:
    """Keys that move a part of the memory to the host."""
    for key, value in table.items():
        off = value in (None, False, 0, "", "none", "false")
        if isinstance(value, Mapping) and depth < _DEEPEST:
            off = str(value.get("device", "none")).lower() == "none"
            yield from offloaded(value, depth + 1)
        if "offload" in str(key).lower() and not off:
            yield str(key)


def _at(table: Any, path: str) -> Any:
    """What stands at a path, a dash of a key being as good as an underscore; None where nothing does."""
    for part in path.split("."):
        if not isinstance(table, Mapping):
            return None
        table = table.get(part, table.get(part.replace("_", "-")))
    return table
