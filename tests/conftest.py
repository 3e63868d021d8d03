"""What all tests share.

On CI property tests draw the same examples each time, so that a red build means a change. Ctrl-C works in the
processes that tests start even where the tests themselves run in the background, which a shell starts with it ignored.
No test sees the calibration that somebody made of this machine. The closed form follows torch 2.13; where newer
versions run a step otherwise, the tests hold it to what they do (CONTRIBUTING.md lists the differences).
"""

from __future__ import annotations

import os
import signal
import tempfile
from importlib.metadata import PackageNotFoundError, version

import pytest
from hypothesis import settings

from trainledger.ledger import activations, update_muon

settings.register_profile("here", deadline=None)  # how long an example takes says more of the machine than of us
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_CACHE = tempfile.TemporaryDirectory(prefix="trainledger-tests-")
os.environ["XDG_CACHE_HOME"] = _CACHE.name

try:
    _TORCH = tuple(int(each) for each in version("torch").split(".")[:2])
except PackageNotFoundError:  # the core is tested without it too
    _TORCH = (2, 13)


@pytest.fixture(autouse=True, scope="session")
def _closed_form_of_this_torch():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(activations, "COMPARED", ("gt", "lt") if _TORCH >= (2, 14) else ("ge", "le"))
        patch.setattr(update_muon, "COPIES_BF16", _TORCH >= (2, 15))
        yield
