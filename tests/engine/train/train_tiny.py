"""A process that trains the run given as JSON; the tests kill it. Arguments: run directory, JSON, [resume]."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import torch
from tiny_run import CountingFeed, tiny_run

from trainledger.engine.train.engine import train
from trainledger.engine.train.stop import Stopped
from trainledger.spec.problem import InvalidInput

if __name__ == "__main__":
    fields = json.loads(sys.argv[2])
    torch.set_num_threads(1)
    if (largest := fields.pop("largest_file", None)) is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
    run = tiny_run(fields.pop("model", None), **fields)
    try:
        finished = train(run, Path(sys.argv[1]), open_feed=CountingFeed, resume="resume" in sys.argv[3:])
    except Stopped as end:
        print(end, file=sys.stderr)
        sys.exit(end.exit_code)
    except InvalidInput as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    print(finished.checkpoint)
