"""What a plan accounts for and the engine does not run: compiled blocks of which operations are kept."""

from __future__ import annotations

import pytest

from trainledger.spec.precision import precision_of
from trainledger.spec.problem import InvalidInput
from trainledger.spec.recipe import Recipe
from trainledger.train.precision import refuse


def test_compiled_blocks_with_selective_recomputation_are_planned_and_not_trained() -> None:
    recipe = Recipe(seq_len=8, global_batch=2, steps=1, compile=True, activation_checkpointing="selective")
    assert not list(recipe.problems())
    with pytest.raises(InvalidInput, match="a compiled block has no operations to choose from"):
        refuse(precision_of(recipe), recipe)
