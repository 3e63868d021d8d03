"""Odd values of every flag of every verb: an answer or a sentence, and a proposal that is not refused again."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from trainledger.cli import main
from trainledger.cli.arguments import flag_of
from trainledger.cli.command_line import COMMANDS, question_named

pytestmark = pytest.mark.sweep
NEEDED = {
    "napkin": ["--params", "1B", "--tokens", "20x", "--mfu", "0.5", "--device", "h100-sxm", "--count", "8"],
    "explain": ["memory", "gpt2"], "compare": ["gpt2", "gpt2"], "dtype": ["1"], "tensor": ["float32[2]"],
    "einsum": ["ij->ji", "2,3"], "catalog": ["links"], "optimal": ["--flops", "1e20"], "lock": ["run.toml"],
    "check": ["run.toml"], "fit": ["gpt2", "--device=l4"], "rl": ["gpt2", "--device=h100-sxm"],
    "sample": ["none"], "evaluate": ["none"], "quantize": ["none", "--bits", "8", "--to", "out"],
    "export": ["none", "out"], "import": ["none", "out"], "runs": [], "reconcile": ["none"], "annotate": ["none.py"],
}  # fmt: skip
# Those that would train, measure or serve with what is right: their words are only read.
ONLY_READ = {"serve", "demo", "train", "data", "init", "trace", *(verb for verb in COMMANDS if verb[:8] == "measure ")}
SHORT = ("--", "1e999", "é\u202e", "1,2")
LONG = ("", "nan", "-1", "0", "x" * 5000, "[", "9" * 400, "inf", "-inf", "0x10", "true", "-")
# Refused for other words then.
AFTER_OTHERS = {
    ("rl", "--longest"), ("rl", "--utilization"), ("explain", "--stage"), ("lock", "--rank"), ("dtype", "--largest"),
}  # fmt: skip
RUN = '[model]\npreset = "gpt2"\n[recipe]\nseq_len = 64\nglobal_batch = 2\nsteps = 2\n'
CASES = [
    pytest.param(verb, values, marks=[] if values is SHORT else [pytest.mark.agreement], id=f"{verb} {values[0]!r}")
    for verb in COMMANDS
    for values in (SHORT, LONG)
]


def said(words: list[str]) -> tuple[int | str | None, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code: int | str | None = main(words)
        except SystemExit as end:
            code = end.code
    return code, err.getvalue()


@pytest.mark.parametrize(("verb", "values"), CASES)
def test_an_odd_value_is_answered_or_refused_and_what_is_proposed_works(
    verb: str, values: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(RUN)
    options = [each for each in question_named(verb).options.values() if not each.word and not each.is_switch]
    flags = dict.fromkeys([*map(flag_of, options), "--set", "--device", "--count", "--plot"])
    for flag in flags:
        for value in values:
            only_read = ["--no-such-flag"] if verb in ONLY_READ else NEEDED.get(verb, ["gpt2"])
            words = [*verb.split(), *only_read, f"{flag}={value}"]
            code, errors = said(words)
            assert code in (0, 1, 2), (words, errors)
            proposed = re.fullmatch(rf"(?s){flag} = .*; nearest that works: ([^\n;]+)\n", errors)
            if code == 2 and proposed and verb not in ONLY_READ and (verb, flag) not in AFTER_OTHERS:
                again, second = said([*words[:-1], f"{flag}={proposed[1]}"])
                assert again != 2 or "nearest that works" not in second, (words, proposed[1], second)
