"""What other programs show of a link to the page: the title and the question of its calculator, and its figure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape

from trainledger.report.draw.chart import standalone
from trainledger.report.show import png
from trainledger.web import answers
from trainledger.web.calculator import Calculator
from trainledger.web.typography import typeset

_WIDE = 600  # pixels of a figure, of which a PNG has twice as many


def headed(html: bytes, calculator: Calculator) -> bytes:
    """The page of a calculator, with its title and its question."""
    title, described = escape(f"{calculator.title} · trainledger"), escape(calculator.question)
    text = re.sub(r"(<title>|og:title\" content=\")[^\"<]*", rf"\1{title}", html.decode())
    text = re.sub(r'(description" content=")[^"]*', rf"\1{described}", text)
    return text.replace("<body>", f'<body data-calculator="{calculator.name}">').encode()


def illustrated(html: bytes, address: str) -> bytes:
    """A page with the address of its figure; as it is where that is empty."""
    large = '<meta name="twitter:card" content="summary_large_image">'
    card = f'<meta property="og:image" content="{escape(address)}">\n{large}\n<link'
    return html.replace(b"<link", card.encode(), 1) if address else html


def fields_of(calculator: Calculator, query: Mapping[str, str]) -> dict[str, str]:
    """What an address says of the answer of a calculator, without what it says of the page and what no field has."""
    if query.keys() & {"exercise", "set"}:  # a link to one hides the answer
        return {}
    known = {field.name for field in calculator.fields}
    return {name: text for name, text in query.items() if name in known or (calculator.any_of_run and "." in name)}


def figure(name: str, given: Mapping[str, str], calculators: answers.Calculators) -> bytes | None:
    """The first figure of an answer under its title as a PNG; None where it has none, or no font for its words is here.

    Raises `InvalidInput` as `answers.answer` does.
    """
    _, _, reply = answers.ask(name, given, calculators=calculators)
    return png(typeset(standalone(reply.drawings[0].chart, _WIDE))) if reply.drawings else None
