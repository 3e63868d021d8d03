"""One run under a limit of its process: limited_run.py RUN.toml DIR LIMIT NBYTES [blind].

The limit is set when torch is loaded: what its libraries take is no part of what a run needs, and NBYTES are beside it.
A blind run has no preflight. The exit code is that of the end.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

from trainledger.answers.closed_loop import run_closed_loop
from trainledger.engine.train.preflight import COUNTED, status
from trainledger.engine.train.stop import Stopped
from trainledger.spec.runfile import read


def main() -> int:
    run, run_dir, name, nbytes = read(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    most = status()[COUNTED[name]] + nbytes
    resource.setrlimit(getattr(resource, name), (most, most))
    try:
        run_closed_loop(run, run_dir, preflight="blind" not in sys.argv)
    except Stopped as end:
        print(end, file=sys.stderr)
        return end.exit_code
    print(status()["VmHWM"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
