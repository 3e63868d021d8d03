"""The findings of a program that already runs: from here on, as long as a context lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from trainledger.trace.annotate.annotation import Finding
from trainledger.trace.annotate.findings import findings
from trainledger.trace.annotate.script import Ending
from trainledger.trace.annotate.source import Files
from trainledger.trace.annotate.steps import Steps
from trainledger.trace.annotate.syncs import reads_seen
from trainledger.trace.annotate.watcher import Watcher
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
