"""Twenty tasks of an assistant with the skill: a question, the call that its text leads to, and the answer checked."""

import re
from collections.abc import Callable
from math import isclose
from pathlib import Path
from typing import Any

import pytest

from trainledger.cli.mcp import TOOLS, answered

SKILL = (Path(__file__).parents[2] / "src/trainledger/cli/skill.md").read_text(encoding="utf-8")
H100 = {"device": "h100-sxm"}
QLORA = (
    "base_model: meta-llama/Meta-Llama-3-8B\nadapter: qlora\nload_in_4bit: true\nlora_r: 16\nsequence_len: 2048\n"
    "micro_batch_size: 1\ngradient_checkpointing: true\nlora_target_linear: true\nbf16: true\nlearning_rate: 0.0002\n"
)
LAUNCH = "swift sft --model Qwen/Qwen2.5-7B --tuner_type full --max_length 2048 --deepspeed zero3"
Check = Callable[[dict[str, Any], str], bool]
TASKS: list[tuple[str, str, dict[str, Any], Check]] = [
    (
        "Can I fine-tune all weights of Llama 3 8B on one H100?",
        "fits", {"run": "llama-3-8b", "count": 1, "method": "full", **H100},
        lambda data, _: data["verdict"] is False and data["nbytes"] > 8 * 8.03e9 and bool(data["change"]),
    ),
    (
        "And QLoRA of it on a 4090?",
        "fits", {"run": "llama-3-8b", "device": "rtx-4090", "method": "qlora"},
        lambda data, _: data["verdict"] is True and 8.03e9 / 2 < data["nbytes"] < 24e9 and data["chance"] > 0.5,
    ),
    (
        "Does my axolotl config fit a 4090?",
        "fits", {"run": "qlora.yml", "device": "rtx-4090"},
        lambda data, said: data["verdict"] is True and "As read" in said,
    ),
    (
        "Does this launch line fit on 8 H100s?",
        "fits", {"run": LAUNCH, "count": 8, **H100},
        lambda data, said: data["verdict"] is True and 7.6e9 * 16 / 8 < data["nbytes"] < 80e9 and "FSDP" in said,
    ),
    (
        "How long does a trillion tokens take on 64 H100s?",
        "plan", {"run": "llama-3-8b", "count": 64, "set": ["recipe.tokens=1T"], **H100},
        lambda data, said: said.startswith("Fits") and data["forecast"]["days"] > 6 * 8e21 / 64 / 989.5e12 / 86400,
    ),
    (
        "How many tokens a second does GPT-2 reach?",
        "plan", {"run": "gpt2", **H100},
        lambda data, _: isclose(
            data["forecast"]["tokens_per_second"],
            data["forecast"]["tokens_per_step"] / data["forecast"]["step_seconds"], rel_tol=0.01,
        ),
    ),
    (
        "What if I accumulate over 8 sequences?",
        "plan", {"run": "gpt2", "set": ["recipe.global_batch=8", "recipe.micro_batch=2"], **H100},
        lambda data, _: data["forecast"]["tokens_per_step"] == 8 * 1024,
    ),
    (
        "Where does the memory go?",
        "explain", {"run": "gpt2", "what": "memory", **H100},
        lambda data, said: data["account"] == "memory" and "optimizer" in said,
    ),
    (
        "Where does the time go?",
        "explain", {"run": "gpt2", "what": "time", **H100},
        lambda data, said: data["account"] == "time" and "launch" in said,
    ),
    (
        "How many parameters does GPT-2 have, and where?",
        "explain", {"run": "gpt2", "what": "parameters", **H100},
        lambda _, said: "124,439,808" in said or "124.4M" in said,
    ),
    (
        "How do I make GPT-2 train faster?",
        "advise", {"run": "gpt2", "together": 1, **H100},
        lambda data, _: data["goal"] == "time" and bool(data["alone"]),
    ),
    (
        "How do I save its memory?",
        "advise", {"run": "gpt2", "goal": "memory", "together": 1, **H100},
        lambda data, _: data["goal"] == "memory" and bool(data["alone"]),
    ),
    (
        "How do I spread GPT-2 over four H100s?",
        "layouts", {"run": "gpt2", "count": 4, "keep": 2, "set": ["recipe.seq_len=512"], **H100},
        lambda data, _: data["fitting"] > 0 and len(data["ranked"]) == 2,
    ),
    (
        "What does activation checkpointing cost?",
        "compare", {"a": "gpt2", "changes_b": ["recipe.activation_checkpointing=full"], **H100},
        lambda data, _: data["nanoseconds"]["difference"][-1] > 0 > data["memory_nbytes"]["difference"][-1]
        if isinstance(data["nanoseconds"]["difference"], list)
        else data["nanoseconds"]["difference"] > 0 > data["memory_nbytes"]["difference"],
    ),
    (
        "How does memory grow with the sequence?",
        "compare", {"a": "gpt2", "over": "recipe.seq_len=256,512,1024", **H100},
        lambda _, said: all(length in said.replace(",", "") for length in ("256", "512", "1024")),
    ),
    (
        "How many days for 70B on 15T tokens with 1,024 H100s at half the peak?",
        "napkin", {"params": "70B", "tokens": "15T", "count": "1024", "mfu": "0.5", **H100},
        lambda data, _: isclose(data["days"], 6 * 70e9 * 15e12 / (1024 * 0.5 * 989.5e12 * 86400), rel_tol=1e-3),
    ),
    (
        "How many H100s for 8B on 1T tokens in 10 days at 40 %?",
        "napkin", {"params": "8B", "tokens": "1T", "days": "10", "mfu": "40%", **H100},
        lambda data, _: isclose(
            data["count_exact"], 6 * 8e9 * 1e12 / (10 * 86400 * 0.4 * 989.5e12), rel_tol=1e-3
        ),
    ),
    (
        "How much memory has a T4?",
        "catalog", {"what": "t4"},
        lambda data, _: data["t4"]["memory_nbytes"] in (16 * 10**9, 15 * 2**30, 16 * 2**30),
    ),
    (
        "Which models are known?",
        "catalog", {"what": "models"},
        lambda data, _: "llama-3-8b" in data["models"] and len(data["models"]) > 90,
    ),
    (
        "Plan it on an 'h100-sxn' (a slip that its error mends)",
        "plan", {"run": "gpt2", "device": "h100-sxn"},
        lambda data, said: data["error"][0]["nearest"] == "h100-sxm" and "nearest that works: h100-sxm" in said,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "tool", "given", "check"), TASKS, ids=[task[0] for task in TASKS])
def test_the_skill_leads_to_the_answer(
    asked: str, tool: str, given: dict[str, Any], check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "qlora.yml").write_text(QLORA)
    monkeypatch.chdir(tmp_path)
    said, data, wrong = answered(tool, given)
    assert wrong is ("slip" in asked), said
    assert check(data, said), said


def test_the_skill_names_what_the_tasks_use() -> None:
    """Every tool, and every argument and field that a task gives, stands in the text that an assistant reads."""
    words = set(re.findall(r"[\w.]+", SKILL))
    arguments = {name for _, _, given, _ in TASKS for name in given} - {"a", "keep", "together", "goal", "mfu", "days"}
    fields = {item.partition("=")[0] for _, _, given, _ in TASKS for item in given.get("set", ())}
    assert {tool for _, tool, _, _ in TASKS} == set(TOOLS) - {"trace"}
    assert set(TOOLS) | {name for name in arguments if name not in ("params", "tokens")} <= words | {"what"}
    assert fields - {"recipe.global_batch"} <= words
    assert len(TASKS) == 20
