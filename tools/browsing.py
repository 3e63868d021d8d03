"""The page served for real, and a Chromium of this machine to look at it; tests/browser and tools use both."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import trainledger

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# The browser asks nobody but the page: what it would do for itself is switched off.
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync")  # fmt: skip
# Where the default question of a calculator takes seconds, a smaller one.
SMALL = {"layouts": "&run=gpt2-xl&cluster.count=8&layout.pipeline=1", "breaks": "&run=gpt2-xl&recipe.seq_len=1024"}
SETTLED = "() => document.querySelector('#answer')?.getAttribute('aria-busy') === 'false'"
RUN = """
[model]
vocab_size = 257
d_model = 64
n_layers = 2
max_seq_len = 64
attention.n_heads = 4
feed_forward.d_ff = 128

[recipe]
seq_len = 64
global_batch = 4
steps = {steps}
precision = "fp32"
checkpoints.every = 20

[data]
path = ["text.txt"]
tokenizer = "bytes"
validation_fraction = 0.05
"""


@contextmanager
def served(runs: Path, *more: str) -> Iterator[str]:
    """The address of `trainledger serve` on a free port, with the runs of a directory."""
    command = [sys.executable, "-m", "trainledger", "serve", "--port", "0", "--json", "--runs", str(runs), *more]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.terminate()
        process.wait()


@contextmanager
def files_served(folder: Path) -> Iterator[str]:
    """The address of a plain file server of a directory on a free port, which logs nothing."""
    handler = functools.partial(_Silent, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


class _Silent(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Nothing."""


def training(folder: Path, steps: int, *more: str) -> subprocess.Popen[bytes]:
    """A small run that trains in a folder, on the words of this package; its directory is in ``runs``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.toml").write_text(RUN.format(steps=steps), encoding="utf-8")
    words = [each.read_text(encoding="utf-8") for each in sorted(Path(trainledger.__file__).parent.rglob("*.py"))]
    (folder / "text.txt").write_text("\n".join(words), encoding="utf-8")
    command = [sys.executable, "-m", "trainledger", "train", "run.toml", *more]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
