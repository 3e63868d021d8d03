"""What all tests share.

On CI property tests draw the same examples each time, so that a red build means a change. Ctrl-C works in the
processes that tests start even where the tests themselves run in the background, which a shell starts with it ignored.
No test sees the calibration that somebody made of this machine.
"""

from __future__ import annotations

import os
import signal
import tempfile

from hypothesis import settings

settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_CACHE = tempfile.TemporaryDirectory(prefix="trainledger-tests-")
os.environ["XDG_CACHE_HOME"] = _CACHE.name
