"""What all tests share: on CI, property tests draw the same examples each time, so that a red build means a change."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
