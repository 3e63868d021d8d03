import os
import signal
import subprocess
import sys
import time

import pytest

from trainledger.observe.measure import local_ranks
from trainledger.observe.measure.local_ranks import Place, on_ranks, threads_of_each

pytestmark = pytest.mark.process


@pytest.fixture
def rooms(tmp_path, monkeypatch):
    """Where modules of ranks are looked for: they are written by the tests."""
    monkeypatch.setattr(
        local_ranks, "_command", lambda module: [sys.executable, "-c", f"from {module} import main; main()"]
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))

    def write(name, body):
        lines = "\n".join(f"    {each}" for each in body)
        (tmp_path / f"{name}.py").write_text(
            "import os, signal, time\n"
            "from trainledger.observe.measure.local_ranks import serve\n\n"
            f"def work(place, job, tell):\n{lines}\n\n"
            "def main():\n    serve(work)\n"
        )
        return name

    return write


def test_each_rank_answers_and_the_first_says_how_far_it_is(rooms):
    name = rooms("squares", ["tell(0.5, 'half')", "print('noise')", "return place.rank ** 2 + job['more']"])
    told = []
    assert on_ranks(name, 3, {"more": 1}, lambda share, what: told.append((share, what))) == [1, 2, 5]
    assert told == [(0.5, "half")]


def test_a_rank_that_raises_ends_all_with_its_sentence(rooms):
    name = rooms("torn", ["if place.rank == 1: raise ValueError('no such thing')", "time.sleep(100)"])
    began = time.monotonic()
    with pytest.raises(ChildProcessError, match="rank 1 of 2 failed: ValueError: no such thing"):
        on_ranks(name, 2, {}, lambda share, what: None)
    assert time.monotonic() - began < 60


def test_a_rank_that_is_killed_is_named_with_the_signal(rooms):
    name = rooms("killed", ["if place.rank == 0: os.kill(os.getpid(), signal.SIGKILL)", "time.sleep(100)"])
    with pytest.raises(ChildProcessError, match="rank 0 of 2 was ended by SIGKILL"):
        on_ranks(name, 2, {}, lambda share, what: None)


def test_ranks_end_with_the_process_that_started_them(rooms, tmp_path):
    name = rooms("waiting", ["open(job['file'] + str(place.rank), 'w').write(str(os.getpid()))", "time.sleep(100)"])
    code = (
        "import sys\nfrom trainledger.observe.measure import local_ranks\n"
        "local_ranks._command = lambda module: [sys.executable, '-c', f'from {module} import main; main()']\n"
        f"local_ranks.on_ranks({name!r}, 2, {{'file': {str(tmp_path / 'pid')!r}}}, lambda share, what: None)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    files = [tmp_path / f"pid{rank}" for rank in range(2)]
    deadline = time.monotonic() + 60
    while not all(each.exists() and each.read_text() for each in files) and time.monotonic() < deadline:
        time.sleep(0.05)
    pids = [int(each.read_text()) for each in files]
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    while any(map(_runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_runs, pids))


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_threads_are_shared_out_unless_they_are_said(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_of_each(2) == 3
    monkeypatch.delenv("OMP_NUM_THREADS")
    cores = len(os.sched_getaffinity(0))
    assert threads_of_each(1) == cores
    assert threads_of_each(1000) == 1
    assert Place(1, 2, "here").rank == 1
