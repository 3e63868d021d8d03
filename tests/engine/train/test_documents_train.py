"""Runs whose attention stops at documents: real text, a metered step, what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rank_runs import StopAfter
from tiny_run import CountingFeed, tiny_run

from trainledger.answers.closed_loop import run_closed_loop
from trainledger.answers.pages.record import read_run
from trainledger.engine.train.engine import train
from trainledger.engine.train.records import read_lines
from trainledger.engine.train.stop import Interrupted
from trainledger.spec.layout import Layout
from trainledger.spec.problem import InvalidInput
from trainledger.spec.rules.run import run_problems
from trainledger.spec.run import DataSpec, Run
from trainledger.spec.runfile import digest, parse, resolved


def on_text(directory: Path, **recipe: object) -> Run:
    """Two short kinds of documents, of which the first token says all that follows."""
    path = directory / "text.jsonl"
    path.write_text("".join(f'{{"text": "{"ab" if at % 3 else "yz"}{"c" * (at % 5)}{at}"}}\n' for at in range(3000)))
    data = DataSpec(path=(str(path),), cache=str(directory / "cache"), validation_fraction=0.1)
    fields = {"steps": 40, "global_batch": 8, "checkpoints.every": 20, "evaluation.every": 20, **recipe}
    return replace(tiny_run({"vocab_size": 257}, **fields), data=data)


def test_a_run_on_text_learns_and_its_books_are_equal(tmp_path: Path) -> None:
    run = on_text(tmp_path, documents="masked")
    run_closed_loop(run, tmp_path / "run")
    evaluations = [
        each["validation_loss"] for each in read_lines(tmp_path / "run" / "metrics.jsonl") if "validation_loss" in each
    ]
    assert evaluations[-1] < evaluations[0] - 0.05
    record = read_run(tmp_path / "run")
    assert record.forecast is not None
    assert record.measured is not None
    assert record.measured.kept_nbytes == record.forecast.kept_nbytes
    assert record.measured.kept_nbytes
    assert record.measured.flops == record.forecast.flops


def test_a_run_that_was_stopped_ends_with_the_same_bits(tmp_path: Path) -> None:
    run = on_text(tmp_path, documents="masked")
    whole = train(run, tmp_path / "whole")
    with pytest.raises(Interrupted):
        train(run, tmp_path / "parts", observers=[StopAfter(13)])
    assert train(run, tmp_path / "parts", resume=True).loss == whole.loss
    files = [tmp_path / each / "checkpoints/step-00000040/model.safetensors" for each in ("whole", "parts")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_data_that_does_not_say_where_documents_end_is_refused(tmp_path: Path) -> None:
    class Endless(CountingFeed):
        end_id = None

    with pytest.raises(InvalidInput, match=r"recipe\.documents = 'masked': needs data that says which token ends"):
        train(tiny_run(documents="masked"), tmp_path, open_feed=Endless)


def test_joined_documents_are_the_run_that_they_always_were() -> None:
    run = tiny_run()
    assert "documents" not in resolved(run)["recipe"]
    assert digest(tiny_run(documents="masked")) != digest(run)


@pytest.mark.parametrize(
    ("model", "recipe", "layout", "named"),
    [
        ({}, {}, {"context": 2}, "layout.context"),
        ({}, {}, {"pipeline": 2}, "layout.pipeline"),
        ({"n_mtp_layers": 1}, {}, {}, "model.n_mtp_layers"),
        ({}, {"attention": "flash", "precision": "bf16-mixed"}, {}, "recipe.attention"),
    ],
)
def test_where_it_does_not_go_yet_it_is_refused_with_what_works(
    model: dict[str, object], recipe: dict[str, object], layout: dict[str, int], named: str
) -> None:
    run = replace(tiny_run(model, documents="masked", **recipe), layout=Layout(**layout))
    run = replace(run, cluster=replace(run.cluster, count=run.layout.devices))
    (problem,) = run_problems(run)
    assert problem.field == named
    assert not list(run_problems(parse(resolved(run), {named: problem.nearest, "cluster.count": 1})))
