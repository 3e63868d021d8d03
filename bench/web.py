"""How quickly the server of the page answers, and that 50 questions a second leave no queue and no memory behind.

    python bench web                        # about four minutes
    python bench web --moves 50 --seconds 5

Latencies are wall time of whole requests; beside them stands the server's CPU time for each, which other processes of
the machine change little. What a browser adds, `page` measures.

How quickly the page answers in a browser: opened, dragged, and with Python in the browser itself.

    python bench page                                  # with the server, a minute
    python bench page --pyodide node_modules/pyodide   # also the exported site, some minutes

The browser is a Chromium of this machine driven by playwright. A drag moves the first slider of a calculator by one
position, and ends when the new answer is in the page, or with the frame that shows it. ``bar_frames_most`` are the
frames from an answer until a bar of its figure has moved.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import repeat
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from urllib.parse import urlencode, urlsplit

from trainledger.web.calculator import Calculator
from trainledger.web.calculators import CALCULATORS
from trainledger.web.export import export

HOUSE = Path(__file__).resolve().parent.parent
QUICK = ("time", "tensor", "formats", "matmul", "model", "memory", "data")
_OF_405B = {"run": "llama-3.1-405b", "cluster.device": "h100-sxm", "layout.tensor": "8", "layout.shard": "128"}
_CHUNKS = {"layout.pipeline": "2", "layout.schedule": "interleaved", "layout.virtual_stages": "63"}
PLANS = {
    "plan of 405B": (_OF_405B, 1),
    "in 14 stages": ({**_OF_405B, "layout.pipeline": "14"}, 5),
    "in 2 x 63 stages": ({**_OF_405B, **_CHUNKS}, 20),  # asked so many times less often
}
TICK_SECONDS = 0.02  # between two positions of a slider that is dragged: 50 in a second
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


class Server:
    """`trainledger serve` in a process of its own, with its CPU time and memory."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process, self.url, self.host = process, url, urlsplit(url).netloc

    def cpu_seconds(self) -> float:
        """CPU time so far; 0 where the system does not say."""
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(words[11]) + int(words[12])) / _TICKS
        return 0.0

    def resident_nbytes(self) -> int:
        """Resident memory; 0 where the system does not say."""
        with contextlib.suppress(OSError):
            pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
            return pages * os.sysconf("SC_PAGE_SIZE")
        return 0


@contextlib.contextmanager
def serving() -> Iterator[Server]:
    words = [sys.executable, "-m", "trainledger", "serve", "--port", "0", "--json"]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPATH": str(HOUSE / "src")}
        process = subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, text=True, env=environment)
        assert process.stdout is not None
        try:
            yield Server(process, json.loads(process.stdout.readline())["url"])
        finally:
            process.terminate()
            process.wait()


def moves(calculator: Calculator, seed: int = 0) -> Iterator[dict[str, str]]:
    """Queries one slider or choice away from the default or a preset, as somebody tries things."""
    drawn = random.Random(seed)
    places = [{}, *(dict(each) for each in calculator.presets.values())]
    moved = [each for each in calculator.fields if each.stops]
    while True:
        query = dict(drawn.choice(places))
        if moved and (len(places) == 1 or drawn.random() < 0.8):
            field = drawn.choice(moved)
            query[field.name] = drawn.choice(field.stops)
        yield query


def get(connection: http.client.HTTPConnection, path: str) -> int:
    connection.request("GET", path)
    reply = connection.getresponse()
    reply.read()
    return reply.status


def view(name: str, query: dict[str, str]) -> str:
    return f"/view/{name}?{urlencode(query)}"


def spread(seconds: list[float]) -> dict[str, float]:
    """Median and 95th percentile, in milliseconds."""
    late = quantiles(seconds, n=20)[-1] if len(seconds) > 1 else seconds[0]
    return {"median_ms": 1000 * median(seconds), "p95_ms": 1000 * late}


def start() -> dict[str, float]:
    """From the command to its line, to the first byte of the page, and to the first answer."""
    began = time.perf_counter()
    with serving() as server:
        listening = time.perf_counter() - began
        connection = http.client.HTTPConnection(server.host)
        get(connection, "/")
        page = time.perf_counter() - began
        get(connection, view("memory", {}))
        first = time.perf_counter() - began
        imported = server.cpu_seconds()
        later = []
        for _ in range(20):
            began = time.perf_counter()
            connection.request("GET", "/")
            reply = connection.getresponse()
            later.append(time.perf_counter() - began)
            reply.read()
    return {
        "listening_seconds": listening, "page_seconds": page, "first_answer_seconds": first, "cpu_seconds": imported,
        "first_byte_ms": 1000 * median(later),
    }  # fmt: skip


def requests(server: Server, name: str, queries: Iterator[dict[str, str]], count: int) -> dict[str, Any]:
    """Latencies of views of one calculator; queries that are refused are not among them."""
    connection = http.client.HTTPConnection(server.host)
    seconds, refused = [], 0
    get(connection, view(name, {}))
    before = server.cpu_seconds()
    for query in queries:
        began = time.perf_counter()
        status = get(connection, view(name, query))
        if status == 200:
            seconds.append(time.perf_counter() - began)
        else:
            refused += 1
        if len(seconds) + refused == count:
            break
    cpu = (server.cpu_seconds() - before) / count
    return {"calculator": name, **spread(seconds), "cpu_ms": 1000 * cpu, "asked": count, "refused": refused}


def dragged(server: Server, name: str, seconds: float) -> dict[str, Any]:
    """A slider dragged at 50 positions a second by a page: one question in flight, of those that wait the newest."""
    queries = moves(CALCULATORS[name])
    wanted: list[tuple[float, dict[str, str]]] = []
    lock, over = threading.Lock(), threading.Event()
    taken: list[float] = []

    def ask() -> None:
        connection = http.client.HTTPConnection(server.host)
        while not over.is_set():
            with lock:
                newest = wanted.pop() if wanted else None
                wanted.clear()
            if newest is None:
                time.sleep(TICK_SECONDS / 10)
                continue
            get(connection, view(name, newest[1]))
            taken.append(time.perf_counter() - newest[0])

    asker = threading.Thread(target=ask)
    asker.start()
    before, until, ticks = server.resident_nbytes(), time.perf_counter() + seconds, 0
    while time.perf_counter() < until:
        with lock:
            wanted.append((time.perf_counter(), next(queries)))
        ticks += 1
        time.sleep(TICK_SECONDS)
    over.set()
    asker.join()
    return {
        "calculator": name, "positions": ticks, "answered": len(taken), **spread(taken),
        "rss_growth_nbytes": server.resident_nbytes() - before, **_afterwards(server, name),
    }  # fmt: skip


def impatient(server: Server, name: str, seconds: float) -> dict[str, Any]:
    """50 requests a second, each on a connection that is closed when the next one is sent."""
    queries = moves(CALCULATORS[name])
    before, until, sent = server.resident_nbytes(), time.perf_counter() + seconds, 0
    connection = None
    while time.perf_counter() < until:
        fresh = http.client.HTTPConnection(server.host)
        fresh.request("GET", view(name, next(queries)))
        if connection is not None:
            connection.close()
        connection, sent = fresh, sent + 1
        time.sleep(TICK_SECONDS)
    growth = server.resident_nbytes() - before
    return {"calculator": name, "sent": sent, "rss_growth_nbytes": growth, **_afterwards(server, name)}


def _afterwards(server: Server, name: str) -> dict[str, float]:
    """How long the first question after all that takes: no queue is left where that is as quick as ever."""
    began = time.perf_counter()
    get(http.client.HTTPConnection(server.host), view(name, {}))
    return {"next_answer_ms": 1000 * (time.perf_counter() - began)}


def table(title: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{title}  (load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores)")
    heads = list(rows[0])
    texts = [[_text(row[head], head) for head in heads] for row in rows]
    widths = [max(len(head), *(len(text[at]) for text in texts)) for at, head in enumerate(heads)]
    for line in (heads, *texts):
        print("  ".join(each.rjust(width) for each, width in zip(line, widths, strict=True)), flush=True)


def _text(value: Any, head: str) -> str:
    if head.endswith("nbytes"):
        return f"{value / 10**6:.1f} MB"
    return f"{value:.2f}" if head.endswith("seconds") else f"{value:.1f}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moves", type=int, default=200, help="of sliders, for each calculator (200)")
    parser.add_argument("--seconds", type=float, default=60, help="of dragging (60)")
    args = parser.parse_args()
    table("Start of the server, from the command", [start()])
    with serving() as server:
        rows = [requests(server, name, moves(CALCULATORS[name]), args.moves) for name in QUICK]
        for title, (query, less) in PLANS.items():
            rows.append({**requests(server, "memory", repeat(query), -(-args.moves // less)), "calculator": title})
        table("Views through the API, one after another", rows)
        rows = [dragged(server, name, args.seconds) for name in ("time", "memory")]
        table(f"A slider dragged for {args.seconds:g} s at 50 positions a second", rows)
        rows = [impatient(server, "memory", args.seconds)]
        table(f"{args.seconds:g} s of 50 requests a second, each given up for the next", rows)


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
  const bars = () => [...document.querySelectorAll("#answer .picture [data-key^=Bars] rect")].map((each) => {
    const { x, width } = each.getBoundingClientRect();
    return `${x.toFixed(1)} ${width.toFixed(1)}`;
  }).join();
  const found = [];
  let at = Number(slider.value);
  for (let move = 0; move < moves; move++) {
    at += at >= Number(slider.max) ? -1 : at <= 0 ? 1 : move % 7 < 4 ? 1 : -1;
    const before = bars(), began = performance.now();
    slider.value = at;
    slider.dispatchEvent(new Event("input", { bubbles: true }));
    await settled();
    const drawn = performance.now() - began;
    await frame();
    const seen = performance.now() - began;
    let frames = 1;
    for (; bars() === before && frames < 10; frames++) await frame();
    found.push([drawn, seen, bars() === before ? 0 : frames]);
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
            *times, bars = zip(*found, strict=True)
            answer, frame = (spread([each / 1000 for each in column]) for column in times)
            frames = {
                "frame_median_ms": frame["median_ms"],
                "frame_p95_ms": frame["p95_ms"],
                "bar_frames_most": max(bars),
            }
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


def page() -> int:
    """How long a drag takes in a real browser, with a server and as an exported site."""
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
