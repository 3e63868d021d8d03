"""Write docs/reference.md: the options of each question, from the signature of its function.

python tools/reference.py
"""

from __future__ import annotations

from pathlib import Path

from trainledger.cli.arguments import flag_of
from trainledger.cli.command_line import COMMANDS, question_named

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference.md"
HEAD = """# Questions and their options

Made by `python tools/reference.py`. A question about a run takes it and overrides first: in Python
`tl.breaks("run.toml", {"recipe.micro_batch": 2}, reach=8)`, else `trainledger breaks run.toml --set ... --reach 8`;
numbers may be text (`"20%"`). `trainledger VERB --help` has the options of verbs that trace, train and measure.
"""


def page() -> str:
    """The page, a table for each question."""
    parts, of = [HEAD], ""
    for name, (group, _, module) in COMMANDS.items():
        options = question_named(name).options if module.startswith("answers.") else {}
        if options and group != of:
            of = group
            parts.append(
                f"\n## {group}\n\n| verb | Python | command line | meaning | default |\n|---|---|---|---|---|\n"
            )
        for at, option in enumerate(options.values()):
            choices = f": {', '.join(option.choices)}" if option.choices else ""
            default = option.default_text or ("off" if option.default is False else option.written) or "none"
            default = "on" if option.default is True else default
            verb = "" if at else f"**{name}**"
            parts.append(f"| {verb} | `{option.name}` | `{flag_of(option)}` | {option.help}{choices} | {default} |\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
