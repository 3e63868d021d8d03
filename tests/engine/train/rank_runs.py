"""One rank that trains some runs one after another; `train_on_ranks` starts as many as a test wants.

Arguments: a JSON file with a list of runs: directory, layout, fields of the tiny run, resume, whether each rank meters
a step, the step after which rank 0 is told to stop (SIGTERM), the seconds of a collective, the largest file that a rank
may write, the indices of batches with a poisoned token, the batch that one data rank cannot read, fields of the run's
own data, and a text to train on (what each rank has seen of it is written beside it). The exit code of each is written
beside it by each rank.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from tiny_run import CountingFeed, Poisoned, poisoned, tiny_run, unreadable

from trainledger.engine.train.observer import Observer, StepRecord
from trainledger.spec.cluster import Cluster
from trainledger.spec.layout import Layout
from trainledger.spec.parts import with_fields
from trainledger.spec.run import Run

SECONDS = 500


def run_of(described: dict[str, Any]) -> Run:
    """The run that a test describes."""
    fields = dict(described.get("fields", {}))
    model, teacher = fields.pop("model", None) or {}, fields.pop("teacher", None)
    run = tiny_run(model, **fields)
    run = replace(run, teacher=None if teacher is None else with_fields(run.model, teacher))
    layout = Layout(**described.get("layout", {}))
    run = replace(run, data=with_fields(run.data, described.get("data", {})))
    return replace(run, layout=layout, cluster=Cluster(count=layout.devices))


def train_on_ranks(directory: Path, runs: Sequence[dict[str, Any]], ranks: int) -> list[list[Any]]:
    """Train runs one after another in so many processes; the exit codes by run and rank."""
    asked, processes = start_ranks(directory, runs, ranks)
    said = [each.communicate(timeout=SECONDS)[1] for each in processes]
    assert not any(each.returncode for each in processes), "\n".join(
        [str([each.returncode for each in processes]), *said]
    )
    by_rank = [json.loads(asked.with_suffix(f".{rank}").read_text()) for rank in range(ranks)]
    return [list(each) for each in zip(*by_rank, strict=True)]


def start_ranks(
    directory: Path, runs: Sequence[dict[str, Any]], ranks: int
) -> tuple[Path, list[subprocess.Popen[str]]]:
    """Start the processes that train runs one after another: the file that tells them, and the processes by rank."""
    from ports import free_ports  # a rank itself, which runs this file, finds no other tests

    asked = directory / f"runs-{len(list(directory.glob('runs-*.json')))}.json"
    # A port for each run: a rank that is early for the next one must not meet the store of the last.
    asked.write_text(
        json.dumps([each | {"port": port} for each, port in zip(runs, free_ports(len(runs)), strict=True)])
    )
    there = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__)), str(asked)], text=True, stderr=subprocess.PIPE,
            env=os.environ | there | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]  # fmt: skip
    return asked, processes


def reading(text: Path) -> Any:
    """The engine's own feed of a text, which writes the hash of each row of each step that this rank trains on."""
    from trainledger.engine.data.loader import Loader, open_loader
    from trainledger.spec.run import DataSpec

    def opened(run: Run, device: Any, **more: Any) -> Loader:
        data = DataSpec(path=(str(text),), cache=str(text.parent / "cache"))
        loader = open_loader(replace(run, data=data), device, **more)
        batches = loader.batches

        def noted(first_step: int) -> Iterator[Any]:
            for step, micro_batches in enumerate(batches(first_step), first_step):
                rows = [row.numpy() for _, targets_BT in micro_batches for row in targets_BT]
                line = {"step": step, "rows": [sha256(each).hexdigest() for each in rows]}
                with open(text.with_suffix(f".{run.layout.devices}.{os.environ['RANK']}"), "a") as seen:
                    seen.write(json.dumps(line) + "\n")
                yield micro_batches

        loader.batches = noted  # type: ignore[method-assign]
        return loader

    return opened


class StopAfter(Observer):
    """Asks this process to stop, as a scheduler would."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_end(self, record: StepRecord) -> None:
        if record.step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def _train(described: dict[str, Any]) -> int:
    from torch.distributed.tensor import debug

    from trainledger.answers.closed_loop import RankMeasuring
    from trainledger.engine.data.loader import open_loader
    from trainledger.engine.train.engine import train
    from trainledger.engine.train.stop import Stopped
    from trainledger.observe.measure.meter import StepMeter
    from trainledger.spec.problem import InvalidInput

    os.environ["MASTER_PORT"] = str(described["port"])
    first = os.environ["RANK"] == "0"
    largest = described.get("largest_file", {}).get(os.environ["RANK"])
    if largest is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, resource.RLIM_INFINITY))
    watching: list[Observer] = [StopAfter(described.get("stop_after"))] if first else []
    bad, text = described.get("bad"), described.get("text")
    feed: Any = CountingFeed if text is None else reading(Path(text))
    if "data" in described:
        feed = open_loader
    if bad is not None:
        watching.append(Poisoned())
        feed = poisoned(bad)
    if "unreadable" in described:
        feed = unreadable(*described["unreadable"])
    if described.get("metered"):
        meter = StepMeter()
        watching += [RankMeasuring(meter), meter]
    try:
        train(
            run_of(described), Path(described["dir"]), open_feed=feed, observers=watching,
            resume=described.get("resume", False), seconds_in_a_collective=described.get("seconds", 600.0),
        )  # fmt: skip
    except Stopped as end:
        print(end, file=sys.stderr)
        return end.exit_code
    except InvalidInput as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        clear: Any = debug._clear_sharding_prop_cache
        clear()  # what it knows of meshes names process groups that are gone
    return 0


if __name__ == "__main__":
    asked = Path(sys.argv[1])
    codes = [_train(each) for each in json.loads(asked.read_text())]
    asked.with_suffix(f".{os.environ['RANK']}").write_text(json.dumps(codes))
