"""Hugging Face's config.json to and from a `ModelSpec`.

A key that changes what a model costs is either understood or refused by name; an explicit list has the keys that change
nothing. Keys, other names and defaults are those of transformers 5; the forms of version 4 are read too.
"""

from trainledger.spec.convert.huggingface.config import (
    FAMILIES,
    LARGEST_NBYTES,
    family_of,
    from_config,
    left_out,
    model_from_hf,
    read_json,
    to_config,
)
from trainledger.spec.convert.huggingface.family import Family

__all__ = [
    "FAMILIES", "LARGEST_NBYTES", "Family", "family_of", "from_config", "left_out", "model_from_hf",
    "read_json", "to_config",
]  # fmt: skip
