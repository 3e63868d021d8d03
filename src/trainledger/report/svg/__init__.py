"""Every figure as light SVG: no scripts and no browser to draw it, and a few kB instead of megabytes."""

from trainledger.report.svg.drawing import WIDTH, standalone, svg

__all__ = ["WIDTH", "standalone", "svg"]
