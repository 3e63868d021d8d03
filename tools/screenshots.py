"""Screenshots of every calculator for docs/calculators.md: wide and light, narrow and dark.

    python tools/screenshots.py           # all of them
    python tools/screenshots.py memory    # one

Starts the server, drives a Chromium that is on the machine (playwright, without a browser of its own), and writes
docs/images/NAME-light-1280.png and NAME-dark-390.png in 64 colours.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from trainledger.web.calculators import CALCULATORS

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
SHOTS = (("light", 1280, 1500), ("dark", 390, 1100))  # scheme, and pixels across and down
NARROW = 600  # below it the answer stands under the form
COLOURS = 64
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
PATIENCE_MS = 120_000


def main(names: list[str]) -> int:
    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    if browser_path is None:
        print("no Chromium was found: apt-get install chromium", file=sys.stderr)
        return 1
    IMAGES.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "trainledger", "serve", "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, sync_playwright() as playwright:
        assert server.stdout is not None
        address = json.loads(server.stdout.readline())["url"]
        browser = playwright.chromium.launch(executable_path=browser_path, args=ARGUMENTS)
        for name in names or CALCULATORS:
            for shot in SHOTS:
                print(take(browser, address, name, *shot))
        browser.close()
        server.terminate()
    return 0


def take(browser: Browser, address: str, name: str, scheme: str, across: int, down: int) -> Path:
    """One calculator's answer to its default query, cut to the height that a reader looks at."""
    page = browser.new_page(viewport={"width": across, "height": down}, color_scheme=scheme)  # type: ignore[arg-type]
    page.goto(f"{address}?calculator={name}")
    page.locator("#answer[aria-busy=false]").wait_for(timeout=PATIENCE_MS)
    if across < NARROW:
        page.locator("#answer").evaluate("answer => answer.scrollIntoView()")
    page.wait_for_timeout(500)
    picture = Image.open(BytesIO(page.screenshot())).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    page.close()
    file = IMAGES / f"{name}-{scheme}-{across}.png"
    picture.save(file, optimize=True)
    return file


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
