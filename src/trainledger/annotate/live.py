"""The findings of a program that already runs: from here on, as long as a context lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from trainledger.annotate.annotation import Finding
from trainledger.annotate.findings import findings
from trainledger.annotate.script import Ending
from trainledger.annotate.source import Files
from trainledger.annotate.steps import Steps
from trainledger.annotate.syncs import reads_seen
from trainledger.annotate.watcher import Watcher
from trainledger.trace.compiled import compiled_runs_eagerly


@contextmanager
def watched_code(script: str) -> Iterator[Callable[[], tuple[Finding, ...]]]:
    """Observe what runs inside, the lines of a script and of the modules beside it; the findings are asked after it."""
    files = Files(script)
    watcher = Watcher(files)
    steps = Steps(watcher, files, None)
    with ExitStack() as stack:
        stack.enter_context(steps.followed())
        stack.enter_context(reads_seen(watcher.synchronized, lambda: None))
        stack.enter_context(compiled_runs_eagerly())
        stack.enter_context(watcher.recorder)
        yield lambda: findings(watcher, files, steps.holder, Ending())
        steps.end_step()  # the context ends with an update
    watcher.account.settle()
