"""The list of pages that commands write has every such page, with the command that the page itself names."""

import re
from pathlib import Path

HOUSE = Path(__file__).parents[1]


def test_every_written_page_is_listed_with_its_command() -> None:
    written = {}
    for page in sorted((HOUSE / "docs").glob("*.md")):
        found = re.search(r"^Written by `(.+?)`", page.read_text(encoding="utf-8"), re.MULTILINE)
        if found:
            written[f"docs/{page.name}"] = found[1]
    rows = re.findall(
        r"^\| `(docs/.+?)` \| `(.+?)`", (HOUSE / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert dict(rows) == written
    for command in written.values():
        assert (HOUSE / command.split()[1]).is_file()
