"""Standard output and standard error that cannot be written never end a run."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from commanded import end, end_all, start, state_of, until_step, write

from trainledger.engine.remarks import Unheard


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    end_all()


REDIRECTED = {"a full disk": ">/dev/full 2>/dev/full", "closed": ">&- 2>&-", "a reader that is gone": "2>&1 | true"}


class Refusing(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def test_what_cannot_be_written_is_left_out_and_remembered() -> None:
    stream = Unheard(Refusing())
    print("a remark", file=stream, flush=True)  # type: ignore[arg-type]
    assert isinstance(stream.lost, BrokenPipeError)
    closed = io.StringIO()
    closed.close()
    gone = Unheard(closed)
    print("a remark", file=gone, flush=True)  # type: ignore[arg-type]
    assert not gone.isatty()
    assert isinstance(gone.lost, ValueError)
    heard = io.StringIO()
    print("a remark", file=Unheard(heard))  # type: ignore[arg-type]
    assert heard.getvalue() == "a remark\n"


@pytest.mark.process
@pytest.mark.parametrize("how", REDIRECTED)
def test_a_run_that_nobody_hears_ends_like_any_other(tmp_path: Path, how: str) -> None:
    write(tmp_path, steps=6, every=2)
    redirect = REDIRECTED[how]
    process = start(tmp_path, redirect=redirect)
    code, _, err = end(process)
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert state_of(run_dir)["state"] == "finished"
    assert (run_dir / "report.html").stat().st_size > 0
    assert code == 0, err
    assert "Traceback" not in err


@pytest.mark.process
def test_two_ranks_that_nobody_hears(tmp_path: Path) -> None:
    write(tmp_path, layout="shard = 2", ranks=2, steps=6, every=2)
    code, _, _ = end(start(tmp_path, ranks=2, redirect=">/dev/full 2>/dev/full"))
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert code == 0
    assert state_of(run_dir)["state"] == "finished"


@pytest.mark.process
def test_a_pipe_that_closes_while_the_run_speaks(tmp_path: Path) -> None:
    write(tmp_path, steps=200, every=100)
    process = start(tmp_path)
    until_step(tmp_path, 3, process)
    assert process.stderr is not None
    process.stderr.close()
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(timeout=300) == 0
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert state_of(run_dir)["step"] == 200
