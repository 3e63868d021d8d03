import os
import re
import tomllib
from pathlib import Path

import pytest
import torch

import trainledger as tl
from trainledger import catalog
from trainledger.catalog.host_copies import host_copies
from trainledger.cli import main
from trainledger.observe.measure import copies
from trainledger.observe.measure.copies import (
    BACK_PAGEABLE,
    BACK_PINNED,
    COLUMNS,
    CONTIGUOUS,
    DEVICE_COPIES,
    NO_ACCELERATOR,
    PAGEABLE,
    PINNED,
    READ,
    READ_AGAIN,
    TRANSPOSED,
    VIEW,
    WRITE,
    device_copies,
    device_copy_calls,
    disk_times,
    measure_copies,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("what", [CONTIGUOUS, TRANSPOSED, COLUMNS])
def test_each_copy_has_the_elements_of_what_it_copies(what):
    torch.manual_seed(0)
    source = torch.rand(5, 10 if what == COLUMNS else 5)
    expected = {CONTIGUOUS: source, TRANSPOSED: source.t(), COLUMNS: source[:, ::2]}[what]
    torch.manual_seed(0)
    assert torch.equal(copies._copied(CPU, 5, what)(), expected)


def test_a_view_is_of_the_same_memory():
    view = copies._copied(CPU, 5, VIEW)
    assert view().data_ptr() == view.__self__.data_ptr()


def test_copies_in_memory_are_given_by_size_and_layout(monkeypatch, tmp_path):
    monkeypatch.setattr(copies, "SIZES", (16, 64))
    found = measure_copies("cpu", folder=str(tmp_path), disk_nbytes=2**16, seconds=0.2)
    assert [(each.what, each.note, each.nbytes) for each in found.memory] == [
        (what, f"{size}x{size}", 0 if what == VIEW else 8 * size * size)
        for size in (16, 64)
        for what in (VIEW, CONTIGUOUS, TRANSPOSED, COLUMNS)
    ]
    assert all(each.seconds > 0 for each in found.memory)
    assert {each.bytes_per_second for each in found.memory if each.what == VIEW} == {None}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has an accelerator")
def test_without_an_accelerator_its_copies_say_so():
    found = device_copies(CPU)
    assert [each.what for each in found] == list(DEVICE_COPIES)
    assert {(each.seconds, each.note) for each in found} == {(None, NO_ACCELERATOR)}


def test_the_calls_of_a_device_bring_every_byte_over_and_back():
    calls = device_copy_calls(CPU, 1000, pin=False)  # a CPU in the place of the device
    assert calls.keys() == {PAGEABLE, PINNED, BACK_PAGEABLE, BACK_PINNED}
    assert calls[PAGEABLE]().sum() == 1000
    for each in (PINNED, BACK_PAGEABLE, BACK_PINNED):
        assert calls[each]().sum() == 1000


@pytest.mark.gpu
def test_a_device_copies_from_pinned_memory_no_slower():
    seconds = {each.what: each.seconds for each in device_copies(torch.device("cuda"))}
    assert seconds[PINNED] <= 1.1 * seconds[PAGEABLE]


def test_a_disk_is_written_and_read_and_left_as_it_was(tmp_path):
    found = {each.what: each for each in disk_times(2**20, str(tmp_path), samples=1)}
    assert found.keys() == {WRITE, READ, READ_AGAIN}
    assert all(each.nbytes == 2**20 and each.seconds > 0 for each in found.values())
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_takes_no_file_is_a_note(tmp_path):
    (found, *_) = disk_times(2**10, os.path.join(tmp_path, "absent"), samples=1)
    assert found.seconds is None
    assert "cannot be written: No such file or directory" in found.note


def test_copies_of_the_catalog_are_those_that_were_measured():
    entry = host_copies()["h200"]
    file, _, _ = entry["source"].partition(":")
    measured = tomllib.loads((Path(__file__).parents[3] / file).read_text(encoding="utf-8"))
    assert entry["copies"] == measured["host_copies"]
    assert (entry["date"].isoformat(), entry["link"]) == (measured["date"][:10], "pcie5")
    of_h200 = tomllib.loads((Path(catalog.__file__).parent / "devices/h200.toml").read_text(encoding="utf-8"))
    assert of_h200["node"]["host"] == entry["link"]


def test_seconds_of_a_copy_by_device_and_memory():
    nbytes = 268435456
    pinned, pageable = (tl.copy_seconds(nbytes, "h200", pinned=each) for each in (True, False))
    assert (pinned.seconds, pageable.seconds) == pytest.approx((4.930e-3, 43.750e-3), rel=1e-3)
    assert {pinned.basis, pageable.basis} == {"measured"}
    assert tl.copy_seconds("98304B", "h200").seconds == pytest.approx(98304 / 54.45e9, rel=1e-3)
    older = [tl.copy_seconds(nbytes, catalog.device("a100-sxm-80gb"), pinned=each) for each in (True, False)]
    assert older[0].seconds == pytest.approx(2 * pinned.seconds)  # half the link
    assert older[1].seconds == pytest.approx(pageable.seconds)  # the host's processor
    assert {each.basis for each in older} == {"assumed"}
    assert "85% from pinned memory" in repr(older[0])
    with pytest.raises(tl.InvalidInput, match="no known link to its host"):
        tl.copy_seconds(1, "tpu-v4")
    with pytest.raises(tl.InvalidInput, match="0 or more"):
        tl.copy_seconds(-1, "h200")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has an accelerator")
def test_a_machine_without_an_accelerator_shows_those_of_the_catalog(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(copies, "SIZES", (16,))
    page = str(measure_copies("cpu", folder=str(tmp_path), disk_nbytes=2**16, seconds=0.1))
    assert "Not of this machine, which has no accelerator" in page
    assert main(["catalog", "h200"]) == 0
    for text in (page, capsys.readouterr().out):
        assert re.search(r"to device, pinned +268.4 MB +4.93 ms +54.45 GB/s", text)
        assert "82.9 % of the" in text
    assert main(["catalog", "h100-sxm"]) == 0
    assert "pinned" not in capsys.readouterr().out
