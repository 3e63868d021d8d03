"""FLOPs of a forward from shapes alone against the account of a step, operation by operation."""

import pytest

import trainledger as tl
from trainledger import catalog
from trainledger.answers.load import resolve
from trainledger.ledger.core.graph import component_of
from trainledger.ledger.entry import Entry
from trainledger.ledger.model.parameters import MTP, SCORES, forward_flops
from trainledger.ledger.rules_of_thumb import is_attention

EACH = ({}, {"recipe.attention": "math"}, {"recipe.attention": "flash"})


def component(entry: Entry) -> str:
    if entry.path.startswith("mtp"):
        return MTP
    return SCORES if is_attention(entry) else component_of(f"{entry.path}.weight")


CASES = [
    (name, more)
    for name in catalog.model_names()
    for more in EACH
    if tl.model(name).indexer is None or more.get("recipe.attention") != "math"  # chosen keys have one kernel
    if tl.model(name).of_layers(None).head_size <= 256 or more.get("recipe.attention") != "flash"  # no such heads
]


@pytest.mark.parametrize(("name", "more"), CASES, ids=str)
@pytest.mark.long
def test_the_shapes_give_the_forward_of_the_account(name: str, more: dict[str, str]) -> None:
    run = resolve(name, {"cluster.device": "h100-sxm", "recipe.seq_len": "200", "recipe.global_batch": 3, **more})
    found: dict[str, int] = {}
    for each in tl.account(run):
        if each.phase == "forward" and each.kind in ("matmul", "attention"):
            found[component(each)] = found.get(component(each), 0) + each.flops * each.times
    shown = forward_flops(run.model, 200, attention=run.recipe.attention)
    assert found == {part: 3 * flops for part, flops in shown.items()}


def test_a_window_spares_flash_kernels_what_lies_beyond_it() -> None:
    spec = tl.model("gemma-2-9b")
    dense, windowed = (forward_flops(spec, 8192, attention=each)[SCORES] for each in ("sdpa", "flash"))
    window = spec.attention.window
    assert window is not None
    assert windowed * 2 == dense * (1 + window / 8192)  # every second layer is local
