"""Charts as SVG: no scripts and no browser to draw them, and a few kB each."""
