"""Screenshots of the lesson and of every calculator for docs/calculators.md: wide and light, narrow and dark.

    python tools/screenshots.py           # all of them
    python tools/screenshots.py memory    # one

Starts the server, drives a Chromium that is on the machine (playwright, without a browser of its own), and writes
docs/images/NAME-light-1280.png and NAME-dark-390.png in few colours.
"""

from __future__ import annotations

import sys
import tempfile
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from browsing import CHROMIUM, QUIET, SETTLED, served, training
from trainledger.web.calculators import CALCULATORS

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
SHOTS = (("light", 1280, 1500), ("dark", 390, 1100))  # scheme, and pixels across and down
NARROW = 600  # below it the answer stands under the form
COLOURS = 256
STEPS = 600  # of the small run that the calculator of runs shows
PATIENCE_MS = 120_000
REST_MS = 2500  # in which the page also asks what each change of a run that does not fit leads to


def main(names: list[str]) -> int:
    """Write the screenshots of these calculators, or of all."""
    if CHROMIUM is None:
        print("no Chromium was found: apt-get install chromium", file=sys.stderr)
        return 1
    IMAGES.mkdir(exist_ok=True)
    wanted = names or ["lesson", *CALCULATORS, "runs"]
    with tempfile.TemporaryDirectory() as folder, served(Path(folder) / "runs") as address:
        if "runs" in wanted:
            training(Path(folder), STEPS).wait()
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
            for name in wanted:
                for shot in SHOTS:
                    print(take(browser, address, name, *shot))
            browser.close()
    return 0


def take(browser: Browser, address: str, name: str, scheme: str, across: int, down: int) -> Path:
    """One calculator's answer to its default query, cut to the height that a reader looks at."""
    page = browser.new_page(viewport={"width": across, "height": down}, color_scheme=scheme)  # type: ignore[arg-type]
    page.goto(address if name == "lesson" else f"{address}?calculator={name}")
    page.wait_for_function(SETTLED, timeout=PATIENCE_MS)
    if across < NARROW:
        page.locator("#answer").evaluate("answer => answer.scrollIntoView()")
    page.wait_for_timeout(REST_MS)
    picture = Image.open(BytesIO(page.screenshot())).convert("RGB")
    picture = picture.quantize(COLOURS, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)  # keeps the paper's colour
    page.close()
    file = IMAGES / f"{name}-{scheme}-{across}.png"
    picture.save(file, optimize=True)
    return file


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
