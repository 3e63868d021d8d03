"""Write docs/claims.md: worked examples of public texts, each with our number and the command that prints it.

``python tools/published/claims_page.py``; a test compares the page with what it would write today.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from claim import AGREES, Claim, Row, line_of, rows, verdict
from tables import Page, Table, markdown
from worked_claims import claim_of

HEAD = """\
# Published worked examples, checked

Written by `python tools/published/claims_page.py`; a test compares it with what it would write today, and runs every
command. The rows are those of `tools/published/worked_examples.csv`: numbers that notes, lectures and papers on
training print. A claim holds where our number agrees within {agrees}; where it does not, the table has the right
number, and the cause of the printed one where it was found. The command that prints each, and its line: {link};
what is said of code is run by `tools/published/lecture_claims.py`.
{counts}

"""
WORDS = {"holds": "holds", "wrong": "**wrong**", "answered": "answered"}


def page() -> Page:
    """docs/claims.md and its table of commands."""
    found = [(row, claim_of(row)) for row in rows()]
    counts = Counter(verdict(row, claim) for row, claim in found)
    said = f"Of {len(found)} claims {counts['holds']} hold, {counts['wrong']} do not"
    said += f", and {counts['answered']} was a question." if counts["answered"] else "."
    table = Table("claims", ("claim", "why", "command", "line"), [line for each in found for line in _commands(*each)])
    head = HEAD.format(counts=said, agrees=f"{100 * AGREES:g} %", link=table.link)
    header = ("topic", "claim", "printed:", "ours:", "verdict")
    return Page("claims", head + markdown(header, (_row(row, claim) for row, claim in found)), [table])


def number(value: float) -> str:
    """A number with four digits, whole ones whole."""
    if value == int(value) and abs(value) < 10**12:
        return f"{int(value):,}"
    return f"{value:.4g}".replace("e+", "e")


def ours(claim: Claim) -> str:
    return ", ".join(map(number, claim.ours))


def _row(row: Row, claim: Claim) -> Sequence[str]:
    unit = "" if row["unit"] in ("value", "ratio") else row["unit"]
    said = row["published_value"]
    printed = said if said in ("", "unanswered") else f"{said} {unit}".strip()
    return row["topic"], row["statement"], printed, f"{ours(claim)} {unit}".strip(), WORDS[verdict(row, claim)]


def _commands(row: Row, claim: Claim) -> Iterator[Sequence[str]]:
    why = [f"{row['why'][0].upper()}{row['why'][1:]}."] if row["why"] else []
    if verdict(row, claim) == "wrong" and claim.how:
        why.append(f"The printed number {claim.how}.")
    for each in claim.shown:
        yield row["statement"], " ".join(why), each.command, line_of(each)
    if not claim.shown:  # of code, which a test runs
        yield row["statement"], " ".join(why), "tools/published/lecture_claims.py", ""


if __name__ == "__main__":
    page().write()
