"""Files of programs as maps of their keys: YAML, JSON and TOML, and launch lines or scripts with their flags."""

from __future__ import annotations

import ast
import json
import operator
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainledger.spec.convert import foreign_program
from trainledger.spec.convert.megatron.shell import Script, ways_through
from trainledger.spec.durable import content_of
from trainledger.spec.frozen import frozen
from trainledger.spec.problem import InvalidInput
from trainledger.spec.units import MIB

_LARGEST = MIB  # bytes of a file
_MAPS = (".yaml", ".yml", ".json", ".toml", ".py")
_SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")
_OF_MEGATRON = {"--num-layers", "--hidden-size", "--num_layers", "--hidden_size"}
_LAUNCHERS = {"accelerate", "torchrun", "deepspeed", "python", "python3", "srun", "poetry", "uv"}
_CONFIG = ("config", "job.config_file", "job.config-file", "config_file")  # flags with the file of a program's keys
_NUMBER = re.compile(r"[+-]?(\d[\d_]*)?\.?\d+(e[+-]?\d+)?", re.IGNORECASE)
_PLAIN = {"true": True, "false": False, "none": None, "null": None}


@frozen
class Launched:
    """Values of a program's keys, the program where a command says it, and why the command is refused."""

    values: dict[str, Any]
    program: str | None = None
    refused: str = ""


def values_of(named: str, tables: Mapping[str, Mapping[str, Any]]) -> Launched | None:
    """The values in a file of a program with a table, or of a launch line; None for any other text."""
    path = Path(named)
    line = " " in named.strip() and not os.path.exists(named)
    if path.suffix in _MAPS and not line:
        found = map_in(named)
        program = foreign_program(found) if isinstance(found, Mapping) else None
        return Launched(dict(found), program) if isinstance(found, Mapping) and program in tables else None
    if path.suffix not in _SCRIPTS and not line:
        return None
    try:
        ways = list(ways_through(named if line else content_of(path, _LARGEST)))
    except (OSError, ValueError, InvalidInput):
        return None  # which the reader of any text refuses
    launches = [launch for way in ways for launch in _launches(way, tables, "" if line else named)]
    # The way with the fewest values that are not known comes first: a variable has its default where it is not set.
    launches.sort(key=lambda launch: (bool(launch.refused), str(launch.values).count("$")))
    return launches[0] if launches else None


def map_in(named: str, where: str = "") -> Mapping[Any, Any] | str | None:
    """The map in a file, from here or from the folder of the file that names it; what is wrong with it, or None."""
    named = named.replace("$PWD/", "").replace("${PWD}/", "")
    path = next((path for folder in (Path(), Path(where).parent) if os.path.isfile(path := folder / named)), None)
    if path is None:
        return None
    kind = path.suffix.lstrip(".").upper().replace("YML", "YAML") or "text"
    try:
        found = _parsed(content_of(path, _LARGEST), path.suffix)
    except (OSError, ValueError, TypeError, SyntaxError, ArithmeticError, RecursionError):
        return f"is not a {kind} file that can be read"
    return found if isinstance(found, Mapping) else "must hold a map"


def _parsed(text: str, suffix: str) -> Any:
    import yaml  # type: ignore[import-untyped]

    if suffix == ".json":
        return json.loads(text)
    if suffix == ".toml":
        return tomllib.loads(text)
    if suffix == ".py":
        return _assigned(text)
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _assigned(text: str) -> dict[str, Any]:
    """Variables of Python that has assignments alone; those that are no literals, or arithmetic of them, as ``$text``.

    >>> _assigned("batch_size = 5 * 8\\nname = 'run' + str(time())")
    {'batch_size': 40, 'name': "$'run' + str(time())"}
    """
    found: dict[str, Any] = {}
    for line in ast.parse(text).body:
        if isinstance(line, ast.Assign) and len(line.targets) == 1 and isinstance(line.targets[0], ast.Name):
            found[line.targets[0].id] = _literal(line.value)
        elif not isinstance(line, ast.Import | ast.ImportFrom | ast.Expr):
            raise ValueError("has more than assignments")
    return found


_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}  # fmt: skip


def _literal(value: ast.expr) -> Any:
    if isinstance(value, ast.BinOp) and type(value.op) in _ARITHMETIC:
        left, right = _literal(value.left), _literal(value.right)
        if all(type(side) in (int, float) for side in (left, right)) and (
            right or not isinstance(value.op, ast.Div | ast.FloorDiv)
        ):
            return _ARITHMETIC[type(value.op)](left, right)
    try:
        return ast.literal_eval(value)
    except ValueError:
        return f"${ast.unparse(value)}"


def _launches(script: Script, tables: Mapping[str, Mapping[str, Any]], where: str) -> Iterator[Launched]:
    """The commands of a script that are a program's: its name says so, or the keys of its flags."""
    for command in script.commands:
        if _OF_MEGATRON & set(command):
            continue
        place = next((at for at, word in enumerate(command) if word.endswith(".py") or word == "-m"), -1)
        of_launcher = place >= 0 and Path(command[0]).name in _LAUNCHERS
        launcher, words = (command[:place], command[place:]) if of_launcher else ((), command)
        text = " ".join(word for word in words[:3] if not word.startswith("--"))
        known = ((name, *said) for name, table in tables.items() for said in table["commands"].items())
        program, refused = next(((name, rule) for name, by, rule in known if re.match(by, text)), (None, ""))
        flags, plain = _flags(words)
        values: dict[str, Any] = {}
        for named in [*(str(flags.pop(key)) for key in _CONFIG if key in flags), *plain]:
            if program and Path(named).name in tables[program]["known"]:
                continue
            found = map_in(named, where) if named.endswith(_MAPS) else None
            if isinstance(found, Mapping):
                values |= found
            elif found is None and named.endswith(_MAPS[:-1]):
                refused = f"names {named}, which is no file here"
        values |= flags
        program = program or foreign_program(values)
        if program in tables:
            values |= _of_launcher(launcher, script.variables)
            yield Launched(values, program, refused)


def _flags(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Values by flag, several words of one as a list, and the words before all flags; ``key=value`` is a flag too.

    >>> _flags("main.py --bf16 --lr=1e-4 --targets q_proj v_proj --no_save".split())
    ({'bf16': True, 'lr': 0.0001, 'targets': ['q_proj', 'v_proj'], 'no_save': True}, ['main.py'])
    """
    found: dict[str, list[str]] = {}
    plain: list[str] = []
    name = None
    for word in words:
        key, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and key:
            name = key.replace("-", "_")
            found[name] = [value] if equals else []
        elif equals and name is None and re.fullmatch(r"[a-z][\w.]*", key):
            found[key] = [value]
        else:
            (plain if name is None else found[name]).append(word)
    values = {name: [_scalar(word) for word in words] for name, words in found.items()}
    return {name: words[0] if len(words) == 1 else words or True for name, words in values.items()}, plain


def _scalar(word: str) -> Any:
    word = word[1:-1] if len(word) > 1 and word[0] == word[-1] and word[0] in "'\"" else word
    if word.lower() in _PLAIN:
        return _PLAIN[word.lower()]
    if word.startswith(("{", "[")):
        try:
            return json.loads(word)
        except ValueError:
            return word
    if not _NUMBER.fullmatch(word):
        return word
    return int(word) if word.lstrip("+-").isdecimal() else float(word)


def _of_launcher(words: Sequence[str], variables: Mapping[str, str]) -> dict[str, Any]:
    """What the launcher says of devices, as keys that every table has."""
    flags, _ = _flags(words[1:])
    program = Path(words[0]).name if words else ""
    found: dict[str, Any] = {}
    if program == "accelerate" and isinstance(config := flags.get("config_file"), str):
        found["launcher.config_file"] = config
    said = [("devices", variables.get("NPROC_PER_NODE")), ("nodes", variables.get("NNODES"))]
    said += [("devices", flags.get("nproc_per_node")), ("devices", flags.get("num_gpus"))]
    said += [
        ("nodes", flags.get("nnodes")),
        ("nodes", flags.get("num_nodes")),
        ("processes", flags.get("num_processes")),
    ]
    for name, value in said:
        if type(number := _scalar(str(value))) is int and number > 0:
            found[f"launcher.{name}"] = number
    visible = variables.get("CUDA_VISIBLE_DEVICES", "")
    if not words and len(visible.split(",")) > found.get("launcher.devices", 1):
        found["launcher.one_process"] = visible
    return found
