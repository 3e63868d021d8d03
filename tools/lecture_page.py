"""Write docs/lecture.md: which chapter of the lecture teaches what, from lecture/items.csv.

``python tools/lecture_page.py``; a test compares the page with what it would write today.
"""

from __future__ import annotations

import csv
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap

HOUSE = Path(__file__).resolve().parents[1]
PAGE = HOUSE / "docs" / "lecture.md"
ITEMS = HOUSE / "lecture" / "items.csv"
COLUMNS = ("number", "kind", "item", "chapter", "reason")
KINDS = {
    "concept": "concepts",
    "formula": "formulas",
    "number": "numbers",
    "claim": "claims",
    "code": "code",
    "pitfall": "pitfalls",
}
WIDTH = 120
OTHERS = "others"  # checklists, calculators, the exercise
HEAD = """\
# What the lecture covers

Written by `python tools/lecture_page.py` from [items.csv](../lecture/items.csv); a test compares it with what it would
write today. The rows are the {all} concepts, formulas, numbers, claims, fragments of code, pitfalls, calculators,
checklists and exercises that five public accounts of a lecture on resource accounting have between them, each once.
{taught} are taught in a chapter{rest}. What is wrong in an account stands in its
chapter with the right value; the numbers that were checked: [claims.md](claims.md). How the chapters run:
[lecture/README.md](../lecture/README.md); one command for each: [learn.md](learn.md).

"""


def items() -> list[dict[str, str]]:
    """The rows of lecture/items.csv."""
    with ITEMS.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def chapters() -> dict[str, str]:
    """The title of each chapter that there is, by the name of its file."""
    found = {}
    for path in sorted((HOUSE / "lecture").glob("[0-9][0-9]_*.py")):
        title = re.search(r'app_title="([^"]+)"', path.read_text(encoding="utf-8"))
        assert title is not None, path
        found[path.stem] = title[1]
    return found


def page() -> str:
    """The text of docs/lecture.md."""
    rows, titles = items(), chapters()
    left = defaultdict(list)
    for row in rows:
        if row["chapter"] not in titles:
            left[row["reason"]].append(row["item"])
    taught = len(rows) - sum(map(len, left.values()))
    rest = f", and {len(rows) - taught} are not, for the reasons below" if left else ""
    names = [*KINDS.values(), OTHERS]
    lines = [_row(["chapter", "items", *names]), _row(["---", *["--:"] * (1 + len(names))])]
    for stem, title in titles.items():
        kinds = Counter(KINDS.get(row["kind"], OTHERS) for row in rows if row["chapter"] == stem)
        lines.append(_row([f"[{title}](../lecture/{stem}.py)", kinds.total(), *(kinds[name] for name in names)]))
    in_all = Counter(KINDS.get(row["kind"], OTHERS) for row in rows if row["chapter"] in titles)
    lines.append(_row(["in all", taught, *(in_all[name] for name in names)]))
    if left:
        lines += ["", "## Not taught", ""]
        for reason, found in left.items():
            said = f"- {reason[0].upper()}{reason[1:]}: {'; '.join(found)}."
            lines += wrap(said, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    head = HEAD.format(all=len(rows), taught=taught, rest=rest)
    return head + "\n".join(lines) + "\n"


def _row(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |" if cells[0] != "---" else f"|{'|'.join(map(str, cells))}|"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
