"""The lecture as static files: every chapter runs in the reader's browser, and nothing is fetched from another host.

    make lecture-site            # writes site/lecture, opens every chapter with the network cut, compares its numbers

marimo (``export html-wasm --offline``) writes the runtime and the packages beside the chapters, and embeds the outputs
of this machine, torch's included, as what a reader sees until Python has started. It takes Pyodide's packages from a
mirror, which is made here: the core from npm, wheels from PyPI, PyYAML without its C extension (PyPI has no build of it
for Pyodide), and trainledger as it stands. Needs a Chromium, playwright and uv (``./install browser``).
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from html import escape
from pathlib import Path

from browsing import CHROMIUM, QUIET, files_served
from trainledger.report.html import whole_page

ROOT = Path(__file__).parents[1]
CHAPTERS = sorted((ROOT / "lecture").glob("[0-9][0-9]_*.py"))
CORE = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip")
# What marimo loads before it asks an index, at the versions of Pyodide 314.0.0's own lock file.
LOADED = ("micropip", "packaging", "docutils", "pygments", "jedi", "parso", "pyodide-http")
PYPI = "https://pypi.org/simple"
FOREIGN_FILES = ("CLAUDE.md",)  # of marimo's wheel, of no use to a reader
SLOWEST_START_MS = 240_000  # of Python in the browser, on a busy machine; a minute on a quiet one
_CALCULATOR = re.compile(r"\.\./\?calculator=(\w+)")
METADATA = """# /// script
# requires-python = ">=3.11"
# dependencies = ["marimo", "trainledger @ {wheel}"]
# ///
"""


def pip(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *words], check=True, cwd=ROOT)


def mirror(folder: Path, pyodide: Path) -> None:
    """A distribution of Pyodide with the packages that marimo loads first."""
    lock = json.loads((pyodide / "pyodide-lock.json").read_text())
    for name in CORE:
        shutil.copy(pyodide / name, folder)
    foreign = ("--no-deps", "--only-binary=:all:", "--python-version", "3.14", "--dest", str(folder))
    wanted = [f"{name}=={lock['packages'][name]['version']}" for name in LOADED]
    pip("download", *foreign, *wanted)
    wasm = ("--platform", "pyemscripten_2026_0_wasm32", "--implementation", "cp", "--abi", "cp314")
    pip("download", *foreign, *wasm, "msgspec")
    pure_yaml(folder, lock["packages"]["pyyaml"]["version"])
    packages = {}
    for wheel in sorted(folder.glob("*.whl")):
        name, version = wheel.name.split("-")[:2]
        name = name.replace("_", "-")
        entry = lock["packages"][name]
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        packages[name] = {**entry, "version": version, "file_name": wheel.name, "sha256": digest}
    (folder / "pyodide-lock.json").write_text(json.dumps({**lock, "packages": packages}))


def pure_yaml(folder: Path, version: str) -> None:
    """A wheel of PyYAML's Python files, which work without its C extension."""
    with tempfile.TemporaryDirectory() as sources:
        pip(
            "download",
            "--no-deps",
            "--no-binary=:all:",
            "--no-build-isolation",
            "--dest",
            sources,
            f"pyyaml=={version}",
        )
        archive = next(Path(sources).glob("*.tar.gz")).read_bytes()
    info = f"pyyaml-{version}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: PyYAML\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: trainledger\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        for member in packed.getmembers():
            inside = member.name.partition("/lib/")[2]
            if inside.startswith("yaml/") and inside.endswith(".py"):
                source = packed.extractfile(member)
                assert source is not None
                files[inside] = source.read().decode()
    record = f"{info}/RECORD"
    files[record] = "".join(f"{name},,\n" for name in [*files, record])
    with zipfile.ZipFile(folder / f"pyyaml-{version}-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)


def start_own_chromium() -> None:
    """Let marimo's playwright start the Chromium of this machine; it has no option for it (0.25.2)."""
    from playwright.async_api import BrowserType

    launch = BrowserType.launch

    async def with_path(self: BrowserType, **options: object) -> object:
        return await launch(self, **{**options, "executable_path": CHROMIUM})

    BrowserType.launch = with_path  # type: ignore[assignment]


def write(site: Path, pyodide: Path, chapters: list[Path]) -> None:
    from marimo._cli.cli import main

    start_own_chromium()
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # marimo looks for uv there
    site.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch, "pyodide")
        base.mkdir()
        mirror(base, pyodide)
        pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", scratch, ".")
        wheel = next(Path(scratch).glob("trainledger-*.whl"))
        shutil.copytree(ROOT / "docs", Path(scratch, "docs"))  # chapter 18 reads the claims from there
        Path(scratch, "lecture").mkdir()
        with files_served(base) as address:
            for chapter in chapters:
                source = Path(scratch, "lecture", chapter.name)
                source.write_text(METADATA.format(wheel=wheel.as_uri()) + chapter.read_text())
                words = ["export", "html-wasm", str(source), "-o", str(site / f"{chapter.stem}.html"), "--no-sandbox"]
                words += ["--offline", "--pyodide-index-url", address, "--pypi-index-url", PYPI]
                main([*words, "--mode", "run", "--show-code", "--execute", "-f"], standalone_mode=False)
                notebook(site / f"{chapter.stem}.ipynb", chapter)
                print(f"{chapter.stem} written", flush=True)
    for name in FOREIGN_FILES:
        (site / name).unlink(missing_ok=True)
    index(site)
    link_back(site)


def notebook(path: Path, chapter: Path) -> None:
    """A chapter for Jupyter and Colab: its first cell installs what it needs."""
    import nbformat
    from marimo._cli.cli import main

    main(["export", "ipynb", str(chapter), "-o", str(path), "--sort", "top-down", "-f"], standalone_mode=False)
    cells = nbformat.read(path, as_version=4)
    cells.cells.insert(0, nbformat.v4.new_code_cell('%pip install --quiet "trainledger[lecture]"'))
    nbformat.write(cells, path)


def index(site: Path) -> None:
    """The list of chapters."""
    rows = [
        f'<li><a href="{path.stem}.html">{escape(title(path))}</a> (<a href="{path.stem}.ipynb">ipynb</a>)</li>'
        for path in CHAPTERS
    ]
    about = "Resource accounting for training language models. Every number is computed in your browser."
    page = whole_page("The lecture", [f"<p>{about}</p><ul>{''.join(rows)}</ul>"], ())
    (site / "index.html").write_text(page, encoding="utf-8")


def link_back(site: Path) -> None:
    """Let an exported page of calculators beside the lecture name the chapter that links to a calculator."""
    config = site.parent / "config.json"
    if config.is_file():
        links = [(name, chapter) for chapter in CHAPTERS for name in _CALCULATOR.findall(chapter.read_text())]
        chapters = {name: f"{site.name}/{chapter.stem}.html" for name, chapter in reversed(links)}
        config.write_text(json.dumps({**json.loads(config.read_text()), "chapters": chapters}))


def title(chapter: Path) -> str:
    return chapter.read_text(encoding="utf-8").partition('app_title="')[2].partition('"')[0]


def check(site: Path, chapters: list[Path]) -> list[str]:
    """What is wrong with the chapters in a browser that reaches no other host: requests to one, and other numbers."""
    from playwright.sync_api import sync_playwright

    faults: list[str] = []
    asked: list[str] = []
    with files_served(site) as address, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        for chapter in chapters:
            page = browser.new_page()
            page.on("request", lambda request: asked.append(request.url))
            page.goto(f"{address}/{chapter.stem}.html")
            tables = page.locator("table.claims")
            tables.first.wait_for(timeout=SLOWEST_START_MS)
            here = set(tables.locator("tbody tr").all_inner_texts())
            page.locator('table.claims[title$="emscripten"]').last.wait_for(timeout=SLOWEST_START_MS)
            page.wait_for_timeout(5_000)  # the cells below
            there = page.locator('table.claims[title$="emscripten"] tbody tr').all_inner_texts()
            faults += [f"{chapter.stem}: {row!r}, which this machine does not show" for row in there if row not in here]
            faults += [f"{chapter.stem}: {row!r} does not hold" for row in there if row.startswith("✗")]
            print(f"{chapter.stem}: {len(there)} of {len(here)} claims computed in the browser", flush=True)
            page.close()
        browser.close()
    ours = (address, "blob:", "data:")
    return faults + [f"asked for {url}" for url in asked if not url.startswith(ours)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path, help="the directory to write")
    parser.add_argument("--pyodide", type=Path, help="the directory of Pyodide's npm package; without it, only check")
    parser.add_argument("--chapter", action="append", help="a chapter alone, such as 01_budget; may be repeated")
    given = parser.parse_args()
    chapters = [path for path in CHAPTERS if not given.chapter or path.stem in given.chapter]
    if given.pyodide:
        write(given.site, given.pyodide, chapters)
    faults = check(given.site, chapters)
    print("\n".join(faults) or "Each number in the browser is this machine's, and no other host was asked.")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
