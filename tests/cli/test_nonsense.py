"""Nonsense in, sentences out: run files, overrides and configurations that nobody should write."""

import contextlib
import io
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import sizes
from trainledger.cli import main
from trainledger.report.document import Bars, Code, Document, Facts, Item, Items, Section, Table, Term, Terms, Text
from trainledger.report.terminal import text
from trainledger.spec.layout import Layout
from trainledger.spec.model import ModelSpec
from trainledger.spec.recipe import Recipe
from trainledger.spec.setting import rule_of

MODEL = sizes(V=301, D=48, L=2, H=6, F=100, T=64)
RECIPE = {"seq_len": 32, "global_batch": 4, "steps": 1}
SECTIONS: dict[str, Any] = {"model": ModelSpec, "recipe": Recipe, "layout": Layout}
NONSENSE = st.one_of(
    st.sampled_from([0, -1, 1, 2, 3, 7, 10**5, 10**9, 10**18, 10**30, -(2**63), 0.0, 0.5, -0.5, 1e308, float("inf"),
                     float("nan"), True, False, "", " ", "7", "15T", "-3", "1e999", "none", "auto", "full",
                     "null", [], [1],
                     ["full"], {}, {"a": 1}, "\\u0000", "ä" * 50, "x" * 3000]),
    st.integers(), st.floats(), st.text(max_size=8),
)  # fmt: skip
RULES = [(section, each) for section, cls in SECTIONS.items() for each in fields(cls)]


def choices_of(section_and_field: tuple[str, Any]) -> st.SearchStrategy[Any]:
    """Nonsense, or one of the field's own words: wrong together, if not alone."""
    own = rule_of(section_and_field[1])["choices"]
    return st.one_of(NONSENSE, st.sampled_from(own)) if own else NONSENSE


@st.composite
def tables(draw: st.DrawFn) -> dict[str, dict[str, Any]]:
    """A small run with a few of its fields replaced."""
    table: dict[str, dict[str, Any]] = {"model": dict(MODEL), "recipe": dict(RECIPE), "layout": {}}
    for each in draw(st.lists(st.sampled_from(RULES), min_size=1, max_size=4)):
        table[each[0]][each[1].name] = draw(choices_of(each))
    if draw(st.integers(0, 9)) == 0:
        table[draw(st.sampled_from(["", "model", "modle", "recipe"]))] = draw(NONSENSE)
    return table


def said(*words: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a verb."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(words))
    return code, out.getvalue(), err.getvalue()


def answered(*words: str) -> None:
    """The verb does its work, or says in sentences why not."""
    code, out, err = said(*words)
    assert code in (0, 2), (code, err)
    assert "Traceback" not in err
    if code == 2:
        assert err.strip()
        assert not out.strip()


@settings(max_examples=300)
@given(tables(), st.sampled_from([("plan",), ("explain", "memory"), ("explain", "flops"), ("rules",)]))
def test_any_run_file_is_answered(tmp_path_factory, table, verb):
    import tomli_w

    path = tmp_path_factory.mktemp("nonsense") / "run.toml"
    try:
        path.write_text(tomli_w.dumps(table), encoding="utf-8")
    except (TypeError, UnicodeEncodeError):
        path.write_text(repr(table), encoding="utf-8", errors="replace")
    answered(*verb, str(path))


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("model.n_layers=0", "model.n_layers = 0: must be at least 1"),
        ("recipe.tokens=" + "1" + "0" * 30, "recipe.tokens"),
        ("model.attention.n_heads=7", "must divide d_model"),
        ("layout.tensor=3", "nearest that works"),
        ("recipe.steps=nonsense", "recipe.steps"),
        ("recipe.precision=fp31", "must be one of"),
        ("model.n_layers=1e400", "model.n_layers"),
        ("nothing.here=1", "nothing"),
        ("model", "model"),
    ],
)
def test_overrides_that_cannot_be(tmp_path: Path, override: str, sentence: str) -> None:
    import tomli_w

    path = tmp_path / "run.toml"
    path.write_text(tomli_w.dumps({"model": {**MODEL, "d_model": 64, "attention.n_heads": 4}, "recipe": RECIPE}))
    code, out, err = said("plan", str(path), "--set", override)
    assert code == 2, out
    assert sentence in err


def test_heads_that_ranks_cannot_share_come_with_layouts_that_work(tmp_path: Path) -> None:
    import tomli_w

    path = tmp_path / "run.toml"
    model = {**MODEL, "d_model": 70, "attention.n_heads": 7, "feed_forward.d_ff": 210}
    table = {"model": model, "recipe": {**RECIPE, "global_batch": 12}, "layout": {"tensor": 3}, "cluster": {"count": 3}}
    path.write_text(tomli_w.dumps(table))
    code, _, err = said("plan", str(path))
    assert code == 2
    assert "layout.tensor = 3" in err
    assert "7" in err
    assert "nearest that works" in err


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 50_000, "{", "", "null", "[]", '"x"', "\ufeff{}", "{}", "0" * 10**6]
)
def test_configurations_that_are_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8")
    code, _, err = said("plan", str(_run_of(tmp_path, path)))
    assert code == 2
    assert "Traceback" not in err
    assert "config.json" in err


def test_a_configuration_of_50_mb_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "padding": "x" * 50_000_000}))
    code, _, err = said("plan", str(_run_of(tmp_path, path)))
    assert code == 2
    assert "config.json" in err
    assert len(err) < 2000


def test_a_run_file_of_tables_in_tables(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("x = " + "[" * 20_000 + "]" * 20_000 + "\n")
    code, _, err = said("plan", str(path))
    assert code == 2
    assert "Traceback" not in err


def _run_of(directory: Path, config: Path) -> Path:
    import tomli_w

    path = directory / "run.toml"
    path.write_text(tomli_w.dumps({"model": {"config": str(config)}, "recipe": RECIPE}))
    return path


RED = "\x1b[31mred\x9b"


def test_control_characters_of_an_input_do_not_reach_the_terminal(tmp_path: Path) -> None:
    """Names, files and values show their escapes (``\\x1b``), in answers and in errors."""
    name = RED.replace("\x1b", "\\u001b").replace("\x9b", "\\u009b")
    model = f'name = "{name}"\n' + "\n".join(f"{field} = {value}" for field, value in MODEL.items())
    recipe = "\n".join(f"{field} = {value}" for field, value in RECIPE.items())
    run = tmp_path / "run.toml"
    run.write_text(f"[model]\n{model}\n\n[recipe]\n{recipe}\n", encoding="utf-8")
    of_file = tmp_path / f"{RED}.toml"
    of_file.write_text(run.read_text(encoding="utf-8").replace(name, "plain"), encoding="utf-8")
    fields = {
        words: said(*words)
        for words in [
            ("plan", str(run)),
            ("explain", "memory", str(run)),
            ("plan", str(of_file)),
            ("plan", str(of_file), "--set", "recipe.steps=-1"),
            ("plan", f"{RED}.toml"),
            ("plan", RED),
            ("plan", str(run), "--set", f"recipe.steps={RED}"),
            ("plan", str(run), "--set", f"{RED}=1"),
            ("plan", str(run), f"--{RED}"),
            ("init", str(tmp_path / f"new{RED}.toml")),
            (RED,),
        ]
    }
    for words, (code, out, err) in fields.items():
        assert code in (0, 2), (words, err)
        assert "\x1b" not in out + err, words
        assert "\x9b" not in out + err, words
    assert "\\x1b[31mred" in fields["plan", str(run)][2]  # the name is refused
    assert fields["plan", str(of_file)][0] == 0
    assert "\\x1b[31mred" in fields["plan", f"{RED}.toml"][2]


def test_colours_are_the_only_escapes_of_a_document() -> None:
    """What a document holds is escaped in every kind of part, and its own colours stay."""
    parts = (
        Table("t", (RED,), ((RED,),)), Facts(((RED, f"{RED} 5 %"),)), Text((RED,), note=True), Bars(((RED, 5),)),
        Code(RED), Items((Item(RED, RED),)), Terms(RED, 1.0, (Term(RED, 1.0, RED, RED, RED),), "nbytes"),
    )  # fmt: skip
    shown = Document(RED, (Section(RED, parts),))
    assert not {"\x1b", "\x9b"} & set(text(shown))
    assert "\x1b[31m" not in text(shown, colour=True)
    assert "\x1b[1m" in text(shown, colour=True)
    assert "5 %" in text(shown)
