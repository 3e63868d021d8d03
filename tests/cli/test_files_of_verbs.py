"""Whatever stands where a verb expects a file ends in a sentence and exit code 2 at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainledger.cli.command_line import main
from trainledger.spec.durable import content_of, opened

RUN = """
model = {name = "t", vocab_size = 257, d_model = 16, n_layers = 1, max_seq_len = 16, attention.n_heads = 2,
         feed_forward.d_ff = 32}
recipe = {seq_len = 16, global_batch = 2, steps = 3}
""".replace(",\n        ", ",")
VERBS = [
    "plan @.toml", "plan @.json", "plan @.yaml", "plan @.sh", "plan good.toml --set model.config=@.json",
    "compare good.toml @.toml", "explain memory @.toml", "layouts @.toml", "fit @.toml", "inference @.json",
    "init new.toml --from @.sh", "data @.toml", "data good.toml --set data.path=@.jsonl",
    "data good.toml --set data.path=good.jsonl --set data.tokenizer=@.json", "train @.toml", "sample @.bin",
    "export @.bin out", "import @.bin out", "trace --hf @.json --inputs 1x8", "reconcile @.bin",
    "reconcile good.toml --profile @.json", "check --lock @.lock", "measure step @.toml",
]  # fmt: skip
NESTED = {"toml": "a=" + "[" * 100_000, "lock": "a=" + "[" * 100_000, "sh": "$((" * 50_000}
KINDS = ("directory", "device", "empty", "binary", "deep")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.toml").write_text(RUN, encoding="utf-8")
    (tmp_path / "good.jsonl").write_text('{"text": "a word"}\n' * 9, encoding="utf-8")
    return tmp_path


def made(kind: str, verb: str) -> list[str]:
    """The words of a verb, whose file has been made in this kind."""
    suffix = verb.partition("@.")[2].split()[0]
    path = Path(f"{kind}.{suffix}")
    if kind == "directory":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "fifo":
        if not path.exists():
            os.mkfifo(path)
    else:
        text = NESTED.get(suffix, "[" * 100_000).encode()
        path.write_bytes({"empty": b"", "binary": bytes(range(256)) * 40}.get(kind, text))
    return verb.replace("@", kind).split()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verb", VERBS)
def test_what_is_no_such_file_is_a_sentence(
    verb: str, kind: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(made(kind, verb))
    except SystemExit as error:
        code = error.code  # type: ignore[assignment]
    said = capsys.readouterr().err
    assert code == 2
    assert said.strip()
    assert "Traceback" not in said


def test_a_pipe_is_not_waited_for(folder: Path) -> None:
    """In a process of its own, as one that waits cannot be stopped otherwise; each verb reads by the same function."""
    program = "import sys\nfrom trainledger.cli.command_line import main\n" + "\n".join(
        f"try: print(main({made('fifo', verb)!r}))\nexcept SystemExit as error: print(error.code)" for verb in VERBS
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert set(done.stdout.split()) == {"2"}, done.stderr


def test_only_regular_files_of_a_bounded_size_are_read(tmp_path: Path) -> None:
    for path, sentence in ((tmp_path, "Is a directory"), (Path("/dev/zero"), "it is not a regular file but a device")):
        with pytest.raises(OSError, match=sentence):
            opened(path)
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(2**40)
    with pytest.raises(OSError, match="it has more than 1,000 bytes"):
        content_of(tmp_path / "sparse", 1000)
