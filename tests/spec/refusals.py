"""The table of refused fields, `refusals.toml`."""

import tomllib
from pathlib import Path


def refusals(section: str, **groups: dict[str, object]) -> list[tuple[list[str], str]]:
    """Each row of a section: its fields as overrides, a group of them by its name in capitals, and its sentence."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))[section]
    at = "" if section == "model" else "model."
    named = {name: [f"{at}{field}={value}" for field, value in group.items()] for name, group in groups.items()}
    return [
        ([field for word in fields.split(" ") for field in named.get(word, [word])], sentence)
        for fields, sentence in table.items()
    ]
