"""Megatron-LM's arguments from any text that has them: a launch line, a script, a YAML map, or a run's log."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from trainledger.spec.convert import foreign_problem
from trainledger.spec.convert.megatron.shell import Script, ways_through
from trainledger.spec.frozen import frozen
from trainledger.spec.plain import table_beside
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.units import MIB

Value = str | tuple[str, ...]  # several words of one argument are a tuple, a flag without words is "true"
LARGEST = 4 * MIB  # bytes of a file: a log prints its arguments at the beginning
SUFFIXES = (".sh", ".bash", ".slurm", ".sbatch", ".yaml", ".yml", ".log", ".out", ".txt", ".args")
_LOGGED = re.compile(r"^.*?\s([a-z][a-z0-9_]+) \.{3,} (.*?)\s*$")
_BRIDGE = {"model", "train", "optimizer", "ddp"}  # sections of Megatron-Bridge's configs
_LOG_BEGINS = "arguments ----"
_OF_A_MODEL = ("num-layers", "hidden-size", "micro-batch-size", "num-attention-heads")


@cache
def tables() -> dict[str, Any]:
    """The tables of flags.toml."""
    return table_beside(__file__, "flags.toml")


@frozen
class Arguments:
    """Arguments by their flags without dashes in front (``num-layers``), and what else the text says of the run.

    ``devices`` are those of the launcher or the log, None where neither says. ``environment`` are the variables that
    the text sets. ``complete`` says that the text has every argument, as a log has, so that none is a default.
    ``program`` is the file that is launched, empty where the text does not say. ``script`` is the way through a script
    that was followed, ``line`` that of the launch, ``others`` are other launches and those on its other ways.
    """

    given: Mapping[str, Value]
    devices: int | None = None
    environment: Mapping[str, str] | None = None
    complete: bool = False
    program: str = ""
    script: Script | None = None
    line: int = 0
    others: tuple[Arguments, ...] = ()


def read_arguments(text: str, where: str = "") -> Arguments:
    """The arguments in a text; raises `InvalidInput` where it has none.

    >>> found = read_arguments("torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 12 --bf16")
    >>> dict(found.given), found.devices
    ({'num-layers': '12', 'bf16': 'true'}, 8)
    """
    logged = _of_log(text)
    if logged is not None:
        return logged
    if where.endswith((".yaml", ".yml")) or _is_map(text):
        return _of_map(text, where)
    try:
        ways = [launch for script in ways_through(text) for launch in _launches(script)]
    except InvalidInput as error:
        raise InvalidInput(list(error.problems), where) from None
    # The way with the fewest values that are not known comes first: a variable has its default where it is not set.
    ways = sorted((way for way in ways if any(name in way.given for name in _OF_A_MODEL)), key=_unknown)
    if not ways:
        rule = "has no arguments of Megatron-LM: a launch line, a script's assignments, a YAML map or a run's log has"
        raise InvalidInput([Problem("", None, rule, "--num-layers 32 --hidden-size 4096 ...")], where)
    return replace(ways[0], others=tuple(ways[1:]))


def _launches(script: Script) -> Iterator[Arguments]:
    """The arguments of the commands that name most of a model's sizes, or of the variables if no command does.

    They are the words after the program's name; the launcher's stand before it.
    """
    found: dict[tuple[str, ...], tuple[tuple[str, ...], str, int]] = {}
    for command, line in zip(script.commands, script.lines, strict=True):
        place = max((at for at, word in enumerate(command) if word.endswith(".py")), default=-1)
        found.setdefault(command[place + 1 :], (command[: max(0, place)], command[place] if place >= 0 else "", line))
    most = max(map(_sizes, found), default=0)
    if not most:
        words = tuple(word for value in script.variables.values() if "--" in value for word in value.split())
        found, most = {words: ((), "", 0)}, _sizes(words)
    for words, (launcher, program, line) in found.items():
        if _sizes(words) == most:
            devices = _devices(launcher, script.variables)
            yield Arguments(flags_of(words), devices, script.variables, program=program, script=script, line=line)


def _unknown(arguments: Arguments) -> tuple[int, bool]:
    return sum("$" in word for words in arguments.given.values() for word in words), arguments.devices is None


def flags_of(words: Sequence[str]) -> dict[str, Value]:
    """Words of a command line by flag; of a flag that is given twice the last one counts.

    >>> flags_of(["--bf16", "--cp-comm-type", "a2a", "p2p", "--lr=1e-4"])
    {'bf16': 'true', 'cp-comm-type': ('a2a', 'p2p'), 'lr': '1e-4'}
    """
    found: dict[str, Value] = {}
    name: str | None = None
    for word in (word.strip("'\"") for word in words):
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            name = name.replace("_", "-")
            found[name] = value if equals else "true"
            if equals:
                name = None
        elif name is not None:
            before = found[name]
            found[name] = word if before == "true" else (*((before,) if isinstance(before, str) else before), word)
    return found


def _sizes(words: Sequence[str]) -> int:
    """The number of a model's sizes that the words name."""
    return sum(f"--{name}" in words for name in _OF_A_MODEL)


def _devices(launcher: Sequence[str], variables: Mapping[str, str]) -> int | None:
    """Processes of a node times nodes, as the launcher has them, or the variables that launchers are given."""
    flags = flags_of(launcher)
    each = _count(flags.get("nproc-per-node"), *(variables.get(name) for name in ("GPUS_PER_NODE", "NPROC_PER_NODE")))
    nodes = _count(flags.get("nnodes"), *(variables.get(name) for name in ("NNODES", "NUM_NODES")))
    whole = _count(variables.get("WORLD_SIZE"))
    return whole if each is None else each * (nodes or 1)


def _count(*values: object) -> int | None:
    found = (int(value) for value in values if isinstance(value, str) and value.isdecimal() and len(value) < 8)
    return next((count for count in found if count), None)


def _of_log(text: str) -> Arguments | None:
    """The arguments that Megatron-LM prints when it starts; None where the text is no such log."""
    begin = text.find(_LOG_BEGINS)
    if begin < 0:
        return None
    found: dict[str, Value] = {}
    for line in text[begin:].splitlines()[1:]:
        matched = _LOGGED.match(f" {line}")
        if matched:
            _take(found, matched[1], matched[2])
        elif "end of arguments" in line:
            break
    devices = found.pop("world-size", None)
    return Arguments(found, _count(devices), None, complete=True) if found else None


def _take(found: dict[str, Value], name: str, value: Any) -> None:
    """An argument by Python's name and printed value: what is None or false is not given."""
    name = name.strip("-").replace("_", "-")
    text = "true" if value is True else "False" if value is False else "None" if value is None else value
    if isinstance(text, list | tuple):  # of plain values: what has others inside is no argument
        found[name] = tuple(str(word) for word in text if isinstance(word, str | int | float))
        return
    if not isinstance(text, str | int | float):
        return
    text = str(text)
    if name in tables()["inverted"]:
        if text in ("False", "false"):
            found[tables()["inverted"][name]] = "true"
    elif text not in ("None", "False", "false", ""):
        found[name] = "true" if text in ("True", "true") else text


def from_values(values: Mapping[str, Any], environment: Mapping[str, Any], *, program: str = "") -> Arguments:
    """Arguments from their values by name, as JSON or YAML have them."""
    found: dict[str, Value] = {}
    for name, value in values.items():
        _take(found, str(name), value)
    return Arguments(found, None, {str(name): str(value) for name, value in environment.items()}, program=program)


def _is_map(text: str) -> bool:
    """A text looks like a YAML map of arguments: a line of a key and a colon comes first."""
    first = next((line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")), "")
    return re.match(r"^\s*-{0,2}[A-Za-z][\w-]*:(\s|$)", first) is not None


def _of_map(text: str, where: str) -> Arguments:
    """The arguments of a map: alone, under MODEL_ARGS as in Megatron-LM's tests, or in groups as in its YAML files."""
    import yaml  # type: ignore[import-untyped]

    try:
        table = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        place = "" if line is None else f" (line {line + 1})"
        raise InvalidInput([Problem("", None, f"is not a YAML file that can be read{place}")], where) from None
    if not isinstance(table, Mapping):
        raise InvalidInput([Problem("", None, "must be a map of arguments")], where)
    if (foreign := None if table.keys() >= _BRIDGE else foreign_problem(table)) is not None:
        raise InvalidInput([foreign], where)
    if table.keys() >= _BRIDGE:
        return _of_bridge(table, where)
    inner, variables = table.get("MODEL_ARGS", table), table.get("ENV_VARS")
    read = from_values(
        dict(_members(inner)) if isinstance(inner, Mapping) else {}, variables if isinstance(variables, Mapping) else {}
    )
    found = dict(read.given)
    if not any(name in found for name in _OF_A_MODEL):
        rule = "has no arguments of Megatron-LM, such as --num-layers or hidden_size"
        raise InvalidInput([Problem("", None, rule)], where)
    return Arguments(found, _count(found.pop("world-size", None)), read.environment)


def _of_bridge(table: Mapping[Any, Any], where: str) -> Arguments:
    """The arguments in the run_config.yaml that Megatron-Bridge keeps with a checkpoint.

    Its fields have the names of Megatron-LM's arguments but for those of ``[bridge]`` in flags.toml, and it has all of
    them, so that none is a default.
    """
    bridge = tables()["bridge"]
    given: dict[str, Any] = {}
    silent = re.compile("|".join(bridge["silent"]))
    for section, fields in table.items():
        if fields is not None and section in bridge["refused"]:
            raise InvalidInput([Problem(str(section), None, bridge["refused"][section])], where)
        for key, value in fields.items() if isinstance(fields, Mapping) else ():
            path = f"{section}.{key}"
            if isinstance(value, Mapping):  # a function, a format or a choice, by its name in Python
                last = str(value.get("_target_", "")).rpartition(".")[2]
                value = bridge["targets"].get(f"{last}{value.get('_args_', '')}", bridge["targets"].get(last))
            if path in bridge["names"] or not silent.fullmatch(path):
                given[bridge["names"].get(path, str(key))] = value
    for name, value in bridge["switches"].items():  # off, where a field says what is otherwise an argument
        if given.pop(name, None) is False:
            given[value] = True
    gated, activation = given.pop("gated", False), given.pop("activation", None)
    given["swiglu" if activation == "silu" else "quick_geglu" if gated else str(activation)] = True
    for absent in (name for name, field in (("moe_", "num-experts"), ("fp8-", "fp8-format")) if not given.get(field)):
        given = {key: value for key, value in given.items() if not key.startswith(absent)}
    heads, groups = given.get("num_attention_heads"), given.get("num_query_groups")
    given["group_query_attention"] = groups is not None and groups != heads
    if "num_layers" not in given:
        rule = "is missing: overrides of a recipe are no run; the run_config.yaml beside a checkpoint has all fields"
        raise InvalidInput([Problem("model.num_layers", None, rule)], where)
    return replace(from_values(given, {}, program="Megatron-Bridge"), complete=True)


def _members(table: Mapping[Any, Any]) -> Iterable[tuple[str, Any]]:
    """Names and values of a map and of the maps in it, one level deep."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from ((str(key), inner) for key, inner in value.items() if not isinstance(inner, Mapping))
        else:
            yield str(name), value


_LARGEST = 10**12


@cache
def _silent() -> re.Pattern[str]:
    begin, end, exact = ("|".join(tables()[name]) for name in ("begin", "end", "exact"))
    return re.compile(f"({begin})(-.*)?|.*-({end})|{exact}")


def changes_nothing(name: str) -> bool:
    """An argument changes neither memory nor time nor what is trained, as far as they are accounted for.

    >>> changes_nothing("tensorboard-dir"), changes_nothing("num-layers")
    (True, False)
    """
    return _silent().fullmatch(name) is not None


class Reading:
    """Arguments being read: those that were asked for, the defaults in place of others, problems and notes.

    A default is Megatron-LM's own (megatron/training/arguments.py and core/transformer/transformer_config.py).
    """

    def __init__(self, arguments: Arguments) -> None:
        self.arguments = arguments
        self.asked: set[str] = set()
        self.supplied: dict[str, Any] = {}
        self.problems: list[Problem] = []
        self.notes: list[str] = []

    def given(self, name: str) -> str | None:
        """The text of an argument, of several words the first; None where it is not given."""
        return next(iter(self.words(name)), None)

    def words(self, name: str) -> tuple[str, ...]:
        """The words of an argument; none where it is not given."""
        self.asked.add(name)
        value = self.arguments.given.get(name, ())
        return (value,) if isinstance(value, str) else value

    def flag(self, name: str) -> bool:
        """A flag is given, and not as false."""
        value = self.given(name)
        return value is not None and value.lower() not in ("false", "0", "none")

    def count(self, name: str, default: int | None = None, *, at_least: int = 1) -> int | None:
        """A whole number; the default, or None, where it is not given; raises nothing: a wrong one is a problem."""
        value = self.given(name)
        if value is None:
            return None if default is None else int(self._default(name, default))
        try:
            number = int(value) if value.lstrip("-").isdecimal() else float(value)
        except ValueError:
            number = -1.0
        if number != number or abs(number) > _LARGEST or number != int(number) or number < at_least:
            self.refuse(name, value, self._unset(value) or f"must be a whole number of at least {at_least}", default)
            return default if default is None or default >= at_least else at_least
        return int(number)

    def needed(self, name: str) -> int:
        """A whole number that has no default; 1 after a problem."""
        value = self.count(name)
        if value is None and not any(problem.field == f"--{name}" for problem in self.problems):
            self.refuse(name, None, "is missing, and Megatron-LM has no default for it")
        return value or 1

    def number(self, name: str, default: float | None = None) -> float | None:
        """A number; the default, or None, where it is not given."""
        value = self.given(name)
        if value is None:
            return None if default is None else float(self._default(name, default))
        try:
            found = float(value)
        except ValueError:
            found = float("nan")
        if found != found or abs(found) == float("inf"):
            self.refuse(name, value, self._unset(value) or "must be a number", default)
            return default
        return found

    def text(self, name: str, default: str | None = None) -> str | None:
        """A word; the default, or None, where it is not given."""
        value = self.given(name)
        return self._default(name, default) if value is None else value

    def chosen(self, name: str, known: Mapping[str, str], default: str, nearest: str) -> str:
        """The meaning of a word; that of ``nearest`` after a problem."""
        value = self.text(name, default)
        if value not in known:
            self.refuse(name, value, f"must be one of {', '.join(known)}", nearest)
        return known.get(str(value), known[nearest])

    def table(self, name: str) -> dict[str, Any]:
        """The fields of a table of flags.toml, each one argument."""
        return {field: getattr(self, kind)(*given) for field, (kind, *given) in tables()[name].items()}

    def refuse(self, name: str, value: Any, rule: str, nearest: Any = None) -> None:
        self.problems.append(Problem(f"--{name}", value, rule, nearest))

    def _default(self, name: str, default: Any) -> Any:
        if default is not None and not self.arguments.complete:
            self.supplied[name] = default
        return default

    @staticmethod
    def _unset(value: str) -> str:
        if "$(" in value and "$((" not in value:
            return "is what a command prints, and none is run; give the number"
        return "names a variable that the text does not set; give the number" if "$" in value else ""

    def strangers(self) -> tuple[str, ...]:
        """Arguments that nothing asked for and that are not known to change nothing."""
        return tuple(name for name in self.arguments.given if name not in self.asked and not changes_nothing(name))
