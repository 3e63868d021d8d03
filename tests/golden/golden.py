"""Frozen: digests of ledgers and traces, figures of plans, winners of searches, keys and values of JSON answers.

The JSON files of this directory were written before the house was rebuilt. A rename is mapped back in ``renames.toml``;
no other change may move a value. A commit that means to move one writes the files again and says why:

    python tests/golden/golden.py --write ledgers     # or plans, searches, traces, answers
    python tests/golden/golden.py --show "gpt2 | adamw"   # the entries of one ledger, to set against another commit's
"""

import argparse
import contextlib
import hashlib
import io
import json
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
AMOUNTS = ("flops", "model_flops", "read", "written", "kept", "scratch", "payload", "ranks")
OF_THE_SEARCH = (  # how a search went, which another search may change; its winners are frozen
    "preparing_seconds", "bounding_seconds", "accounting_seconds", "layouts_per_second", "fitting", "accounted",
    "rejected", "seconds_gap", "nbytes_gap", "bound_seconds", "bound_nbytes", "pareto",
)  # fmt: skip
PLACES = 9  # significant digits of a figure that is compared: additions may change their order


def renames() -> dict[str, dict[str, str]]:
    """Today's names of ledgers (``words``) and figures (``figures``), each with the name in the frozen files."""
    with open(HERE / "renames.toml", "rb") as file:
        return tomllib.load(file)


def frozen(name: str) -> dict[str, Any]:
    return json.loads((HERE / f"{name}.json").read_text(encoding="utf-8"))


def ledger_digest(ledger: Any, words: Mapping[str, str]) -> dict[str, Any]:
    """A few totals of a ledger, and the SHA-256 of all its entries in order."""
    lines = [*entry_lines(ledger, words), json.dumps([pairs(ledger.resident, words), ledger.tokens])]
    return {
        "entries": len(ledger.entries), "flops": int(ledger.flops), "model_flops": int(ledger.model_flops),
        "kept": int(ledger.total("kept")), "peak": int(ledger.peak().nbytes), "parameters": int(ledger.parameters),
        "sha256": hashlib.sha256("\n".join(lines).encode()).hexdigest(),
    }  # fmt: skip


def entry_lines(ledger: Any, words: Mapping[str, str]) -> Iterator[str]:
    """Each entry as a line of text: all that is not a time, a rule's name or a line of a program."""

    def old(name: str) -> str:
        return words.get(name, name)

    for each in ledger.entries:
        path = ".".join(old(part) for part in each.path.split("."))
        amounts = [int(getattr(each, name)) for name in AMOUNTS]
        loop = [[old(name), int(count)] for name, count in each.loop]
        shape = [[int(size) for size in sizes] for sizes in (each.shape, each.fused)]
        named = [old(name) for name in (each.name, each.phase, each.kind, each.group, each.overlap, each.basis)]
        memory = [pairs(each.allocated, words), pairs(each.freed, words)]
        yield json.dumps([path, named, each.dtype, amounts, memory, loop, shape])


def pairs(amounts: Iterable[tuple[str, Any]], words: Mapping[str, str]) -> list[list[Any]]:
    return sorted([words.get(name, name), int(nbytes)] for name, nbytes in amounts)


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number in plain data, by its path."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return
    if isinstance(value, int | float):
        yield path, value
        return
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, each in items:
        yield from numbers(each, f"{path}/{key}" if path else str(key))


def answer(words: list[str]) -> Any:
    """What the command line answers, as JSON; paths in ``words`` begin at the root of the repository."""
    from trainledger.cli import main

    output = io.StringIO()
    with (
        contextlib.chdir(HERE.parents[1]),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        main([*words, "--json"])
    return json.loads(output.getvalue())


def leaves(value: Any, path: str = "", depth: int = 2) -> Iterator[tuple[str, Any]]:
    """Every value of a JSON answer by its path; below ``depth`` mappings the SHA-256 of the keys and values in order.

    Numbers are rounded to `PLACES` significant digits.
    """
    if isinstance(value, Mapping) and depth and value:
        for key, item in value.items():
            if key in OF_THE_SEARCH:
                continue
            yield from leaves(item, f"{path}/{key}" if path else key, depth - 1)
    elif isinstance(value, Mapping | list):
        text = json.dumps(_rounded(value))
        yield path, f"{len(value)} {hashlib.sha256(text.encode()).hexdigest()[:16]}"
    else:
        yield path, _rounded(value)


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items() if key not in OF_THE_SEARCH}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.{PLACES}g}") if isinstance(value, float) else value


def figures(words: list[str], leave_out: tuple[str, ...] = ("run/",)) -> dict[str, float]:
    """The numbers of an answer, rounded to what is compared."""
    found = {path: float(f"{value:.{PLACES}g}") for path, value in numbers(answer(words))}
    return {path: value for path, value in found.items() if not path.startswith(leave_out)}


def main() -> None:
    from golden_cases import ANSWERS, LEDGERS, PLANS, SEARCHES, TRACES, ledger_of, ranks_of, search_of, trace_of

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", choices=("ledgers", "plans", "searches", "traces", "answers"))
    parser.add_argument("--show", help="the name of a ledger's case")
    args = parser.parse_args()
    words = renames()["words"]
    if args.show:
        for ledger in ranks_of(LEDGERS[args.show]):
            print("\n".join(entry_lines(ledger, words)))
    writers = {
        "ledgers": lambda: {name: ledger_of(case, words) for name, case in LEDGERS.items()},
        "plans": lambda: {name: figures(case) for name, case in PLANS.items()},
        "searches": lambda: {name: search_of(case) for name, case in SEARCHES.items()},
        "answers": lambda: {name: dict(leaves(answer(words))) for name, words in ANSWERS.items()},
        "traces": lambda: {name: trace_of(make, words) for name, make in TRACES.items()},
    }
    if args.write:
        text = json.dumps(writers[args.write](), indent=0, sort_keys=args.write != "answers")
        (HERE / f"{args.write}.json").write_text(text + "\n", encoding="utf-8")
        print(f"{len(text):,} characters", file=sys.stderr)


if __name__ == "__main__":
    main()
