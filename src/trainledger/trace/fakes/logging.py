"""What torch logs of code that a trace cannot follow, kept back: the trace says it itself."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_LOGGER = "torch._subclasses.fake_tensor"
_LINE = "failed while attempting to run meta for"


@contextmanager
def quiet_fake_errors() -> Iterator[None]:
    """Keep back the log line, with its stack, that torch writes where an operator refuses fake tensors.

    The error itself is raised as ever; other lines of that logger are written. Nothing stays behind.
    """

    def other(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(_LINE)

    logger = logging.getLogger(_LOGGER)
    logger.addFilter(other)
    try:
        yield
    finally:
        logger.removeFilter(other)
