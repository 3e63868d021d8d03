"""Write docs/reference.md: the options of each question, from the signature of its function.

python tools/reference.py
"""

from __future__ import annotations

from pathlib import Path

import trainledger as tl
from trainledger.answers.question import question_of
from trainledger.cli.asking import flag_of
from trainledger.cli.command_line import COMMANDS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference.md"
HEAD = """# Questions and their options

Made from the signatures in `src/trainledger/answers/` by `python tools/reference.py`. A question about a run takes the
run and overrides first: `tl.breaks("run.toml", {"recipe.micro_batch": 2}, reach=8)` in Python,
`trainledger breaks run.toml --set recipe.micro_batch=2 --reach 8` on the command line; numbers may be text everywhere
(`"20%"`, `"15T"`). Every verb has `--full`, `--json` and, where it has charts, `--plot FILE`.
"""


def page() -> str:
    """The page, a table for each question."""
    parts = [HEAD]
    for name, row in COMMANDS.items():
        if not isinstance(row, str):
            continue
        question = question_of(getattr(tl, name))
        parts.append(f"\n## {name}\n\n{question.summary[0].upper()}{question.summary[1:]}.\n")
        parts.append("\n| Python | command line | meaning | default |\n|---|---|---|---|\n")
        for option in question.options.values():
            choices = f": {', '.join(option.choices)}" if option.choices else ""
            default = option.default_text or ("off" if option.default is False else option.written) or "none"
            default = "on" if option.default is True else default
            parts.append(f"| `{option.name}` | `{flag_of(option)}` | {option.help}{choices} | {default} |\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
