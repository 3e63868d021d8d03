"""The page as static files: what is written, what is refused, and that its archive alone answers as we do."""

import json
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from trainledger.spec.problem import InvalidInput
from trainledger.web import answers
from trainledger.web.calculators import CALCULATORS
from trainledger.web.export import export

# A Python that has the standard library and the archive, as Pyodide has: no numpy, no installed package of ours.
ALONE = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from trainledger.web.message import replied
for message in sys.stdin:
    print(replied(message, lambda *how_far: None))
assert not {"numpy", "torch", "rich", "fastapi", "plotly"} & set(sys.modules)
"""


@pytest.fixture
def pyodide(tmp_path: Path) -> Path:
    """A directory with the names of Pyodide's files, which are copied as they are."""
    folder = tmp_path / "pyodide"
    folder.mkdir()
    for name in (
        "pyodide.mjs",
        "pyodide.asm.mjs",
        "pyodide.asm.wasm",
        "python_stdlib.zip",
        "package.json",
        "README.md",
    ):
        (folder / name).write_text(name)
    lock = {"info": {"python": "3.14.2"}, "packages": {"numpy": {"file_name": "numpy.whl"}}}
    (folder / "pyodide-lock.json").write_text(json.dumps(lock))
    return folder


@pytest.mark.long
def test_the_archive_alone_answers_every_calculator_and_preset_as_we_do(tmp_path: Path, pyodide: Path) -> None:
    export(tmp_path / "site", pyodide)
    with zipfile.ZipFile(tmp_path / "site" / "python.zip") as archive:
        archive.extractall(tmp_path / "calculators")
    asked = [
        {"call": "view", "name": name, "query": query, "width": 700}
        for name, calculator in CALCULATORS.items()
        if not calculator.patient
        for query in ({}, *map(dict, calculator.presets.values()))
    ]
    paths = [str(tmp_path / "calculators"), sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
    paths += [each for each in sys.path if each.endswith("lib-dynload")]
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", ALONE, json.dumps(paths)],
        input="\n".join(map(json.dumps, asked)), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    replies = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(replies) == len(asked)
    for message, reply in zip(asked, replies, strict=True):
        expected = answers.view(str(message["name"]), message["query"], 700)  # type: ignore[arg-type]
        assert reply == {"result": json.loads(json.dumps(expected))}, message


@pytest.mark.long
def test_without_numpy_the_layouts_give_the_command_to_run(tmp_path: Path, pyodide: Path) -> None:
    export(tmp_path / "site", pyodide)
    with zipfile.ZipFile(tmp_path / "site" / "python.zip") as archive:
        archive.extractall(tmp_path / "calculators")
    paths = [str(tmp_path / "calculators"), sysconfig.get_path("stdlib")]
    paths += [each for each in sys.path if each.endswith("lib-dynload")]
    message = {"call": "view", "name": "layouts", "query": {"cluster.count": "64", "layout.tensor": "8"}, "width": 700}
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", ALONE, json.dumps(paths)],
        input=json.dumps(message), capture_output=True, text=True, check=True,
    )  # fmt: skip
    result = json.loads(done.stdout)["result"]
    assert "needs numpy" in result["verdict"]
    assert result["paste"]["command"].startswith("trainledger layouts llama-3-8b --fix tensor=8")


@pytest.mark.long
def test_the_page_asks_a_worker_and_may_load_nothing_from_elsewhere(tmp_path: Path, pyodide: Path) -> None:
    site = export(tmp_path / "site", pyodide)
    folder = tmp_path / "site"
    assert json.loads((folder / "config.json").read_text())["worker"] is True
    config, listed = (json.loads((folder / f"{name}.json").read_text()) for name in ("config", "calculators"))
    assert config["without"] == ["Layouts needs numpy, which this page does not have: ask trainledger layouts."]
    every = json.loads(json.dumps(answers.listing()))
    assert listed == [each for each in every if each["name"] != "layouts"]
    page = (folder / "index.html").read_text()
    assert page.index("Content-Security-Policy") < page.index("<script")
    assert json.loads((folder / "pyodide" / "pyodide-lock.json").read_text())["packages"] == {}
    for each in folder.glob("*.js"):
        assert "https://" not in each.read_text(), each.name
    for each in ("index.html", *(path.name for path in folder.glob("*.css"))):
        assert 'src="/' not in (folder / each).read_text()
        assert "url(/" not in (folder / each).read_text()
    written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.name != "site.json")
    assert site.document().data()["nbytes"] == written
    assert site.document().data()["compiled"] is False  # these files are none of Pyodide's
    assert 0 < site.document().data()["gzip_nbytes"] < written


@pytest.mark.long
def test_each_calculator_has_a_page_with_its_title_and_its_figure(tmp_path: Path, pyodide: Path) -> None:
    pytest.importorskip("resvg_py")
    export(tmp_path / "site", pyodide)
    index = (tmp_path / "site" / "index.html").read_text()
    for name, calculator in CALCULATORS.items():
        page = tmp_path / "site" / f"{name}.html"
        assert page.exists() == (not calculator.needs)
        if page.exists():
            text = page.read_text()
            assert f'og:title" content="{calculator.title} · trainledger"' in text
            assert f'og:image" content="figures/{name}.png"' in text
            assert (tmp_path / "site" / "figures" / f"{name}.png").read_bytes()[1:4] == b"PNG"
            assert text.partition("<body")[2].partition(">")[2] == index.partition("<body>")[2]


@pytest.mark.long
def test_an_export_is_written_again_and_what_is_not_ours_stays(tmp_path: Path, pyodide: Path) -> None:
    folder = tmp_path / "site"
    export(folder, pyodide)
    first = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    (folder / "CNAME").write_text("example.org")
    listed = json.loads((folder / "site.json").read_text())
    (folder / "left.js").write_text("of an older export")
    (folder / "site.json").write_text(json.dumps({**listed, "files": [*listed["files"], "left.js"]}))
    export(folder, pyodide)
    assert not (folder / "left.js").exists()
    (folder / "CNAME").unlink()
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == first


def test_a_directory_of_something_else_is_refused_and_left(tmp_path: Path, pyodide: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("years")
    with pytest.raises(
        InvalidInput, match=r"is not empty, and holds no earlier export; nearest that works: .*/other/site"
    ):
        export(other, pyodide)
    (other / "site.json").write_text(json.dumps({"files": ["../secret"]}))
    (tmp_path / "secret").write_text("stays")
    with pytest.raises(InvalidInput, match="holds no earlier export"):
        export(other, pyodide)
    assert (tmp_path / "secret").read_text() == "stays"
    with pytest.raises(InvalidInput, match="is a file"):
        export(other / "thesis.tex", pyodide)


def test_without_pyodide_the_sentence_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput, match="npm install pyodide@314 brings it into node_modules"):
        export(tmp_path / "site")
    (tmp_path / "node_modules" / "pyodide").mkdir(parents=True)
    with pytest.raises(InvalidInput, match=r"node_modules/pyodide'?: does not have pyodide\.mjs"):
        export(tmp_path / "site")
    assert not (tmp_path / "site").exists()


@pytest.mark.long
def test_an_old_pyodide_and_a_wheel_of_another_machine_are_refused(tmp_path: Path, pyodide: Path) -> None:
    wheel = tmp_path / "numpy-2.4.6-cp314-cp314-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("numpy/__init__.py", "")
    with pytest.raises(InvalidInput, match="must be a wheel of Pyodide"):
        export(tmp_path / "site", pyodide, [wheel])
    of_pyodide = wheel.rename(tmp_path / "numpy-2.4.6-cp314-cp314-pyodide_2026_0_wasm32.whl")
    export(tmp_path / "with numpy", pyodide, [of_pyodide])
    assert '"layouts"' in (tmp_path / "with numpy" / "calculators.json").read_text()
    lock = pyodide / "pyodide-lock.json"
    lock.write_text(json.dumps({"info": {"python": "3.10.2"}}))
    with pytest.raises(InvalidInput, match=r"is of Python 3\.10\.2, and trainledger needs 3\.11"):
        export(tmp_path / "site", pyodide)
    lock.write_text("[]")
    with pytest.raises(InvalidInput, match=r"none of Pyodide's"):
        export(tmp_path / "site", pyodide)
    assert not (tmp_path / "site").exists()
