"""A change in the words of another trainer's file: the copy, read again, is the changed run."""

import json
from pathlib import Path
from typing import Any

import pytest

import trainledger as tl
from trainledger.answers.load import resolve
from trainledger.answers.write_back import Words
from trainledger.cli import main
from trainledger.spec.convert.patch import patched
from trainledger.spec.run import Run
from trainledger.spec.run_text import changed

AXOLOTL = """# a comment that stays
base_model: meta-llama/Meta-Llama-3-8B
sequence_len: 4096
micro_batch_size: 2  # of a device
gradient_accumulation_steps: 4
gradient_checkpointing: false
bf16: true
learning_rate: 0.00002
optimizer: adamw_torch_fused
fsdp:
  - full_shard
  - auto_wrap
fsdp_config:
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
"""
TRL = """model_name_or_path: meta-llama/Meta-Llama-3-8B
dataset_name: d
torch_dtype: bfloat16
max_length: 4096
gradient_checkpointing: false
per_device_train_batch_size: 8
gradient_accumulation_steps: 2
max_steps: 100
"""
LINE = (
    "accelerate launch --num_processes 8 sft.py --model_name_or_path meta-llama/Meta-Llama-3-8B --max_length 4096 "
    "--torch_dtype bfloat16 --per_device_train_batch_size 4 --gradient_checkpointing false --dataset_name d"
)
DEEPSPEED = """{
  "zero_optimization": {"stage": 2},
  "train_micro_batch_size_per_gpu": 4,
  "gradient_accumulation_steps": 2,
  "bf16": {"enabled": true}
}
"""
TITAN = """[model]
name = "llama3"
flavor = "8B"  # the size
[training]
local_batch_size = 2
seq_len = 8192
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 1
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
"""
MEGATRON = r"""#!/bin/bash
MICRO=2
torchrun --nproc_per_node 8 pretrain_gpt.py \
  --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --vocab-size 128256 \
  --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm --disable-bias-linear \
  --position-embedding-type rope --untie-embeddings-and-output-weights --bf16 --lr 1e-4 --train-iters 1000 \
  --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size ${MICRO} --global-batch-size 128 \
  --tensor-model-parallel-size 1 --use-distributed-optimizer
"""
SWIFT = (
    "NPROC_PER_NODE=8 swift sft --model Qwen/Qwen2.5-7B --train_type full --torch_dtype bfloat16 --max_length 4096 "
    "--per_device_train_batch_size 4 --gradient_accumulation_steps 2 --gradient_checkpointing false --deepspeed zero2 "
    "--dataset d"
)
FACTORY = """model_name_or_path: meta-llama/Meta-Llama-3-8B
stage: sft
finetuning_type: full
dataset: identity  # of the example
cutoff_len: 4096
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
bf16: true
disable_gradient_checkpointing: true
"""
MAXTEXT = """model_name: llama3-8b
per_device_batch_size: 2
max_target_length: 4096
remat_policy: minimal  # what is saved
ici_fsdp_parallelism: 8
steps: 10
"""
NANOTRON = """model:
  model_config: {hidden_size: 1024, intermediate_size: 4096, num_attention_heads: 16, num_key_value_heads: 16,
    num_hidden_layers: 8, vocab_size: 32000, max_position_embeddings: 2048, tie_word_embeddings: false}
optimizer:
  zero_stage: 0
  accumulate_grad_in_fp32: true
parallelism:
  dp: 8
  tp: 1
  pp: 1
  pp_engine: 1f1b
  recompute_layer: false
tokens:
  micro_batch_size: 4  # of a rank
  batch_accumulation_per_replica: 2
  sequence_length: 2048
  train_steps: 10
"""
LITGPT = """model_name: pythia-1b  # a size
precision: bf16-true
devices: 8
train:
  global_batch_size: 64
  micro_batch_size: 4
  max_seq_length: 1024
  max_tokens: 1000000000
"""
FILES = {
    "axolotl.yml": AXOLOTL, "trl.yaml": TRL, "ds.json": DEEPSPEED, "titan.toml": TITAN, "megatron.sh": MEGATRON,
    "sequence.sh": MEGATRON.replace("parallel-size 1", "parallel-size 2 --sequence-parallel"),
    "flash.yml": f"{AXOLOTL}flash_attention: true\n",
    "adapter.yml": f"{AXOLOTL.partition('fsdp:')[0]}adapter: lora\nlora_r: 8\nload_in_8bit: true\n",
    "factory.yaml": FACTORY, "maxtext.yml": MAXTEXT, "nanotron.yaml": NANOTRON, "litgpt.yaml": LITGPT,
    "swift.sh": SWIFT,
    "hf.json": """{"output_dir": "out",  "learning_rate": 2e-5,
      "per_device_train_batch_size": 4, "bf16": true, "max_steps": 100}""",
}  # fmt: skip
FULL = {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}
# What is changed, and how the file says it.
CHANGES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("axolotl.yml", {"recipe.activation_checkpointing": "full"}, {"gradient_checkpointing": True}),
    ("axolotl.yml", {"recipe.micro_batch": 1}, {"micro_batch_size": 1, "gradient_accumulation_steps": 8}),
    ("axolotl.yml", {"recipe.optimizer": "adamw-8bit", "recipe.optimizer.implementation": "fused"},
     {"optimizer": "adamw_bnb_8bit"}),
    ("axolotl.yml", {"layout.reshard_after_forward": False}, {"fsdp": ["shard_grad_op", "auto_wrap"]}),
    ("axolotl.yml", {"layout.shard": 4, "layout.tensor": 2, "recipe.attention": "flash"},
     {"gradient_accumulation_steps": 8, "tensor_parallel_size": 2, "flash_attention": True}),
    ("trl.yaml", {"recipe.loss": "fused", "recipe.compile": True}, {"use_liger_kernel": True, "torch_compile": True}),
    ("trl.yaml", {"recipe.micro_batch": 2, "recipe.activation_checkpointing": "full"},
     {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "gradient_checkpointing": True}),
    ("launch line", {"recipe.activation_checkpointing": "full", "recipe.micro_batch": 2},
     {"gradient_checkpointing": True, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}),
    ("ds.json", {"layout.zero": 3}, {"zero_optimization.stage": 3}),
    ("ds.json", {"recipe.micro_batch": 1, "recipe.seq_len": 8192},
     {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8}),
    ("titan.toml", {"recipe.activation_checkpointing": "full"}, {"activation_checkpoint.mode": "full"}),
    ("titan.toml", {"layout.shard": 4, "layout.tensor": 2, "layout.sequence_parallel": True},
     {"parallelism.tensor_parallel_degree": 2, "training.global_batch_size": 16}),
    ("titan.toml", {"recipe.compile": True}, {"compile.enable": True, "compile.components": ["model"]}),
    ("megatron.sh", {"recipe.micro_batch": 1, "recipe.activation_checkpointing": "full"},
     {"micro-batch-size": 1, **FULL}),
    ("megatron.sh", {"layout.overlap": ["gradients"]}, {"overlap-grad-reduce": True}),
    ("sequence.sh", {"layout.sequence_parallel": False, "layout.sequence_gather": "kept"},
     {"sequence-parallel": False}),
    ("flash.yml", {"recipe.attention": "sdpa"}, {"flash_attention": False, "sdp_attention": True}),
    ("adapter.yml", {"recipe.lora.base_format": "nf4"},
     {"load_in_8bit": False, "load_in_4bit": True, "adapter": "qlora"}),
    ("factory.yaml", {"recipe.micro_batch": 2, "recipe.activation_checkpointing": "full"},
     {"disable_gradient_checkpointing": False, "gradient_checkpointing": True, "per_device_train_batch_size": 2,
      "gradient_accumulation_steps": 4}),
    ("factory.yaml", {"recipe.compile": True}, {"torch_compile": True}),
    ("swift.sh", {"layout.zero": 3, "recipe.loss": "fused"}, {"deepspeed": "zero3", "use_liger_kernel": True}),
    ("swift.sh", {"layout.shard": 4, "layout.tensor": 2},
     {"gradient_accumulation_steps": 4, "deepspeed_autotp_size": 2}),
    ("maxtext.yml", {"recipe.micro_batch": 1, "recipe.activation_checkpointing": "full"},
     {"per_device_batch_size": 1, "gradient_accumulation_steps": 2, "remat_policy": "full"}),
    ("maxtext.yml", {"layout.shard": 4, "layout.tensor": 2},
     {"ici_fsdp_parallelism": 4, "gradient_accumulation_steps": 2, "ici_tensor_parallelism": 2}),
    ("nanotron.yaml", {"recipe.micro_batch": 1, "recipe.activation_checkpointing": "full"},
     {"tokens.micro_batch_size": 1, "tokens.batch_accumulation_per_replica": 8, "parallelism.recompute_layer": True}),
    ("nanotron.yaml", {"layout.shard": 8, "layout.replicate": 1, "layout.zero": 1}, {"optimizer.zero_stage": 1}),
    ("litgpt.yaml", {"recipe.micro_batch": 1}, {"train.micro_batch_size": 1}),
    ("hf.json", {"recipe.micro_batch": 2}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}),
]  # fmt: skip


def read(folder: Path, name: str, text: str = "") -> Run:
    """The run of one of `FILES`, or of its text, on 8 devices."""
    if name == "launch line":
        return resolve(text or LINE, ["cluster.device=h100-sxm"])
    (folder / name).write_text(text or FILES[name])
    model = ["model.preset=llama-3-8b"] if name.endswith(".json") else []
    return resolve(str(folder / name), [*model, "cluster.device=h100-sxm", "cluster.count=8"])


@pytest.mark.parametrize(("name", "change", "edits"), CHANGES, ids=str)
def test_a_copy_with_the_words_of_a_change_is_the_changed_run(
    name: str, change: dict[str, Any], edits: dict[str, Any], tmp_path: Path
) -> None:
    run = read(tmp_path, name)
    words = Words.of(run)
    assert words is not None
    target = changed(run, change)
    assert words.says(target)
    written = words.written(target)
    assert (written.edits, written.missing) == (edits, ())
    assert {line.partition("=")[0] for line in written.changes} & change.keys()
    again = read(tmp_path, name, written.text)
    assert again == written.run
    assert changed_keys(words, again) == edits.keys()
    assert all(key in written.lines for key in edits)
    assert "False" not in written.lines
    assert again != run
    assert again.recipe.tokens_per_step == target.recipe.tokens_per_step
    numbers = [tl.plan(each).forecast for each in (again, target)]
    assert numbers[0].device_nbytes == numbers[1].device_nbytes
    assert numbers[0].step_seconds == numbers[1].step_seconds
    for line in (FILES.get(name) or LINE).splitlines():
        if "#" in line:
            assert line.partition("#")[2] in written.text


def changed_keys(words: Words, again: Run) -> set[str]:
    """The keys of a file that its copy has otherwise."""
    copy = Words.of(again)
    assert copy is not None
    values = [{key: value for key, value in some.has.items() if not isinstance(value, dict)} for some in (words, copy)]
    return {key for key, value in values[1].items() if values[0].get(key) != value} | values[0].keys() - values[1]


@pytest.mark.parametrize("packed", ["sample_packing: true", ""])
def test_the_kernel_of_packed_rows_is_kept(packed: str, tmp_path: Path) -> None:
    run = read(tmp_path, "flash.yml", f"{FILES['flash.yml']}{packed}\n")
    words = Words.of(run)
    assert words is not None
    assert words.says(changed(run, {"recipe.attention": "sdpa"})) is not bool(packed)
    rewritten = tl.advise(run).words
    assert rewritten is not None
    assert rewritten.edits
    assert ("flash_attention" in rewritten.edits) is any("recipe.attention=" in line for line in rewritten.changes)


def test_what_stands_in_json_stays(tmp_path: Path) -> None:
    run = read(tmp_path, "hf.json")
    words = Words.of(run)
    assert words is not None
    text = words.written(changed(run, {"recipe.micro_batch": 2})).text
    grown = FILES["hf.json"].replace('size": 4', 'size": 2')
    assert text == grown.replace("100}", '100, "gradient_accumulation_steps": 2}')
    nested = '{\n  "a": {"b": 1e-5, "c": {}},\n  "d": [1]\n}'
    assert patched(nested, ".json", {"a.b": 2, "a.c.x": True, "e.f": "g"}) == (
        '{\n  "a": {"b": 2, "c": {"x": true}},\n  "d": [1],\n  "e": {"f": "g"}\n}'
    )


def test_advice_that_a_file_has_no_words_for_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    none = "gradient_accumulation_steps: 8\nmicro_batch_size: 1\ngradient_checkpointing: true\n"
    Path("tiny.yml").write_text(f"base_model: gpt2\nsequence_len: 16\nbf16: true\nmax_steps: 1\n{none}")
    monkeypatch.setattr(Words, "says", lambda words, target: False)
    monkeypatch.setattr(Words, "edits", lambda words, target: ({}, ("recipe.loss=compiled",)))
    assert main(["advise", "tiny.yml", "--device", "h100-sxm", "--write", "copy.yml"]) == 2
    shown = capsys.readouterr()
    assert "Changes that do not affect the result" in shown.out
    assert "--write = 'copy.yml': axolotl has no words for a change that helps: recipe.loss=compiled" in shown.err
    assert not Path("copy.yml").exists()


@pytest.mark.parametrize("name", [*FILES, "launch line"])
def test_what_a_file_has_no_words_for_is_said(name: str, tmp_path: Path) -> None:
    run = read(tmp_path, name)
    words = Words.of(run)
    assert words is not None
    target = changed(run, {"recipe.activation_checkpointing": "offload"})
    assert not words.says(target)
    assert "recipe.activation_checkpointing=offload" in words.written(target).missing
    assert words.edits(run) == ({}, ())


def test_runs_of_no_trainer_have_no_words(tmp_path: Path) -> None:
    assert Words.of(resolve("gpt2")) is None
    assert tl.advise("gpt2", device="h100-sxm").words is None
    with pytest.raises(tl.InvalidInput, match=r"--write = .*another trainer"):
        tl.fit("gpt2", device="h100-sxm", of=["memory"], write=str(tmp_path / "out.yml"))


@pytest.mark.parametrize(
    ("verb", "name"),
    [("advise", "axolotl.yml"), ("fit", "axolotl.yml"), ("layouts", "titan.toml"), ("fit", "titan.toml"),
     ("advise", "megatron.sh"), ("advise", "trl.yaml")],
)  # fmt: skip
@pytest.mark.long
def test_the_copy_that_a_verb_writes_plans_to_what_it_announced(
    verb: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(FILES[name])
    copy = f"copy{Path(name).suffix}"
    asked = [verb, name, "--device", "h100-sxm", "--count", "8", "--write", copy, *["--of", "memory"] * (verb == "fit")]
    assert main(asked) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert len(out.splitlines()) <= 40
    said = " ".join(out[out.index("In the words of ") :].split())
    assert main(["plan", copy, "--device", "h100-sxm", "--count", "8", "--json"]) in (0, 2)
    forecast = json.loads(capsys.readouterr().out)["forecast"]
    from trainledger.spec.units import format_nbytes, format_seconds

    assert f"{format_nbytes(forecast['device_nbytes'])} on the peak rank" in said
    assert f"{format_seconds(forecast['step_seconds'])} a step" in said


def test_the_nearest_change_that_fits_is_in_the_files_words(tmp_path: Path) -> None:
    answer = tl.fits(read(tmp_path, "axolotl.yml", AXOLOTL.replace("micro_batch_size: 2", "micro_batch_size: 3")))
    assert not answer
    assert answer.words is not None
    assert answer.words.missing == ()
    assert tl.fits(read(tmp_path, "axolotl.yml", answer.words.text))


def test_text_is_patched_where_it_stands() -> None:
    nested = "a:\n    b: 1\n    c:\n        - x\n    d: 2\ne: 3\n"
    assert patched(nested, ".yaml", {"a.c": ["y"]}) == nested.replace("\n        - x", ' ["y"]')
    assert patched("a: 1", ".yml", {"b.c.d": "on"}) == 'a: 1\nb:\n  c:\n    d: "on"\n'
    toml = 'x = 1\n[a]\nb = "#1"  # one\n[c]\nd = 2\n'
    assert patched(toml, ".toml", {"a.b": "two", "c.e": [1], "f.g": True, "x": 2}) == (
        'x = 2\n[a]\nb = "two"  # one\n[c]\ne = [1]\nd = 2\n\n[f]\ng = true\n'
    )
    script = 'N=4\nrun.py --a=1 \\\n  --b "${N}" --flag\n'
    changes = {"a": 2, "b": 8, "flag": False, "c": "x y"}
    assert patched(script, "", changes) == "N=8\nrun.py --c 'x y' --a=2 \\\n  --b \"${N}\" \n"
