"""Changes planted in a module, and the lines that are reported for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from planted_changes import KEPT_OF_H, KEPT_OF_Y, MODEL, line_of, traced
from torch import nn

from trainledger.answers.budgets.check import compare
from trainledger.answers.budgets.compare import Difference, Move, Row, Tolerance
from trainledger.answers.budgets.lockfile import Locked, read_lock, write_lock
from trainledger.answers.budgets.summary import QUANTITIES, Place, Summary
from trainledger.answers.budgets.target import Evaluation, Target
from trainledger.answers.pages.budget import checked, moved_at, table_of
from trainledger.report.document import Content, Document, sections
from trainledger.report.terminal import text
from trainledger.trace.recorder.source_lines import remembering_makers

torch.set_num_threads(1)
TARGET = Target(module="model:build", input=("float32[1000,64]",))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def locked(folder: Path, source: str = MODEL) -> Locked:
    """A source's figures, written to a lock and read back."""
    write_lock(folder / "trainledger.lock", {"model": Locked(TARGET, "", traced(source, folder))})
    return read_lock(folder / "trainledger.lock")["model"]


def changed(folder: Path, old: str, new: str, **allowed: Tolerance) -> tuple[Difference, str]:
    """The report of a source in which one text is another, against the source as it was."""
    before = locked(folder)
    assert old in MODEL
    source = MODEL.replace(old, new)
    return compare("model", before, TARGET, Evaluation(traced(source, folder), ""), allowed, folder), source


def written(content: Content) -> str:
    return text(Document("", sections(content)))


def test_a_line_with_many_operations_is_reported_in_80_columns() -> None:
    many = tuple(f"operation_of_a_long_name_{at}" for at in range(6))
    moves = [Move("kept", "a/folder/that/is/deep/model.py:41", "h = many(x)", 16_780_000, many)]
    printed = written(moved_at(moves)).splitlines()
    assert max(map(len, printed)) <= 80
    assert all(each in " ".join(printed) for each in many)


def test_the_table_of_a_difference_has_a_line_for_each_quantity() -> None:
    titles = {name: QUANTITIES[name][0] for name in ("parameters", "flops", "model_flops", "kept", "peak")}
    rows = [Row(name, title, 4_844_668_946, 4_870_000_000, allowed=911_400) for name, title in titles.items()]
    lines = written(table_of(rows)).splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) == 2 + len(rows)


def change(difference: Difference, quantity: str) -> int:
    return sum(each.change for each in difference.judged if each.quantity == quantity)


def test_an_operation_that_keeps_one_more_activation(folder: Path) -> None:
    """``h * sigmoid(h)`` keeps its input and the sigmoid, where relu keeps its output alone."""
    new = "h = h * torch.sigmoid(h)"
    difference, source = changed(folder, "h = F.relu(h)", new)
    assert difference.fails()
    assert change(difference, "kept") == 2 * KEPT_OF_H
    kept = {each.place: each for each in difference.moves if each.quantity == "kept"}
    here, above = f"model.py:{line_of(source, new)}", f"model.py:{line_of(source, 'h = self.up(x)')}"
    assert {place: each.change for place, each in kept.items()} == {here: KEPT_OF_H, above: KEPT_OF_H}
    assert kept[here].operations == ("mul", "sigmoid")
    printed = text(checked([difference]))
    assert f"kept +1.024 MB at {here} (aten::mul, aten::sigmoid)\n    {new}\n" in printed
    assert max(len(line) for line in printed.splitlines()) <= 80


def test_a_tensor_that_python_holds_is_reported_with_the_line_that_holds_it(folder: Path) -> None:
    """Without an operation of its own: the ledger has the line that made the tensor, the lock the one that is new."""
    difference, source = changed(folder, "y = self.down(h)", "y = self.down(h)\n        self.last = y")
    assert change(difference, "kept") == KEPT_OF_Y
    (move,) = [each for each in difference.moves if each.quantity == "kept"]
    assert (move.place, move.operations) == (f"model.py:{line_of(source, 'y = self.down(h)')}", ("addmm",))
    assert difference.edited == ((f"model.py:{line_of(source, 'self.last = y')}", "self.last = y"),)
    assert "\nmodel.py:16\n    self.last = y\n" in text(checked([difference]))


def test_where_the_saving_line_is_another_than_the_making_one_both_are_reported(folder: Path) -> None:
    """silu keeps its input, which the line before made; the edited line is reported with it."""
    difference, source = changed(folder, "h = F.relu(h)", "h = F.silu(h)")
    assert [each.place for each in difference.moves if each.quantity == "kept"] == ["model.py:13"]
    assert difference.edited == ((f"model.py:{line_of(source, 'h = F.silu(h)')}", "h = F.silu(h)"),)


def test_lines_that_only_move_move_nothing(folder: Path) -> None:
    before = locked(folder)
    source = '"""A word first."""\n\n' + MODEL.replace(
        "        h = self.up(x)", "        # up\n\n        h = self.up(x)"
    )
    difference = compare("model", before, TARGET, Evaluation(traced(source, folder), ""), {}, folder)
    assert not difference.fails(tight=True)
    assert difference.moves == difference.edited == ()
    assert text(checked([difference])) == "model: as locked (5 figures)"
    # Nor are they taken for changes when something else moves.
    source = source.replace("h = F.relu(h)", "h = F.silu(h)")
    difference = compare("model", before, TARGET, Evaluation(traced(source, folder), ""), {}, folder)
    assert difference.edited == ((f"model.py:{line_of(source, 'h = F.silu(h)')}", "h = F.silu(h)"),)
    assert {each.place for each in difference.moves if each.quantity == "kept"} == {"model.py:17"}


def test_a_renamed_class_moves_nothing(folder: Path) -> None:
    before = locked(folder)
    difference = compare(
        "model", before, TARGET, Evaluation(traced(MODEL.replace("Block", "Layer"), folder), ""), {}, folder
    )
    assert not difference.fails(tight=True)
    wider = MODEL.replace("Block", "Layer").replace("128", "130")
    difference = compare("model", before, TARGET, Evaluation(traced(wider, folder), ""), {}, folder)
    flops = [each for each in difference.moves if each.quantity == "flops"]
    assert {each.text for each in flops} == {"h = self.up(x)", "h = F.relu(h)", "y = self.down(h)", ""}
    assert not any(each.gone for each in flops)


def test_parameters_are_reported_by_name(folder: Path) -> None:
    difference, _ = changed(folder, "nn.Linear(64, 128)", "nn.Linear(64, 128, bias=False)")
    assert change(difference, "parameters") == -2 * 128
    (move,) = [each for each in difference.moves if each.quantity == "parameters"]
    assert (move.place, move.change, move.gone) == ("*.up.bias", -256, True)


def test_less_is_a_note_and_a_failure_only_where_the_lock_is_to_be_tight(folder: Path) -> None:
    difference, _ = changed(folder, "return nn.Sequential(Block(), Block())", "return nn.Sequential(Block())")
    assert {each.verdict for each in difference.judged} == {"less"}
    assert not difference.fails()
    assert difference.fails(tight=True)
    assert "To lock the lower figures: `trainledger lock model`." in text(checked([difference]))
    assert "which --tight does not allow" in text(checked([difference], tight=True))


def test_a_tolerance_is_kept_to_the_byte(folder: Path) -> None:
    most = {"kept": Tolerance(amount=KEPT_OF_Y), "peak": Tolerance(amount=10**9)}
    difference, _ = changed(folder, "y = self.down(h)", "y = self.down(h)\n        self.last = y", **most)
    assert not difference.fails(tight=True)
    assert "model: moved within what is allowed" in text(checked([difference]))
    most["kept"] = Tolerance(amount=KEPT_OF_Y - 1)
    difference, _ = changed(folder, "y = self.down(h)", "y = self.down(h)\n        self.last = y", **most)
    assert [each.quantity for each in difference.more] == ["kept"]


def test_places_sum_to_the_totals(folder: Path) -> None:
    """Two ways to the same numbers: the ledger's totals, and the sums over lines and modules."""
    found = traced(MODEL, folder)
    for quantity in ("parameters", "kept", "flops"):
        assert sum(each.amount(quantity) for each in found.places) == found.totals[quantity]
    made = ("activations", "gradients", "scratch", "logits and loss")
    assert sum(each.peak for each in found.places) == sum(found.peak.get(each, 0) for each in made)
    assert found.totals["kept"] == KEPT_OF_H + KEPT_OF_Y // 2 + 4  # of the sums, the first; and the loss


def test_a_line_twice_in_one_function_is_one_place(folder: Path) -> None:
    source = MODEL.replace("h = F.relu(h)", "h = h.exp()\n        h = F.relu(h)\n        h = h.exp()")
    exps = [each for each in traced(source, folder).places if each.text == "h = h.exp()"]
    assert [each.lines for each in exps] == [(14, 16)]
    assert dict(exps[0].kept) == {"exp": 2 * KEPT_OF_H}


def test_the_report_of_lines_that_went_and_of_many() -> None:
    places = tuple(Place("model.py f", f"a{at} = x", flops=10 + at) for at in range(5))
    totals = {"parameters": 0, "flops": 60, "model_flops": 0, "kept": 0, "peak": 0}
    before = Summary(totals, {}, {}, {}, places, {})
    after = Summary({**totals, "flops": 0}, {}, {}, {}, (), {})
    printed = text(checked([compare("t", Locked(TARGET, "", before), TARGET, Evaluation(after, ""), {}, Path())]))
    assert "FLOPs -14 FLOP at model.py f, a line that is gone\n    a4 = x" in printed
    assert "FLOPs -21 FLOP at 2 other places together" in printed


def test_a_lock_without_tensors_one_by_one_is_not_set_against_one_with_them(folder: Path) -> None:
    """Where identical blocks were traced once, the peak has no places: its rise is reported, and no line blamed."""
    before = locked(folder)
    places = tuple(replace(each, peak=0, parameters=0) for each in before.summary.places)
    folded = replace(before, summary=replace(before.summary, places=places))
    now = Evaluation(traced(MODEL.replace("F.relu(h)", "F.silu(h)"), folder), "")
    difference = compare("model", folded, TARGET, now, {}, folder)
    assert [each.quantity for each in difference.more] == ["kept", "peak"]
    assert {each.quantity for each in difference.moves} == {"kept"}


HEAD = "import torch\nfrom torch import nn\n\n\ndef loss(output):\n    return output.sum()\n\n\n"
SEQUENCES = {
    "alone": """def build():
    return nn.Sequential(
        nn.Linear(64, 128),
        nn.ReLU(),
        nn.Linear(128, 64),
    )
""",
    "in a module": """class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, 128),
            nn.ReLU(),
            nn.Linear(128, 64),
        )

    def forward(self, x):
        return self.net(x)


def build():
    return Net()
""",
    "nested": """def build():
    inner = nn.Sequential(
        nn.Linear(64, 128),
        nn.ReLU(),
        nn.Linear(128, 64),
    )
    return nn.Sequential(nn.Identity(), nn.Sequential(inner))
""",
    "of a subclass": """class Stack(nn.Sequential):
    pass


def build():
    return Stack(
        nn.Linear(64, 128),
        nn.ReLU(),
        nn.Linear(128, 64),
    )
""",
    "of torch's own blocks": """def build():
    return nn.Sequential(
        nn.Linear(64, 128),
        nn.TransformerEncoderLayer(128, 4, 128, batch_first=True),
        nn.Linear(128, 64),
    )
""",
}  # fmt: skip


@pytest.mark.parametrize("name", SEQUENCES)
def test_of_modules_that_a_sequential_calls_the_lines_that_make_them_are_named(name: str, folder: Path) -> None:
    source = HEAD + SEQUENCES[name]
    with remembering_makers():
        write_lock(folder / "trainledger.lock", {"model": Locked(TARGET, "", traced(source, folder))})
        grown = source.replace("128", "256")
        now = Evaluation(traced(grown, folder), "")
    difference = compare("model", read_lock(folder / "trainledger.lock")["model"], TARGET, now, {}, folder)
    edited = {f"model.py:{at}" for at, line in enumerate(grown.splitlines(), 1) if "256" in line}
    made = edited | {f"model.py:{at}" for at, line in enumerate(grown.splitlines(), 1) if "nn.ReLU()" in line}
    assert {place for place, _ in difference.edited} == edited
    for quantity in ("parameters", "kept", "peak", "flops"):
        places = {move.place for move in difference.moves if move.quantity == quantity} - {"loss", "optimizer"}
        assert places
        assert places <= made, quantity


def test_in_a_forward_of_the_users_its_lines_stay_and_parameters_have_those_that_make_them(folder: Path) -> None:
    with remembering_makers():
        places = traced(MODEL, folder).places
    of_lines = {place.where.partition(" ")[2]: place for place in places if place.text}
    texts = {place.text for place in places if place.kept}
    assert {"h = F.relu(h)", "return x + y"} <= texts
    assert not any("nn." in text for text in texts)
    assert sum(place.parameters for place in places if place.where.endswith("Block.__init__")) == 2 * 16_576
    assert "build" not in of_lines


def test_what_is_remembered_ends_with_the_context(folder: Path) -> None:
    with remembering_makers():
        init = nn.Module.__init__
    assert nn.Module.__init__ is not init
    source = HEAD + SEQUENCES["alone"]
    assert {place.where for place in traced(source, folder).places if place.kept} == {"1", "model.py loss"}
