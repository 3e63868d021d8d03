"""The tool that counts how example files of trainers are read, and the table that it wrote."""

import csv
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from trainledger.spec.convert.trainers.files import Launched

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tools"))
import trainer_files  # noqa: E402

FILES = {
    "planned": {"base_model": "gpt2", "sequence_len": 512, "micro_batch_size": 2, "wandb_project": "p"},
    "refused": {"base_model": "gpt2", "sequence_len": 512, "qat": {"weight_dtype": "int8"}},
    "no text model": {"base_model": "llava-hf/llava-1.5-7b-hf", "sequence_len": 512},
}


@pytest.mark.parametrize("outcome", FILES)
def test_a_file_is_counted_by_what_becomes_of_it(outcome: str, tmp_path: Path) -> None:
    (tmp_path / "run.yml").write_text(yaml.safe_dump(FILES[outcome]))
    told = trainer_files.outcome_of("run.yml", tmp_path)
    assert told[:2] == (outcome, "qat" if outcome == "refused" else "")


def test_a_key_that_is_dropped_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Launched(FILES["planned"] | {"made_up": 3, "lora_r": None}, "axolotl")
    assert trainer_files.silent_keys(launch) == []  # the sentence of what was not understood names it
    monkeypatch.setattr("trainledger.spec.convert.trainers.reading.Reading._stranger", lambda *_: None)
    assert trainer_files.silent_keys(launch) == ["made_up"]


def test_nine_of_ten_files_are_planned_or_refused_by_their_key() -> None:
    with trainer_files.TABLE.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    counts: Counter[tuple[str, str]] = Counter()
    for row in rows:
        named = row["outcome"] == "planned" or (row["outcome"] == "refused" and bool(row["deciding key"]))
        kind = "other" if row["outcome"].startswith("no ") else "named" if named else row["outcome"]
        counts[row["program"], kind] += int(row["files"])
    programs = {source.program for source in trainer_files.SOURCES}
    assert programs == {row["program"] for row in rows}
    assert not any(counts[program, bad] for program in programs for bad in ("traceback", "silent"))
    for program in programs:
        assert counts[program, "named"] >= 0.9 * (counts[program, "named"] + counts[program, "refused"]) > 0
