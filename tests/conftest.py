"""What all tests share.

On CI property tests draw the same examples each time, so that a red build means a change. Ctrl-C and SIGHUP work in the
processes that tests start even where the tests themselves run in the background or under nohup, with them ignored.
No test sees the calibration that somebody made of this machine, or what its processor says that it can do. The closed
form follows torch 2.13; where newer versions run a step otherwise, the tests hold it to what they do (CONTRIBUTING.md
lists the differences).
"""

from __future__ import annotations

import os
import re
import signal
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from trainledger.answers import fast_precision
from trainledger.ledger.ops import operations
from trainledger.ledger.optimizers import update as update_muon

# How long an example takes says more of the machine than of us. A test says how many examples it draws; `make test` and
# `./check` draw at most `DRAWN` of them, `make test-all` all.
DRAWN = 10
# Of a parametrized test with torch or of a sweep `make test` runs as many cases, the first and the last among them.
CASES = 3
settings.register_profile("here", deadline=None, suppress_health_check=list(HealthCheck))
settings.register_profile("ci", settings.get_profile("here"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # whatever else the machine does, and `train` says nothing of it
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # of nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

_CACHE = tempfile.TemporaryDirectory(prefix="trainledger-tests-")
os.environ["XDG_CACHE_HOME"] = _CACHE.name

try:
    _TORCH = tuple(int(each) for each in version("torch").split(".")[:2])
except PackageNotFoundError:  # the core is tested without it too
    _TORCH = (2, 13)


@pytest.fixture(autouse=True, scope="session")
def _processor_that_says_nothing():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast_precision, "CPUINFO", Path(_CACHE.name) / "cpuinfo")
        yield


@pytest.fixture(autouse=True, scope="session")
def _closed_form_of_this_torch():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operations, "COMPARED", ("gt", "lt") if _TORCH >= (2, 14) else ("ge", "le"))
        patch.setattr(update_muon, "COPIES_BF16", _TORCH >= (2, 15))
        yield


# What a test costs: unit tests need no torch and run in `./check`; long ones (4 s or more of a processor), those of
# agreement, published figures and processes run in `make test-all`.
COSTS = ("unit", "sweep", "torch", "long", "agreement", "published", "process")
_NEEDS_TORCH = re.compile(
    r"^\s*(?:import torch|from torch|from trainledger\.(?:trace|engine|observe\.measure)\b)"
    r"|importorskip\(.torch",
    re.MULTILINE,
)
_SAYS_ITS_COST = re.compile(r"^pytestmark = .*?pytest\.mark\.(\w+)", re.MULTILINE | re.DOTALL)


def cost_of(path: Path) -> str:
    """The cost of a test file: what its ``pytestmark`` says, else whether it needs torch; read without importing it."""
    text = path.read_text(encoding="utf-8")
    own = _SAYS_ITS_COST.search(text)
    if own and own[1] in COSTS:
        return own[1]
    return "torch" if _NEEDS_TORCH.search(text) else "unit"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cost", default="", help=f"only files of these costs: {', '.join(COSTS)}")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files of another cost out before they import anything."""
    wanted = _wanted(config)
    if not wanted or collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    if "long" in wanted and "mark.long" in collection_path.read_text(encoding="utf-8"):
        return None
    return True if cost_of(collection_path) not in wanted else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave tests out that say another cost than their file's."""
    wanted = _wanted(config)
    if not wanted:
        return
    for item in items:
        _draw_at_most(DRAWN, item)
    left = {item for item in items if (_own_cost(item) or cost_of(item.path)) not in wanted}
    left |= _beyond(CASES, [item for item in items if item not in left])
    config.hook.pytest_deselected(items=[*left])
    items[:] = [item for item in items if item not in left]


def _beyond(most: int, items: list[pytest.Item]) -> set[pytest.Item]:
    """The cases of each test with torch or of a sweep that are too many, spread evenly; others take little time."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    beyond: set[pytest.Item] = set()
    for of_test in cases.values():
        if len(of_test) > most and cost_of(of_test[0].path) in ("torch", "sweep"):
            kept = {round(at * (len(of_test) - 1) / (most - 1)) for at in range(most)}
            beyond |= {item for at, item in enumerate(of_test) if at not in kept}
    return beyond


def _draw_at_most(most: int, item: pytest.Item) -> None:
    drawn = getattr(getattr(item, "obj", None), "_hypothesis_internal_use_settings", None)
    if drawn is not None and drawn.max_examples > most:
        item.obj._hypothesis_internal_use_settings = settings(drawn, max_examples=most)  # type: ignore[attr-defined]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what is marked ``gpu`` where there is none."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs an accelerator")


def _own_cost(item: pytest.Item) -> str | None:
    return next((each.name for each in item.iter_markers() if each.name in COSTS), None)


def _wanted(config: pytest.Config) -> set[str]:
    return {each for each in config.getoption("--cost").split(",") if each}
