"""The files of the page, without a browser."""

import re
from importlib.resources import files

import pytest

from trainledger.report.draw.elements import STYLE

PAGE = {each.name: each.read_text(encoding="utf-8") for each in files("trainledger.web").joinpath("page").iterdir()}
SCRIPTS = sorted(name for name in PAGE if name.endswith(".js"))


def test_every_class_of_a_drawing_has_a_colour_for_light_and_dark() -> None:
    drawn = set(re.findall(r"\.([\w-]+)\{", STYLE))
    assert len(drawn) > 20
    assert drawn <= set(re.findall(r"\.([\w-]+) \{", PAGE["drawing.css"]))


def test_what_the_page_loads_is_there() -> None:
    assert set(re.findall(r'(?:src|href)="([\w.]+\.(?:js|css|svg))"', PAGE["index.html"])) <= set(PAGE)
    for name in SCRIPTS:
        assert set(re.findall(r'from "\./([\w.]+)"', PAGE[name])) <= set(PAGE), name


@pytest.mark.parametrize("name", sorted(PAGE))
def test_a_file_has_one_idea_and_fetches_nothing_from_elsewhere(name: str) -> None:
    assert PAGE[name].count("\n") < 300
    assert not re.search(r"""(?:src|url|import|fetch)\W{1,3}https?:""", PAGE[name])


def test_markup_has_no_scripts_and_no_styles_of_its_own() -> None:
    assert not re.search(r"<style|<script>|\sstyle=|\son\w+=", PAGE["index.html"])
