"""How the example files of other trainers' repositories are read, counted from snapshots of them on this machine.

    python tools/trainer_files.py SNAPSHOTS [PROGRAM] [--each]

SNAPSHOTS is a folder with a git directory ``OWNER+NAME`` (or ``OWNER+NAME/repo``) of each repository of `SOURCES`.
Writes ``docs/tables/trainer_files.csv``: files by program, outcome and deciding key. ``--each`` prints files alone.
"""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import trainledger as tl
from trainledger.spec.convert.trainers import from_values, tables, values_of
from trainledger.spec.convert.trainers.files import Launched
from trainledger.spec.problem import InvalidInput

TABLE = Path(__file__).parents[1] / "docs/tables/trainer_files.csv"
HEADER = ("program", "repository", "revision", "outcome", "deciding key", "files")


class Source(NamedTuple):
    """Files of a repository's revision by a pattern of their paths."""

    program: str
    repository: str
    paths: str
    revision: str = "HEAD"


SOURCES = (
    Source("axolotl", "axolotl-ai-cloud/axolotl", r"examples/.*\.ya?ml"),
    Source("LLaMA-Factory", "hiyouga/LLaMA-Factory", r"examples/(train|extras|meg|ascend|v1|kt\w*/train)\w*/.*\.ya?ml"),
    Source("ms-swift", "modelscope/ms-swift", r"examples/(train|models|megatron|yaml|ascend)/.*\.(sh|ya?ml)"),
    Source("torchtitan", "pytorch/torchtitan", r"torchtitan/.*\.toml", "v0.2.2"),
    Source("torchtitan", "pytorch/torchtitan", r"torchtitan/.*\.toml", "v0.1.0"),
    Source("torchtitan", "pytorch/torchtitan", r"train_configs/.*\.toml", "3e3909a0c1"),
    Source("MaxText", "AI-Hypercomputer/maxtext", r"(src/maxtext/configs|tests/end_to_end|scripts)/.*\.(sh|yml)"),
    Source("nanotron", "huggingface/nanotron", r"examples/.*\.yaml"),
    Source("TRL", "huggingface/trl", r"examples/cli_configs/.*\.yaml"),
    Source("TRL", "huggingface/alignment-handbook", r"(recipes/.*/(sft|dpo|orpo)|tests/fixtures)/.*\.yaml"),
    Source("litgpt", "Lightning-AI/litgpt", r"config_hub/.*\.yaml"),
    Source("nanoGPT", "karpathy/nanoGPT", r"config/train_.*\.py|config/finetune_.*\.py"),
)  # fmt: skip
TRAINS = re.compile(
    r"(trainers?|maxtext)[\w./]*[./](\w+_)?train\b|(swift|megatron) (sft|pt|rlhf)|model_name|base_model"
)
OTHER_SENSES = re.compile(
    r"vision|[-_/]vl[-_./]|\d-?vl|vlm|multimodal|mm[-_]|omni|pixtral|llava|audio|voxtral|flux|internvl|ovis|ocr|"
    r"smolvlm|tts|asr|moss.?v|minicpmv|keye|paddle|glm-?4\.?\d?v|/app/|mllama|gemma-?3n",
    re.IGNORECASE,
)


def main(arguments: list[str]) -> None:
    each = "--each" in arguments
    snapshots, *programs = (argument for argument in arguments if argument != "--each")
    counts: Counter[tuple[str, ...]] = Counter()
    for source in SOURCES:
        if programs and source.program not in programs:
            continue
        with tempfile.TemporaryDirectory() as folder:
            names = list(_extracted(source, Path(snapshots), Path(folder)))
            for name in names:
                outcome, key, more = outcome_of(name, Path(folder))
                revision = source.revision if source.revision != "HEAD" else _commit(source, Path(snapshots))
                counts[(source.program, source.repository, revision, outcome, key)] += 1
                if each:
                    print(f"{source.program}\t{name}\t{outcome}\t{key}\t{more}", flush=True)
    if not (each or programs):
        with TABLE.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(HEADER)
            writer.writerows((*row, str(count)) for row, count in sorted(counts.items()))
    for program in dict.fromkeys(row[0] for row in counts):
        own = Counter[str]()
        for row, count in counts.items():
            own[row[3]] += count * (row[0] == program)
        print(program, dict(own))


def _git(source: Source, snapshots: Path, *words: str, text: str = "") -> bytes:
    folder = snapshots / source.repository.replace("/", "+")
    folder = folder / "repo" if (folder / "repo").is_dir() else folder
    return subprocess.run(("git", "-C", folder, *words), input=text.encode(), capture_output=True, check=True).stdout


def _commit(source: Source, snapshots: Path) -> str:
    return _git(source, snapshots, "log", "-1", "--format=%h %cs", source.revision).decode().strip()


def _extracted(source: Source, snapshots: Path, folder: Path) -> Iterator[str]:
    """The paths of the files, after all files that they may name are written below a folder."""
    listing = _git(source, snapshots, "ls-tree", "-r", "--name-only", source.revision).decode().splitlines()
    for path in listing:
        if re.search(r"\.(ya?ml|toml|json|sh)$|^config/.*\.py$", path) and not path.startswith("."):
            try:
                content = _git(source, snapshots, "show", f"{source.revision}:{path}")
            except subprocess.CalledProcessError:  # which the snapshot lists and leaves out
                continue
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
    yield from (path for path in listing if re.fullmatch(source.paths, path) and (folder / path).is_file())


def outcome_of(name: str, folder: Path) -> tuple[str, str, str]:
    """What became of a file: its outcome, the key that decided it, and the sentence or the keys that were not read."""
    here = Path.cwd()
    os.chdir(folder)
    try:
        launch = values_of(name)
        text = Path(name).read_text(encoding="utf-8", errors="replace")
        if OTHER_SENSES.search(name) or OTHER_SENSES.search(_model_in(launch, text)):
            return "no text model", "", ""
        if launch is None and not TRAINS.search(text):
            return "no training", "", ""
        if launch is not None and (silent := silent_keys(launch)):
            return "silent", silent[0], " ".join(silent)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run = tl.load(name, search=False, device="h100-sxm")
            tl.plan(run)
        strangers = [note for note in run.origin.notes if note.startswith("not understood")]
        return "planned", "", " ".join(strangers)
    except InvalidInput as error:
        problem = error.problems[0]
        return "refused", problem.field, f"{problem.value}: {problem.rule}" + f" (+{len(error.problems) - 1})"
    except Exception:
        return "traceback", "", traceback.format_exc().splitlines()[-1]
    finally:
        os.chdir(here)


def _model_in(launch: Launched | None, text: str) -> str:
    if launch is None:
        return text if len(text) < 3000 else ""
    names = ("base_model", "model_name_or_path", "model", "model_name", "processor_type", "model_id_or_path")
    return " ".join(str(launch.values.get(name, "")) for name in names)


def silent_keys(launch: Launched) -> list[str]:
    """Keys without which nothing at all would be other, and which no list says to be without effect."""

    def answer(values: dict[str, Any]) -> object:
        try:
            run = from_values(values, program=launch.program)
        except InvalidInput as error:
            return str(error)
        return run.table, run.remarks, run.model

    if launch.refused or launch.program is None:
        return []
    table, whole = tables()[launch.program], answer(launch.values)
    if isinstance(whole, str):
        return []
    silent = re.compile("|".join(table["silent"]) or "(?!)")
    known = (table["fields"], table["words"], table["assumed"], table["refused"], table["unset"], table["opened"])
    dropped = []
    for key in map(str, launch.values):
        named = any(path == key or path.startswith(f"{key}.") for names in known for path in names)
        rest = {name: value for name, value in launch.values.items() if str(name) != key}
        if not (named or silent.fullmatch(key) or silent.fullmatch(f"{key}.x")) and answer(rest) == whole:
            dropped.append(key)
    return dropped


if __name__ == "__main__":
    main(sys.argv[1:])
