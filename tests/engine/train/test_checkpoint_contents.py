"""Checkpoints whose hashes are right and whose content is not: refused for the one before, or harmless."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_run import CountingFeed, tiny_run
from torch import Tensor

from thinned import thinned
from trainledger.engine.train.checkpoint_contents import unusable
from trainledger.engine.train.engine import train
from trainledger.spec.run import Run

ONE_EACH = ("embed_tokens.weight", "layers.0.mlp.down_proj.weight")  # Muon leaves the first to AdamW; not square
RUNS: dict[str, Run] = {
    "fp32": tiny_run(**{"ema.decay": 0.9, "dropout": 0.1}),
    "bf16-sharded": tiny_run(precision="bf16-sharded", optimizer="muon"),
    "fp16-mixed": tiny_run(precision="fp16-mixed"),
}


def reseal(checkpoint: Path) -> None:
    """Write right sizes and hashes into the manifest of a checkpoint that was changed."""
    told = json.loads((checkpoint / "manifest.json").read_text())
    for name in told["files"]:
        content = (checkpoint / name).read_bytes()
        told["files"][name] = {"nbytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (checkpoint / "manifest.json").write_text(json.dumps(told))


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a finished run, by name."""
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            made[name] = train(RUNS[name], tmp_path_factory.mktemp(name), open_feed=CountingFeed).run_dir
        return made[name]

    return of


TENSORS: dict[str, Callable[[Tensor], Tensor]] = {
    "as bf16": lambda each: each.bfloat16() if each.dtype != torch.bfloat16 else each.float(),
    "as int64": lambda each: each.long(),
    "with another dim": lambda each: each.unsqueeze(0),
    "transposed": lambda each: each.T.contiguous() if each.ndim == 2 else each.repeat(2),
    "NaN": lambda each: torch.full_like(each, torch.nan),
}


def changed_tensors(file: Path, how: str) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The tensors of a file with one of each kind changed, or all of a kind, or all."""
    tensors = load_file(file)
    kinds = {name.rpartition("/")[0]: name for name in tensors if name.endswith(ONE_EACH)}
    for kind, name in kinds.items():
        rest = {each: value for each, value in tensors.items() if each != name}
        if how in TENSORS:
            yield name, rest | {name: TENSORS[how](tensors[name])}
        elif how == "dropped":
            yield name, rest
            if kind:
                yield kind, {each: value for each, value in tensors.items() if not each.startswith(f"{kind}/")}
                yield "all", {}
        else:
            yield name, rest | {f"{name}.other": tensors[name]}


@pytest.mark.parametrize("how", [*TENSORS, "dropped", "renamed"])
@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("run", RUNS)
def test_a_checkpoint_without_the_tensors_of_its_run_is_not_gone_on_from(
    run: str, file: str, how: str, ended: Callable[[str], Path], tmp_path: Path
) -> None:
    whole = ended(run) / "checkpoints" / "step-00000004"
    assert unusable(whole, RUNS[run]) is None
    met = 0
    for name, tensors in changed_tensors(whole / file, how):
        harmed = tmp_path / whole.name
        shutil.copytree(whole, harmed, dirs_exist_ok=True)
        with safe_open(whole / file, framework="pt") as opened:
            save_file(tensors, harmed / file, opened.metadata())
        reseal(harmed)
        assert unusable(harmed, RUNS[run]) is not None, name
        met += 1
    assert met


def resumed_after(ended: Path, to: Path, harm: Callable[[Path], None], run: Run) -> tuple[list[str], Path]:
    """What a run says that is resumed from its last but one checkpoint, which was harmed, and its last one."""
    shutil.copytree(ended, to, dirs_exist_ok=True)
    shutil.rmtree(to / "checkpoints" / "step-00000006")
    state = json.loads((to / "state.json").read_text())
    (to / "state.json").write_text(json.dumps(state | {"state": "running", "step": 4}))
    harm(to / "checkpoints" / "step-00000004")
    reseal(to / "checkpoints" / "step-00000004")
    said: list[str] = []
    return said, train(run, to, open_feed=CountingFeed, resume=True, say=said.append).checkpoint


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors"])
def test_the_checkpoint_before_is_used_and_the_run_ends_with_the_same_bits(
    file: str, ended: Callable[[str], Path], tmp_path: Path
) -> None:
    def harm(checkpoint: Path) -> None:
        save_file({}, checkpoint / file)

    said, last = resumed_after(ended("fp32"), tmp_path, harm, RUNS["fp32"])
    assert sum("step-00000004 lacks " in each and each.endswith("; skipped.") for each in said) == 1
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (last / name).read_bytes() == (ended("fp32") / "checkpoints" / last.name / name).read_bytes()


def changed_facts(facts: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """A table with each of its fields, and of those in it, dropped, renamed, of another type, and not a number."""
    for name, value in facts.items():
        rest = {each: one for each, one in facts.items() if each != name}
        yield f"no {name}", rest
        yield f"other {name}", rest | {f"{name}_": value}
        for other in ("4", [4], {"4": 4}, None, True, -4, float("nan")):
            yield f"{name} = {other!r}", facts | {name: other}
        if isinstance(value, dict):
            yield from ((f"{name}.{at}", facts | {name: inner}) for at, inner in changed_facts(value))


@pytest.mark.parametrize("run", thinned(["fp16-mixed", "fp32"]))
@pytest.mark.long
def test_facts_of_other_types_are_refused_or_change_no_bit(
    run: str, ended: Callable[[str], Path], tmp_path: Path
) -> None:
    whole = ended(run) / "checkpoints" / "step-00000004"
    facts = json.loads((whole / "training.json").read_text())
    taken = []
    harmed = tmp_path / "one" / whole.name
    shutil.copytree(whole, harmed)
    for name, others in changed_facts(facts):
        (harmed / "training.json").write_text(json.dumps(others))
        reseal(harmed)
        if unusable(harmed, RUNS[run]) is None:
            taken.append((name, others))
    assert len(taken) < 0.4 * len(list(changed_facts(facts)))
    expected = (ended(run) / "checkpoints" / "step-00000006" / "model.safetensors").read_bytes()
    for at, (name, others) in enumerate(taken):

        def harm(checkpoint: Path, others: dict[str, Any] = others) -> None:
            (checkpoint / "training.json").write_text(json.dumps(others))

        _, last = resumed_after(ended(run), tmp_path / str(at), harm, RUNS[run])
        assert (last / "model.safetensors").read_bytes() == expected, name
