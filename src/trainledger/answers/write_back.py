"""The change of a run in the words of the file that it was read from: another trainer's keys, and a copy with them.

Keys are tried: the reader of the file reads it with other values of its table, and what each value changes in the run
is what it says. So a change is only written where the file, read again, is the changed run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from trainledger.answers.megatron import arguments_of, run_of_arguments
from trainledger.answers.pages.interval import fits
from trainledger.answers.pages.plain_data import named, run_data
from trainledger.answers.plan import planned
from trainledger.answers.question import output
from trainledger.answers.trainers import run_of_launch
from trainledger.report.document import Code, Section, section
from trainledger.spec import runfile
from trainledger.spec.convert.megatron.arguments import tables as megatron_tables
from trainledger.spec.convert.patch import Edits, Rewritten, patched
from trainledger.spec.convert.trainers import tables, values_of
from trainledger.spec.convert.trainers.files import Launched
from trainledger.spec.durable import content_of
from trainledger.spec.plain import replace_file
from trainledger.spec.problem import InvalidInput, Problem, refuse_given
from trainledger.spec.run import Run
from trainledger.spec.run_text import as_override
from trainledger.spec.units import MIB, format_nbytes, format_seconds

To = Annotated[str | None, output("of another trainer's file: write a copy with the change", ".yml")]
_LAUNCHED = (".sh", ".bash", ".slurm", ".sbatch")
_KEPT = ("model", "cluster", "data", "teacher")  # sections that no file is changed for
_PACKED = ("sample_packing", "packing", "neat_packing", "padding_free", "dynamic_padding_free")
# Paths of a table of keys that are no fields of a run, by what they are of it.
_DERIVED: dict[str, Callable[[Run], int]] = {
    "run.accumulation": lambda run: run.grad_accum,
    "recipe.micro_batch": lambda run: run.device_batch,
    "run.zero": lambda run: run.layout.zero if run.layout.shard > 1 else 0,
}


class Words:
    """The words of the file of a run, where it was read from one of another trainer: `of` makes them."""

    def __init__(self, run: Run, named: str, overrides: tuple[str, ...]) -> None:
        launch = values_of(named)
        self.named, self.launch = named, launch
        self.arguments = arguments_of(named) if launch is None else None
        self.program = "Megatron-LM" if launch is None else str(launch.program)
        self.is_line = not os.path.isfile(named)
        self.suffix = "" if self.is_line or Path(named).suffix in _LAUNCHED else Path(named).suffix
        kept = [override for override in overrides if override.startswith(("model.", "data."))]
        self.overrides = [*kept, f"cluster.device={run.cluster.device}", f"cluster.count={run.cluster.count}"]

    @staticmethod
    def of(run: Run) -> Words | None:
        """Those of a run; None where it was not read from a file or launch line whose words are written."""
        if run.origin.trainer is None:
            return None
        words = Words(run, *run.origin.trainer)
        if words.arguments is not None:
            return None if words.suffix else words
        return words if words.suffix in ("", ".yml", ".yaml", ".toml", ".json") else None

    def read(self, edits: Mapping[str, Any]) -> Run:
        """The run of the file with other values of some keys; raises `InvalidInput`."""
        if self.arguments is not None:
            given = {**self.arguments.given, **{key: str(value).lower() for key, value in edits.items()}}
            given = {key: value for key, value in given.items() if edits.get(key) is not False}
            return run_of_arguments(self.named, self.overrides, replace(self.arguments, given=given, others=()))
        assert self.launch is not None
        values = dict(self.launch.values)
        for key, value in edits.items():
            _put(values, key, value)
        return run_of_launch(self.named, self.overrides, Launched(values, self.launch.program, self.launch.refused))

    @cached_property
    def own(self) -> Run:
        """The file's own run."""
        return self.read({})

    @cached_property
    def before(self) -> dict[str, Any]:
        """Every field of it."""
        return _fields(self.own)

    @cached_property
    def said(self) -> list[tuple[Edits, dict[str, Any]]]:
        """What words change, of those that change the same the first: words of keys that the file has come first."""
        found: dict[str, tuple[Edits, dict[str, Any]]] = {}
        for edits in sorted(self._words(), key=lambda edits: not edits.keys() & self.has):
            try:
                after = _fields(self.read(edits))
            except InvalidInput:
                continue
            if changes := _changes(self.before, after):
                found.setdefault(repr(changes), (edits, changes))
        return list(found.values())

    @cached_property
    def has(self) -> dict[str, Any]:
        """The keys that the file has."""
        if self.launch is None:
            return {} if self.arguments is None else dict(self.arguments.given)
        return dict(_flat(self.launch.values))

    def _words(self) -> Iterator[Edits]:
        """Every word of the program, those that say exactly what they are before those that are counted as another."""
        if self.arguments is not None:
            yield from megatron_tables()["write"]["words"]
            return
        table = tables()[self.program]
        named = (key for key in self.has if table["fields"].get(key) == "run.deepspeed")
        for key in (key for key in named if str(self.has[key]).startswith("zero")):  # names of ms-swift's own files
            yield from ({key: f"zero{stage}"} for stage in (1, 2, 3))
        write, kept = table["write"], self._kept
        words = [(key, word, meaning) for key, each in table["words"].items() for word, meaning in each.items()]
        for key, word, meaning in sorted(words, key=lambda item: "note" in item[2] or not item[2]):
            old = key in write.get("old", ()) and key not in self.has
            if "refuse" in meaning or word == "*" or old or key in kept:
                continue
            number = word.isdecimal() and not isinstance(self.has.get(key, table["defaults"].get(key)), str)
            value: Any = {"true": True, "false": False}.get(word, int(word) if number else word)
            written = write.get(f"{key} {word}", {key: value})
            off = dict.fromkeys(self._contrary(key, meaning), False)
            for edits in written if isinstance(written, list) else [written]:
                longer = [key for key in edits if key in write.get("lists", ())]
                yield off | edits | {key: self._longer(key, edits[key]) for key in longer}

    def _contrary(self, key: str, meaning: Mapping[str, Any]) -> Iterator[str]:
        """Other keys that the file has switched on and that say otherwise, such as another kernel of attention."""
        words = tables()[self.program]["words"]
        for other in (name for name, value in self.has.items() if value is True and name != key):
            means = words.get(other, {}).get("true", {})
            if any(path in meaning and meaning[path] != said for path, said in means.items() if path != "note"):
                yield other

    @cached_property
    def _kept(self) -> set[str]:
        """Keys of the kernel of attention, where rows are packed: another kernel may mix their documents."""
        table = tables()[self.program]
        if not any(self.has.get(key) is True for key in _PACKED):
            return set()
        return {key for key, words in table["words"].items() if any("recipe.attention" in w for w in words.values())}

    def _longer(self, key: str, words: list[Any]) -> list[Any]:
        """The words that the file has in a list, and further ones."""
        before = self.has.get(key)
        return [*before, *(word for word in words if word not in before)] if isinstance(before, list) else words

    def _numbers(self, run: Run) -> tuple[list[Edits], list[Edits]]:
        """Numbers that a run has otherwise: those of keys that the file has and of the batch; and further ones."""
        numbers = megatron_tables()["write"]["numbers"]
        fields = numbers if self.arguments is not None else tables()[self.program]["fields"]
        after, edits, keys = _fields(run), Edits(), dict[str, str]()
        for key, path in sorted(fields.items(), key=lambda pair: pair[0] not in self.has):
            was, value = _meant(path, self.before, self.own), _meant(path, after, run)
            if path not in keys and type(value) in (int, float) and value != was and not key.startswith("launcher."):
                edits[key], keys[path] = value, key
        there = {key: value for key, value in edits.items() if key in self.has}
        batch = {key: value for key, value in edits.items() if key in self.has or fields[key] in _DERIVED}
        whole = {key: run.recipe.global_batch for key, path in fields.items() if path == "recipe.global_batch"}
        others = [edits, edits | whole, *({key: value} for key, value in edits.items())]
        return [some for some in (batch, there) if some], [some for some in others if some]

    def edits(self, target: Run) -> tuple[Edits, tuple[str, ...]]:
        """The keys that make the file's run the target, and the fields of it that they do not reach."""
        wanted = _fields(target)
        best: Edits = {}
        numbers = set[str]()
        left = _changes(self.before, wanted)
        for _ in range(6):
            found = None
            known, further = self._numbers(target)
            numbers.update(*known, *further)
            words = [edits for edits, changes in self.said if changes.keys() & left.keys()]
            for edits in (*known, *words, *further):
                tried = {**best, **edits}
                try:
                    rest = _changes(_fields(self.read(tried)), wanted)
                except InvalidInput:
                    continue
                if rest.keys() <= left.keys() and len(rest) < len(left if found is None else found[1]):
                    found = tried, rest
            if found is None:
                break
            best, left = found
        for key in numbers & best.keys():  # what follows from the others anyway
            fewer = {name: value for name, value in best.items() if name != key}
            with suppress(InvalidInput):  # a size that others need
                best = fewer if _changes(_fields(self.read(fewer)), wanted) == left else best
        return best, tuple(as_override(path, value) for path, value in left.items())

    def written(self, target: Run) -> Rewritten:
        """The file with the words of a change; of what it has no words for it keeps its own."""
        edits, missing = self.edits(target)
        text = patched(self.named if self.is_line else content_of(Path(self.named), MIB), self.suffix, edits)
        run = self.read(edits)
        changes = tuple(as_override(path, value) for path, value in _changes(self.before, _fields(run)).items())
        return Rewritten(self.named, self.program, self.suffix, edits, changes, missing, text, run)

    def says(self, target: Run) -> bool:
        """Whether the file has words for all that a target changes."""
        left = _changes(self.before, _fields(target))
        words = {path for _, changes in self.said for path in changes}
        known, further = self._numbers(target)
        return bool(left) and (bool(known or further) or left.keys() <= words) and not self.edits(target)[1]


def in_words(run: Run, targets: Iterable[Run], write: str | None = None) -> Rewritten | None:
    """The file of a run with the first target that it has words for in full, else with what it has of the first.

    None where the run is of no file whose words are written, or without targets where nothing is to be written. The
    text is kept in the file ``write``; what cannot be is `unwritten`. Raises `InvalidInput` for a run of no such file.
    """
    words, targets = Words.of(run), list(targets)
    if words is None:
        rule = "is of a run in a file or launch line of another trainer, such as axolotl, TRL or torchtitan"
        refuse_given([("--write", write, rule, None)])
        return None
    if not targets and write is None:
        return None
    whole = next((target for target in targets if words.says(target)), None)
    rewritten = words.written(whole or [*targets, words.own][0])
    if whole is None and not _helps(rewritten.run, words.own):  # half of a layout is none
        rewritten = replace(rewritten, edits={}, text="", run=words.own)
    if write is not None and rewritten.edits:
        replace_file(write, rewritten.text.encode())
    return replace(rewritten, unwritten="" if write is None or rewritten.edits else write)


def unwritten(answer: Any) -> Problem | None:
    """Why an answer did not write the file that was asked for; None where it did, or none was."""
    words: Rewritten | None = answer.words
    if words is None or not words.unwritten:
        return None
    missing = f": {', '.join(words.missing)}" if words.missing else ""
    return Problem("--write", words.unwritten, f"{words.program} has no words for a change that helps{missing}")


def _helps(after: Run, before: Run) -> bool:
    """Whether a part of a change needs less memory, and fits where the change is made for that."""
    now, was = planned(after).forecast, planned(before).forecast
    return bool(now.fits) and (not was.fits or (now.step_seconds or 0) <= (was.step_seconds or 0))


def words_section(rewritten: Rewritten | None) -> Section | None:
    """The change in the file's words, what the run then takes, and what there are no words for."""
    if rewritten is None:
        return None
    title = f"In the words of {rewritten.program}"
    none = f"No words there for {', '.join(rewritten.missing)}." if rewritten.missing else None
    if not rewritten.edits:
        return section("", none)
    forecast = planned(rewritten.run).forecast
    needs = [] if forecast.device_nbytes is None else [f"{format_nbytes(forecast.device_nbytes)} on the peak rank"]
    needs += [] if forecast.step_seconds is None else [f"{format_seconds(forecast.step_seconds)} a step"]
    fitting = [] if forecast.fits is None else [fits(forecast.fits, forecast.chance_of_fitting)]
    changed = f"What changes: {', '.join(rewritten.changes)}."
    return section(f"{title}: {', '.join([*fitting, *needs])}", Code(rewritten.lines), changed, none)


def words_data(rewritten: Rewritten | None) -> dict[str, Any]:
    """The change in the file's words, for programs; empty where there is no file."""
    if rewritten is None:
        return {}
    return {"words": {**named(rewritten, "named program edits changes missing text"), "run": run_data(rewritten.run)}}


def _meant(path: str, fields: Mapping[str, Any], run: Run) -> Any:
    """The value of a path of a table in a run."""
    if path in _DERIVED:
        return _DERIVED[path](run)
    return fields.get(path, fields.get(f"recipe.{path}"))


def _fields(run: Run) -> dict[str, Any]:
    """The fields of a run that a file may be changed for; its length, which is mostly assumed, is none of them."""
    plain = replace(run, recipe=replace(run.recipe, steps=None, tokens=None, micro_batch=run.device_batch))
    return {path: value for path, value in runfile.flat(plain).items() if path.partition(".")[0] not in _KEPT}


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    return {path: after[path] for path in after if path not in before or before[path] != after[path]}


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    """Give a key of nested maps a value."""
    if key in values:
        values[key] = value
        return
    name, dot, rest = key.partition(".")
    if not dot:
        values[key] = value
        return
    inner = values.get(name)
    values[name] = dict(inner) if isinstance(inner, Mapping) else {}
    _put(values[name], rest, value)


def _flat(values: Mapping[Any, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        yield f"{before}{key}", value
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
