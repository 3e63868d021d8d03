"""Formats of corpora: read as what they are or refused by name; ends of documents; text that is lost or changed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from trainledger.engine.data import documents
from trainledger.engine.data import prepare as preparing
from trainledger.engine.data.corpus import Corpus, Source, find_corpus, plan_shards
from trainledger.engine.data.prepare import prepare
from trainledger.engine.data.store import TokenStore
from trainledger.engine.data.tokenizer import json_tokenizer, read_tokenizer
from trainledger.spec.problem import InvalidInput
from trainledger.spec.run import DataSpec

SpecOf = Callable[..., DataSpec]
RECORDS = [{"text": f"record {number} says so"} for number in range(40)]


def made(data: DataSpec) -> TokenStore:
    return prepare(data, vocab_size=None, progress=False, workers=0)


def text_of(store: TokenStore) -> str:
    return store.tokenizer().decode(store.train.read(0, store.train.tokens).tolist())


def refusal(data: DataSpec) -> str:
    with pytest.raises(InvalidInput) as caught:
        made(data)
    return str(caught.value)


@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_array_is_its_records(tmp_path: Path, spec_of: SpecOf, indent: int | None) -> None:
    array, lines = tmp_path / "array.json", tmp_path / "lines.json"
    array.write_text(json.dumps(RECORDS, indent=indent), encoding="utf-8")
    lines.write_text("\n".join(map(json.dumps, RECORDS)), encoding="utf-8")
    one, two = made(spec_of(array)), made(spec_of(lines))
    assert text_of(one) == text_of(two)
    assert "record 3 says so" in text_of(one)
    assert "{" not in text_of(one)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ([{"instruction": "add", "output": "2"}] * 3, "record 1 has no field 'text'; its fields are 'instruction'"),
        ([{"text": "a"}, "b"], "record 2 is a JSON null"),
        ([{"text": 1}], "its field 'text' is a JSON number"),
        ('[{"text": "a"}, {"text"', "is not a JSON array"),
        ("[{" + '"a":[' * 100_000, "is not a JSON array"),
    ],
)
def test_other_arrays_are_refused(tmp_path: Path, spec_of: SpecOf, content: object, sentence: str) -> None:
    path = tmp_path / "array.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    assert sentence in refusal(spec_of(path))


@pytest.mark.parametrize("suffix", ["csv", "TSV", "npy", "pkl", "xlsx", "zip", "tar", "pdf", "sqlite"])
@pytest.mark.parametrize("inside", [False, True])
def test_what_is_no_text_is_refused_by_name(tmp_path: Path, spec_of: SpecOf, suffix: str, inside: bool) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    path = folder / f"data.{suffix}"
    path.write_text("id,text\n1,words\n" * 50, encoding="utf-8")
    found = refusal(spec_of(folder if inside else path))
    assert f"(.{suffix.lower()}), whose bytes are no text to train on; nearest that works: write its texts" in found


def test_a_json_object_in_a_directory_is_text(tmp_path: Path, spec_of: SpecOf) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "package.json").write_text('{\n "name": "x"\n}\n', encoding="utf-8")
    (tmp_path / "corpus" / "all.json").write_text(json.dumps(RECORDS), encoding="utf-8")
    corpus = find_corpus((str(tmp_path / "corpus"),), tmp_path / "cache")
    assert [each.kind for each in corpus.sources] == ["json", "text"]


def test_lines_without_an_end_are_refused(tmp_path: Path, spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "LONGEST_LINE_NBYTES", 2**21)
    path = tmp_path / "sparse.jsonl"
    with open(path, "wb") as file:
        file.truncate(2**24)
    assert "has a line of more than 2097152 bytes (it begins at byte 0)" in refusal(spec_of(path))


def test_two_columns_of_one_name_are_refused(tmp_path: Path, spec_of: SpecOf) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = [arrow.array(["a", "b"]), arrow.array(["c", "d"])]
    parquet.write_table(arrow.table(columns, names=["text", "text"]), tmp_path / "two.parquet")
    assert "has 2 columns 'text', and which is the text is not known" in refusal(spec_of(tmp_path / "two.parquet"))


def definition(special: list[str], plain: tuple[str, ...] = (), unknown: str | None = None) -> str:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: place for place, word in enumerate([*special, *plain])}
    model = models.WordLevel(words, unk_token=unknown) if unknown else models.BPE(vocab=words, merges=[])
    engine = Tokenizer(model)
    engine.pre_tokenizer = pre_tokenizers.Whitespace()
    engine.add_special_tokens(special)
    return str(engine.to_str())


@pytest.mark.parametrize(
    ("special", "proposed"),
    [
        (["<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"], 1),
        (["[CLS]", "[PAD]", "[SEP]", "[UNK]"], 2),
        (["<start_of_turn>", "<end_of_turn>", "<bos>"], 1),
        (["<|begin_of_text|>", "<|eot_id|>"], 1),
        (["<|im_start|>", "<|im_end|>"], 1),
        (["<s>", "<pad>", "<|weekend|>"], None),
    ],
)
def test_the_proposed_end_is_a_token_whose_name_says_end(special: list[str], proposed: int | None) -> None:
    with pytest.raises(InvalidInput) as caught:
        json_tokenizer("t", definition(special))
    (problem,) = caught.value.problems
    assert problem.nearest == (None if proposed is None else special[proposed])
    if proposed is not None:
        assert json_tokenizer("t", definition(special), special[proposed]).end_id == proposed


def test_a_special_end_comes_before_a_word_that_looks_like_one() -> None:
    assert json_tokenizer("t", definition(["<pad>", "<eos>"], ("</s>",))).end_id == 1
    assert json_tokenizer("t", definition(["<pad>"], ("</s>",))).end_id == 1


def test_the_end_that_the_config_beside_names_is_proposed(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(definition(["[SEP]", "<stop>"]), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<stop>"}}', encoding="utf-8")
    with pytest.raises(InvalidInput, match="nearest that works: <stop>"):
        read_tokenizer(str(tmp_path), None)


def test_a_corpus_of_unknown_tokens_is_refused(
    tmp_path: Path, spec_of: SpecOf, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.json").write_text(definition(["<eos>", "<unk>"], ("known",), "<unk>"), encoding="utf-8")
    for name, text in (("lost", "strange words"), ("part", "known " * 20 + "strange")):
        known = 40 if name == "part" else 0
        lines = (json.dumps({"text": f"{text} {place} {'known ' * known}"}) for place in range(20))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    data = {"tokenizer": str(tmp_path / "t.json"), "validation_fraction": 0.3}
    assert "of this corpus as its token for unknown text; at most 50% works" in refusal(
        spec_of(tmp_path / "lost.jsonl", **data | {"validation_fraction": 0.5})
    )
    made(spec_of(tmp_path / "part.jsonl", **data))
    assert "% of the tokens are unknown text." in capsys.readouterr().err
    (tmp_path / "t.json").write_text(definition(["<eos>"], ("known",), "<eos>"), encoding="utf-8")  # one for both
    (tmp_path / "whole.jsonl").write_text("".join(f'{{"text": "known{" known" * place}"}}\n' for place in range(20)))
    made(spec_of(tmp_path / "whole.jsonl", **data))
    assert capsys.readouterr().err == ""


def test_a_file_that_is_rewritten_while_it_is_prepared_is_refused(
    tmp_path: Path, spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size and its modification time kept, after it was hashed and before it was read; then prepared anew."""
    path = tmp_path / "text.jsonl"
    path.write_text("\n".join(map(json.dumps, RECORDS)), encoding="utf-8")
    times, run = os.stat(path), preparing.run_jobs

    def rewritten(*args: object) -> object:
        path.write_text(path.read_text(encoding="utf-8").replace("says", "SAYS"), encoding="utf-8")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        return run(*args)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(preparing, "run_jobs", rewritten)
        assert f"{path} was changed while it was prepared" in refusal(spec_of(path))
    store = made(spec_of(path))
    assert "SAYS" in text_of(store)


def test_many_files_are_dealt_out_by_one_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their sizes were added up again for each file, which took 12 s for 16,000."""
    asked = []
    monkeypatch.setattr(Corpus, "nbytes", property(lambda corpus: asked.append(1) or 3000))
    shards = plan_shards(Corpus(tuple(Source(f"{number}.txt", "text", "", 1) for number in range(3000))))
    assert sum(map(len, shards)) == 3000
    assert len(asked) == 1
