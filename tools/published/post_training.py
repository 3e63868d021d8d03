"""Write docs/tables/post_training.csv: published steps of reinforcement learning beside `trainledger rl`, by phase.

    python tools/published/post_training.py

NVIDIA-NeMo/RL, docs/about/performance-summary.md (v0.5 at e7c0123d7, v0.6 at aea463d), with the recipes of
examples/configs/recipes/llm/performance: packed, with a reference, recomputed blocks, Megatron's distributed optimizer,
gpu_memory_utilization 0.6 where both halves share the devices and 0.8 where half of them generate (1-step off policy).
Prompts of 100 tokens are assumed; nothing is fitted to these rows. The page states whole steps alone, so that phases
have no error of their own. Left out: fp8 (our engine has weights in bf16), DAPO (how many batches its dynamic sampling
generates is not stated), SWE (what its tools take is not stated).
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from tables import Table

import trainledger as tl
from trainledger.forecast.plan.post_training import PostTraining

_PROMPT = 100
_LLAMA, _QWEN, _DEEPSEEK = "llama-3-8b", "qwen3-32b", "deepseek-v3"
_SPLIT: dict[str, Any] = {"shard": 16, "expert": 16, "pipeline": 16, "stage_layers": [4] * 13 + [3] * 3}
_FOUR: dict[str, Any] = {"shard": 2, "tensor": 4, "pipeline": 4, "sequence_parallel": True}
_TWO: dict[str, Any] = {"shard": 8, "tensor": 2, "sequence_parallel": True}


@dataclass(frozen=True)
class Row:
    """A published step: its model, the layout of its update, devices in all and those of an engine, the mean and the
    longest sequence with its prompt, and seconds; ``split``: half of the devices generate for the step after."""

    name: str
    model: str
    layout: dict[str, Any]
    device: str
    devices: int
    engine: int
    mean: int
    longest: int
    seconds: float
    split: bool = False

    @property
    def answer(self) -> PostTraining:
        fields: dict[str, Any] = {f"layout.{axis}": size for axis, size in self.layout.items()} | {"layout.zero": 1}
        fields |= {"recipe.precision": "bf16", "recipe.precision.master_weights": True, "recipe.global_batch": 512}
        fields |= {"model.n_mtp_layers": 0} if self.model == _DEEPSEEK else {}
        training = self.devices // 2 if self.split else self.devices
        return tl.rl(
            self.model, fields, device=self.device, count=training, generation_devices=self.devices - training,
            overlapped=self.split, parked=not self.split, utilization=0.8 if self.split else 0.6, packed=True,
            prompts=16 if self.model == _DEEPSEEK else 64, group=32, prompt=_PROMPT, completion=self.mean - _PROMPT,
            longest=self.longest - _PROMPT, engine_tensor=self.engine, reference=True,
        )  # fmt: skip


ROWS = (
    Row("RL021", _LLAMA, {"shard": 8, "pipeline": 2}, "h100-sxm", 16, 1, 1019, 4096, 92.8),
    Row("RL022", _LLAMA, {"shard": 8}, "h100-sxm", 16, 1, 1123, 4096, 64.8, split=True),
    Row("RL030", _QWEN, _FOUR, "h100-sxm", 32, 4, 3251, 4096, 376.0),
    Row("RL031", _QWEN, _FOUR, "h100-sxm", 64, 4, 3252, 4096, 200.0, split=True),
    Row("RL042", _QWEN, _TWO, "gb200", 16, 1, 3253, 4096, 381.0),
    Row("RL043", _QWEN, _TWO, "gb200", 32, 1, 3258, 4096, 210.0, split=True),
    Row("RL001", _DEEPSEEK, _SPLIT, "h100-sxm", 256, 32, 701, 1536, 134.0),
    Row("RL023", _DEEPSEEK, _SPLIT, "h100-sxm", 256, 32, 744, 1536, 134.0),
    Row("RL002", _DEEPSEEK, {**_SPLIT, "shard": 32}, "h100-sxm", 512, 32, 697, 1536, 111.0),
    Row("RL003", _DEEPSEEK, _SPLIT, "h100-sxm", 512, 32, 710, 1536, 64.1, split=True),
    Row("RL024", _DEEPSEEK, _SPLIT, "h100-sxm", 512, 32, 738, 1536, 64.9, split=True),
)
_PHASES = ("rollout", "log-probabilities", "reference", "update", "refit")


def table() -> tuple[Table, list[float]]:
    """The table, and the errors of its steps as shares."""
    lines, errors = [], []
    for row in ROWS:
        answer = row.answer
        assert answer.fits, row.name
        assert answer.seconds is not None, row.name
        seconds = {phase.name: phase.seconds or 0.0 for phase in answer.phases}
        errors.append(answer.seconds / row.seconds - 1)
        kind = "half generate, 1 step off policy" if row.split else "on policy"
        said = [f"{each:.1f}" for each in (row.seconds, answer.seconds, *(seconds[name] for name in _PHASES))]
        where = f"{row.devices} x {row.device}"
        lines.append([row.name, row.model, where, kind, *said[:2], f"{100 * errors[-1]:+.1f}", *said[2:]])
    header = (
        "row",
        "model",
        "devices",
        "policy",
        "measured s",
        "predicted s",
        "error %",
        *(f"{of} s" for of in _PHASES),
    )
    return Table("post_training", header, lines), errors


if __name__ == "__main__":
    made, off = table()
    made.path.write_text(made.text, encoding="utf-8")
    print(made.text, f"median of absolute errors {100 * median(map(abs, off)):.1f} %", sep="\n")
