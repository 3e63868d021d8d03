"""Preparing: the same bytes however it is done, whole after any kill, and a sentence for what goes wrong."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from trainledger.engine.data.documents import held_out
from trainledger.engine.data.prepare import prepare
from trainledger.engine.data.shard import DTYPES
from trainledger.engine.data.store import TokenStore, open_store
from trainledger.engine.data.workers import run_jobs
from trainledger.spec.problem import InvalidInput
from trainledger.spec.run import DataSpec

SpecOf = Callable[..., DataSpec]

PROGRAM = """
import json, sys
from trainledger.engine.data.prepare import prepare
from trainledger.spec.run import DataSpec
fields = json.loads(sys.argv[1])
prepare(DataSpec(**fields | {"path": tuple(fields["path"])}), vocab_size=600, progress=False, workers=2)
"""


def start(data: DataSpec) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", PROGRAM, json.dumps(asdict(data))]
    return subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True)


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found


def content(store: TokenStore) -> dict[str, bytes]:
    """Every file of a store but the lock, and the index without the places of the corpus files."""
    files = {each.name: each.read_bytes() for each in sorted(store.directory.iterdir()) if each.name != "lock"}
    assert not [name for name in files if name.endswith(".tmp")]
    return files


def documents_of(store: TokenStore) -> dict[str, list[str]]:
    """The documents of each split, decoded, cut where the index says."""
    texts: dict[str, list[str]] = {"train": [], "validation": []}
    tokenizer = store.tokenizer()
    for split in (store.train, store.validation):
        start = 0
        for shard in range(len(store.index["shards"])):
            begin = 0
            for end in split.document_ends(shard).tolist():
                *tokens, last = split.read(start + begin, end - begin).tolist()
                assert last == store.end_id
                texts[split.name].append(tokenizer.decode(tokens))
                begin = end
            start += begin
        assert start == split.tokens
    return texts


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_a_store_holds_every_document_in_its_split(library: Path, spec_of: SpecOf, tokenizer: str) -> None:
    store = prepare(spec_of(library, tokenizer=tokenizer), vocab_size=600, progress=False)
    texts = documents_of(store)
    everything = "".join(each.read_text() for each in sorted(library.iterdir()))
    assert sum(map(len, texts["train"] + texts["validation"])) == len(everything)
    assert all(each in everything for each in texts["train"] + texts["validation"])
    for name, held in (("train", False), ("validation", True)):
        split = getattr(store, name)
        assert all(held_out(each.encode(), 0.1) is held for each in texts[name])
        assert split.documents == len(texts[name]) > 2
        assert split.text_nbytes == sum(len(each.encode()) for each in texts[name])
    store.verify()


def test_processes_write_what_one_process_writes(library: Path, spec_of: SpecOf, tmp_path: Path) -> None:
    data = spec_of(library, tokenizer="bpe")
    alone = prepare(data, vocab_size=600, progress=False, workers=0)
    together = prepare(replace(data, cache=str(tmp_path / "other")), vocab_size=600, progress=False, workers=3)
    assert len(alone.index["shards"]) > 1
    assert content(alone) == content(together)


def test_preparing_again_touches_nothing(library: Path, spec_of: SpecOf) -> None:
    data = spec_of(library)
    before = prepare(data, vocab_size=None, progress=False)
    times = {each: each.stat().st_mtime_ns for each in before.directory.iterdir()}
    assert prepare(data, vocab_size=None, progress=False).directory == before.directory
    assert {each: each.stat().st_mtime_ns for each in before.directory.iterdir()} == times


def test_a_changed_corpus_or_tokenizer_or_split_is_another_store(library: Path, spec_of: SpecOf) -> None:
    data = spec_of(library)
    stores = [prepare(data, vocab_size=600, progress=False)]
    stores.append(prepare(replace(data, tokenizer="bpe"), vocab_size=600, progress=False))
    stores.append(prepare(replace(data, tokenizer="bpe", vocab_size=500), vocab_size=600, progress=False))
    stores.append(prepare(replace(data, validation_fraction=0.2), vocab_size=600, progress=False))
    with (library / "abc.py").open("a") as file:
        file.write("# changed\n")
    stores.append(prepare(data, vocab_size=600, progress=False))
    assert len({each.fingerprint for each in stores}) == len({each.directory for each in stores}) == 5
    assert [each.vocab_size for each in stores] == [257, 600, 500, 257, 257]


def test_equal_records_make_equal_tokens_whatever_the_file(tmp_path: Path, spec_of: SpecOf) -> None:
    lines = "".join(json.dumps({"text": f"document {n} of some"}) + "\n" for n in range(200)).encode()
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    plain, packed = (
        prepare(spec_of(tmp_path / each), vocab_size=None, progress=False) for each in ("a.jsonl", "a.jsonl.gz")
    )
    assert plain.directory != packed.directory
    for name in ("train", "validation"):
        one, other = getattr(plain, name), getattr(packed, name)
        assert one.read(0, one.tokens).tolist() == other.read(0, other.tokens).tolist()


@pytest.mark.process
def test_killed_at_any_moment_and_resumed_it_writes_the_same_bytes(
    library: Path, spec_of: SpecOf, tmp_path: Path
) -> None:
    data = spec_of(library, tokenizer="bpe")
    wanted = content(prepare(replace(data, cache=str(tmp_path / "whole")), vocab_size=600, progress=False))
    kept = []
    for milestone in ("*.tmp", "00000.json", "*.json"):
        cache = tmp_path / f"killed at {milestone.replace('*', 'any')}"
        killed = replace(data, cache=str(cache))
        process = start(killed)
        deadline = time.monotonic() + 60
        while not list(cache.glob(f"tokens-*/{milestone}")) and time.monotonic() < deadline:
            assert process.poll() is None, process.stderr and process.stderr.read()
            time.sleep(0.001)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        finished = {each: each.stat().st_mtime_ns for each in cache.glob("tokens-*/*.u16")}
        kept.append(len(finished))
        resumed = prepare(killed, vocab_size=600, progress=False)
        while list(cache.glob("tokens-*/*.tmp")) and time.monotonic() < deadline:
            time.sleep(0.01)  # a worker of the killed process is still giving up
        assert content(resumed) == wanted
        records = {each.name.partition(".")[0] for each in cache.glob("tokens-*/0*.json")}
        assert len(records) == len(resumed.index["shards"])
    assert max(kept) > 0


@pytest.mark.process
def test_ctrl_c_ends_every_process_and_costs_nothing_finished(library: Path, spec_of: SpecOf) -> None:
    data = spec_of(library, tokenizer="bpe")
    process = start(data)
    deadline = time.monotonic() + 60
    workers: list[int] = []
    while not (workers and list(Path(data.cache).glob("tokens-*/*.tmp"))) and time.monotonic() < deadline:
        time.sleep(0.001)
        workers = children(process.pid)
    assert workers
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does
    _, complaint = process.communicate(timeout=30)
    assert complaint.rstrip().endswith(b"KeyboardInterrupt")
    assert complaint.count(b"Traceback") == 1  # the caller's; its workers say nothing
    for each in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(each, 0)
    prepare(data, vocab_size=600, progress=False).verify()


def test_finished_shards_are_kept(library: Path, spec_of: SpecOf) -> None:
    data = spec_of(library)
    store = prepare(data, vocab_size=None, progress=False)
    wanted = content(store)
    times = {each.name: each.stat().st_mtime_ns for each in store.directory.glob("0000*")}
    (store.directory / "index.json").unlink()
    (store.directory / "00001.json").unlink()
    (store.directory / "00001.train.u16.123.tmp").write_bytes(b"left behind")
    again = prepare(data, vocab_size=None, progress=False)
    assert content(again) == wanted
    remade = {each.name for each in store.directory.glob("0000*") if each.stat().st_mtime_ns != times[each.name]}
    assert remade
    assert all(name.startswith("00001.") for name in remade)


def test_two_at_once_make_one_store(library: Path, spec_of: SpecOf, tmp_path: Path) -> None:
    data = spec_of(library, tokenizer="bpe")
    both = [start(data) for _ in range(2)]
    assert [each.communicate(timeout=120)[1] for each in both] == [b"", b""]
    assert [each.returncode for each in both] == [0, 0]
    prepare(data, vocab_size=600, progress=False).verify()


def test_workers_import_neither_torch_nor_the_callers_script(library: Path, spec_of: SpecOf, tmp_path: Path) -> None:
    # A script without a __main__ guard, as people write them; the worker's modules are looked at from inside.
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, json\n"
        "print('script runs')\n"
        "from trainledger.engine.data.prepare import prepare\n"
        "from trainledger.spec.run import DataSpec\n"
        f"data = DataSpec(path=({str(library)!r},), cache={str(tmp_path / 'cache')!r}, validation_fraction=0.1)\n"
        "prepare(data, vocab_size=None, progress=False, workers=2)\n"
        "assert 'torch' not in sys.modules and 'rich' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert done.stdout == "script runs\n"
    program = "import sys, trainledger.engine.data.workers; assert not {'torch', 'rich', 'pyarrow'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_worker_that_dies_is_reported(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\nread job\nkill -9 $$\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    with pytest.raises(InvalidInput) as caught:
        run_jobs([{"do": "write shard", "shard": 3}], 1, lambda nbytes: None)
    rule = "data: shard 3: a process that prepared it was ended by signal 9; what is finished is kept for the next try"
    assert str(caught.value) == rule


def test_an_error_in_a_worker_is_the_error_of_the_caller(tmp_path: Path, spec_of: SpecOf) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "fine"}\n' * 1000 + "oops\n")
    messages = set()
    for workers in (0, 2):
        with pytest.raises(InvalidInput) as caught:
            prepare(spec_of(path), vocab_size=None, progress=False, workers=workers)
        messages.add(str(caught.value))
    assert len(messages) == 1
    assert f"{path}:1001 is not JSON" in messages.pop()
    assert not list((tmp_path / "cache").glob("tokens-*/*.tmp"))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_full_disk_is_reported(library: Path, spec_of: SpecOf, tmp_path: Path, workers: int) -> None:
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000));"
    limited += "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    checked = PROGRAM.replace("prepare(D", "try:\n    prepare(D").replace("workers=2", f"workers={workers}")
    checked += "except OSError as error:\n    sys.exit(f'{error.filename} {error.strerror}')\n"
    command = [sys.executable, "-c", limited + checked, json.dumps(asdict(spec_of(library)))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert re.fullmatch(r".*tokens-\w+.* File too large\n", done.stderr), done.stderr
    prepare(spec_of(library), vocab_size=None, progress=False).verify()


def test_a_full_disk_under_the_cache_is_code_4(library: Path, tmp_path: Path) -> None:
    """As under a run's directory: the command line's own code for it."""
    (tmp_path / "run.toml").write_text(
        f'[model]\npreset = "teach-1m"\n[recipe]\nseq_len = 16\nglobal_batch = 2\nsteps = 1\n'
        f'[data]\npath = ["{library}"]\ncache = "{tmp_path / "cache"}"\n'
    )
    limit = "import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000));"
    run = "os.execv(sys.executable, [sys.executable, '-m', 'trainledger', 'data', sys.argv[1]])"
    command = [sys.executable, "-c", limit + run, str(tmp_path / "run.toml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 4, done.stderr
    rule = r"trainledger data: the disk is full: .*tokens-\w+.* cannot be written \(File too large\)\n"
    assert re.search(rule, done.stderr), done.stderr


def test_an_unwritable_cache_is_reported(library: Path, spec_of: SpecOf, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InvalidInput) as caught:
        prepare(spec_of(library, cache=str(tmp_path / "file" / "cache")), vocab_size=None, progress=False)
    assert str(caught.value).startswith(f"data.cache: {tmp_path / 'file' / 'cache'} cannot be written: Not a directory")


def test_a_corpus_too_small_to_hold_out_is_reported(tmp_path: Path, spec_of: SpecOf) -> None:
    (tmp_path / "one.jsonl").write_text('{"text": "only"}\n')
    with pytest.raises(InvalidInput, match="holds a single document, so that none can be held out"):
        prepare(spec_of(tmp_path / "one.jsonl"), vocab_size=None, progress=False)
    (tmp_path / "one.txt").write_text("a line of text\n" * 100)
    with pytest.raises(InvalidInput, match=r"two files or records, or a text file of many lines over 2 KiB"):
        prepare(spec_of(tmp_path / "one.txt"), vocab_size=None, progress=False)
    (tmp_path / "one.txt").write_text("a line of text\n" * 200)
    assert prepare(spec_of(tmp_path / "one.txt", validation_fraction=0.5), vocab_size=None, progress=False).train.tokens
    (tmp_path / "none.jsonl").write_text('{"text": ""}\n{"text": null}\n')
    with pytest.raises(InvalidInput, match="holds no text: every document in it is empty"):
        prepare(spec_of(tmp_path / "none.jsonl"), vocab_size=None, progress=False)


def test_the_fraction_that_is_named_holds_something_out(tmp_path: Path, spec_of: SpecOf) -> None:
    path = tmp_path / "few.jsonl"
    path.write_text("".join(json.dumps({"text": f"text {n}"}) + "\n" for n in range(9)))
    data = spec_of(path, validation_fraction=1e-6)
    with pytest.raises(InvalidInput, match="holds out none of the 9 documents") as caught:
        prepare(data, vocab_size=None, progress=False)
    nearest = caught.value.problems[0].nearest
    assert isinstance(nearest, float)
    store = prepare(replace(data, validation_fraction=nearest), vocab_size=None, progress=False)
    assert store.validation.documents == 1


@pytest.mark.parametrize(("given", "field"), [(None, "model.vocab_size"), (256, "model.vocab_size")])
def test_a_bpe_needs_a_vocabulary(library: Path, spec_of: SpecOf, given: int | None, field: str) -> None:
    with pytest.raises(InvalidInput, match="needs a vocabulary of at least 257") as caught:
        prepare(spec_of(library, tokenizer="bpe"), vocab_size=given, progress=False)
    assert (caught.value.problems[0].field, caught.value.problems[0].nearest) == (field, 257)


def test_the_unigram_entropy_is_that_of_the_counts(library: Path, spec_of: SpecOf) -> None:
    store = prepare(spec_of(library), vocab_size=None, progress=False)
    train, validation = (split.read(0, split.tokens) for split in (store.train, store.validation))
    counts = np.bincount(train, minlength=257) + 1
    wanted = -np.log(counts / counts.sum())[validation].mean()
    assert store.unigram_entropy_nats == pytest.approx(wanted, rel=1e-12)
    assert 2.5 < wanted < 3.5


def test_a_large_vocabulary_takes_four_bytes(tmp_path: Path, spec_of: SpecOf) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    engine = Tokenizer(models.WordLevel({"<eos>": 0, "low": 1, "high": 70_000}, unk_token="<eos>"))
    engine.pre_tokenizer = pre_tokenizers.Whitespace()
    engine.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.jsonl").write_text('{"text": "low high"}\n{"text": "high"}\n' * 50 + '{"text": "low low"}\n')
    data = spec_of(tmp_path / "a.jsonl", tokenizer=str(tmp_path / "tokenizer.json"), validation_fraction=0.5)
    store = prepare(data, vocab_size=None, progress=False)
    assert (store.vocab_size, store.index["dtype"], DTYPES[store.index["dtype"]]) == (70_001, "uint32", "u32")
    assert int(store.train.read(0, store.train.tokens).max()) == 70_000
    assert open_store(store.directory).fingerprint == store.fingerprint
