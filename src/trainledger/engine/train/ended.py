"""What a rank leaves for those that `launch` starts after it: the exit code of an end that a restart does not mend.

torchrun's agent starts ranks again after any failure. Those that find such a code end with it at once, before they
import torch.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

FILE = "TRAINLEDGER_ENDED"  # the environment variable with the file's path; `launch` makes one for each run
_MENDED_BY_A_RESTART = (0, 1, 5)  # done, a failure nobody foresaw, a lost rank


def leave(code: int) -> None:
    """Keep the exit code of this rank where a restart would end in the same way, or nobody wants one."""
    if FILE in os.environ and code not in _MENDED_BY_A_RESTART:
        with suppress(OSError):
            Path(os.environ[FILE]).write_text(str(code))


def left() -> int | None:
    """The exit code that an earlier rank has left, if one has."""
    try:
        return int(Path(os.environ[FILE]).read_text())
    except (KeyError, OSError, ValueError):
        return None
