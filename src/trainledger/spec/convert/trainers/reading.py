"""The keys of a program's file being read by its table, with those of the files that it names."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from trainledger.spec.convert.trainers.files import map_in
from trainledger.spec.problem import Problem, nearest_text
from trainledger.spec.units import ceil_div

_DEEPEST = 4  # maps in one another
_MOST_EPOCHS = 10**6
_NAMED = 40  # keys that a sentence names
_UNSET = ("None", "False", "none", "false", "", "[]", "{}")  # values, as text, of keys that say nothing
_SLIP = 0.92  # likeness of two names of which one is a slip of the other
_KINDS = [
    "always",
    "defaults",
    "fields",
    "words",
    "refused",
    "assumed",
    "unset",
    "products",
    "models",
    "commands",
    "write",
]
_LISTS = ("silent", "split", "opened", "alone", "known")
_OF_LAUNCHERS = {
    "launcher.devices": "run.per_node",
    "launcher.nodes": "run.nodes",
    "launcher.processes": "run.devices",
    "launcher.config_file": "run.accelerate",
}
# Programs whose files others name, by what a key means that names one.
_BESIDE = {"run.accelerate": "Accelerate", "run.deepspeed": "DeepSpeed"}
# What a file that is not here says by its name.
_BY_NAME = {
    re.compile(r"(?:zero|ds_z|z)_?-?([0-3])"): "run.zero",
    re.compile(r"(fsdp)"): "run.sharded",
    re.compile(r"(multi_gpu|ddp|single_gpu)"): "run.replicated",
}


@cache
def tables() -> dict[str, dict[str, Any]]:
    """The table of each program's keys, by the program's name."""
    files = sorted(Path(__file__).parent.glob("*.toml"))
    written = [tomllib.loads(file.read_text(encoding="utf-8")) for file in files]
    known = {table["program"]: table for table in written}
    return {name: _whole(table, known) for name, table in known.items()}


def _whole(table: dict[str, Any], known: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """A table with what it has not of the one that it is like: a key that it has is its own, of whatever kind."""
    table = {kind: {} for kind in _KINDS} | {kind: [] for kind in _LISTS} | {"alias": ["", ""]} | table
    if "like" not in table:
        return table | {"fields": table["fields"] | _OF_LAUNCHERS}
    before = _whole(known[table["like"]], known)
    own = {key for kind in ("fields", "words", "refused", "assumed") for key in table[kind]}
    for kind in _KINDS:
        table[kind] = {key: value for key, value in before[kind].items() if key not in own} | table[kind]
    return table | {kind: before[kind] + table[kind] for kind in _LISTS}


class Reading:
    """Values being read: ``said`` are those with a meaning by its path, which sections are made of.

    What the file says comes before what the files that it names say, and that before what is said of no key.
    """

    def __init__(self, program: str, values: Mapping[Any, Any], where: str = "", *, beside: bool = False) -> None:
        self.table, self.program, self.where = tables()[program], program, where
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.strangers: list[str] = []
        self.said_by: dict[str, str] = {}  # the key of the file by its meaning
        self.sharded = self.devices_said = False  # until the layout is made
        for key in self.table["opened"]:
            if isinstance(values.get(key), str) and isinstance(found := map_in(values[key], where), Mapping):
                values = {**values, **(found if key in found else {key: found})}
        given = {key.replace(*self.table["alias"]): value for key, value in _flat(values, self.table["alone"])}
        missing = {} if beside else self.table["defaults"]
        always = {"run.zero": 0} if beside and program == "DeepSpeed" else {} if beside else self.table["always"]
        self.said: dict[str, Any] = {}
        meant = {key: set(self._take({key: value})) for key, value in missing.items() if given.get(key) is None}
        defaults = always | self.said
        self.said = {}
        self._take(given)
        for meaning, other in _BESIDE.items():
            if (named := self.said.pop(meaning, None)) is not None:
                self._join(other, self.key_of(meaning), named)
        for path, factors in self.table["products"].items():
            if path not in self.said:
                self._multiply(path, factors, defaults | self.said)
        self.given = self.said.keys()
        self.supplied = {key: missing[key] for key, paths in meant.items() if paths - self.said.keys()}
        self.said = defaults | self.said
        if not self.said.get("run.adapter"):
            self.supplied = {
                key: value
                for key, value in self.supplied.items()
                if not (key.startswith("lora_") or key == "target_modules")
            }
        self.epochs = not self.said.keys() & {"recipe.steps", "recipe.tokens"}
        if self.epochs and not _is_within(passes := self.said.get("run.epochs", 1), _MOST_EPOCHS):
            self.refuse(self.key_of("run.epochs"), passes, f"must be a number above 0, at most {_MOST_EPOCHS:,}", 1)

    def _take(self, given: Mapping[str, Any]) -> Iterator[str]:
        """Take keys in the order of the table, whatever that of the file is; the meanings that are said since then."""
        before, silent = dict(self.said), re.compile("|".join(self.table["silent"]) or "(?!)")
        order = {key: place for place, key in enumerate(self.table["words"])}
        for key, value in sorted(given.items(), key=lambda item: order.get(item[0], -1)):
            earlier = dict(self.said)
            if not (self._read(key, value) or silent.fullmatch(key)):
                self._stranger(key, value)
            self.said_by |= {path: key for path, said in self.said.items() if earlier.get(path) != said}
        return (path for path in self.said if path not in before or self.said[path] != before[path])

    def _read(self, key: str, value: Any) -> bool:
        """Take one key: a field of its own, words with a meaning, or what cannot be accounted for; False for others."""
        table = self.table
        if isinstance(value, str) and "$" in value and (key in table["words"] or key in table["fields"]):
            self.refuse(key, value, "is not known until the program runs; give the value")
        elif str(value) in (*table["unset"].get(key, ()), *table["unset"].get("any", ())):
            return True
        elif key in table["words"]:
            words = value.replace(",", " ").split() if isinstance(value, str) and key in table["split"] else value
            words = "[]" if words == [] else words
            for word in words if isinstance(words, list) else [words]:
                self._word(key, word)
        elif str(value) in _UNSET:  # what is off is not refused, and says nothing where it is known
            return value is not False or any(key in table[kind] for kind in ("fields", "refused", "assumed"))
        elif key in table["fields"]:
            path = table["fields"][key]
            both = value if path == "optimizer.betas" and isinstance(value, list) and len(value) == 2 else None
            self.said |= {path: value} if both is None else {"optimizer.beta1": both[0], "optimizer.beta2": both[1]}
        elif key in table["refused"]:
            self.refuse(key, value, table["refused"][key], f"{key}: false" if value is True else f"without {key}")
        elif key in table["assumed"]:
            self.notes.append(f"{key}: {table['assumed'][key]}")
        else:
            return False
        return True

    def _stranger(self, key: str, value: Any) -> None:
        """List a key that is not known; refuse a part of what is refused, and a slip of what changes the run."""
        parts = key.split(".")
        wholes = (".".join(parts[:count]) for count in range(1, len(parts)))
        if whole := next((name for name in wholes if name in self.table["refused"]), ""):
            if value is not False and all(problem.field != whole for problem in self.problems):
                self.refuse(whole, value, self.table["refused"][whole], f"without {whole}")
            return
        known = [*self.table["fields"], *self.table["words"]]
        if value is not False and (close := get_close_matches(key, known, 1, _SLIP)):
            self.refuse(key, value, f"is no key of {self.program} that is known", close[0])
        self.strangers.append(key)

    def _word(self, key: str, word: Any) -> None:
        known = self.table["words"][key]
        text = str(word).lower() if isinstance(word, bool) else str(word)
        if text not in known and "*" not in known:
            if text not in _UNSET:
                self.refuse(key, word, "is not accounted for", nearest_text(text, known) or next(iter(known)))
            return
        meaning = dict(known[text if text in known else "*"])
        if note := meaning.pop("note", None):
            self.notes.append(f"{key} {text}: {note}")
        if rule := meaning.pop("refuse", None):
            self.refuse(key, word, rule, next(name for name, other in known.items() if "refuse" not in other))
        self.said |= meaning

    def _join(self, program: str, key: str, named: Any) -> None:
        """Take what a file of another program says, which the file names: where it is here, else by its name."""
        if not isinstance(named, Mapping):
            values = map_in(str(named), self.where)
            if values is None:
                name = Path(str(named)).name
                found = ((path, match[1]) for by, path in _BY_NAME.items() if (match := by.search(name)))
                path, meant = next(found, ("", ""))
                if not meant:
                    rule = "is no file here, and its name gives no ZeRO stage"
                    self.refuse(key, named, rule, "zero2.json")
                    return
                # ds_z3_offload_config.json of LLaMA-Factory offloads both, ds_z2_offload_config.json the optimizer.
                offload = "" if "offload" not in name else "parameters" if meant == "3" else "optimizer"
                rule = f"ZeRO-{meant}, offload {offload or 'none'}" if meant.isdecimal() else f"{meant}'s defaults"
                if offload:
                    self.said.setdefault("recipe.offload", offload)
                self.notes.append(f"{key} {name} is no file here: assuming {rule}")
                self.said.setdefault(path, int(meant) if meant.isdecimal() else True)
                return
            if not isinstance(values, Mapping):
                self.refuse(key, named, values)
                return
            named = values
        other = Reading(program, named, self.where, beside=True)
        for path, value in other.said.items():
            if self.said.setdefault(path, value) != value:
                text = f"{other.key_of(path)} {value} of {program} is not taken: {self.key_of(path)} {self.said[path]}"
                self.notes.append(text)
        self.problems += other.problems
        self.notes += other.notes
        self.strangers += [f"{key}.{stranger}" for stranger in other.strangers]

    def _multiply(self, path: str, factors: list[str | int], said: Mapping[str, Any]) -> None:
        """A meaning that is the product of others and numbers, over those with a slash before them, or one other."""
        if len(factors) == 1 and factors[0] in said:
            self.said[path] = said[str(factors[0])]
            return
        divisors = [factor[1:] for factor in factors if isinstance(factor, str) and factor[0] == "/"]
        over = [said.get(factor, 0) for factor in divisors]
        times = [said.get(str(factor), factor) for factor in factors if not str(factor).startswith("/")]
        if not all(type(value) is int and value > 0 for value in (*over, *times)):
            return
        whole, part = prod(map(int, times)), prod(map(int, over))
        self.said[path] = max(1, whole // part)
        if whole % part:
            self.refuse(
                self.key_of(str(factors[0])), whole, f"must be a multiple of {part}", ceil_div(whole, part) * part
            )

    def refuse(self, key: str, value: Any, rule: str, nearest: Any = None) -> None:
        plain = value if isinstance(value, str | int | float) else str(value)
        self.problems.append(Problem(key, plain, rule, nearest))

    def key_of(self, meaning: str) -> str:
        """The key of the file that has a meaning, else the program's first of it."""
        known = (key for key, path in self.table["fields"].items() if path == meaning)
        return self.said_by.get(meaning) or next(known, meaning)

    def remarks(self) -> Iterator[str]:
        yield from self.notes
        if self.epochs:
            epochs = self.said.get("run.epochs")
            data = "data" if epochs is None else f"{epochs} epochs of data"
            yield f"assuming one step: {data} of a size that is not known (set recipe.steps or tokens)"
        if self.strangers:
            more = f" and {len(self.strangers) - _NAMED} more" if len(self.strangers) > _NAMED else ""
            yield f"not understood: {', '.join(self.strangers[:_NAMED])}{more}"
        if self.supplied:
            yield f"defaults of {self.program}: " + ", ".join(f"{key} {value}" for key, value in self.supplied.items())

    def count(self, meaning: str) -> int:
        """A whole number of at least 1; 1 after a problem, or where nothing is said."""
        value = self.said.pop(meaning, 1)
        if type(value) in (int, float) and value > 0 and float(value).is_integer():
            return int(value)
        self.refuse(self.key_of(meaning), value, "must be a whole number of at least 1", 1)
        return 1

    def group(self, name: str) -> dict[str, Any]:
        """What is said of a section or a part."""
        begin = f"{name}."
        return {path.removeprefix(begin): value for path, value in self.said.items() if path.startswith(begin)}


def _is_within(value: Any, most: float) -> bool:
    """A value is a number, or its text, above 0 and at most so large."""
    try:
        return 0 < float(str(value)) <= most
    except ValueError:
        return False


def _flat(values: Mapping[Any, Any], alone: list[str], before: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Keys and values, a map's keys with those of the maps around it before them.

    A list of one map that stands alone is as the map.
    """
    for name, value in values.items():
        key = f"{before}{name}"
        if key in alone and isinstance(value, list) and len(value) == 1:
            value = value[0]
        if isinstance(value, Mapping) and value and depth < _DEEPEST:
            yield from _flat(value, alone, f"{key}.", depth + 1)
        else:
            yield key, value
