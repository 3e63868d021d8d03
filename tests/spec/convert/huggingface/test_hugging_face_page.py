"""The page on Hugging Face's models names every model type, and no other."""

import re
from pathlib import Path

from trainledger.spec.convert.huggingface import _TEXT_OF, FAMILIES

PAGE = Path(__file__).parents[4] / "docs/hugging-face.md"


def test_the_page_names_every_model_type_and_no_other():
    rows = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    named = {each for row in rows for each in re.findall(r"`(\w+)`", row)}
    assert named == {*FAMILIES, *_TEXT_OF}
