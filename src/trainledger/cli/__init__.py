"""The command line: a table of verbs, each in a module of its own that is imported when it is called.

Exit codes: 0 done; 1 it was tried and failed; 2 the input was wrong, with a sentence for each problem;
3 a training diverged; 4 the disk is full; 130 interrupted; 141 the reader of the output went away; 143 told to end.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from trainledger import __version__
from trainledger.cli.arguments import Parser, error_json, print_json, problem_json, while_waiting
from trainledger.durable import is_full
from trainledger.report.table import wrapped
from trainledger.spec.problem import InvalidInput, Problem, nearest_text, printable, shown

DONE, FAILED, WRONG_INPUT, DISK_FULL, INTERRUPTED, NO_READER = 0, 1, 2, 4, 130, 141

COMMANDS: dict[str, tuple[str, str, str]] = {
    # verb: (group, what it does, module)
    "init": ("Plan", "write a commented run file", "init"),
    "napkin": ("Plan", "days, FLOPs and bytes from five numbers, or the one left out", "napkin"),
    "plan": ("Plan", "what a run file will cost, from closed forms", "plan"),
    "explain": ("Plan", "every line of an account with its formula and source", "explain"),
    "rules": ("Plan", "rules of thumb beside the ledger, each with its error", "rules"),
    "trace": ("Plan", "the same from the real model on fake tensors", "trace"),
    "annotate": ("Plan", "run a script and tell what each line costs", "annotate"),
    "breaks": ("Plan", "what breaks first when a run grows", "breaks"),
    "advise": ("Plan", "what to change, ranked by what it gains", "advise"),
    "compare": ("Plan", "two plans side by side, and why they differ", "compare"),
    "layouts": ("Plan", "the quickest ways to spread a run over devices", "layouts"),
    "fit": ("Plan", "the largest, longest and fewest that fits", "fit"),
    "optimal": ("Plan", "the best model and data for a budget", "optimal"),
    "catalog": ("Plan", "the models and devices that are known", "catalog"),
    "dtype": ("Plan", "a number in every format, and what the formats hold", "dtype"),
    "tensor": ("Plan", "bytes and strides of a tensor, and which operations copy it", "tensor"),
    "einsum": ("Plan", "FLOPs, bytes and the cheapest order of a product", "einsum"),
    "demo": ("Train", "forecast, train, sample and reconcile a small run", "demo"),
    "data": ("Train", "tokenize a corpus and say what is in it", "data"),
    "train": ("Train", "train what a run file says", "train"),
    "sample": ("Train", "let a trained model write", "sample"),
    "measure": ("Look back", "measure this machine, or one step of a run", "measure"),
    "reconcile": ("Look back", "forecast beside measurement, with the unexplained rest", "reconcile"),
    "runs": ("Look back", "the runs so far", "runs"),
    "lock": ("Hold", "write what targets cost into trainledger.lock", "lock"),
    "check": ("Hold", "fail where one costs more than it is locked at", "check"),
    "export": ("Look back", "write a model that transformers opens", "export_model"),
    "import": ("Look back", "read a model that transformers wrote", "import_model"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code; without ``argv`` the words are those of the process."""
    words = list(sys.argv[1:] if argv is None else argv)
    if sys.stderr is None:  # started with it closed: the next file to be opened must not pass for it
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    try:
        code = _run(words)
        if sys.stdout is not None:  # None where the process was started with it closed
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return _failed("interrupted", INTERRUPTED, "--json" in words, before="\n")
    except BrokenPipeError:
        # Python flushes standard output once more on its way out; let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NO_READER
    except OSError as error:  # the output itself cannot be written
        sentence, code = _of_system(error)
        print(printable(f"trainledger: {sentence}"), file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code


def _of_system(error: OSError) -> tuple[str, int]:
    """What the system refused, as a sentence, and the exit code."""
    if is_full(error):
        where = "the output" if error.filename is None else error.filename
        return f"the disk is full: {where} cannot be written ({error.strerror})", DISK_FULL
    where = "" if error.filename is None else f"{error.filename}: "
    return f"{where}{error.strerror or error}", FAILED


def _run(words: list[str]) -> int:
    as_json = "--json" in words
    first = next((each for each in words if each != "--json"), "help")
    if first in ("-h", "--help", "help"):
        return _answer({"help": _help()}, _help(), as_json)
    if first in ("-V", "--version"):
        return _answer({"version": __version__}, f"trainledger {__version__}", as_json)
    if first not in COMMANDS:
        near = nearest_text(first, COMMANDS)
        sentence = f"trainledger has no verb {shown(first)}" + (f"; nearest: {near}" if near else "")
        return _failed(sentence, WRONG_INPUT, as_json, after="\ntrainledger --help lists them all")
    rest = list(words)
    rest.remove(first)
    return _call(first, rest)


def _answer(result: dict[str, str], text: str, as_json: bool) -> int:
    if as_json:
        print_json(result)
    else:
        print(text)
    return DONE


def _failed(sentence: str, code: int, as_json: bool, *, before: str = "", after: str = "") -> int:
    """Tell a failure, a program in the form that wrong input has; the exit code."""
    if as_json:
        print_json({"error": [problem_json(Problem("", None, sentence))], "where": ""})
        sys.stdout.flush()  # where the output is what failed, it fails again, and `main` tells it, once
    print(printable(f"{before}{sentence}{after}"), file=sys.stderr)
    return code


def _call(verb: str, rest: list[str]) -> int:
    _, does, module_name = COMMANDS[verb]
    as_json = "--json" in rest
    try:
        module = import_module(f"trainledger.cli.{module_name}")
        parser = Parser(prog=f"trainledger {verb}", description=module.__doc__ or does)
        module.configure(parser)
        if as_json and not {"-h", "--help"}.isdisjoint(rest):
            return _answer({"help": parser.format_help()}, "", as_json)
        code: int = module.execute(parser.parse_args(rest))
        return code
    except InvalidInput as error:
        return _complain(error, as_json)
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        package = f"'trainledger[{extra}]'" if extra else error.name  # of no extra that a user wants
        sentence = f"trainledger {verb} needs {error.name}: pip install {package}"
        return _failed(sentence, FAILED, as_json)
    except BrokenPipeError:
        raise
    except OSError as error:
        sentence, code = _of_system(error)
        return _failed(f"trainledger {verb}: {sentence}", code, as_json)


_EXTRAS = {
    "torch": "train", "tokenizers": "train", "safetensors": "train", "tensorboard": "train", "zstandard": "train",
    "pyarrow": "train", "plotly": "web", "kaleido": "web", "transformers": "",
}  # fmt: skip


def _complain(error: InvalidInput, as_json: bool) -> int:
    while_waiting()("")  # a line of long work that broke off
    sentences = str(error)
    if sys.stderr.isatty():
        sentences = "\n".join(wrapped(each) for each in sentences.split("\n"))
    print(sentences, file=sys.stderr)
    if as_json:
        print_json(error_json(error))
    return WRONG_INPUT


def _help() -> str:
    lines = ["trainledger VERB ...", "", "What a training run costs: before it starts, while it runs, and afterwards."]
    for group in dict.fromkeys(group for group, _, _ in COMMANDS.values()):
        lines += ["", f"{group}:"]
        lines += [f"  {verb:<10} {does}" for verb, (at, does, _) in COMMANDS.items() if at == group]
    lines += ["", "trainledger VERB --help says more. Every verb takes --json.", ""]
    lines += [
        "Exit codes: 0 done, 1 failed, 2 wrong input, 3 diverged, 4 disk full,",
        "130 interrupted, 141 no reader, 143 told to end.",
    ]
    return "\n".join(lines)
