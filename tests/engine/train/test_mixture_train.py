"""Runs on several sources: stopped and resumed with equal bits, other proportions refused, losses of each source."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rank_runs import StopAfter
from tiny_run import tiny_run

from trainledger.cli import main
from trainledger.engine.train.engine import train
from trainledger.engine.train.records import read_lines
from trainledger.engine.train.stop import Interrupted
from trainledger.spec.problem import InvalidInput
from trainledger.spec.run import DataSpec, MixtureSource, Run
from trainledger.spec.runfile import to_toml

WEIGHTS = "checkpoints/step-00000014/model.safetensors"


def mixed_run(directory: Path, letters: float = 0.75) -> Run:
    """Letters that are easily learned, and digits of primes that are not."""
    easy, hard = directory / "easy.txt", directory / "hard.txt"
    easy.write_text("".join(f"{'abcdefgh' * 12} {at}\n\n" for at in range(300)))
    hard.write_text("".join(f"{7919 ** (9 + at % 20) % 10**90}\n\n" for at in range(400)))
    mixture = (
        ("digits", MixtureSource(path=(str(hard),), weight=1 - letters)),
        ("letters", MixtureSource(path=(str(easy),), weight=letters)),
    )
    data = DataSpec(mixture=mixture, cache=str(directory / "cache"), validation_fraction=0.3)
    run = tiny_run({"vocab_size": 257}, steps=14, **{"evaluation.every": 7, "checkpoints.every": 7})
    return replace(run, data=data)


def test_a_run_that_was_stopped_ends_with_the_same_bits(tmp_path: Path) -> None:
    run, said = mixed_run(tmp_path), list[str]()
    whole = train(run, tmp_path / "whole", say=said.append)
    (epochs,) = [each for each in said if each.startswith("Epochs that the run takes")]
    assert re.search(r"digits [\d.]+ \(25\.0 %\), letters [\d.]+ \(75\.0 %\)\.", epochs)
    for after in (3, 10):
        with pytest.raises(Interrupted):
            train(run, tmp_path / "parts", resume=after > 3, observers=[StopAfter(after)])
    assert train(run, tmp_path / "parts", resume=True).loss == whole.loss
    assert (tmp_path / "parts" / WEIGHTS).read_bytes() == (tmp_path / "whole" / WEIGHTS).read_bytes()


def test_the_loss_is_told_by_source_and_as_they_are_mixed(tmp_path: Path) -> None:
    train(mixed_run(tmp_path), tmp_path / "run")
    evaluations = [each for each in read_lines(tmp_path / "run" / "metrics.jsonl") if "validation_loss" in each]
    assert [each["step"] for each in evaluations] == [7, 14]
    for each in evaluations:
        by_source = each["by_source"]
        assert list(by_source) == ["digits", "letters"]
        assert by_source["digits"] != by_source["letters"]
        mixed = 0.25 * by_source["digits"] + 0.75 * by_source["letters"]
        assert each["validation_loss"] == pytest.approx(mixed, rel=1e-12)


def test_other_proportions_are_another_run(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        train(mixed_run(tmp_path), tmp_path / "run", observers=[StopAfter(3)])
    with pytest.raises(
        InvalidInput, match=r"data\.mixture\.letters\.weight = 0\.5: is not what the run was begun with"
    ):
        train(mixed_run(tmp_path, letters=0.5), tmp_path / "run", resume=True)
    # Nor is other text of a source the data that it was begun with.
    changed = mixed_run(tmp_path)
    with (tmp_path / "hard.txt").open("a") as file:
        file.write("9" * 3000)
    with pytest.raises(InvalidInput, match=r"data\.mixture = .*: was begun on other text"):
        train(changed, tmp_path / "run", resume=True)


def test_the_verbs_say_the_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = mixed_run(tmp_path)
    train(run, tmp_path / "run")
    file = tmp_path / "run.toml"
    file.write_text(to_toml(run))
    capsys.readouterr()

    assert main(["data", str(file), "--verify", "--show"]) == 0
    told = capsys.readouterr().out
    assert "digits, 25.0 % of the sequences: 1 file of" in told
    assert re.search(r"letters train +\d+ ", told)
    assert "every file has its recorded SHA-256" in told
    assert main(["data", str(file), "--json"]) == 0
    sources = json.loads(capsys.readouterr().out)["sources"]
    assert {name: each["share"] for name, each in sources.items()} == {"digits": 0.25, "letters": 0.75}
    taken = {name: each["epochs"] * each["splits"]["train"]["sequences"] for name, each in sources.items()}
    assert sum(taken.values()) == pytest.approx(14 * 4)

    assert main(["plan", str(file), "--full"]) == 0
    assert "Tokens of each source: digits 224 (25.0 %), letters 672 (75.0 %)" in capsys.readouterr().out

    assert main(["evaluate", str(tmp_path / "run"), "--json", "--documents", "3"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [each["place"] for each in told["documents"]] == [
        f"{name} document {at}" for name in ("digits", "letters") for at in range(3)
    ]
    nats = {name: each["nats_per_token"] * each["tokens"] for name, each in told["sources"].items()}
    assert sum(nats.values()) == pytest.approx(told["nats_per_token"] * told["tokens"])
    assert main(["evaluate", str(tmp_path / "run"), "--documents", "3"]) == 0
    assert re.search(r"digits +3 +[\d,]+ ", capsys.readouterr().out)
