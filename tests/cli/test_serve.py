"""`trainledger serve` as a process: its line, its port, and its end."""

import json
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")
pytestmark = pytest.mark.process


def started(*words: str, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "trainledger", "serve", "--port", "0", *words],
        cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_json_is_one_line_with_the_address_and_ctrl_c_ends_it(tmp_path: Path) -> None:
    process = started("--json", cwd=tmp_path)
    address = json.loads(process.stdout.readline())
    assert address["token"] == ""
    assert address["url"] == f"http://127.0.0.1:{address['port']}/"
    with urllib.request.urlopen(f"{address['url']}api/time?params=70B&tokens=15T&mfu=50%25") as reply:
        assert round(json.load(reply)["data"]["days"], 1) == 143.9
    with urllib.request.urlopen(f"{address['url']}view/runs") as reply:
        assert json.load(reply)["verdict"] == "No runs in runs."
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert (process.returncode, out, error) == (0, "", "")


def test_the_link_is_on_standard_error_and_sigterm_ends_it(tmp_path: Path) -> None:
    process = started("--host", "0.0.0.0", cwd=tmp_path)
    link = process.stderr.readline().strip()
    assert "/?token=" in link
    port = link.partition("/?")[0].rpartition(":")[2]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/?{link.partition('?')[2]}") as reply:
        assert "trainledger-" in reply.headers["set-cookie"]
    process.terminate()
    out, error = process.communicate(timeout=60)
    assert process.returncode in (143, -signal.SIGTERM)
    assert "Traceback" not in error
    assert out == ""


def test_ctrl_c_ends_it_while_a_search_goes_on(tmp_path: Path) -> None:
    process = started("--json", cwd=tmp_path)
    address = json.loads(process.stdout.readline())
    with urllib.request.urlopen(f"{address['url']}view/layouts?run=llama-3.1-405b&cluster.count=16384") as reply:
        assert reply.status == 202
        assert json.load(reply)["working"].keys() == {"what", "done", "of"}
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (0, "")


def test_a_port_in_use_is_exit_code_2_with_the_next_free_one(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "trainledger", "serve", "--port", str(port)],
            cwd=tmp_path, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith(f"--port = {port}: cannot be had: Address already in use")
