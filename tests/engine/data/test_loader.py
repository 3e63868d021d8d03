"""The loader: the sampler's batches on a device, whatever the micro-batch, the start or the thread."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from resealed import reseal

from models import sizes
from trainledger.engine.data.loader import STEPS_AHEAD, Loader, open_loader
from trainledger.engine.data.mixture import alone, mixed_batch, train_batch, validation_batch
from trainledger.engine.data.prepare import prepare
from trainledger.engine.data.store import TokenStore, open_store
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields
from trainledger.spec.problem import InvalidInput
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import DataSpec, Run

SIZES = {"seed": 5, "seq_len": 32, "global_batch": 12}


@pytest.fixture
def data(tmp_path: Path) -> DataSpec:
    (tmp_path / "text.txt").write_text("".join(f"Paragraph number {n}.\n\n" for n in range(6000)))
    return DataSpec(path=(str(tmp_path / "text.txt"),), cache=str(tmp_path / "cache"), validation_fraction=0.1)


@pytest.fixture
def store(data: DataSpec) -> TokenStore:
    return prepare(data, vocab_size=None, progress=False)


def threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "trainledger data"]


def steps(loader: Loader, first: int, count: int) -> list[torch.Tensor]:
    """The inputs and targets of some steps, micro-batches joined."""
    found = []
    for _, batches in zip(range(count), loader.batches(first), strict=False):
        joined = [torch.cat(halves) for halves in zip(*batches, strict=True)]
        found.append(torch.cat([joined[0], joined[1][:, -1:]], dim=1))
    return found


@pytest.mark.parametrize("micro_batch", [1, 3, 4, 12])
def test_micro_batches_are_slices_of_the_global_batch(store: TokenStore, micro_batch: int) -> None:
    with Loader(alone(store), **SIZES, micro_batch=micro_batch) as loader:
        batches = next(loader.batches(4))
        assert len(batches) == 12 // micro_batch
        whole = train_batch(store, step=4, **SIZES)
        for number, (inputs_BT, targets_BT) in enumerate(batches):
            rows = whole[number * micro_batch : (number + 1) * micro_batch]
            for tensor, wanted in ((inputs_BT, rows[:, :-1]), (targets_BT, rows[:, 1:])):
                assert np.array_equal(tensor.numpy(), wanted)
                assert tensor.dtype == torch.int64
                assert tensor.is_contiguous()
                assert tensor.untyped_storage().nbytes() == tensor.nbytes
        storages = {each.untyped_storage().data_ptr() for pair in batches for each in pair}
        assert len(storages) == 2 * len(batches)


def test_the_start_does_not_matter(store: TokenStore) -> None:
    with Loader(alone(store), **SIZES, micro_batch=4) as loader:
        whole = steps(loader, 0, 9)
        for first in (1, 5, 8):
            assert all(torch.equal(a, b) for a, b in zip(steps(loader, first, 9 - first), whole[first:], strict=True))
        assert loader.seconds_waited > 0


def test_ranks_have_their_rows(store: TokenStore) -> None:
    whole = train_batch(store, step=2, **SIZES)
    parts = []
    for rank in range(3):
        with Loader(alone(store), **SIZES, micro_batch=2, rank=rank, ranks=3) as loader:
            parts += steps(loader, 2, 1)
    assert np.array_equal(torch.cat(parts).numpy(), whole)


def test_validation_is_the_same_each_time_and_ends(store: TokenStore) -> None:
    with Loader(alone(store), **SIZES, micro_batch=4, eval_sequences=10) as loader:
        once, again = ([torch.cat(each) for each in zip(*loader.validation(), strict=True)] for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
        wanted = validation_batch(store, first=0, count=10, seq_len=32)
        assert np.array_equal(once[0].numpy(), wanted[:, :-1])
        assert np.array_equal(once[1].numpy(), wanted[:, 1:])
    n = store.validation.sequences(32)
    with Loader(alone(store), **SIZES, micro_batch=6, eval_sequences=10 * n) as loader:
        assert sum(len(inputs_BT) for inputs_BT, _ in loader.validation()) == n


def test_it_reads_ahead_but_not_far(store: TokenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def counted(*arguments: object, step: int, **more: object) -> object:
        read.append(step)
        return mixed_batch(*arguments, step=step, **more)  # type: ignore[arg-type]

    monkeypatch.setattr("trainledger.engine.data.loader.mixed_batch", counted)
    with Loader(alone(store), **SIZES, micro_batch=4) as loader:
        batches = loader.batches(10)
        next(batches)
        deadline = time.monotonic() + 30
        while len(read) < 2 + STEPS_AHEAD and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.3)
        assert read == list(range(10, 12 + STEPS_AHEAD))


def test_an_error_of_the_thread_is_raised_in_the_loop(store: TokenStore) -> None:
    path = store.directory / "00000.train.u16"
    tokens = np.fromfile(path, dtype="<u2")
    tokens[:] = 999
    tokens.tofile(path)
    reseal(path)
    store = open_store(store.directory)
    with Loader(alone(store), **SIZES, micro_batch=4) as loader:
        with pytest.raises(InvalidInput, match=rf"{path} the token at byte \d+ is 999, outside the vocabulary of 257"):
            next(loader.batches(0))
        assert not threads()


def test_threads_end(store: TokenStore) -> None:
    loader = Loader(alone(store), **SIZES, micro_batch=4)
    batches = loader.batches(0)
    next(batches)
    assert len(threads()) == 1
    next(loader.batches(3))
    assert len(threads()) <= 1
    with pytest.raises(StopIteration):
        next(batches)
    loader.close()
    loader.close()
    assert not threads()


def test_a_forgotten_loader_ends_its_thread(store: TokenStore) -> None:
    def forget() -> None:
        next(Loader(alone(store), **SIZES, micro_batch=4).batches(0))

    forget()
    gc.collect()
    deadline = time.monotonic() + 30
    while threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not threads()


def test_a_program_that_forgets_to_close_ends(store: TokenStore) -> None:
    program = (
        "import sys; from pathlib import Path; from trainledger.engine.data.store import open_store\n"
        "from trainledger.engine.data.loader import Loader\n"
        "from trainledger.engine.data.mixture import alone, mixed_batch\n"
        "loader = Loader(alone(open_store(Path(sys.argv[1]))), seed=0, seq_len=32, global_batch=4, micro_batch=4)\n"
        "batches = loader.batches(0); next(batches); print('done')\n"
    )
    command = [sys.executable, "-c", program, str(store.directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_open_loader_checks_the_run(data: DataSpec) -> None:
    def run(vocab_size: int, seq_len: int) -> Run:
        model = from_fields(ModelSpec, sizes(V=vocab_size, D=8, L=1, H=1, F=8, T=10**9))
        return Run(model=model, recipe=Recipe(seq_len=seq_len, global_batch=4, micro_batch=2, steps=1), data=data)

    with open_loader(run(257, 16), "cpu", progress=False) as loader:
        assert [each.shape for each in next(loader.batches(0))[0]] == [(2, 16), (2, 16)]
        assert loader.unigram_entropy == loader.mixture.unigram_entropy_nats
    with pytest.raises(InvalidInput, match=r"model\.vocab_size = 256"):
        open_loader(run(256, 16), "cpu", progress=False)
    with pytest.raises(InvalidInput, match=r"recipe\.seq_len = 1000000"):
        open_loader(run(257, 1_000_000), "cpu", progress=False)


@pytest.mark.gpu
def test_batches_arrive_on_the_device_whole(store: TokenStore) -> None:
    with Loader(alone(store), **SIZES, micro_batch=4, device="cuda") as loader:
        for step, batches in zip(range(200), loader.batches(0), strict=False):
            inputs = torch.cat([inputs_BT for inputs_BT, _ in batches])
            assert inputs.is_cuda
            assert np.array_equal(inputs.cpu().numpy(), train_batch(store, step=step, **SIZES)[:, :-1])
