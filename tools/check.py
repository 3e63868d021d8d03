"""What runs before every commit, within a minute: format, lint, types, unit tests, tests of the rooms that changed.

    ./check             # rooms that differ from the last commit; where nothing does, those of the last commit
    ./check ledger nn   # these rooms

Unit tests need no torch (`tests/conftest.py` reads what a test file costs). Types are checked while the tests run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

HOUSE = Path(__file__).resolve().parent.parent
TESTS = HOUSE / "tests"
PYTHON = sys.executable
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HOUSE / "src")}


def changed_files() -> list[str]:
    """Paths that differ from the last commit, new ones too; of a clean tree those of the last commit."""
    status = git("status", "--porcelain", "--untracked-files=all").splitlines()
    found = [line[3:].split(" -> ")[-1].strip('"') for line in status]
    return found or git("show", "--pretty=", "--name-only", "HEAD").split()


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=HOUSE, capture_output=True, text=True, check=True).stdout


def tests_of(paths: list[str]) -> list[str]:
    """The tests of changed files: of a source file the nearest directory of its tests, of a test itself."""
    found = set()
    for path in paths:
        parts = Path(path).parts
        if parts[:2] == ("src", "trainledger") and len(parts) > 2:
            rooms = [TESTS.joinpath(*parts[2:depth]) for depth in range(len(parts) - 1, 2, -1)]
            found |= {str(room.relative_to(HOUSE)) for room in [room for room in rooms if room.is_dir()][:1]}
        elif parts[0] == "tests" and parts[-1].startswith("test_") and (HOUSE / path).exists():
            found.add(path)
    return sorted(found)


def main() -> int:
    began = time.monotonic()
    named = [f"src/trainledger/{each}/" for each in sys.argv[1:]]
    rooms = tests_of(named or changed_files())
    for words in (["ruff", "format", "--check", "."], ["ruff", "check", "."]):
        if subprocess.run([PYTHON, "-m", *words], cwd=HOUSE, check=False).returncode:
            return 1
    types = subprocess.Popen([PYTHON, "-m", "mypy"], cwd=HOUSE, stdout=subprocess.PIPE, text=True)
    pytest = [PYTHON, "-m", "pytest", "-n", "2"]
    codes = [subprocess.run([*pytest, "--cost", "unit"], cwd=HOUSE, env=ENVIRONMENT, check=False).returncode]
    if rooms:
        print(f"of the rooms that changed: {' '.join(rooms)}", flush=True)
        code = subprocess.run([*pytest, "--cost", "torch", *rooms], cwd=HOUSE, env=ENVIRONMENT, check=False).returncode
        codes.append(0 if code == 5 else code)  # 5: none of them needs torch
    print(types.communicate()[0].strip())
    codes.append(types.returncode)
    print(f"./check took {time.monotonic() - began:.0f} s")
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
