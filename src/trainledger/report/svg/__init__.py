"""Every figure as light SVG: no scripts and no browser to draw it, and a few kB instead of megabytes."""

from trainledger.report.svg.drawing import WIDTH, standalone, svg
from trainledger.report.svg.paint import STYLE

__all__ = ["STYLE", "WIDTH", "standalone", "svg"]
