"""Lock the targets of a project, and check it against its lock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from trainledger.answers.budgets.compare import MORE, Difference, Tolerance, edited_lines, moves_of, rows_of
from trainledger.answers.budgets.lockfile import LOCK, Locked, read_lock, write_lock
from trainledger.answers.budgets.summary import PLACED, Sources, Summary
from trainledger.answers.budgets.target import PROJECT, Evaluation, Target, evaluate, named, targets_of_project
from trainledger.spec.durable import held
from trainledger.spec.frozen import frozen
from trainledger.spec.plain import check_target
from trainledger.spec.problem import InvalidInput, Problem, nearest_text

Say = Callable[[str], None]
_DEFAULT_RUN = "run.toml"


@frozen
class Written:
    """A lock that was written: the new and the renewed targets, and those that were removed."""

    path: str
    locked: dict[str, Locked]
    before: dict[str, Locked]
    gone: tuple[str, ...]
    notes: tuple[str, ...] = ()


def lock(
    names: Sequence[str] = (),
    *,
    root: Path,
    file: str = LOCK,
    fields: Mapping[str, Any] | None = None,
    say: Say = lambda _: None,
) -> Written:
    """Write what targets cost now into a lock; without ``names`` all of the project's and of the lock's own.

    A name is one of the project's, or a run file, ``package.module:build`` or a config.json (``fields`` say the rest).
    Without names what the project no longer has leaves the lock; with them all others are unchanged, also those that
    another process writes meanwhile. Raises `InvalidInput`.
    """
    path = root / file
    if path.is_symlink():  # its target is written, and the link stays
        path = path.resolve()
    project = targets_of_project(root)
    there = read_lock(path) if path.is_file() else {}
    own = {name: each.target for name, each in there.items() if each.target.is_own_name(name) and name not in project}
    if names:
        wanted = {name: _target(name, project, own, fields or {}) for name in names}
    else:
        wanted = {name: target for name, (target, _) in project.items()}
        wanted |= {name: target for name, target in own.items() if _is_there(target, root)}
        if not wanted and (root / _DEFAULT_RUN).is_file():
            wanted = {_DEFAULT_RUN: named(_DEFAULT_RUN, {})}
    if not wanted:
        raise InvalidInput([_no_target(root)])
    check_target(path, "--lock")
    locked: dict[str, Locked] = {}
    notes: list[str] = []
    for name, target in wanted.items():
        say(name)
        evaluation = evaluate(name, target, root)
        locked[name] = Locked(target, evaluation.versions, evaluation.summary)
        notes += [f"{name}: {note}" for note in evaluation.notes]
    say("")
    with _alone(path):
        now = read_lock(path) if path.is_file() else {}
        kept = {name: each for name, each in now.items() if names or name not in there}
        write_lock(path, {**kept, **locked})
    gone = tuple(name for name in now if name not in {**kept, **locked})
    return Written(str(path), locked, now, gone, tuple(notes))


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """While inside, no other process reads and writes the locks of this folder; it waits, as this one does for it.

    The folder is held and not the lock, which is another file each time that it is written. Where a file system holds
    no folders, as some network ones, it continues without.
    """
    with ExitStack() as stack:
        with suppress(OSError):
            stack.enter_context(held(path.parent, wait=True))
        yield


def check(
    names: Sequence[str] = (),
    *,
    root: Path,
    file: str = LOCK,
    allowed: Mapping[str, Tolerance] | None = None,
    say: Say = lambda _: None,
) -> list[Difference]:
    """Targets against their lock: all of the project's and of the lock's own, or those of these names.

    ``allowed`` comes before the tolerances of the project. Raises `InvalidInput` where the lock is missing or is not
    that of the project's targets.
    """
    there = read_lock(root / file)
    project = targets_of_project(root)
    targets = _checked(names, there, project, root, file)
    differences = []
    for name, (target, tolerances) in targets.items():
        say(name)
        evaluation = evaluate(name, target, root)
        differences.append(compare(name, there[name], target, evaluation, {**tolerances, **(allowed or {})}, root))
    say("")
    return differences


def compare(
    name: str, locked: Locked, target: Target, now: Evaluation, allowed: Mapping[str, Tolerance], root: Path
) -> Difference:
    """One target's figures now against those in its lock."""
    summary = now.summary
    rows = rows_of(locked.summary, summary, allowed)
    both = (locked.summary, summary)
    moved = {row.quantity for row in rows if not row.part and row.verdict == MORE}
    if not moved:
        moved = {row.quantity for row in rows if not row.part and row.change}
    moves = moves_of(locked.summary, summary, [each for each in PLACED if each in moved and _is_placed(each, both)])
    edited: tuple[tuple[str, str], ...] = ()
    if moved:
        labels = {move.place.rpartition(":")[0] for move in moves}
        first = [where for where in summary.functions if where.partition(" ")[0] in labels]
        edited = edited_lines(locked.summary, summary, Sources(root), first)
    return Difference(
        name,
        rows,
        moves,
        edited,
        _settings(locked.target, target),
        (locked.versions, now.versions),
        now.notes,
        now.outlook,
    )


def _is_placed(quantity: str, both: Iterable[Summary]) -> bool:
    """Whether both have places of a quantity: where identical blocks are traced once, no tensor is listed alone."""
    if quantity not in ("parameters", "peak"):
        return True
    return all(any(place.amount(quantity) for place in summary.places) for summary in both)


def _settings(locked: Target, now: Target) -> tuple[tuple[str, str, str], ...]:
    before, after = locked.described(), now.described()
    names = [
        dataclass_field
        for dataclass_field in Target.__dataclass_fields__
        if before.get(dataclass_field) != after.get(dataclass_field)
    ]
    return tuple((name, _told(before.get(name)), _told(after.get(name))) for name in names)


def _told(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(str(each) for each in value)
    return "not given" if value is None else str(value)


def _is_there(target: Target, root: Path) -> bool:
    """Whether the file of a target is there; a module is looked for when it is imported."""
    return bool(target.module) or (root / (target.run or target.hf)).exists()


def _target(
    name: str, project: Mapping[str, tuple[Target, Any]], own: Mapping[str, Target], fields: Mapping[str, Any]
) -> Target:
    if name in project:
        if fields:
            rule = f"says what a run file or a module is; {name} is one of {PROJECT}'s targets, which says it there"
            raise InvalidInput([Problem(f"--{next(iter(fields))}", None, rule)])
        return project[name][0]
    if name in own and not fields:
        return own[name]
    if ":" in name or name.endswith((".toml", ".json")):
        return named(name, fields)
    known = [*project, *own]
    rule = f"is no target of {PROJECT}, no run file (run.toml), no module (package.module:build) and no config.json"
    raise InvalidInput([Problem("target", name, rule, nearest_text(name, known))])


def _no_target(root: Path) -> Problem:
    rule = (
        f"has no target to lock: neither [tool.trainledger.targets.NAME] in {PROJECT} nor {_DEFAULT_RUN}; name a run "
        'file, or a module with its input (trainledger lock package.module:build --input "int64[8,2048]")'
    )
    return Problem(str(root), None, rule)


def _checked(
    names: Sequence[str],
    there: Mapping[str, Locked],
    project: Mapping[str, tuple[Target, dict[str, Tolerance]]],
    root: Path,
    file: str,
) -> dict[str, tuple[Target, dict[str, Tolerance]]]:
    """The targets to be checked with their tolerances; every one that is missing or stale is a problem."""
    problems = []
    known = {**project}
    for name, locked in there.items():
        if name in project:
            continue
        target = locked.target
        if not target.is_own_name(name):
            rule = f"is locked, but {PROJECT} has no such target now; `trainledger lock` takes it out"
            problems.append(Problem(f"targets.{name}", None, rule))
        elif not _is_there(target, root):
            rule = f"is locked, but there is no file {target.run or target.hf} now; `trainledger lock` takes it out"
            problems.append(Problem(f"targets.{name}", None, rule))
        else:
            known[name] = (target, {})
    for name in project.keys() - there.keys():
        rule = f"is not in {file}; `trainledger lock {name}` adds it"
        problems.append(Problem(f"targets.{name}", None, rule))
    for name in names:
        if name not in known and not any(problem.field == f"targets.{name}" for problem in problems):
            problems.append(Problem("target", name, f"is not in {file}", nearest_text(name, known)))
    if names:
        problems = [
            problem for problem in problems if problem.field == "target" or problem.field.partition(".")[2] in names
        ]
    if not there and not problems:
        problems.append(Problem(file, None, "holds no target; `trainledger lock` writes them"))
    if problems:
        raise InvalidInput(sorted(problems, key=lambda problem: problem.field), str(root / file))
    return {name: known[name] for name in names or known}
