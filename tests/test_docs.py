"""The pages in docs: how long they may be in all."""

from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
MOST_LINES = 3080


def test_pages_hold_verdicts_and_tables_lie_beside_them() -> None:
    """Generated tables are CSV files in docs/tables (`tools/published/tables.py`)."""
    assert sum(page.read_text(encoding="utf-8").count("\n") for page in DOCS.glob("*.md")) <= MOST_LINES
