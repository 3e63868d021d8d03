"""The run file: TOML or a dict in, a checked `Run` out, and back again.

All problems of a file are found in one go. Fields, units and rules come from the metadata that
`trainledger.spec.setting.setting` put on the dataclasses; there is no second list of them here.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from trainledger.spec.cluster import Cluster
from trainledger.spec.convert import foreign_problem
from trainledger.spec.durable import opened
from trainledger.spec.layout import Layout
from trainledger.spec.model import OF_LOGITS, ModelSpec
from trainledger.spec.parts import KIND, explicit, fields_of, members_of, merged
from trainledger.spec.problem import InvalidInput, Problem, nearest_text
from trainledger.spec.reading import AUTO, MOST_UNKNOWN, Overrides, Reader, field_of, nearest_path, put_overrides
from trainledger.spec.recipe import Recipe
from trainledger.spec.rules.run import run_problems
from trainledger.spec.run import DataSpec, Run
from trainledger.spec.setting import NONE

SECTIONS: dict[str, type[Any]] = {
    "model": ModelSpec,
    "recipe": Recipe,
    "layout": Layout,
    "cluster": Cluster,
    "data": DataSpec,
    "teacher": ModelSpec,  # of distillation alone
}
LARGEST_FILE_NBYTES = 2**20
_NAME = r"(?!.*\.(?:json|toml)$)[\w.-]+"  # such as of a model, not of a file
_HUB_ID = re.compile(r"(?!\.)[\w.-]+/(?!\.)[\w.-]+(?<!\.toml)(?<!\.json)")  # organisation/model
_TWO_LAYOUTS = r"(?ms)^layout\s*=.*^\[layout\]"  # the text and the section

Table = Mapping[str, Any]
Resolver = Callable[[str], Table]


def read(
    path: str | os.PathLike[str],
    overrides: Overrides = (),
    *,
    presets: Resolver | None = None,
    from_config: Resolver | None = None,
    devices: Callable[[str], object] | None = None,
    networks: Callable[[str], object] | None = None,
) -> Run:
    """The run in a TOML file; raises InvalidInput with every problem of the file."""
    table = read_table(path)
    return parse(
        table, overrides, presets=presets, from_config=from_config, devices=devices, networks=networks,
        where=os.fspath(path),
    )  # fmt: skip


def parse(
    table: Table,
    overrides: Overrides = (),
    *,
    presets: Resolver | None = None,
    from_config: Resolver | None = None,
    devices: Callable[[str], object] | None = None,
    networks: Callable[[str], object] | None = None,
    where: str = "",
) -> Run:
    """The run that a table of sections says, after overrides such as ``"recipe.micro_batch=2"``.

    ``presets`` and ``from_config`` give the model fields of a catalog name and of a Hugging Face
    config.json; fields written next to them win. ``devices`` and ``networks`` raise InvalidInput for a device
    and a network that are unknown. Raises InvalidInput with every problem.
    """
    if isinstance(table, Mapping) and (foreign := foreign_problem(table)) is not None:
        raise InvalidInput([replace(foreign, field="run file")], where)
    problems: list[Problem] = []
    sections = _sections(table, problems)
    put_overrides(SECTIONS, sections, overrides, problems)
    if str(sections["cluster"].get("device", "")).startswith("tpu-"):
        sections["recipe"].setdefault("framework", "jax")
    if sections["recipe"].get("objective") in ("reward", {KIND: "reward"}):
        of_scores = {name: NONE if value is None else value for name, value in OF_LOGITS.items()}
        sections["model"] = {"scores": True, **of_scores, **sections["model"]}
    if sections["teacher"]:
        sections["recipe"].setdefault("objective", "distillation")
    else:
        del sections["teacher"]
    unknown = set()
    for name in sections.keys() & {"model", "teacher"}:
        base = _model_base(name, sections[name], presets, from_config, problems)
        own = {key: value for key, value in sections[name].items() if key not in ("preset", "config")}
        sections[name] = merged(ModelSpec, merged(ModelSpec, {}, base or {}), own)
        unknown |= {name} if base is None else set()
    reader = Reader(SECTIONS, problems)
    parts = {
        name: reader.read(name, SECTIONS[name], table, complete=name not in unknown) for name, table in sections.items()
    }
    if devices is not None and "device" not in reader.guessed:
        _resolve(devices, parts["cluster"].device, problems)
    if networks is not None and parts["cluster"].network is not None:
        _resolve(networks, parts["cluster"].network, problems)
    if None not in parts.values():
        run = Run(**parts)
        problems = [_followed(problem, run) for problem in problems]
        problems.extend(problem for problem in run_problems(run) if not _speaks_of(problem, reader.guessed))
        if not problems:
            return run
    raise InvalidInput(problems, where)


def _followed(problem: Problem, run: Run) -> Problem:
    """The problem of a number, with the nearest that works beside the other fields too."""
    section, _, path = problem.field.partition(".")
    if (
        section not in SECTIONS
        or type(problem.nearest) is not int
        or path not in SECTIONS[section].__dataclass_fields__
    ):
        return problem
    followed = replace(run, **{section: replace(getattr(run, section), **{path: problem.nearest})})
    others = (other for other in run_problems(followed) if other.field == problem.field)
    return replace(problem, nearest=next((other.nearest for other in others), problem.nearest))


def section_of(name: str, overrides: Overrides) -> Any:
    """One section by itself, as overrides of its fields say it; raises InvalidInput with every problem."""
    problems: list[Problem] = []
    put_overrides(SECTIONS, sections := _sections({}, problems), overrides, problems)
    found = Reader(SECTIONS, problems).read(name, SECTIONS[name], sections[name])
    if problems:
        raise InvalidInput(problems)
    return found


def written(table: Table, overrides: Overrides = ()) -> frozenset[str]:
    """The fields that were written into a table of sections or its overrides, each as ``section.field``.

    A section that is a dataclass has all its fields, and so has a file of `to_toml`, which alone writes ``auto =
    false``: which of those were chosen is not known, so none is named.
    """
    layout = table.get("layout")
    whole = isinstance(layout, Mapping) and layout.get(AUTO) is False
    ours = {} if whole else {name: content for name, content in table.items() if isinstance(content, Mapping)}
    sections = _sections(ours, [])
    put_overrides(SECTIONS, sections, overrides, [])
    return frozenset(path for section, content in sections.items() for path in _paths(section, content))


def _paths(at: str, table: Mapping[str, Any]) -> Iterator[str]:
    """The paths of a table's fields, those of parts in it too; a part's own path where its kind is said."""
    for name, value in table.items():
        if name == KIND:
            yield at
        elif isinstance(value, Mapping):
            yield from _paths(f"{at}.{name}", value)
        else:
            yield f"{at}.{name}"


def _speaks_of(problem: Problem, names: set[str]) -> bool:
    """A problem between fields has to do with one of those names."""
    words = f"{problem.field} {problem.rule}".replace(".", " ").replace(",", " ").split()
    return not names.isdisjoint(words)


def read_table(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The table in a TOML file; raises InvalidInput where it cannot be read or is not TOML."""
    where = os.fspath(path)
    try:
        with opened(path) as file:
            content = file.read(LARGEST_FILE_NBYTES + 1)
        if len(content) > LARGEST_FILE_NBYTES:
            raise InvalidInput([Problem("run file", where, f"is longer than {LARGEST_FILE_NBYTES} bytes")])
        return parse_toml(content.decode("utf-8-sig"), where)
    except OSError as error:
        rule = f"cannot be read: {error.strerror or error}"
        if isinstance(error, FileNotFoundError) and where == "run.toml":  # what every verb reads where none is named
            rule += "; name a run file (planning verbs also take a model, such as gpt2), or write one: trainledger init"
        elif isinstance(error, FileNotFoundError) and re.fullmatch(_NAME, where):  # to verbs that take no model's name
            rule += "; a run file says what is trained: trainledger init writes one, --preset takes a model's name"
        elif isinstance(error, FileNotFoundError) and _HUB_ID.fullmatch(where) and not os.path.exists(where):
            rule = (
                "is no file, and no hub id of `trainledger catalog models`; nothing is downloaded here: give the path "
            )
            rule += f"of the model's config.json, which is at https://huggingface.co/{where}/raw/main/config.json"
        elif isinstance(error, FileNotFoundError) and not where.endswith(".toml"):
            rule += "; a model is a name of `trainledger catalog models`, or the path of its config.json"
        raise InvalidInput([Problem("run file", where, rule, _nearest_file(where))]) from None
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise InvalidInput([Problem(f"line {line}", None, "is not UTF-8 text")], where) from None
    except ValueError as error:  # a path with a NUL in it
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput([Problem("run file", where, f"is no path: {error}")]) from None


def parse_toml(text: str, where: str = "") -> dict[str, Any]:
    """The table in TOML text; raises InvalidInput that names the line."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise InvalidInput([Problem("run file", None, "is nested too deeply")], where) from None
    except ValueError as error:
        message, _, place = str(error).partition(" (at ")
        place = place.rstrip(")") if place.startswith("line") else "run file" if not place else "the last line"
        rule = f"is not TOML: {message}"
        if message == "Cannot overwrite a value" and re.search(_TWO_LAYOUTS, text):
            rule += '; layout = "auto" excludes a section [layout]: write auto = true in it instead'
        raise InvalidInput([Problem(place, None, rule)], where) from None


def vocabulary_problem(vocab_size: int, needed: int, tokenizer: str) -> Problem | None:
    """The problem of a tokenizer with more tokens than the model; the data room knows ``needed``."""
    if needed <= vocab_size:
        return None
    return Problem("model.vocab_size", vocab_size, f"is smaller than the {needed} tokens of {tokenizer}", needed)


def _nearest_file(path: str) -> str | None:
    """The run file that is probably meant: in a directory the one of a run, else one whose name is like it."""
    if os.path.isdir(path):
        of_run = os.path.join(path, "run.toml")
        return of_run if os.path.isfile(of_run) else None
    folder = os.path.dirname(path)
    try:
        names = os.listdir(folder or ".") if not os.path.exists(path) else []
    except (OSError, ValueError):
        return None
    known = {os.path.splitext(name)[0]: name for name in names if _is_run_file(os.path.join(folder, name))}
    nearest = nearest_text(os.path.splitext(os.path.basename(path))[0], known)  # what all names end in says nothing
    return os.path.join(folder, known[nearest]) if nearest else None


def _is_run_file(path: str) -> bool:
    """A file says something of a run, right or wrong."""
    try:
        return path.endswith(".toml") and os.path.isfile(path) and not SECTIONS.keys().isdisjoint(read_table(path))
    except InvalidInput:
        return False


def _sections(table: object, problems: list[Problem]) -> dict[str, dict[str, Any]]:
    """The known sections of a table as separate dicts; anything else is a problem."""
    sections: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    if not isinstance(table, Mapping):
        problems.append(Problem("run", table, "must be a table with the sections " + ", ".join(SECTIONS)))
        return sections
    unknown = 0
    for name, content in table.items():
        cls = SECTIONS.get(name) if isinstance(name, str) else None
        if cls is None:
            unknown += 1
            rule = f"unknown section; a run file has {', '.join(SECTIONS)}"
            if unknown <= MOST_UNKNOWN:
                problems.append(Problem(str(name), content, rule, nearest_path(SECTIONS, str(name), SECTIONS)))
        elif isinstance(content, cls):
            sections[name] = explicit(content)
        elif isinstance(content, Mapping):
            sections[name] = merged(cls, {}, {str(key): value for key, value in content.items()})
        elif name == "layout" and content == AUTO:
            sections[name] = {AUTO: True}
        else:
            rule = f"must be a section: [{name}] and its fields below"
            near = None
            if name == "layout":
                rule, near = rule + ', or the text "auto"', AUTO
            elif name == "model" and isinstance(content, str):
                rule, near = (
                    rule + ", of which preset names a model of the catalog",
                    f'[model] preset = "{content if content.isprintable() else "NAME"}"',
                )
                sections[name] = {"preset": content}
            problems.append(Problem(name, content, rule, near))
    if unknown > MOST_UNKNOWN:
        problems.append(Problem("run", None, f"has {unknown - MOST_UNKNOWN:,} more unknown sections"))
    return sections


def _model_base(
    section: str, model: dict[str, Any], presets: Resolver | None, from_config: Resolver | None, problems: list[Problem]
) -> Table | None:
    """The fields that ``preset`` or ``config`` stands for; {} where neither is given, None where it failed."""
    given = [(key, model[key]) for key in ("preset", "config") if key in model]
    if not given:
        return {}
    key, value = given[0]
    resolver = presets if key == "preset" else from_config
    if len(given) > 1:
        problems.append(Problem(f"{section}.config", given[1][1], "give either preset or config, not both"))
    elif not isinstance(value, str) or not value:
        problems.append(Problem(f"{section}.{key}", value, "must be a text in quotes"))
    elif resolver is None:
        problems.append(Problem(f"{section}.{key}", value, "cannot be looked up here; write the fields themselves"))
    else:
        met: list[Problem] = []
        base: Table | None = _resolve(resolver, value, met)
        problems += (replace(problem, field=problem.field.replace("model.", f"{section}.", 1)) for problem in met)
        return base
    return None


def _resolve(resolver: Callable[[str], Any], value: str, problems: list[Problem]) -> Any:
    """The result of a resolver, or None and its problems."""
    try:
        return resolver(value)
    except InvalidInput as error:
        problems.extend(error.placed())
        return None


def sections_of(run: Run) -> dict[str, Any]:
    """The sections that a run has, by name."""
    return {name: section for name in SECTIONS if (section := getattr(run, name)) is not None}


def resolved(run: Run) -> dict[str, dict[str, Any]]:
    """Every field of a run, defaults included, as a table that `parse` reads back into an equal run."""
    return {name: explicit(section) for name, section in sections_of(run).items()}


def flat(run: Run) -> dict[str, Any]:
    """Every field of a run by its path, as `fields_of` has those of a section; none where it has no value.

    Of tables by name there is the whole, and each field of each.
    """

    return {path: value for name, section in sections_of(run).items() for path, value in _flat(f"{name}.", section)}


def _flat(before: str, section: Any) -> Iterator[tuple[str, Any]]:
    for name, value in fields_of(section).items():
        path = f"{before}{name}"
        if value is not None and members_of(field_of(SECTIONS, path)) is not None:
            yield path, {member: explicit(one) for member, one in value}
            for member, one in value:
                yield from _flat(f"{path}.{member}.", one)
        else:
            yield path, NONE if value is None else list(value) if isinstance(value, tuple) else value


def validated(run: Run) -> Run:
    """The same run, checked as if it had been read from a file; raises InvalidInput."""
    return parse(resolved(run))


def to_toml(run: Run) -> str:
    """The complete run file of a run: explicit, in fixed order, equal when read back."""
    import tomli_w

    return tomli_w.dumps(resolved(run))


def is_of_the_machine(field: str, run: Run) -> bool:
    """A field may change when a run goes on: it says where and how a run is trained or what is reported of it, or how
    long at a rate that does not depend on that.

    What it changes of the bits, `engine.train.run_directory.begin_or_match` says: rounding, and draws of dropout.
    """
    if field in ("recipe.steps", "recipe.tokens"):
        return run.recipe.schedule.kind == "constant"
    return field in ("recipe.micro_batch", "data.cache") or field.startswith(("layout.", "cluster.", "recipe.watch"))


def digest(run: Run) -> str:
    """SHA-256 (hexadecimal) of what a run computes: where and on how many devices it is trained is left out."""
    import hashlib
    import json

    content = {
        section: {name: content for name, content in fields.items() if not is_of_the_machine(f"{section}.{name}", run)}
        for section, fields in resolved(run).items()
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode()).hexdigest()


def run_name(run: Run) -> str:
    """The name of the run's directory: the model's name and the beginning of the digest."""
    safe = "".join(
        character if character.isascii() and (character.isalnum() or character in "-_.") else "-"
        for character in run.model.name
    )
    return f"{safe[:60].lstrip('.-') or 'run'}-{digest(run)[:8]}"
