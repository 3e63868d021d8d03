"""The script that this process runs."""

from __future__ import annotations

import os
import sys


def main_script() -> str | None:
    """Its whole path; None where there is none, as in an interactive session."""
    found = getattr(sys.modules.get("__main__"), "__file__", None)
    return None if found is None else os.path.abspath(found)
