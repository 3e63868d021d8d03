"""The page as a reader sees it: what is asked, answered and announced."""

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from browsing import SETTLED
from trainledger.web.typography import in_words


class Page:
    """One page in a context of its own; ``complaints`` are errors it logged and hosts that it should not have asked."""

    def __init__(self, context: Any, base: str) -> None:
        self.context, self.base = context, base
        self.complaints: list[str] = []
        self.page = context.new_page()
        self.page.on("console", lambda said: self._logged(said.type, said.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self._asked(request.url))

    def _logged(self, kind: str, text: str) -> None:
        if kind == "error" and "status of 422" not in text:  # a refusal, which the browser logs by itself
            self.complaints.append(text)

    def _asked(self, url: str) -> None:
        if not url.startswith((self.base, "data:", "blob:")):
            self.complaints.append(f"asked {url}")

    def go(self, query: str = "") -> None:
        """Opens an address of the page and waits for its answer."""
        self.page.goto(self.base + query)
        self.settled()

    def settled(self) -> None:
        """Waits until no question is open."""
        self.page.wait_for_function(SETTLED, timeout=120_000)

    def back(self) -> None:
        """One entry back in the browser's history."""
        self._travel("back")

    def forward(self) -> None:
        """One entry forward."""
        self._travel("forward")

    def _travel(self, way: str) -> None:
        before = self.query
        self.page.evaluate(f"history.{way}()")
        self.page.wait_for_function("before => location.search !== before", arg=before)
        self.settled()

    def field(self, name: str) -> Any:
        """The text, list or file box of a field."""
        return self.page.locator(f'[id="field-{name}"]')

    def slider(self, name: str) -> Any:
        """The slider of a field."""
        return self.page.locator(f'[data-field="{name}"] input[type=range]')

    def button(self, name: str) -> Any:
        """A button by its name."""
        return self.page.get_by_role("button", name=name, exact=True)

    def fill(self, name: str, text: str) -> None:
        """Types a value and leaves the field."""
        field = self.field(name)
        if field.evaluate("each => each.tagName") == "SELECT":
            field.select_option(text)
        else:
            field.fill(text)
            field.press("Escape")
            field.blur()
        self.settled()

    @property
    def verdict(self) -> str:
        return str(self.page.locator("#verdict .said").inner_text())

    @property
    def api_verdict(self) -> str:
        """The verdict of the API to this query, in the words of a page."""
        return in_words(self.api()["verdict"])

    @property
    def headlines(self) -> dict[str, str]:
        """The numbers by their titles."""
        cards = self.page.locator(".headline").all()
        return {each.locator(".title").inner_text(): each.locator(".number").inner_text() for each in cards}

    @property
    def values(self) -> dict[str, str]:
        """The texts of all fields."""
        found: dict[str, str] = self.page.eval_on_selector_all(
            "[data-field] [id^='field-'].text", "all => Object.fromEntries(all.map(each => [each.id, each.value]))"
        )
        return found

    @property
    def query(self) -> str:
        """The address behind the host."""
        return str(self.page.evaluate("location.search"))

    def api(self) -> dict[str, Any]:
        """What the API answers to the query of this page."""
        name, given = self.page.evaluate(
            "() => { const said = new URLSearchParams(location.search); const name = said.get('calculator');"
            " said.delete('calculator'); return [name, String(said)]; }"
        )
        return self._answered(f"{self.base}api/{name}?{given}")

    def _answered(self, url: str) -> dict[str, Any]:
        for _ in range(400):
            reply = self.context.request.get(url)
            if reply.status != 202:
                break
            self.page.wait_for_timeout(250)
        found: dict[str, Any] = reply.json()
        return found

    def command(self) -> list[str]:
        """The words that the page shows to paste into a terminal."""
        return shlex.split(self.page.locator(".terminal code").inner_text())


def said_by(words: list[str]) -> Any:
    """The JSON of a command line, also of one whose exit code says that a run does not fit."""
    command = [sys.executable, "-m", *words, "--json"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=False, timeout=300).stdout)


def numbers(data: Any) -> Iterator[float]:
    """Every number in an answer."""
    if isinstance(data, dict | list):
        for each in data.values() if isinstance(data, dict) else data:
            yield from numbers(each)
    elif isinstance(data, int | float) and not isinstance(data, bool):
        yield float(data)


def named(data: Any, name: str) -> Iterator[float]:
    """The numbers that an answer has under this name."""
    if isinstance(data, dict):
        for key, each in data.items():
            yield from numbers(each) if key == name else named(each, name)
    elif isinstance(data, list):
        for each in data:
            yield from named(each, name)
