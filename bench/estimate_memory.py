"""What `accelerate estimate-memory` says of a model of the catalog, without huggingface.co: run by bench/plan.py.

A server on this machine answers what it asks a hub. The model's config.json is written here from the catalog's sizes,
so that both tools are asked about the same model. The server is a thread of the benchmark: its CPU time is no child's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import trainledger as tl
from trainledger.spec.convert.huggingface import to_config

UNITS = {"bytes": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30}  # accelerate's words for powers of 1,024
PRECISIONS = {"float32": "fp32", "float16": "fp16-mixed"}  # of those it knows, the ones that it trains in


@contextmanager
def loopback_hub(name: str, folder: str) -> Iterator[dict[str, str]]:
    """The environment of a process for which the hub is this one; what it downloads goes into ``folder``."""
    config = to_config(tl.model(name))
    text = json.dumps(config).encode()
    commit = sha1(text).hexdigest()
    told = {"id": name, "sha": commit, "config": config, "siblings": [{"rfilename": "config.json"}]}
    paths = {f"/api/models/{name}": json.dumps(told).encode()}
    paths |= {f"/{name}/resolve/{revision}/config.json": text for revision in ("main", commit)}

    class Answer(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = paths.get(self.path.partition("?")[0])
            self.send_response(404 if body is None else 200)
            self.send_header("Content-Length", str(len(body or b"")))
            self.send_header("Content-Type", "application/json")
            if body is None:
                self.send_header("X-Error-Code", "EntryNotFound")
            else:
                self.send_header("X-Repo-Commit", commit)
                self.send_header("ETag", f'"{commit}"')
            self.end_headers()
            if body is not None and self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: the benchmark's output is its table."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        server.daemon_threads = True
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield {
                "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": folder, "NO_PROXY": "127.0.0.1",
                "HF_HUB_OFFLINE": "0", "HF_TOKEN": "", "HF_HUB_DISABLE_TELEMETRY": "1",
            }  # fmt: skip
        finally:
            server.shutdown()


def sizes(printed: str, name: str) -> list[dict[str, Any]]:
    """Bytes to train with Adam: by the table that accelerate printed, and by the ledger of a step."""
    longest = tl.model(name).max_seq_len
    rows = []
    for line in printed.splitlines():
        dtype, *cells = [each.strip() for each in line.strip("│").split("│")]
        if dtype in PRECISIONS:
            number, unit = cells[2].split()
            rows.append(
                {
                    "dtype": dtype,
                    "precision": PRECISIONS[dtype],
                    "accelerate_nbytes": round(float(number) * UNITS[unit]),
                    "one_token_nbytes": _peak_nbytes(name, PRECISIONS[dtype], 1),
                    "tokens": longest,
                    "one_sequence_nbytes": _peak_nbytes(name, PRECISIONS[dtype], longest),
                }
            )
    return rows


def _peak_nbytes(name: str, precision: str, tokens: int) -> int:
    """The most that a step of one sequence of so many tokens holds at once."""
    recipe = {"seq_len": tokens, "global_batch": 1, "steps": 1, "precision": precision, "optimizer": "adam"}
    run = tl.load({"model": {"preset": name}, "recipe": recipe, "cluster": {"device": "h100-sxm"}})
    nbytes: int = tl.account(run).peak().nbytes
    return nbytes
