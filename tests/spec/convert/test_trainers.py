"""Files of axolotl and LLaMA-Factory as runs."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainledger import load
from trainledger.answers.load import resolve
from trainledger.cli.train import init
from trainledger.spec.convert.trainers import from_values, tables
from trainledger.spec.parts import field_at, table_of
from trainledger.spec.problem import InvalidInput

AXOLOTL: dict[str, Any] = {
    "base_model": "NousResearch/Meta-Llama-3-8B",
    "sequence_len": 4096,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "num_epochs": 3,
    "optimizer": "adamw_bnb_8bit",
    "lr_scheduler": "cosine",
    "learning_rate": 2e-4,
    "bf16": "auto",
    "gradient_checkpointing": True,
    "attn_implementation": "flash_attention_2",
}
CUT_LOSS = "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"
QLORA = {"adapter": "qlora", "load_in_4bit": True, "lora_r": 32, "lora_alpha": 16, "lora_target_linear": True}
FACTORY: dict[str, Any] = {
    "model_name_or_path": "meta-llama/Meta-Llama-3-8B-Instruct",
    "stage": "sft",
    "finetuning_type": "lora",
    "lora_rank": 8,
    "lora_target": "q_proj,v_proj",
    "cutoff_len": 2048,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8,
    "learning_rate": 1e-4,
    "max_steps": 200,
    "warmup_ratio": 0.1,
    "bf16": True,
}


def written(tmp_path: Path, values: dict[str, Any]) -> str:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(values))
    return str(file)


def refusals(values: dict[str, Any], devices: int | None = None) -> dict[str, tuple[str, Any]]:
    with pytest.raises(InvalidInput) as refused:
        from_values(values, devices=devices)
    return {each.field: (each.rule, each.nearest) for each in refused.value.problems}


def test_a_qlora_of_axolotl(tmp_path: Path) -> None:
    run = resolve(written(tmp_path, AXOLOTL | QLORA))
    assert run.model.name == "llama-3-8b"
    recipe = run.recipe
    assert (recipe.seq_len, recipe.micro_batch, recipe.global_batch, recipe.attention) == (4096, 2, 8, "flash")
    assert (recipe.precision.kind, recipe.optimizer.kind, recipe.optimizer.implementation) == (
        "bf16",
        "adamw-8bit",
        "fused",
    )
    assert recipe.lora is not None
    assert (recipe.lora.rank, recipe.lora.alpha, recipe.lora.targets, recipe.lora.base_format) == (
        32,
        16,
        ("linear",),
        "nf4",
    )
    assert recipe.activation_checkpointing.kind == "full"
    assert {"recipe.steps", "cluster.count"} <= set(run.origin.assumed)
    assert any("3 epochs of data" in note for note in run.origin.notes)


def test_a_lora_of_llama_factory(tmp_path: Path) -> None:
    run = resolve(written(tmp_path, FACTORY | {"quantization_bit": 8}))
    recipe = run.recipe
    assert run.model.name == "llama-3-8b"
    assert (recipe.global_batch, recipe.total_steps, recipe.schedule.kind, recipe.schedule.warmup_steps) == (
        8,
        200,
        "linear",
        20,
    )
    assert recipe.lora is not None
    assert (recipe.lora.targets, recipe.lora.alpha, recipe.lora.base_format) == (("q_proj", "v_proj"), 16, "int8")
    assert recipe.activation_checkpointing.kind == "full"  # unless disable_gradient_checkpointing says otherwise
    assert "recipe.steps" not in run.origin.assumed


@pytest.mark.parametrize(
    ("values", "field", "expected"),
    [
        (AXOLOTL, "recipe.precision.kind", "bf16"),
        (AXOLOTL | {"bf16": False, "tf32": True}, "recipe.precision.kind", "tf32"),
        (AXOLOTL | {"deepspeed": "configs/zero1.json"}, "recipe.precision.master_weights", True),
        (AXOLOTL | {"fsdp_config": {"reshard_after_forward": True}}, "recipe.precision.kind", "bf16-sharded"),
        (AXOLOTL | {"optimizer": "adamw_torch", "adam_beta2": 0.95}, "recipe.optimizer.beta2", 0.95),
        (AXOLOTL | {"plugins": [CUT_LOSS]}, "recipe.loss.kind", "chunked"),  # which the plugin alone turns on
        (AXOLOTL | {"plugins": [CUT_LOSS], "cut_cross_entropy": False}, "recipe.loss.kind", "full"),
        (AXOLOTL, "recipe.schedule.final_ratio", 0.0),
        (AXOLOTL | {"weight_decay": 0.0}, "recipe.optimizer.weight_decay", 0.0),
        (AXOLOTL | {"weight_decay": 0.02}, "recipe.optimizer.weight_decay", 0.02),
        (AXOLOTL | {"lr_scheduler": "constant"}, "recipe.schedule.kind", "constant"),
        (AXOLOTL | {"max_steps": 50, "warmup_steps": 5}, "recipe.schedule.warmup_steps", 5),
        (AXOLOTL | {"liger_fused_linear_cross_entropy": True}, "recipe.loss.kind", "fused"),
        (FACTORY | {"finetuning_type": "full"}, "recipe.precision.kind", "bf16-mixed"),
        (FACTORY | {"finetuning_type": "full", "pure_bf16": True}, "recipe.precision.kind", "bf16"),
        (FACTORY | {"disable_gradient_checkpointing": True}, "recipe.activation_checkpointing.kind", "none"),
        (FACTORY | {"flash_attn": "disabled"}, "recipe.attention", "math"),
    ],
)
def test_what_a_key_means(tmp_path: Path, values: dict[str, Any], field: str, expected: object) -> None:
    run = resolve(written(tmp_path, values))
    section, _, path = field.partition(".")
    assert field_at(getattr(run, section), path) == expected


@pytest.mark.parametrize(
    ("more", "devices", "layout", "batch"),
    [
        ({}, 8, {"replicate": 8}, 64),
        ({"deepspeed": "zero3_bf16.json"}, 8, {"shard": 8, "zero": 3}, 64),
        ({"deepspeed": "ds_z2_config.json"}, 4, {"shard": 4, "zero": 2}, 32),
        ({"fsdp": ["full_shard", "auto_wrap"]}, 4, {"shard": 4, "zero": 3}, 32),
        (
            {"fsdp_config": {"fsdp_reshard_after_forward": False}},
            4,
            {"shard": 4, "zero": 3, "reshard_after_forward": False},
            32,
        ),
        ({"context_parallel_size": 2}, 8, {"context": 2, "shard": 4, "zero": 0}, 32),
        (
            {"dp_shard_size": 4, "dp_replicate_size": 2, "tensor_parallel_size": 2},
            None,
            {"tensor": 2, "shard": 4, "zero": 3, "replicate": 2},
            64,
        ),
    ],
)
def test_how_devices_share_a_run(more: dict[str, Any], devices: int | None, layout: dict[str, Any], batch: int) -> None:
    table = from_values(AXOLOTL | more, devices=devices).table
    assert table["layout"] == layout
    assert table["recipe"]["global_batch"] == batch


PREFERENCES: dict[str, tuple[Any, dict[str, Any], int]] = {
    "axolotl, dpo": (AXOLOTL | {"rl": "dpo", "rl_beta": 0.3}, {"kind": "dpo", "beta": 0.3}, 16),
    "axolotl, orpo": (AXOLOTL | {"rl": "orpo", "orpo_alpha": 0.2}, {"kind": "orpo", "weight": 0.2}, 16),
    "axolotl, kto": (AXOLOTL | {"rl": "kto", "kto_undesirable_weight": 0.5}, {"kind": "kto", "undesirable": 0.5}, 8),
    "LLaMA-Factory, dpo": (FACTORY | {"stage": "dpo", "pref_beta": 0.2}, {"kind": "dpo", "beta": 0.2}, 16),
    "LLaMA-Factory, orpo": (FACTORY | {"stage": "dpo", "pref_loss": "orpo"}, {"kind": "orpo"}, 16),
    "LLaMA-Factory, kto": (
        FACTORY | {"stage": "kto", "kto_rejected_weight": 2.0},
        {"kind": "kto", "undesirable": 2.0},
        8,
    ),
}


@pytest.mark.parametrize("name", PREFERENCES)
def test_preferences_are_objectives_whose_pairs_are_two_sequences(name: str) -> None:
    values, objective, sequences = PREFERENCES[name]
    plain = {key: value for key, value in values.items() if key not in ("rl", "stage", "pref_loss")}
    table, before = (from_values(some, devices=1).table["recipe"] for some in (values, plain))
    assert table["objective"] == objective
    assert (table["micro_batch"], table["global_batch"]) == (
        before["micro_batch"] * sequences // 8, before["global_batch"] * sequences // 8,
    )  # fmt: skip


LAUNCHED = {
    "trl dpo --model_name_or_path Qwen/Qwen2.5-0.5B --precompute_ref_log_probs true --per_device_train_batch_size 2":
        ({"kind": "dpo", "beta": 0.1, "reference": "precomputed"}, 4),
    "accelerate launch trl/scripts/kto.py --model_name_or_path Qwen/Qwen2.5-0.5B --desirable_weight 2.0 "
    "--per_device_train_batch_size 4": ({"kind": "kto", "beta": 0.1, "desirable": 2.0}, 4),
    "trl orpo --model_name_or_path Qwen/Qwen2.5-0.5B --beta 0.3 --per_device_train_batch_size 1":
        ({"kind": "orpo", "weight": 0.3}, 2),
}  # fmt: skip


@pytest.mark.parametrize("line", LAUNCHED)
def test_commands_of_trl_are_objectives(line: str) -> None:
    objective, rows = LAUNCHED[line]
    recipe = resolve(line).recipe
    assert table_of(recipe.objective).items() >= objective.items()
    assert (recipe.micro_batch, recipe.seq_len, recipe.learning_rate) == (rows, 1024, 1e-6)
    assert recipe.loss.kind == ("full" if objective["kind"] == "orpo" else "chunked")


def test_what_is_trained_beside_adapters_is_read() -> None:
    line = (
        "trl sft --model_name_or_path meta-llama/Meta-Llama-3-8B --use_peft --lora_modules_to_save embed_tokens lm_head"
    )
    run = resolve(line)
    assert run.recipe.lora is not None
    assert run.recipe.lora.whole == ("embed_tokens", "lm_head")
    assert "what is trained beside adapters is counted once; PEFT keeps the frozen original too" in run.origin.notes
    factory = FACTORY | {"finetuning_type": "lora", "additional_target": "embed_tokens,lm_head"}
    assert from_values(factory).table["recipe"]["lora"]["whole"] == ["embed_tokens", "lm_head"]


def test_magnitudes_of_adapters_are_read() -> None:
    line = "trl sft --model_name_or_path meta-llama/Meta-Llama-3-8B --use_peft --use_dora"
    assert resolve(line).recipe.lora is not None
    for values in (
        AXOLOTL | {"adapter": "lora", "peft_use_dora": True},
        FACTORY | {"finetuning_type": "lora", "use_dora": True},
    ):
        assert from_values(values).table["recipe"]["lora"]["dora"] is True


def test_reward_models_have_scores(tmp_path: Path) -> None:
    line = "trl reward --model_name_or_path Qwen/Qwen2.5-0.5B --per_device_train_batch_size 4 --use_peft"
    run = resolve(line)
    assert (run.recipe.objective.kind, run.recipe.micro_batch, run.model.scores) == ("reward", 8, True)
    assert not run.model.tie_embeddings
    assert run.recipe.lora is not None
    assert run.recipe.lora.whole == ("lm_head",)
    for values in (AXOLOTL | {"reward_model": True, "num_labels": 1}, FACTORY | {"stage": "rm"}):
        run = resolve(written(tmp_path, values))
        assert (run.recipe.objective.kind, run.model.head_rows) == ("reward", 1)


def test_a_launch_of_distillation_has_both_models() -> None:
    line = (
        "accelerate launch --num_processes 2 examples/scripts/gkd.py --model_name_or_path Qwen/Qwen3-0.6B --lmbda 0 "
        "--teacher_model_name_or_path Qwen/Qwen3-8B --per_device_train_batch_size 4"
    )
    run = resolve(line)
    assert table_of(run.recipe.objective) == {
        "kind": "distillation", "temperature": 0.9, "kd_ratio": 1.0, "teacher_weights": None,
    }  # fmt: skip
    assert run.teacher is not None
    assert (run.model.name, run.teacher.name) == ("qwen3-0.6b", "qwen3-8b")
    assert (run.recipe.micro_batch, run.layout.replicate, run.recipe.loss.kind) == (4, 2, "full")
    assert any("a lower bound" in note for note in run.origin.notes)
    with pytest.raises(InvalidInput, match=r"share of batches whose text the student generates.*that works: 0"):
        resolve(line.replace("--lmbda 0 ", ""))
    without = line.replace("--teacher_model_name_or_path Qwen/Qwen3-8B ", "")
    with pytest.raises(InvalidInput, match="teacher: is missing"):
        resolve(without)


def test_adapters_of_experts_are_read() -> None:
    mixture = AXOLOTL | {"adapter": "lora", "lora_target_modules": ["q_proj"]}
    stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    read = from_values(mixture | {"lora_target_parameters": stacks}).table["recipe"]["lora"]
    assert read["targets"] == ["q_proj", "experts"]
    for part in (stacks[:1], [*stacks, "mlp.gate.weight"], [f"7.{stack}" for stack in stacks]):
        assert "both stacks of the experts" in str(refusals(mixture | {"lora_target_parameters": part}))


def test_another_loss_of_preferences_is_refused() -> None:
    with pytest.raises(InvalidInput, match="loss_type = 'ipo': is not accounted for; nearest that works: sigmoid"):
        resolve("trl dpo --model_name_or_path Qwen/Qwen2.5-0.5B --loss_type ipo")


def test_a_deepspeed_file_is_opened(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    file = written(tmp_path, AXOLOTL | {"deepspeed": "mine.json"})
    assert resolve(file, {"cluster.count": 4}).layout.zero == 2
    offloads = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    (tmp_path / "mine.json").write_text(json.dumps(offloads))
    assert resolve(file).recipe.offload == "optimizer"
    (tmp_path / "mine.json").write_text("[1")
    with pytest.raises(InvalidInput, match="is not a JSON file that can be read"):
        resolve(file)


@pytest.mark.parametrize(
    ("values", "field", "rule", "nearest"),
    [
        (AXOLOTL | {"plugins": ["mine.Plugin"]}, "plugins", "is not accounted for", CUT_LOSS),
        (AXOLOTL | {"rl": "grpo"}, "rl", "generates text between steps", "dpo"),
        (AXOLOTL | {"optimizer": "adamw_torch_4bit"}, "optimizer", "is not accounted for", "adamw_torch_8bit"),
        (
            AXOLOTL | {"activation_offloading": True, "gradient_checkpointing": False},
            "activation_offloading",
            "host memory",
            None,
        ),
        (AXOLOTL | {"context_parallell_size": 2}, "context_parallell_size", "is no key", "context_parallel_size"),
        (AXOLOTL | {"micro_batch_size": "two"}, "micro_batch_size", "must be a whole number", 1),
        (AXOLOTL | {"peft": {"loftq_config": {"loftq_bits": 4}}}, "peft", "quantized model", "without peft"),
        (AXOLOTL | {"deepspeed": "mine.json"}, "deepspeed", "gives no ZeRO stage", "zero2.json"),
        (AXOLOTL | {"num_epochs": 10**300}, "num_epochs", "must be a number above 0, at most 1,000,000", 1),
        (AXOLOTL | {"num_epochs": "1e300"}, "num_epochs", "must be a number above 0, at most 1,000,000", 1),
        (AXOLOTL | {"load_in_4bit": True}, "weights in 4 bits", "need an adapter", None),
        (FACTORY | {"use_galore": True}, "use_galore", "projects gradients", "use_galore: false"),
        (FACTORY | {"quantization_bit": 2}, "quantization_bit", "must be 4 or 8", 4),
    ],
)
def test_what_changes_numbers_is_not_passed_over(
    values: dict[str, Any], field: str, rule: str, nearest: object
) -> None:
    found = refusals(values)
    assert rule in found[field][0]
    assert found[field][1] == nearest


def test_a_whole_batch_and_sequences_beyond_the_models(tmp_path: Path) -> None:
    values = AXOLOTL | {"base_model": "TinyLlama/TinyLlama_v1.1", "batch_size": 16, "sequence_len": 4096}
    del values["gradient_accumulation_steps"]
    run = resolve(written(tmp_path, values))
    assert (run.recipe.global_batch, run.recipe.micro_batch, run.model.max_seq_len) == (16, 2, 4096)
    assert any("longer than the 2,048" in note for note in run.origin.notes)
    with pytest.raises(InvalidInput, match=r"sequence_len \(recipe.seq_len\) = 4096: is longer"):
        resolve(written(tmp_path, values | {"base_model": "gpt2"}))


def test_a_key_that_is_off_is_named_where_it_is_not_known(tmp_path: Path) -> None:
    off = {"made_up": False, "relora": False, "liger_rope": False, "trl": {"use_vllm": False}, "wandb_project": None}
    notes = from_values(AXOLOTL | off).remarks
    assert "not understood: made_up" in notes


def test_tensor_ranks_compute_the_loss_of_all_logits() -> None:
    run = from_values(AXOLOTL | {"tensor_parallel_size": 2, "cut_cross_entropy": True})
    assert "loss" not in run.table["recipe"]
    assert any("all logits at once" in remark for remark in run.remarks)


def test_devices_must_take_the_sizes_of_the_file() -> None:
    assert refusals(AXOLOTL | {"tensor_parallel_size": 4}, 6)["cluster.count"][1] == 8


def test_keys_without_effect_and_strangers(tmp_path: Path) -> None:
    quiet = {"wandb_project": "p", "val_set_size": 0.1, "special_tokens": {"pad_token": "<pad>"}, "output_dir": "o"}
    plain, more = from_values(AXOLOTL), from_values(AXOLOTL | quiet)
    assert plain == more
    strange = from_values(AXOLOTL | {"frobnicate": 3})
    assert strange.table == plain.table
    assert "not understood: frobnicate" in strange.remarks


def test_a_model_that_is_not_known_is_asked_for(tmp_path: Path) -> None:
    file = written(tmp_path, AXOLOTL | {"base_model": "someone/secret-8b"})
    with pytest.raises(
        InvalidInput, match=r"'someone/secret-8b': is not in the catalog: give its config.json.*model\.config"
    ):
        resolve(file)
    assert resolve(file, {"model.preset": "llama-3.2-1b"}).model.name == "llama-3.2-1b"


def test_a_model_trained_further_has_the_sizes_of_the_one_before(tmp_path: Path) -> None:
    run = resolve(written(tmp_path, FACTORY | {"model_name_or_path": "google/gemma-2-9b-it"}))
    assert run.model.name == "gemma-2-9b"
    assert "assuming the sizes of gemma-2-9b for google/gemma-2-9b-it" in run.origin.notes
    quantized = {"quantization_bit": 4}
    for name, known, fields in (
        ("Qwen/Qwen3-4B-Thinking-2507", "qwen3-4b", {}),
        ("Qwen/Qwen3-4B-Instruct-2507", "qwen3-4b", {}),
        ("unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit", "llama-3.1-8b", quantized),
    ):
        assert resolve(written(tmp_path, FACTORY | fields | {"model_name_or_path": name})).model.name == known
    with pytest.raises(InvalidInput, match="is not in the catalog"):  # its weights are not those that the file says
        resolve(written(tmp_path, FACTORY | {"model_name_or_path": "unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit"}))


@pytest.mark.parametrize(("bits", "base_format"), [({}, "bf16"), ({"quantization_bit": 4}, "nf4")])
def test_adapters_in_fp16_are_those_of_an_autocast(bits: dict[str, int], base_format: str, tmp_path: Path) -> None:
    half = {name: value for name, value in FACTORY.items() if name != "bf16"} | {"fp16": True}
    recipe = resolve(written(tmp_path, half | bits)).recipe
    assert recipe.lora is not None
    assert (recipe.precision.kind, recipe.lora.base_format) == ("fp16-mixed", base_format)


def test_load_says_what_it_assumes(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="leaves some of the recipe open; assuming .*recipe.steps=1"):
        run = load(written(tmp_path, AXOLOTL), count=8)
    assert (run.cluster.count, run.layout.replicate, run.recipe.global_batch) == (8, 8, 64)


@pytest.mark.parametrize("program", tables())
def test_a_key_has_one_meaning(program: str) -> None:
    table = tables()[program]
    kinds = [set(table[kind]) for kind in ("fields", "words", "refused", "assumed")]
    assert sum(map(len, kinds)) == len(set().union(*kinds))
    assert set(table["defaults"]) <= kinds[0] | kinds[1]


def test_init_writes_the_same_run(tmp_path: Path) -> None:
    source, made = written(tmp_path, AXOLOTL | QLORA), str(tmp_path / "run.toml")
    init(made, source=source)
    assert load(made) == resolve(source)
