"""A drawing read back as an eye reads it: words and their places, values by the ticks of the axes, shapes in pixels."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from trainledger.report.chart import Chart

M = TypeVar("M")
_SVG = "{http://www.w3.org/2000/svg}"
_PIECE = re.compile(r"([MLHVlhvz])|(-?(?:\d+\.?\d*|\.\d+))")
_LETTERS = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_RAISED = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")


def marks(chart: Chart, kind: type[M], name: str | None = None) -> list[M]:
    """The marks of a kind, and of a name where it is given."""
    return [each for each in chart.marks if isinstance(each, kind) and name in (None, getattr(each, "name", ""))]


@dataclass(frozen=True)
class Box:
    """A rectangle in pixels, its colour, and what it says."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    said: str

    @property
    def right(self) -> float:
        return self.x + self.width

    @property
    def bottom(self) -> float:
        return self.y + self.height


class Drawn:
    """A drawing: ``root`` is its element, ``width`` and ``height`` are its pixels."""

    def __init__(self, text: str) -> None:
        self.root = ElementTree.fromstring(text)
        assert self.root.tag == f"{_SVG}svg"
        left, top, self.width, self.height = map(float, self.root.attrib["viewBox"].split())
        assert (left, top) == (0, 0)

    def of(self, name: str) -> Iterator[tuple[Element, dict[str, str]]]:
        """The elements of a name, each with its attributes and those of the groups that it is in."""
        yield from _of(self.root, f"{_SVG}{name}", {})

    @property
    def words(self) -> list[str]:
        """All that is written, each text as one line."""
        return [_line(each) for each, _ in self.of("text")]

    def titles(self, name: str) -> list[str]:
        """What the elements of a name say under the pointer."""
        return [said for each, _ in self.of(name) if (said := _title(each))]

    @property
    def boxes(self) -> list[Box]:
        """The rectangles that say something and can be seen."""
        return [
            Box(*(float(style[side]) for side in ("x", "y", "width", "height")), style["fill"], _title(each))
            for each, style in self.of("rect") if _title(each) and style.get("fill-opacity") != "0"
        ]  # fmt: skip

    def ticks(self, letter: str, at: int = 0) -> list[tuple[str, float]]:
        """The words of the ticks of an x or y axis, each with its pixel; of several axes that of a number."""
        anchor, side = ("middle", "x") if letter == "x" else ("end", "y")
        groups = [each for each in self.root.iter(f"{_SVG}g") if each.get("text-anchor") == anchor]
        shift = 0.0 if letter == "x" else -0.35 * 12  # from a baseline to the middle of its letters
        return [(_line(each), float(each.attrib[side]) + shift) for each in groups[at].iter(f"{_SVG}text")]

    def scale(self, letter: str, at: int = 0) -> Scale:
        """The values of pixels by the first and the last tick of an axis with numbers."""
        (first, low), *_, (last, high) = self.ticks(letter, at)
        return Scale(low, high, number(first), number(last))

    def paths(self, stroke: str = "", fill: str = "") -> list[list[tuple[float, float]]]:
        """The corners of the paths of a colour that are not symbols."""
        return [
            corners(style["d"]) for _, style in self.of("path")
            if style.get("stroke", "") == stroke and style.get("fill", "none") == (fill or "none")
            and "transform" not in style
        ]  # fmt: skip

    @property
    def symbols(self) -> list[tuple[float, float, str]]:
        """Where points are, and what they say."""
        found = [(float(style["cx"]), float(style["cy"]), _title(each)) for each, style in self.of("circle")]
        for each, style in self.of("path"):
            if "transform" in style:
                moved = re.match(r"translate\((\S+) (\S+)\)", style["transform"])
                assert moved is not None
                found.append((float(moved[1]), float(moved[2]), _title(each)))
        return [each for each in found if each[2]]


@dataclass(frozen=True)
class Scale:
    """Two pixels of an axis and their values."""

    low: float
    high: float
    first: float
    last: float

    def value(self, pixel: float) -> float:
        return self.first + (pixel - self.low) / (self.high - self.low) * (self.last - self.first)

    @property
    def pixel(self) -> float:
        """The value of one pixel."""
        return abs((self.last - self.first) / (self.high - self.low))


def number(text: str) -> float:
    """A tick's words as a number."""
    power = re.fullmatch(r"(?:([\d.]+)·)?10([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)", text)
    if power:
        return float(power[1] or 1) * 10.0 ** int(power[2].translate(_RAISED))
    plain = text.replace(",", "")
    return float(plain[:-1]) * _LETTERS[plain[-1]] if plain[-1] in _LETTERS else float(plain)


def corners(d: str) -> list[tuple[float, float]]:
    """The points of a path of straight lines."""
    pieces = [(letter, float(amount) if amount else 0.0) for letter, amount in _PIECE.findall(d)]
    x = y = 0.0
    found: list[tuple[float, float]] = []
    at, command = 0, ""
    while at < len(pieces):
        if pieces[at][0]:
            command, at = pieces[at][0], at + 1
        if command == "z":
            continue
        amount, at = pieces[at][1], at + 1
        if command in "hH":
            x = amount if command == "H" else x + amount
        elif command in "vV":
            y = amount if command == "V" else y + amount
        else:
            other, at = pieces[at][1], at + 1
            x, y = (amount, other) if command in "ML" else (x + amount, y + other)
        found.append((x, y))
    return found


def _of(element: Element, name: str, style: dict[str, str]) -> Iterator[tuple[Element, dict[str, str]]]:
    for each in element:
        own = style | each.attrib
        if each.tag == name:
            yield each, own
        yield from _of(each, name, own)


def _line(element: Element) -> str:
    spans = [each.text or "" for each in element.iter(f"{_SVG}tspan")]
    return " ".join(spans) if spans else element.text or ""


def _title(element: Element) -> str:
    return element.findtext(f"{_SVG}title", "")
