"""CPU time of `trainledger plan` on a catalog model against a bare `python -c pass`, interleaved in one run.

The plan may take 150 ms more. Medians of the children's user and system time, and how many of our modules it imports.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from statistics import median

SAMPLES = 31
PYTHON = sys.executable
PLAN = [str(Path(PYTHON).with_name("trainledger")), "plan", "gpt2", "--device", "h100-sxm"]

MODULES = """
import sys
from trainledger.cli import main
main(["plan", "gpt2", "--device", "h100-sxm"])
print(sum(each.startswith("trainledger") for each in sys.modules), "modules of trainledger")
"""


def cpu_seconds(command: list[str], environment: dict[str, str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    # Without compiled files on disk every start compiles the source again, which is not what is measured here.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    cpu_seconds(PLAN, environment)
    pairs = [(cpu_seconds([PYTHON, "-c", "pass"], environment), cpu_seconds(PLAN, environment)) for _ in range(SAMPLES)]
    bare, plan = (median(column) for column in zip(*pairs, strict=True))
    print(f"python -c pass   {1000 * bare:6.1f} ms")
    print(f"trainledger plan {1000 * plan:6.1f} ms   {1000 * (plan - bare):.1f} ms more (at most 150)")
    print(subprocess.run([PYTHON, "-c", MODULES], capture_output=True, text=True, check=True).stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
