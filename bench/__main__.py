"""Benchmarks of this machine: ``python bench NAME [OPTIONS]``, ``python bench all`` for those of `make bench`.

Each prints what it measured; ``python bench NAME --help`` says how. Performance is measured here and in no test.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module

# Name: module, function, what it measures.
BENCHMARKS = {
    "startup": ("plan", "startup", "CPU time of `trainledger plan` beside a bare Python"),
    "ledger": ("ledger", "main", "accounts per second, with whole numbers and with arrays of layouts"),
    "plan": ("plan", "main", "time to answer of searches; accelerate and llm-analysis"),
    "step_time": ("step_time", "main", "predicted and measured step times on this machine"),
    "trace": ("trace", "main", "time and memory of a trace; tools that count FLOPs or bytes, on the same step"),
    "web": ("web", "main", "latency, queue and memory of the page's server"),
    "page": ("web", "page", "a slider dragged in a Chromium, with a server and as an exported site"),
    "books": ("books", "main", "runs of the engine and loops of others: forecast, metered, reconciled"),
    "engine": ("engine", "main", "speed of the engine and of other loops (docs/training_speed.md)"),
    "faults": ("faults", "main", "runs killed at random moments and resumed (docs/faults.md, an hour)"),
    "annotate": ("costs", "annotate", "what annotated lines cost"),
    "loader": ("costs", "loader", "how quickly the token store gives batches"),
    "checkpoint": ("costs", "checkpoint", "how long a checkpoint stops the steps"),
    "metering": ("costs", "metering", "what the meter costs a loop"),
    "gpu": ("gpu", "main", "all that needs an accelerator; in bench/results"),
}
IN_MAKE = (
    ("startup",), ("ledger",), ("plan",), ("step_time",), ("trace", "--beside"), ("web",),
    ("page", "--pyodide", ".venv/pyodide/node_modules/pyodide"),
)  # fmt: skip


def main() -> int:
    name, *options = sys.argv[1:] or ["--help"]
    if name == "all":
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return max(subprocess.call([sys.executable, sys.argv[0], *words], env=environment) for words in IN_MAKE)
    if name not in BENCHMARKS:
        print(__doc__)
        print("\n".join(f"    {each:<12}{what}" for each, (_, _, what) in BENCHMARKS.items()))
        return 0 if name in ("-h", "--help") else 2
    module, function, _ = BENCHMARKS[name]
    sys.argv[:] = [f"bench {name}", *options]
    return getattr(import_module(module), function)() or 0


if __name__ == "__main__":
    sys.exit(main())
