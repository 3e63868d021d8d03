"""A trace of a gigabyte is read in less than half a gigabyte of memory."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainledger.spec.units import GIGA, MIB

TRACE = Path(__file__).parent / "traces" / "a100_ddp_2ranks.json.gz"
STEPS = 3
READ = """
import resource, sys
from trainledger.observe.profiler.profile import profile_of
found = profile_of(sys.argv[1])
print(len(found.steps), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def repeated(path: Path, nbytes: int) -> int:
    """Write the trace again and again, each time later and with other numbers; how often."""
    events = json.loads(gzip.decompress(TRACE.read_bytes()))["traceEvents"]
    length = max(each["ts"] for each in events) - min(each["ts"] for each in events) + 5000
    times = 0
    with open(path, "w", encoding="ascii") as file:
        file.write('{"traceEvents": [{}')
        while file.tell() < nbytes:
            for each in events:
                args = {name: value + times * 10**7 if name in ("correlation", "External id") else value
                        for name, value in each["args"].items()}  # fmt: skip
                file.write(",\n" + json.dumps(each | {"ts": each["ts"] + times * length, "args": args}))
            times += 1
        file.write("]}")
    return times


@pytest.mark.slow
def test_a_gigabyte_is_read_in_half_of_it(tmp_path):
    times = repeated(tmp_path / "trace.json", GIGA)
    read = subprocess.run([sys.executable, "-c", READ, str(tmp_path / "trace.json")], capture_output=True, text=True)
    assert not read.returncode, read.stderr
    steps, peak_nbytes = map(int, read.stdout.split())
    assert steps == times * STEPS
    assert peak_nbytes < 500 * MIB
