"""Small corpora of real text, and a data spec over them."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from trainledger.spec.run import DataSpec

SpecOf = Callable[..., DataSpec]


@pytest.fixture
def spec_of(tmp_path: Path) -> SpecOf:
    """A data spec with its cache in the test's directory and a tenth held out."""

    def spec(*paths: Path | str, **fields: object) -> DataSpec:
        given = {"cache": str(tmp_path / "cache"), "validation_fraction": 0.1, "path": tuple(map(str, paths))}
        return DataSpec(**given | fields)  # type: ignore[arg-type]

    return spec


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A directory with a few dozen modules of the standard library, about 1.5 MB."""
    directory = tmp_path / "library"
    directory.mkdir()
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-i]*.py")):
        (directory / file.name).write_bytes(file.read_bytes())
    return directory


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real data that lies beside the repository on some machines."""
    beside = Path(__file__).resolve().parents[4] / "shared"
    directory = Path(os.environ.get("TRAINLEDGER_SHARED", beside)) / "data"
    if not directory.is_dir():
        pytest.skip("the shared test data is not on this machine (TRAINLEDGER_SHARED names its directory)")
    return directory
