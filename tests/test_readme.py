"""README and pages run: the Python as it stands, and every line that they show of a command is printed by it."""

import re
import shlex
from pathlib import Path

import pytest

from trainledger.cli import main

HOUSE = Path(__file__).parent.parent
README = (HOUSE / "README.md").read_text(encoding="utf-8")
PAGES = ("README.md", "docs/planning.md", "docs/tracing.md")
LINK = re.compile(r"\]\((?!https?:)([^)#]+)(?:#([\w-]+))?\)")


def shown(page: str) -> list[tuple[str, str]]:
    """The commands of a page, each with what the page shows of its output."""
    text = (HOUSE / page).read_text(encoding="utf-8").replace("\\\n", " ")
    return re.findall(r"    \$ \.venv/bin/trainledger (.*)\n((?:    .*\n|\n)*)", text)


SHOWN = [pytest.param(*each, id=f"{page}: {each[0].split()[0]}") for page in PAGES for each in shown(page)]


def test_the_python_section_runs(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    assert main(["init", "run.toml"]) == 0
    capsys.readouterr()
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    rows = [line.rsplit(" ", 3) for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == ["parameters", "hardware FLOPs", "kept for backward", "peak memory"]
    assert all(predicted == measured for _, predicted, measured, _ in rows)


@pytest.mark.parametrize(("command", "said"), SHOWN)
def test_every_line_it_shows_of_a_command_is_printed(command, said, capsys):
    assert main(shlex.split(command)) == 0
    printed = capsys.readouterr().out.splitlines()
    lines = [line.removeprefix("    ") for line in said.splitlines() if line.strip() and line.strip() != "..."]
    assert len(lines) > 0
    for line in lines:
        assert line in printed, line


def test_the_pages_show_commands() -> None:
    assert [each.id for each in SHOWN] == [
        "README.md: plan", "docs/planning.md: napkin", "docs/planning.md: napkin", "docs/planning.md: plan",
        "docs/planning.md: loop", "docs/planning.md: plan", "docs/planning.md: explain", "docs/tracing.md: trace",
    ]  # fmt: skip


def test_the_readme_is_short() -> None:
    assert README.count("\n") <= 150


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in HOUSE.glob("docs/*.md"))])
def test_links_lead_somewhere(page: str) -> None:
    for target, anchor in LINK.findall((HOUSE / page).read_text(encoding="utf-8")):
        found = (HOUSE / page).parent / target
        assert found.exists(), target
        if anchor and found.suffix == ".md":
            headings = re.findall(r"^#+ (.+)$", found.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings}, anchor
