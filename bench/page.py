"""How quickly the page answers in a browser: opened, dragged, and with Python in the browser itself.

    python bench/page.py                                  # with the server, a minute
    python bench/page.py --pyodide node_modules/pyodide   # also the exported site, some minutes

The browser is a Chromium of this machine driven by playwright. A drag moves the first slider of a calculator by one
position, and ends when the new answer is in the page, or with the frame that shows it.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import Any

from trainledger.web.export import export
from web import QUICK, serving, spread, table

IN_BROWSER = (*QUICK, "serving")
_CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

# Moves a slider of the page, and waits for the new answer and the frame that shows it.
_DRAG = """async ([moves, still]) => {
  const slider = document.querySelector("#form input[type=range]:enabled");
  if (!slider) return [];
  const root = document.querySelector("#answer");
  const frame = () => new Promise(requestAnimationFrame);
  const settled = () => new Promise((done) => {
    const look = () => root.getAttribute("aria-busy") === "false" && (watch.disconnect(), done());
    const watch = new MutationObserver(look);
    watch.observe(root, { attributes: true });
    look();
  });
  const found = [];
  let at = Number(slider.value);
  for (let move = 0; move < moves; move++) {
    at += at >= Number(slider.max) ? -1 : at <= 0 ? 1 : move % 7 < 4 ? 1 : -1;
    const began = performance.now();
    slider.value = at;
    slider.dispatchEvent(new Event("input", { bubbles: true }));
    await settled();
    const drawn = performance.now() - began;
    await frame();
    found.push([drawn, performance.now() - began]);
    await new Promise((done) => setTimeout(done, still));
  }
  slider.dispatchEvent(new Event("change", { bubbles: true }));
  return found;
}"""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@contextlib.contextmanager
def static(folder: Path) -> Iterator[str]:
    """The address of a plain file server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=_CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


def opened(browser: Any, url: str) -> tuple[Any, dict[str, float]]:
    """The page as a new reader opens it, and its milliseconds until text is painted and until the answer is there."""
    page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
    began = time.perf_counter()
    page.goto(url)
    settled = "() => document.querySelector('#answer')?.getAttribute('aria-busy') === 'false'"
    page.wait_for_function(settled, timeout=120_000)
    answered = time.perf_counter() - began
    painted = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0")
    return page, {"first_paint_ms": painted, "first_answer_ms": 1000 * answered}


def drags(browser: Any, url: str, names: tuple[str, ...], count: int) -> list[dict[str, Any]]:
    """Drags of the first slider of each calculator that has one."""
    rows = []
    for name in names:
        page, _ = opened(browser, f"{url}?calculator={name}")
        found = page.evaluate(_DRAG, [count + 3, 30])[3:]  # the first ones import what is used first
        page.context.close()
        if found:
            answer, frame = (spread([each / 1000 for each in column]) for column in zip(*found, strict=True))
            frames = {"frame_median_ms": frame["median_ms"], "frame_p95_ms": frame["p95_ms"]}
            rows.append({"calculator": name, **answer, **frames})
    return rows


def in_server(browser: Any, count: int) -> None:
    with serving() as server:
        drags(browser, server.url, QUICK[:1], 3)  # what is imported at first use is not measured
        table("The page opened by a new reader (medians of 5)", [_opened(browser, server.url, 5)])
        table("Drags in the page", drags(browser, server.url, QUICK, count))


def in_site(browser: Any, pyodide: Path, count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        site = export(Path(folder) / "site", pyodide)
        table("The exported site", site.document().data()["parts"])
        with static(Path(folder) / "site") as url:
            table("The site opened by a new reader, nothing cached (medians of 3)", [_opened(browser, url, 3)])
            table("Drags in the site, answered by Python in the browser", drags(browser, url, IN_BROWSER, count))


def _opened(browser: Any, url: str, times: int) -> dict[str, float]:
    seen = []
    for _ in range(times):
        page, found = opened(browser, url)
        page.context.close()
        seen.append(found)
    return {name: median(each[name] for each in seen) for name in seen[0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moves", type=int, default=50, help="of a slider, for each calculator (50)")
    parser.add_argument("--pyodide", type=Path, help="the directory of Pyodide's npm package")
    args = parser.parse_args()
    try:
        import playwright.sync_api  # noqa: F401
    except ModuleNotFoundError:
        print("The page in a browser was not measured: playwright is not installed.")
        return 0
    if _CHROMIUM is None:
        print("The page in a browser was not measured: there is no Chromium or Chrome.")
        return 0
    with chromium() as browser:
        in_server(browser, args.moves)
        if args.pyodide and not args.pyodide.is_dir():
            print(f"The exported site was not measured: there is no {args.pyodide} (make browser installs it).")
        elif args.pyodide:
            in_site(browser, args.pyodide, args.moves)
    return 0


if __name__ == "__main__":
    sys.exit(main())
