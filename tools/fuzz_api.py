"""The API under queries that nobody means: schemathesis from its own OpenAPI description, then hostile texts by field.

    make fuzz                                     # some minutes
    python tools/fuzz_api.py --only memory --examples 200

Fails for an answer of 500 or more, one that the description does not allow, one that takes more than 2 s, and for a
traceback in the server's terminal. Times are of a whole request on this machine, whose load is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles
from urllib.parse import urlencode, urlsplit

import hostile
from trainledger.web.calculators import CALCULATORS

HOUSE = Path(__file__).resolve().parent.parent
SLOWEST_SECONDS = 2.0
# A text of the right length may still be no quantity, which no schema says: what is valid may be refused.
CHECKS_LEFT_OUT = "positive_data_acceptance"
REFUSALS = (200, 202, 422)


@contextlib.contextmanager
def server(said: list[str]) -> Iterator[str]:
    """The address of a server of its own; ``said`` gets what it writes to standard error."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
        words = [sys.executable, "-m", "trainledger", "serve", "--port", "0", "--json"]
        process = subprocess.Popen(
            words, cwd=folder, stdout=subprocess.PIPE, stderr=errors, text=True,
            env={**os.environ, "PYTHONPATH": str(HOUSE / "src")},
        )  # fmt: skip
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()
            process.wait()
            errors.seek(0)
            said.append(errors.read())


def schemathesis(url: str, examples: int, only: str) -> int:
    """The exit code of schemathesis over every operation, or those of one calculator."""
    words = [
        sys.executable, "-m", "schemathesis.cli", "run", f"{url}openapi.json", "--phases", "examples,coverage,fuzzing",
        "--max-examples", str(examples), "--exclude-checks", CHECKS_LEFT_OUT, "--max-response-time",
        str(SLOWEST_SECONDS), "--continue-on-failure", "--generation-deterministic", "--warnings", "off",
    ]  # fmt: skip
    if only:
        words += ["--include-path-regex", f"/{only}$"]
    with tempfile.TemporaryDirectory() as folder:  # it keeps a database of examples where it is run
        return subprocess.run(words, cwd=folder, check=False).returncode


def hostile_queries(url: str, name: str, most: int) -> list[str]:
    """Hostile queries of one calculator; what is wrong with the answers, in lines."""
    every = list(hostile.queries(CALCULATORS[name]))
    queries = every[:: -(-len(every) // most)]
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    wrong, seconds, codes = [], [], Counter[int]()
    for query in queries:
        began = time.perf_counter()
        connection.request("GET", f"/view/{name}?{urlencode(query, errors='replace')}")
        reply = connection.getresponse()
        body = reply.read()
        seconds.append(time.perf_counter() - began)
        codes[reply.status] += 1
        if reply.status not in REFUSALS or seconds[-1] > SLOWEST_SECONDS:
            wrong.append(f"{name}: status {reply.status} after {seconds[-1]:.2f} s: {json.dumps(query)[:300]}")
        elif reply.status == 422 and not all(each["sentence"] for each in json.loads(body)["error"]):
            wrong.append(f"{name}: refused without a sentence: {json.dumps(query)[:300]}")
    late = quantiles(seconds, n=20)[-1]
    print(
        f"{name:<12}{len(queries):>6} queries {dict(sorted(codes.items()))}  median {1000 * median(seconds):.1f} ms, "
        f"95th percentile {1000 * late:.1f} ms, slowest {1000 * max(seconds):.0f} ms",
        flush=True,
    )
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=30, help="of schemathesis, for each operation (30)")
    parser.add_argument("--hostile", type=int, default=1000, help="hostile queries of each calculator, at most (1000)")
    parser.add_argument("--only", default="", choices=("", *CALCULATORS), help="one calculator")
    args = parser.parse_args()
    said: list[str] = []
    wrong: list[str] = []
    code = 0
    with server(said) as url:
        if args.examples:
            code = schemathesis(url, args.examples, args.only)
        for name in [args.only] if args.only else CALCULATORS:
            wrong += hostile_queries(url, name, args.hostile)
    print(*wrong, sep="\n")
    if "Traceback" in said[0]:
        print(said[0], file=sys.stderr)
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; {len(wrong)} answers wrong or slow")
    return int(bool(code or wrong or "Traceback" in said[0]))


if __name__ == "__main__":
    sys.exit(main())
