"""Programs for torchrun: a traced rank against real gloo processes, collective by collective and byte by byte."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rank_programs

from ports import free_ports
from trainledger.ledger.ledger import Ledger
from trainledger.trace.distributed import trace_rank

pytestmark = pytest.mark.process

REAL = Path(__file__).with_name("real_rank.py")
TWO = (
    "fsdp",
    "fsdp_in_proportion",
    "tensor",
    "ddp_accumulated",
    "pipeline_1f1b",
    "experts_functional",
    "experts_routed",
)
TWO_MORE = (
    "fsdp_bf16",
    "fsdp_adapters",
    "fsdp_from_meta",
    "tensor_sequence",
    "ddp",
    "ddp_unused",
    "pipeline_gpipe",
    "experts",
)
FOUR = ("fsdp", "hybrid", "fsdp_tensor", "tensor", "ddp", "pipeline_gpipe", "pipeline_1f1b", "experts")


def processes(names: tuple[str, ...], world: int, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What each rank held and sent, by program."""
    (port,) = free_ports(1)
    environment = {**os.environ, "PROGRAM_BACKEND": "gloo", "PROGRAM_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    outs = [folder / f"rank{rank}.json" for rank in range(world)]
    started = [
        subprocess.Popen(
            [sys.executable, str(REAL), ",".join(names), str(rank), str(world), str(port), str(out)], env=environment,
            stderr=subprocess.PIPE, text=True,
        )
        for rank, out in enumerate(outs)
    ]  # fmt: skip
    errors = [each.communicate(timeout=500)[1] for each in started]
    assert all(out.exists() for out in outs), "\n".join(errors)[-4000:]
    facts = [json.loads(out.read_text()) for out in outs]
    failed = [each[name]["error"] for each in facts for name in each if "error" in each[name]]
    assert not failed, failed[0]
    return {name: [each[name] for each in facts] for name in names}


def sent(ledger: Ledger) -> list[tuple[str, str, int, int]]:
    """The collectives in their order: phase, name, payload, ranks."""
    phases = {"backward": "backward", "recompute": "backward", "optimizer": "optimizer"}
    return [
        (phases.get(each.phase, "forward"), each.name, each.payload, each.ranks)
        for each in ledger
        if each.kind == "collective"
    ]


def check(name: str, ranks: list[dict[str, Any]]) -> None:
    for rank, facts in enumerate(ranks):
        ledger = trace_rank(getattr(rank_programs, name), world_size=len(ranks), rank=rank)
        assert not ledger.partial
        assert not ledger.uncounted
        assert sent(ledger) == [tuple(each) for each in facts["sent"]], (name, rank)
        # gloo's threads let go of what they sent when they like, some bytes late; never is a rank's own peak lower.
        late = max((payload for _, _, payload, _ in sent(ledger)), default=0)
        assert ledger.peak().nbytes <= facts["peak"], (name, rank)
        assert ledger.peak().nbytes >= facts["peak"] - max(late, 256), (name, rank)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return processes(TWO, 2, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("name", TWO)
def test_a_traced_rank_is_the_process(two: dict[str, list[dict[str, Any]]], name: str) -> None:
    check(name, two[name])


@pytest.mark.slow
def test_more_programs_of_two_processes(tmp_path: Path) -> None:
    for name, ranks in processes(TWO_MORE, 2, tmp_path).items():
        check(name, ranks)


@pytest.mark.slow
def test_programs_of_four_processes(tmp_path: Path) -> None:
    for name, ranks in processes(FOUR, 4, tmp_path).items():
        check(name, ranks)


def per_rank(collectives: list[Any]) -> list[tuple[Any, ...]]:
    """What a rank has or makes of each message: its own piece of what is gathered or scattered, all of a sum."""
    whole = ("all_reduce",)
    return [(phase, name, size if name in whole else size // ranks) for phase, name, size, ranks in collectives]


@pytest.mark.parametrize("name", ["fsdp_in_proportion", "tensor"])
def test_a_thousand_ranks_send_what_two_processes_send_of_the_same_pieces(
    two: dict[str, list[dict[str, Any]]], name: str
) -> None:
    ledger = trace_rank(getattr(rank_programs, name), world_size=1024, rank=700)
    assert {each.ranks for each in ledger if each.kind == "collective"} == {1024}
    assert per_rank(sent(ledger)) == per_rank(two[name][0]["sent"])


def test_what_only_data_tells_is_taken_to_be_even_and_said_to_be() -> None:
    ledger = trace_rank(rank_programs.experts_routed, world_size=16)
    sent_away = [each for each in ledger if each.name == "all_to_all"]
    assert [each.basis for each in sent_away] == ["exact", *["assumed"] * 4]
    assert {each.payload for each in sent_away[1:]} == {4 * 16 * 32 * 4}
    (note,) = ledger.notes
    assert "rank_programs.py" in note
    assert note.endswith("tokens are assumed to be routed evenly to all experts")
