"""The page as static files, in which the same Python answers inside the browser, under Pyodide."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import tempfile
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import trainledger
from trainledger.report.document import Document, Section, Table, Text
from trainledger.spec.frozen import frozen
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.web import answers
from trainledger.web.calculator import Calculator
from trainledger.web.calculators import CALCULATORS
from trainledger.web.preview import figure, headed, illustrated

PYODIDE = "pyodide@314"
POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'"
)
ROOMS = ("__init__", "spec", "catalog", "ledger", "forecast", "tensors", "observe", "report", "answers", "web")
_NOT_ASKED = ("server", "openapi", "guard", "jobs", "listening", "export", "preview")  # of the room `web`
_CORE = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "package.json", "README.md")
_LOCK = "pyodide-lock.json"
_CHARSET = '<meta charset="utf-8">'
_MANIFEST = "site.json"
_LONGEST_SECONDS = 300  # of compiling


@frozen
class Site:
    """What was written: the directory, and of each part its name, files, bytes, and bytes as gzip sends them."""

    folder: Path
    parts: tuple[tuple[str, int, int, int], ...]
    compiled: bool

    def document(self) -> Document:
        """The sizes by part."""
        files, nbytes, sent = (sum(column) for column in zip(*(part[1:] for part in self.parts), strict=True))
        total = ("all", files, nbytes, sent)
        heads, units = ("part", "files", "size", "sent with gzip"), ("", "integer", "nbytes", "nbytes")
        table = Table("parts", heads, (*self.parts, total), units=units)
        slower = "Python starts a second or two later than it could: its sources are compiled where node is installed."
        notes = () if self.compiled else (Text((slower,)),)
        parts = [dict(zip(("part", "files", "nbytes", "gzip_nbytes"), part, strict=True)) for part in self.parts]
        data = {
            "folder": os.fspath(self.folder),
            "parts": parts,
            "nbytes": nbytes,
            "gzip_nbytes": sent,
            "compiled": self.compiled,
        }
        return Document(f"{self.folder}: a page for any web server", (Section("", (table, *notes)),), data=lambda: data)


def export(folder: Path, pyodide: Path | None = None, wheels: Sequence[Path] = ()) -> Site:
    """Write the page with its Python into a directory that is new, empty, or an earlier export.

    ``pyodide`` is the directory of its npm package, by default the one in ``node_modules``; ``wheels`` are packages
    built for it, such as numpy. Raises `InvalidInput`.
    """
    core = _core_of(pyodide)
    _check_wheels(wheels)
    _clear(folder)
    sources = _sources()
    compiled = _compiled(sources, core)
    packages = {wheel.name.partition("-")[0] for wheel in wheels}
    shown = {name: calculator for name, calculator in CALCULATORS.items() if packages.issuperset(calculator.needs)}
    drawn = {f"figures/{name}.png": figure(name, {}, CALCULATORS) for name in shown}
    figures = {name: image for name, image in drawn.items() if image is not None}
    parts = {
        "page": dict(_page([wheel.name for wheel in wheels], shown, figures)),
        "figures": figures,
        "examples": {f"presets/{name}.json": _examples(name) for name in shown},
        "calculators": {"python.zip": compiled or sources},
        "Pyodide": {f"pyodide/{name}": (core / name).read_bytes() for name in _CORE}
        | {f"pyodide/{_LOCK}": _lock(core)},
        "wheels": {f"pyodide/{wheel.name}": wheel.read_bytes() for wheel in wheels},
    }
    everything = {name: content for part in parts.values() for name, content in part.items()}
    parts["page"]["service.js"] = _service(everything) + parts["page"]["service.js"]
    for part in parts.values():
        for name, content in part.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    manifest = {"trainledger": trainledger.__version__, "files": list(everything)}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1))
    sizes = tuple(_sizes(name, list(part.values())) for name, part in parts.items() if part)
    return Site(folder, sizes, compiled is not None)


def _sizes(name: str, contents: list[bytes]) -> tuple[str, int, int, int]:
    sent = sum(min(len(content), len(zlib.compress(content))) for content in contents)
    return name, len(contents), sum(map(len, contents)), sent


def _service(files: Mapping[str, bytes]) -> bytes:
    """What the worker that keeps files for offline reloads must know: their names, and a digest of what they hold."""
    digest = hashlib.sha256(b"".join(files.values())).hexdigest()[:16]
    names = ["./", *(name for name in files if name != "service.js")]
    return f"const DIGEST = {json.dumps(digest)}, FILES = {json.dumps(names)};\n".encode()


@cache
def _examples(name: str) -> bytes:
    """The views of a calculator's examples, which the page shows until its Python is awake."""
    calculator = CALCULATORS[name]
    defaults = {field.name: field.default for field in calculator.fields}
    screens = [screen["given"] for screen in answers.lesson() if screen["calculator"] == name]
    queries = [{}, *screens, *(() if calculator.patient else map(dict, calculator.presets.values()))]
    given = [sorted([key, text] for key, text in query.items() if text != defaults.get(key, "")) for query in queries]
    keys = [json.dumps(each, separators=(",", ":"), ensure_ascii=False) for each in given]
    return json.dumps({key: answers.view(name, dict(each)) for key, each in zip(keys, given, strict=True)}).encode()


def _page(wheels: list[str], shown: Mapping[str, Calculator], figures: Collection[str]) -> Iterator[tuple[str, bytes]]:
    for path in sorted(Path(__file__).with_name("page").iterdir()):
        if path.name == "index.html":
            policy = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
            html = path.read_text(encoding="utf-8").replace(_CHARSET, f"{_CHARSET}\n{policy}").encode()
            yield path.name, html
            for name, calculator in shown.items():
                image = f"figures/{name}.png"
                yield f"{name}.html", illustrated(headed(html, calculator), image if image in figures else "")
        elif path.is_file():
            yield path.name, path.read_bytes()
    without = [
        f"{calculator.title} needs {', '.join(calculator.needs)}, which this page does not have: "
        f"ask trainledger {name}."
        for name, calculator in CALCULATORS.items()
        if name not in shown
    ]
    config = {"worker": True, "version": trainledger.__version__, "wheels": wheels, "without": without}
    config["lesson"] = answers.lesson(shown)
    yield "config.json", json.dumps(config).encode()
    yield "calculators.json", json.dumps(answers.listing(shown)).encode()


def _sources() -> bytes:
    """An archive of the rooms that the calculators need, and of the package that writes TOML."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, path in _source_files():
            entry = zipfile.ZipInfo(name)  # without a time, so that the same sources make the same archive
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, path.read_bytes(), compresslevel=9)
    return made.getvalue()


def _compiled(sources: bytes, core: Path) -> bytes | None:
    """The archive as bytecode of Pyodide's Python; None where no node can run it."""
    node = shutil.which("node")
    if node is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder, "sources.zip"), Path(folder, "compiled.zip")
        given.write_bytes(sources)
        script = Path(__file__).with_name("compile.mjs")
        words = [script, (core / "pyodide.mjs").resolve(), given, made]
        done = subprocess.run([node, *words], capture_output=True, check=False, timeout=_LONGEST_SECONDS)
        return made.read_bytes() if done.returncode == 0 else None


def _source_files() -> Iterator[tuple[str, Path]]:
    root = Path(trainledger.__file__).parent
    writer = find_spec("tomli_w")
    assert writer is not None, "is a dependency"
    assert writer.origin is not None, "is a package of files"
    for path in sorted(Path(writer.origin).parent.glob("*.py")):
        yield f"tomli_w/{path.name}", path
    for room in ROOMS:
        place = root / room
        for path in sorted(place.rglob("*") if place.is_dir() else root.glob(f"{room}.py*")):
            within = path.relative_to(root)
            served = within.parts[0] == "web" and (within.parts[1] == "page" or within.stem in _NOT_ASKED)
            if path.is_file() and "__pycache__" not in within.parts and not served:
                yield f"trainledger/{within.as_posix()}", path


def _core_of(given: Path | None) -> Path:
    """The directory of Pyodide's core files; raises `InvalidInput` where there is none."""
    folder = given or Path("node_modules", "pyodide")
    how = f"npm install {PYODIDE} brings it into node_modules, where it is looked for"
    if not folder.is_dir():
        rule = f"is no directory; {how}" if given else f"must name the directory of Pyodide's npm package; {how}"
        raise InvalidInput([Problem("--pyodide", given and os.fspath(given), rule)])
    if missing := [name for name in (*_CORE, _LOCK) if not (folder / name).is_file()]:
        raise InvalidInput([Problem("--pyodide", os.fspath(folder), f"does not have {', '.join(missing)}; {how}")])
    return folder


def _lock(core: Path) -> bytes:
    """The lock file without packages: a page loads nothing from elsewhere."""
    try:
        found: dict[str, Any] = json.loads((core / _LOCK).read_text(encoding="utf-8"))
        version = tuple(int(part) for part in found["info"]["python"].split(".")[:2])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InvalidInput(
            [Problem("--pyodide", os.fspath(core), f"has a {_LOCK} that is none of Pyodide's")]
        ) from None
    if version < (3, 11):
        rule = f"is of Python {found['info']['python']}, and trainledger needs 3.11"
        raise InvalidInput([Problem("--pyodide", os.fspath(core), rule, PYODIDE)])
    return json.dumps({**found, "packages": {}}).encode()


def _check_wheels(wheels: Sequence[Path]) -> None:
    problems = [
        Problem("--wheel", os.fspath(wheel), "must be a wheel of Pyodide (wasm32) or of pure Python")
        for wheel in wheels
        if not wheel.is_file()
        or not wheel.name.endswith(("wasm32.whl", "none-any.whl"))
        or not zipfile.is_zipfile(wheel)
    ]
    if problems:
        raise InvalidInput(problems)


def _clear(folder: Path) -> None:
    """Take away an earlier export; raises `InvalidInput` where something else is there."""
    if folder.exists() and not folder.is_dir():
        raise InvalidInput([Problem("--export", os.fspath(folder), "is a file")])
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    try:
        names = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))["files"]
        earlier = [folder / name for name in (*names, _MANIFEST)]
        inside = all(each.resolve().is_relative_to(folder.resolve()) for each in earlier)
    except (OSError, ValueError, KeyError, TypeError):
        inside = False
    if not inside:
        rule = "is not empty, and holds no earlier export"
        raise InvalidInput([Problem("--export", os.fspath(folder), rule, os.fspath(folder / "site"))])
    for each in earlier:
        each.unlink(missing_ok=True)
    for each in ("pyodide", "presets", "figures"):
        with suppress(OSError):
            (folder / each).rmdir()  # where something else is in it, that stays
