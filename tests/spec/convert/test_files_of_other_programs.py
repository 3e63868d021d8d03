"""Files of other programs, named as what they are."""

import pytest
import yaml

from trainledger.spec.convert import foreign_problem
from trainledger.spec.convert.megatron import read_arguments
from trainledger.spec.problem import InvalidInput

FILES = {
    "axolotl": "base_model: some/8b\nadapter: qlora\nsequence_len: 4096\nmicro_batch_size: 2\nlearning_rate: 2e-4\n",
    "LLaMA-Factory": "model_name_or_path: m\nstage: sft\nfinetuning_type: lora\ncutoff_len: 2048\nmax_steps: 5\n"
    "per_device_train_batch_size: 1\noutput_dir: out\n",
    "nanotron": "general: {project: p, run: r}\nparallelism: {dp: 2, tp: 4, pp: 1}\n"
    "tokens: {micro_batch_size: 2, sequence_length: 1024}\nmodel: {model_config: {hidden_size: 64, num_layers: 2}}\n",
    "GPT-NeoX": '{"pipe-parallel-size": 1, "model-parallel-size": 2, "num-layers": 12, "hidden-size": 768, '
    '"num-attention-heads": 12, "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}}',
    "NeMo": "trainer: {devices: 8, num_nodes: 2, precision: bf16}\nexp_manager: {}\n"
    "model: {micro_batch_size: 4, global_batch_size: 64, num_layers: 12, hidden_size: 768, mcore_gpt: true}\n",
    "Accelerate": "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: bf16\n"
    "num_processes: 8\nfsdp_config: {fsdp_offload_params: true}\n",
    "Hugging Face's Trainer": "output_dir: out\nper_device_train_batch_size: 8\nnum_train_epochs: 3\nbf16: true\n",
    "torchtune": "model: {_component_: torchtune.models.x}\ntokenizer: {_component_: t, max_seq_len: 128}\n",
    "LLM Foundry": "max_seq_len: 2048\nmax_duration: 10ba\ndevice_train_microbatch_size: 8\n",
    "Lightning": "seed_everything: 1\nmodel: {class_path: a.B}\ntrainer: {devices: 2, max_steps: 3}\n",
    "torchtitan": "job: {}\ntraining: {seq_len: 8, steps: 2}\nparallelism: {tensor_parallel_degree: 2}\n",
}


@pytest.mark.parametrize("program", FILES)
def test_a_file_is_named_by_its_contents(program: str) -> None:
    with pytest.raises(InvalidInput, match=f"is a config of {program}, not a run file") as refused:
        read_arguments(FILES[program], "any.yaml")
    assert len(refused.value.problems) == 1


@pytest.mark.parametrize(
    ("program", "nearest"),
    [
        ("axolotl", "trainledger plan MODEL --set recipe.seq_len=4096 --set recipe.micro_batch=2"),
        (
            "nanotron",
            "trainledger plan MODEL --set recipe.seq_len=1024 --set recipe.micro_batch=2 --set layout.tensor=4",
        ),
        (
            "Hugging Face's Trainer",
            "trainledger plan MODEL --set recipe.micro_batch=8 --set recipe.precision=bf16-mixed",
        ),
    ],
)
def test_what_it_says_of_a_run_is_proposed(program: str, nearest: str) -> None:
    problem = foreign_problem(yaml.safe_load(FILES[program]))
    assert problem is not None
    assert problem.nearest == nearest


def test_offloading_is_not_lost_in_silence() -> None:
    problem = foreign_problem(yaml.safe_load(FILES["Accelerate"]))
    assert problem is not None
    assert problem.rule.endswith("its offloading (fsdp_offload_params) is recipe.offload here")


@pytest.mark.parametrize("table", [{}, {"model": {}, "recipe": {}, "layout": {}}, {"model_type": "llama", "norm": 1}])
def test_our_files_and_config_json_are_not_of_others(table: dict[str, object]) -> None:
    assert foreign_problem(table) is None
