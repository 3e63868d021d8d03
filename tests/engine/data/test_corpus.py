"""Which files make a corpus, in which order, and what identifies it."""

from __future__ import annotations

import glob
import json
import os
import re
import sysconfig
from pathlib import Path

import pytest

from trainledger.engine.data.corpus import _matches, find_corpus, identify, plan_shards
from trainledger.spec.problem import InvalidInput
from trainledger.spec.run import STANDARD_LIBRARY


def names(paths: tuple[str, ...], cache: Path) -> list[str]:
    return [os.path.basename(each.path) for each in find_corpus(paths, cache).sources]


def test_the_standard_library_is_sources_without_tests(tmp_path: Path) -> None:
    corpus = find_corpus((STANDARD_LIBRARY,), tmp_path)
    root = Path(sysconfig.get_path("stdlib"))
    relative = [Path(each.path).relative_to(root) for each in corpus.sources]
    assert corpus.nbytes > 5_000_000
    assert {Path("argparse.py"), Path("json/decoder.py")} <= set(relative)
    assert all(each.suffix == ".py" for each in relative)
    assert not {"site-packages", "test", "__pycache__"} & {part for each in relative for part in each.parts}


def test_the_order_is_that_of_the_names(tmp_path: Path) -> None:
    directory = tmp_path / "corpus"
    for name in ("b/2.txt", "a/9.md", "b/10.txt", ".hidden/x.txt", "top.txt", ".also"):
        file = directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    assert names((str(directory),), tmp_path) == ["top.txt", "9.md", "10.txt", "2.txt"]
    assert names((str(directory / "b" / "*.txt"),), tmp_path) == ["10.txt", "2.txt"]
    assert names((str(directory / "**" / "*.md"), str(directory)), tmp_path)[0] == "9.md"


def test_a_file_named_twice_is_taken_once(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("a")
    assert names((str(file), str(tmp_path / "*.txt")), tmp_path / "cache") == ["a.txt"]


def test_the_cache_is_no_part_of_the_corpus(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "index.json").write_text("{}")
    assert names((str(tmp_path),), cache) == ["a.txt"]


def test_the_identity_is_the_text_and_not_the_place(tmp_path: Path) -> None:
    for directory in ("here", "there"):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "a.txt").write_text("same text")
    cache = tmp_path / "cache"
    cache.mkdir()
    here, there = (identify(find_corpus((str(tmp_path / each),), cache), cache) for each in ("here", "there"))
    assert here.sha256 == there.sha256
    (tmp_path / "there" / "a.txt").write_text("sane text")
    assert identify(find_corpus((str(tmp_path / "there"),), cache), cache).sha256 != here.sha256


def test_hashes_are_remembered_only_for_what_has_not_changed_lately(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one")
    cache = tmp_path / "cache"
    cache.mkdir()
    corpus = find_corpus((str(file),), cache)
    identify(corpus, cache)
    assert not (cache / "corpus-hashes.json").exists()
    os.utime(file, (1, 1))
    first = identify(corpus, cache).sha256
    assert (cache / "corpus-hashes.json").exists()
    file.write_text("two")
    assert identify(corpus, cache).sha256 != first
    # The memory is used: with size and time put back, the change is not seen.
    os.utime(file, (1, 1))
    assert identify(corpus, cache).sha256 == first


def test_a_damaged_memory_of_hashes_is_no_obstacle(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one")
    (tmp_path / "corpus-hashes.json").write_text("{half")
    assert len(identify(find_corpus((str(file),), tmp_path), tmp_path).sources[0].sha256) == 64


@pytest.mark.parametrize(
    "pattern", ["**", "**/*.txt", "a/**", "a/**/c/*.txt", "*/**/*.txt", "[a]/**/[bc]/**/*.txt", "a/**b"]
)
@pytest.mark.parametrize("absolute", [True, False])
def test_a_pattern_matches_what_glob_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str, absolute: bool
) -> None:
    for each in ("a/b/c/1.txt", "a/2.txt", "a/.hidden/3.txt", "a/c/4.txt", "d/5.txt", "a/c/.6.txt", "7.txt"):
        (tmp_path / each).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / each).write_text("text")
    monkeypatch.chdir(tmp_path)
    asked = str(tmp_path / pattern) if absolute else pattern
    wanted = {os.path.normpath(each) for each in glob.glob(asked, recursive=True)}
    assert {os.path.normpath(each) for each in _matches(asked)} == wanted


def test_links_in_a_circle_are_searched_once(tmp_path: Path) -> None:
    """Twelve directories that each link to all others: glob would follow some 10 ** 8 ways."""
    folders = [tmp_path / "text" / str(number) for number in range(12)]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "a.txt").write_text(f"text of {folder.name}")
    for one in folders:
        for other in folders:
            (one / f"to-{other.name}").symlink_to(other)
    corpus = find_corpus((str(tmp_path / "text" / "**" / "*.txt"),), tmp_path / "cache")
    assert len(corpus.sources) == 12


@pytest.mark.parametrize("content", ["[]", "{}", "3", "[" * 100_000, '{"hashes": 1, "sha256": "a"}'])
def test_a_memory_of_hashes_of_another_shape_is_no_obstacle(tmp_path: Path, content: str) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one")
    (tmp_path / "corpus-hashes.json").write_text(content)
    assert len(identify(find_corpus((str(file),), tmp_path), tmp_path).sources[0].sha256) == 64


def test_a_hash_that_was_changed_in_the_memory_is_not_believed(tmp_path: Path) -> None:
    file, memory = tmp_path / "a.txt", tmp_path / "corpus-hashes.json"
    file.write_text("one")
    os.utime(file, (1, 1))
    corpus = find_corpus((str(file),), tmp_path)
    true = identify(corpus, tmp_path).sha256
    answer = json.loads(memory.read_text())
    ((key, digest),) = answer["hashes"].items()
    memory.write_text(json.dumps(answer | {"hashes": {key: digest[::-1]}}))
    assert identify(corpus, tmp_path).sha256 == true


def test_the_plan_covers_every_byte_once(tmp_path: Path) -> None:
    (tmp_path / "large.txt").write_text("text\n\n" * 900_000)
    (tmp_path / "records.jsonl").write_text('{"text": "a"}\n' * 300_000)
    for number in range(30):
        (tmp_path / f"small{number}.txt").write_text("x" * number * 1000)
    plan = plan_shards(find_corpus((str(tmp_path),), tmp_path / "cache"))
    covered: dict[str, int] = {}
    for segment in (segment for shard in plan for segment in shard):
        assert segment.start == covered.get(segment.path, 0)
        covered[segment.path] = segment.stop
    assert covered == {str(each): each.stat().st_size for each in tmp_path.iterdir() if each.stat().st_size}
    assert len(plan) > 5


def test_what_cannot_be_found_is_reported_all_at_once(tmp_path: Path) -> None:
    (tmp_path / "shakespeare.txt").write_text("text")
    (tmp_path / "books.txt.gz").write_bytes(b"")
    paths = ("shakespaere.txt", "*.md", "books.txt.gz")
    with pytest.raises(InvalidInput) as caught:
        find_corpus(tuple(str(tmp_path / each) for each in paths), tmp_path / "cache")
    missing, no_match, compressed = map(str, caught.value.problems)
    assert missing.endswith(f"no such file; nearest that works: {tmp_path / 'shakespeare.txt'}")
    assert re.search(r"no file matches this pattern; nearest that works: python-standard-library$", no_match)
    assert "of compressed files only .jsonl.gz is read: decompress it" in compressed


def test_a_corpus_without_a_byte_is_reported(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(InvalidInput, match="holds no text: every file is empty or binary"):
        find_corpus((str(tmp_path),), tmp_path / "cache")
    empty = tmp_path / "directory"
    empty.mkdir()
    with pytest.raises(InvalidInput, match="is a directory without files"):
        find_corpus((str(empty),), tmp_path / "cache")
