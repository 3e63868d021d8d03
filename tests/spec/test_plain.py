"""Plain data and dataclasses, and files that appear whole or not at all."""

import os
import subprocess
import sys

import pytest

from trainledger.spec.device import Device
from trainledger.spec.plain import check_target, finite, from_plain, is_amount, read_json, replace_file
from trainledger.spec.problem import InvalidInput

WHOLE = {"name": "x", "title": "x", "peak_flops_per_second": {"fp32": 1.0}}


def test_a_file_is_replaced_in_one_motion_and_no_draft_stays(tmp_path):
    path = tmp_path / "a.json"
    replace_file(path, b"one")
    replace_file(path, b"two")
    assert path.read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["a.json"]


@pytest.mark.parametrize(
    ("named", "rule"),
    [
        ("fifo", "is not a regular file, and only regular files are replaced"),
        ("link", "is not a regular file, and only regular files are replaced"),
        ("", "is a directory; name a file in it"),
        ("no/where/x.json", "there is no directory "),
        ("file/x.json", " is not a directory"),
    ],
)
def test_what_is_no_regular_file_is_left_alone_and_no_directory_is_made(tmp_path, named, rule):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / "fifo")
    (tmp_path / "file").write_text("kept")
    with pytest.raises(InvalidInput) as caught:
        replace_file(tmp_path / named, b"x")
    assert rule in caught.value.problems[0].rule
    assert sorted(os.listdir(tmp_path)) == ["fifo", "file", "link"]
    assert (tmp_path / "fifo").is_fifo()
    assert (tmp_path / "file").read_text() == "kept"


def test_an_empty_name_is_wrong_input():
    with pytest.raises(InvalidInput, match="--html = '': must not be empty"):
        check_target("", "--html")


def test_a_directory_that_must_not_be_written_is_a_sentence(tmp_path):
    """Before the work that the file is for. Root may write everywhere, so that it becomes somebody else."""
    program = (
        "import os, sys\n"
        "from trainledger.spec.plain import check_target\n"
        "if os.geteuid() == 0:\n"
        "    os.chdir(sys.argv[1])\n"
        "    os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "try:\n"
        "    check_target('x.lock', '--lock')\n"
        "except ValueError as error:\n"
        "    print(error)\n"
    )
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(0o555)
    done = subprocess.run([sys.executable, "-c", program, closed], cwd=closed, capture_output=True, text=True)
    assert done.stdout == "--lock = 'x.lock': cannot be written: the directory '.' takes no new files\n", done.stderr


def test_a_name_alone_goes_into_the_present_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_target("x.html")


def test_deep_json_is_a_sentence(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("[" * 100_000)
    with pytest.raises(InvalidInput, match="is nested too deeply"):
        read_json(Device, path)


@pytest.mark.parametrize("number", [10**400, -(10**400), 1e300, 5e-324])
def test_a_number_that_no_run_has_is_a_sentence(number):
    with pytest.raises(InvalidInput, match=r"power_watts = .*: is too large or too small"):
        from_plain(Device, {**WHOLE, "power_watts": number})


def test_amounts():
    assert all(map(is_amount, (0, 0.0, -1, 1e30, 10**30, 1e-30)))
    assert not any(map(is_amount, (True, None, "1", float("nan"), float("inf"), 10**400, 1e-300)))


def test_what_json_has_no_word_for_is_none():
    assert finite({"a": (float("nan"), [float("-inf"), 1]), "b": "x"}) == {"a": [None, [None, 1]], "b": "x"}
