"""Write docs/claims.md: worked examples of public texts, each with our number and the command that prints it.

``python tools/published/claims_page.py``; a test compares the page with what it would write today.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from claim import AGREES, Claim, Row, line_of, rows, verdict
from worked_claims import claim_of

PAGE = Path(__file__).parents[2] / "docs" / "claims.md"
HEAD = """\
# Published worked examples, checked

Written by `python tools/published/claims_page.py`; a test compares it with what it would write today, and runs every
command. The rows are those of `tools/published/worked_examples.csv`: numbers that notes, lectures and papers on
training print. A claim holds where our number agrees within {agrees}; where it does not, the table has the right
number, and the cause of the printed one where it was found. {counts}

| topic | claim | printed | ours | verdict |
|---|---|--:|--:|---|
"""
WORDS = {"holds": "holds", "wrong": "**wrong**", "answered": "answered"}


def page() -> str:
    """docs/claims.md."""
    found = [(row, claim_of(row)) for row in rows()]
    counts = Counter(verdict(row, claim) for row, claim in found)
    said = f"Of {len(found)} claims {counts['holds']} hold, {counts['wrong']} do not"
    said += f", and {counts['answered']} was a question." if counts["answered"] else "."
    head = HEAD.format(counts=said, agrees=f"{100 * AGREES:g} %")
    parts = [head, *(_row(row, claim) for row, claim in found), "\n## The commands\n"]
    return "".join((*parts, *(part for row, claim in found for part in _commands(row, claim))))


def number(value: float) -> str:
    """A number with four digits, whole ones whole."""
    if value == int(value) and abs(value) < 10**12:
        return f"{int(value):,}"
    return f"{value:.4g}".replace("e+", "e")


def ours(claim: Claim) -> str:
    return ", ".join(map(number, claim.ours))


def _row(row: Row, claim: Claim) -> str:
    unit = "" if row["unit"] in ("value", "ratio") else row["unit"]
    said = row["published_value"]
    printed = said if said in ("", "unanswered") else f"{said} {unit}".strip()
    cells = (row["topic"], row["statement"], printed, f"{ours(claim)} {unit}".strip(), WORDS[verdict(row, claim)])
    return f"| {' | '.join(cells)} |\n"


def _commands(row: Row, claim: Claim) -> Iterator[str]:
    yield f"\n### {row['statement']}\n\n"
    if row["why"]:
        yield f"{row['why'][0].upper()}{row['why'][1:]}.\n"
    if verdict(row, claim) == "wrong" and claim.how:
        yield f"The printed number {claim.how}.\n"
    for each in claim.shown:
        yield f"\n    $ {each.command}\n    {line_of(each)}\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
