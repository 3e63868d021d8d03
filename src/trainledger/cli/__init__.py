"""The command line: `command_line.main`."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code; without ``argv`` the words are those of the process."""
    from trainledger.cli import command_line  # pytest imports this package in every project, for its plugin

    return command_line.main(argv)
