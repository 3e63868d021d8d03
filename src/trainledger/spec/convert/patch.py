"""A text in YAML, TOML or JSON, or with flags, in which some keys get other values; the rest stays as it is."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from trainledger.spec.frozen import frozen
from trainledger.spec.run import Run

Edits = dict[str, Any]


@frozen
class Rewritten:
    """A file of another trainer with a change: its ``edits`` by key, its text, and the run that it now is.

    ``changes`` are the fields that the edits change, and ``missing`` those of the change that the file has no words
    for, as ``--set`` takes them; ``suffix`` is as in `patched`. ``unwritten`` is a copy that was asked for, in vain.
    """

    named: str
    program: str
    suffix: str
    edits: Edits
    changes: tuple[str, ...]
    missing: tuple[str, ...]
    text: str
    run: Run
    unwritten: str = ""

    @property
    def lines(self) -> str:
        """The keys and their values as the file has them, a line each."""
        if not self.suffix:
            return "\n".join(
                f"{'# without ' * (value is False)}--{key}" + ("" if isinstance(value, bool) else f" {_word(value)}")
                for key, value in self.edits.items()
            )
        between = " = " if self.suffix == ".toml" else ": "
        write = _in_line if self.suffix in (".yml", ".yaml") else _plain
        return "\n".join(f"{key}{between}{write(value)}" for key, value in self.edits.items())


_INDENT = 2
_VALUES = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}  # words of YAML that are no text


def patched(text: str, suffix: str, edits: Mapping[str, Any]) -> str:
    """The text with other values of keys, dots between a section and its key; those that it lacks are added.

    ``suffix`` says what the text is: ``.yml``, ``.toml``, ``.json``, else flags. A flag is there or not where its value
    is true or false.

    >>> print(patched("a: 1  # one\\nb:\\n  c: 2\\n", ".yml", {"a": True, "b.d": 3}), end="")
    a: true  # one
    b:
      d: 3
      c: 2
    >>> patched("run.py --a 1 --b 2", "", {"a": 4, "c": True})
    'run.py --c --a 4 --b 2'
    """
    by_suffix = {".yaml": _in_yaml, ".yml": _in_yaml, ".toml": _in_toml, ".json": _in_json}
    change = by_suffix.get(suffix, _in_flags)
    for key, value in edits.items():
        text = change(text if text.endswith("\n") or change in (_in_flags, _in_json) else f"{text}\n", key, value)
    return text


def _in_json(text: str, key: str, value: Any) -> str:
    """One key of nested maps; a new one comes after the last of its map, on a line of its own where that has one."""
    begin, parts = text.index("{"), key.split(".")
    for depth, name in enumerate(parts):
        members = list(_members(text, begin))
        place = next(((start, end) for known, start, end in members if known == name), None)
        if place is None or text[place[0]] != "{" or depth == len(parts) - 1:
            break
        begin = place[0]
    for inner in reversed(parts[depth + 1 :]):
        value = {inner: value}
    if place is not None:
        return f"{text[: place[0]]}{json.dumps(value)}{text[place[1] :]}"
    end = members[-1][2] if members else begin + 1
    space = text[begin + 1 : text.index('"', begin)] if members else ""
    before = f",{space or ' '}" if members else ""
    return f"{text[:end]}{before}{json.dumps(name)}: {json.dumps(value)}{text[end:]}"


def _members(text: str, begin: int) -> Iterator[tuple[str, int, int]]:
    """The keys of the map that begins at a place of JSON, and where the value of each begins and ends."""
    decode, at = json.JSONDecoder().raw_decode, begin + 1
    while name := re.compile(r'[\s,]*"').match(text, at):
        key, at = decode(text, name.end() - 1)
        start = next(place for place in range(text.index(":", at) + 1, len(text)) if not text[place].isspace())
        _, at = decode(text, start)
        yield key, start, at


def _in_yaml(text: str, key: str, value: Any) -> str:
    """One key of a block map; what its old value has in further lines goes with it."""
    *parts, last = key.split(".")
    lines = text.splitlines(keepends=True)
    start, end, depth = 0, len(lines), 0
    for at, name in enumerate(parts):
        place = _line_of(lines, name, start, end, depth)
        if place is None:
            inner = "".join(f"{' ' * (depth + _INDENT * below)}{part}:\n" for below, part in enumerate(parts[at:]))
            new = f"{inner}{' ' * (depth + _INDENT * len(parts[at:]))}{last}: {_in_line(value)}\n"
            return "".join([*lines[:start], new, *lines[start:]] if at else [*lines, new])
        start, end = place + 1, _end_of(lines, place, depth)
        depth = next((_depth(line) for line in lines[start:end] if line.strip()), depth + _INDENT)
    place = _line_of(lines, last, start, end, depth)
    new = f"{' ' * depth}{last}: {_in_line(value)}"
    if place is None:
        return "".join([*lines[:start], f"{new}\n", *lines[start:]] if parts else [*lines, f"{new}\n"])
    comment = re.search(r"\s+#.*$", lines[place].rstrip("\n"))
    lines[place : _end_of(lines, place, depth)] = [f"{new}{comment[0] if comment else ''}\n"]
    return "".join(lines)


def _line_of(lines: list[str], name: str, start: int, end: int, depth: int) -> int | None:
    begin = re.compile(rf"{' ' * depth}(['\"]?){re.escape(name)}\1\s*:(\s|$)")
    return next((at for at in range(start, end) if begin.match(lines[at])), None)


def _end_of(lines: list[str], place: int, depth: int) -> int:
    """Where the value of a line ends: at the next line that is as deep, but for the items of a list."""
    at = place + 1
    while at < len(lines) and (
        _depth(lines[at]) > depth or (_depth(lines[at]) == depth and lines[at].lstrip().startswith("- "))
    ):
        at += 1
    return at


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip()) if line.strip() else -1


def _in_toml(text: str, key: str, value: Any) -> str:
    section, _, last = key.rpartition(".")
    lines = text.splitlines(keepends=True)
    heads = [at for at, line in enumerate(lines) if line.lstrip().startswith("[")]
    head = next((at for at in heads if lines[at].partition("#")[0].strip() == f"[{section}]"), None if section else -1)
    new = f"{last} = {_plain(value)}"
    if head is None:
        return f"{text}\n[{section}]\n{new}\n"
    end = next((at for at in heads if at > head), len(lines))
    begin = re.compile(rf"\s*{re.escape(last)}\s*=")
    place = next((at for at in range(head + 1, end) if begin.match(lines[at])), None)
    if place is None:
        return "".join([*lines[: head + 1], f"{new}\n", *lines[head + 1 :]])
    comment = re.search(r"\s+#[^\"']*$", lines[place].rstrip("\n"))
    lines[place] = f"{new}{comment[0] if comment else ''}\n"
    return "".join(lines)


def _in_flags(text: str, key: str, value: Any) -> str:
    """A flag of a launch line or script; where its value is a variable, the value of that is changed."""
    flag = re.compile(rf"(?<![\w-])--{re.sub(r'[-_]', '[-_]', key)}(?![\w.-])((?:=|[ \t]+)(?!-)[^\s\\]+)?")
    found = flag.search(text)
    if found is None:
        return text if value is False else _with_flag(text, key, value)
    old = (found[1] or "").lstrip("= \t")
    variable = re.fullmatch(r"\"?\$\{?(\w+)\}?\"?", old)
    if variable and (place := re.search(rf"^(\s*(?:export\s+)?{variable[1]}=)(\S*)", text, re.MULTILINE)):
        return f"{text[: place.end(1)]}{_word(value)}{text[place.end() :]}"
    new = "" if value is False else found[0][: len(found[0]) - len(found[1] or "")]
    if not isinstance(value, bool):
        new += f"{found[1][0] if found[1] else ' '}{_word(value)}"
    return f"{text[: found.start()]}{new}{text[found.end() :]}"


def _with_flag(text: str, key: str, value: Any) -> str:
    """A further flag, before the first one."""
    first = re.search(r"(?<![\w-])--(?!config|nproc|nnodes|num_processes|master|node)[a-z]", text)
    at = first.start() if first else len(text.rstrip())
    name = f"--{key}" if value is True else f"--{key} {_word(value)}"
    return f"{text[:at]}{name} {text[at:]}" if first else f"{text[:at]} {name}{text[at:]}"


def _word(value: Any) -> str:
    return " ".join(shlex.quote(str(one)) for one in value) if isinstance(value, list) else shlex.quote(str(value))


def _in_line(value: Any) -> str:
    """A value as YAML writes it; words that are no other value need no quotes."""
    bare = isinstance(value, str) and re.fullmatch(r"[A-Za-z_][\w.-]*", value)
    return str(value) if bare and value.lower() not in _VALUES else json.dumps(value)


def _plain(value: Any) -> str:
    """A value as TOML writes it."""
    return json.dumps(value)
