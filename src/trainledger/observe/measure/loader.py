"""The data loader by its workers: text made tokens by processes, batches read in this thread, ahead, and by ranks."""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trainledger.engine.data.loader import Loader
from trainledger.engine.data.mixture import Mixture, mixed_batch, open_mixture
from trainledger.engine.data.prepare import prepare
from trainledger.engine.data.workers import default_workers
from trainledger.observe.measure.hardware import watched
from trainledger.observe.measure.local_ranks import Job, Place, on_ranks, serve
from trainledger.observe.measure.rates import LoaderTimes
from trainledger.observe.measure.rounds import Tell
from trainledger.spec.block import Dense, MultiHead
from trainledger.spec.calibration import LoaderTime
from trainledger.spec.model import ModelSpec
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import DataSpec, Run
from trainledger.spec.runfile import read, to_toml
from trainledger.spec.units import MIB

TEXT_NBYTES, DOCUMENT_NBYTES = 8 * MIB, 4000
BYTES_VOCABULARY = 257  # every byte and an end of document
TOKENIZE, READ, AHEAD, RANKS = "tokenize text", "read", "read ahead by a thread", "read by ranks at once"
SECONDS, SAMPLES = 0.4, 3


def measure_loader(
    run: Run | None = None,
    *,
    text_nbytes: int = TEXT_NBYTES,
    seconds: float = SECONDS,
    workers: Sequence[int] | None = None,
    ranks: Sequence[int] | None = None,
    tell: Tell = lambda share, name: None,
) -> LoaderTimes:
    """Tokens per second of the loader, of a run's own data or of text that is made here.

    ``workers`` are processes that tokenize (0: none but this one), ``ranks`` processes that each read their rows of
    every batch; absent, as many as there are cores, at most four.
    """
    most = default_workers()
    notes, times, data = [], list[LoaderTime](), "the run's data"
    with tempfile.TemporaryDirectory(prefix="trainledger-loader-") as made:
        folder = Path(made)
        if run is None:
            data = f"{text_nbytes / MIB:.0f} MiB of made text as bytes"
            run = made_run(folder, text_nbytes)
            for processes in range(most + 1) if workers is None else workers:
                tell(0.0, f"tokenizing with {processes} workers")
                times.append(_tokenized(run, folder / f"cache-{processes}", processes))
        else:
            notes.append("tokenizing is not timed: the tokens of a run are made once")
        tell(0.3, "reading")
        recipe = run.recipe
        mixture = open_mixture(run.data, vocab_size=run.model.vocab_size, progress=False)
        mixture.check_vocabulary(run.model.vocab_size)
        times += [_read(run, mixture, seconds), read_ahead(run, mixture, seconds)]
        (folder / "run.toml").write_text(to_toml(run), encoding="utf-8")
        for number in range(2, most + 1) if ranks is None else ranks:
            if recipe.global_batch % number:
                notes.append(f"{recipe.global_batch} sequences cannot be divided evenly among {number} ranks")
                continue
            tell(0.5, f"reading on {number} ranks")
            taken = on_ranks("loader", number, {"run": str(folder / "run.toml"), "seconds": seconds}, tell)
            tokens, longest = sum(each[0] for each in taken), max(each[1] for each in taken)
            times.append(LoaderTime(what=RANKS, workers=number, tokens=tokens, seconds=longest))
    sizes = {"seq_len": recipe.seq_len, "global_batch": recipe.global_batch}
    return LoaderTimes(data=data, **sizes, times=tuple(times), notes=tuple(notes))


def loader_tokens_per_second(text_nbytes: int = 2 * MIB, seconds: float = 0.2) -> float:
    """Tokens per second that the loader reads ahead, from text that is made for it."""
    with tempfile.TemporaryDirectory(prefix="trainledger-loader-") as folder:
        run = made_run(Path(folder), text_nbytes)
        mixture = open_mixture(run.data, vocab_size=BYTES_VOCABULARY, progress=False, workers=0)
        return read_ahead(run, mixture, seconds).tokens_per_second


def made_run(folder: Path, text_nbytes: int) -> Run:
    """A run over text that is written there: documents of random words."""
    chance = random.Random(0)
    words = ["".join(chance.choices("etaoinshrdlu", k=chance.randint(2, 9))) for _ in range(2000)]
    with open(folder / "text.jsonl", "w", encoding="utf-8") as file:
        for _ in range(max(50, text_nbytes // DOCUMENT_NBYTES)):
            file.write(json.dumps({"text": " ".join(chance.choices(words, k=DOCUMENT_NBYTES // 7))}) + "\n")
    sizes: dict[str, Any] = {"vocab_size": BYTES_VOCABULARY, "d_model": 8, "n_layers": 1, "max_seq_len": 1024}
    model = ModelSpec(**sizes, attention=MultiHead(n_heads=2), feed_forward=Dense(d_ff=16))
    data = DataSpec(path=(str(folder / "text.jsonl"),), cache=str(folder / "cache"), validation_fraction=0.1)
    return Run(model=model, recipe=Recipe(seq_len=1024, global_batch=12, micro_batch=1, steps=1), data=data)


def main() -> None:
    """Be one of the ranks that read."""
    serve(_read_rank)


def _tokenized(run: Run, cache: Path, workers: int) -> LoaderTime:
    """The text of a run made tokens anew."""
    start = time.perf_counter()
    store = prepare(replace(run.data, cache=str(cache)), vocab_size=None, progress=False, workers=workers)
    seconds = time.perf_counter() - start
    tokens = store.train.tokens + store.validation.tokens
    return LoaderTime(what=TOKENIZE, workers=workers, tokens=tokens, seconds=seconds)


def _read(run: Run, mixture: Mixture, seconds: float) -> LoaderTime:
    """Batches read by whoever needs them."""
    recipe = run.recipe
    sizes = {"seed": recipe.seed, "global_batch": recipe.global_batch, "seq_len": recipe.seq_len}
    batches = (mixed_batch(mixture, step=step, **sizes)[:, :-1].size for step in count())
    return LoaderTime(what=READ, workers=1, **_median(batches, seconds))


def read_ahead(run: Run, mixture: Mixture, seconds: float) -> LoaderTime:
    """Batches as the training loop gets them, taken as fast as they come."""
    with _tokens(run, mixture) as tokens:
        return LoaderTime(what=AHEAD, workers=1, **_median(tokens, seconds))


@contextmanager
def _tokens(run: Run, mixture: Mixture, rank: int = 0, ranks: int = 1) -> Iterator[Iterator[int]]:
    """The tokens of one batch after another of a rank's loader."""
    recipe = run.recipe
    sizes: dict[str, Any] = {"seed": recipe.seed, "seq_len": recipe.seq_len, "global_batch": recipe.global_batch}
    with Loader(mixture, **sizes, micro_batch=recipe.global_batch // ranks, rank=rank, ranks=ranks) as loader:
        yield (sum(inputs_BT.numel() for inputs_BT, _ in batch) for batch in loader.batches(0))


def _median(batches: Iterator[int], seconds: float) -> dict[str, Any]:
    """Tokens and seconds of the median undisturbed stretch of batches; the first batch warms up."""
    next(batches)
    samples = []
    for _ in range(SAMPLES):
        with watched(2) as sample:  # the thread that reads and the one that takes
            tokens = _within(batches, seconds / SAMPLES)
        samples.append((sample.seconds / tokens, tokens, sample))
    quiet = [each for each in samples if not each[2].disturbed] or [min(samples, key=lambda each: each[0])]
    middle = statistics.median_low([each[0] for each in quiet])
    _, tokens, sample = next(each for each in quiet if each[0] == middle)
    return {"tokens": tokens, "seconds": sample.seconds}


def _within(batches: Iterator[int], seconds: float) -> int:
    """Tokens of the batches that come within some seconds, one at the least."""
    tokens, deadline = 0, time.perf_counter() + seconds
    while not tokens or time.perf_counter() < deadline:
        tokens += next(batches)
    return tokens


def _read_rank(place: Place, job: Job, tell: Tell) -> tuple[int, float]:
    run = read(job["run"])
    mixture = open_mixture(run.data, vocab_size=run.model.vocab_size, progress=False, workers=0)
    with _tokens(run, mixture, place.rank, place.ranks) as tokens:
        next(tokens)
        store: Any = dist.FileStore(place.meeting, place.ranks)  # type: ignore[attr-defined]  # it is there
        store.add("here", 1)
        while store.add("here", 0) < place.ranks:
            time.sleep(0.001)
        start = time.perf_counter()
        return _within(tokens, job["seconds"]), time.perf_counter() - start
