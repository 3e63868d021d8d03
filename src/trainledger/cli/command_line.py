"""The command line: a table of verbs, each a function of arguments that answers with a document.

Exit codes: 0 done; 1 it was tried and failed; 2 the input was wrong or what it describes cannot run, with a sentence
for each problem; 3 a training diverged; 4 the disk is full; 5 a rank is lost; 6 out of memory; 130 interrupted; 141
the reader of the output is gone; 143 ended by SIGTERM.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from keyword import iskeyword

from trainledger import __version__
from trainledger.answers.pages.plain_data import error_json
from trainledger.answers.question import Question, question_of
from trainledger.cli.arguments import (
    DISK_FULL,
    EXIT_CODES,
    FAILED,
    INTERRUPTED,
    NO_READER,
    WRONG_INPUT,
    Outcome,
    flag_of,
    parser_of,
)
from trainledger.cli.asking import ask, lines, say, while_waiting
from trainledger.engine.remarks import Unheard, unheard
from trainledger.report.document import Answer
from trainledger.report.show import show
from trainledger.report.table import wrapped
from trainledger.spec.durable import is_full
from trainledger.spec.plain import table_beside
from trainledger.spec.problem import InvalidInput, Problem, nearest_text, printable, shown

_WRITTEN = table_beside(__file__, "commands.toml")
# A verb: its group and summary in the help, and the module of its question.
COMMANDS: dict[str, tuple[str, str, str]] = {
    verb: (group, summary, module) for group, verbs in _WRITTEN.items() for verb, (module, summary) in verbs.items()
}
_EXTRAS = (
    dict.fromkeys(("resvg_py", "fastapi", "uvicorn"), "web")
    | {"transformers": "", "torchao": "quantize", "anyio": "mcp", "mcp": "mcp"}
    | dict.fromkeys(("torch", "tokenizers", "safetensors", "tensorboard", "zstandard", "pyarrow"), "train")
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code; without ``argv`` the words are those of the process."""
    words = list(sys.argv[1:] if argv is None else argv)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # started with it closed: the next file to be opened must not pass for it
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    before = sys.stdout, sys.stderr
    sys.stderr = unheard(sys.stderr)
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return _failed("interrupted", INTERRUPTED, "--json" in words, before="\n")
    except BrokenPipeError:
        _discard_output()
        return NO_READER
    except OSError as error:  # the output itself cannot be written
        sentence, code = _of_system(error)
        say(f"trainledger: {sentence}")
        _discard_output()
        return code
    finally:
        # A verb goes on without it, as `train` does.
        if isinstance(sys.stdout, Unheard) and sys.stdout.lost is not None:
            say(f"trainledger: standard output could not be written ({sys.stdout.lost})")
            _discard_output()
        sys.stdout, sys.stderr = before


def _discard_output() -> None:
    """Python flushes standard output once more on its way out: send that nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _of_system(error: OSError) -> tuple[str, int]:
    """What the system refused, as a sentence, and the exit code."""
    if is_full(error):
        where = "the output" if error.filename is None else error.filename
        return f"the disk is full: {where} cannot be written ({error.strerror})", DISK_FULL
    where = "" if error.filename is None else f"{error.filename}: "
    return f"{where}{error.strerror or error}", FAILED


def _run(words: list[str]) -> int:
    as_json = "--json" in words
    first = next((word for word in words if word != "--json"), "help")
    if first in ("-h", "--help", "help"):
        return _show(Outcome(lines(_help(), {"help": _help()})), as_json)
    if first in ("-V", "--version"):
        return _show(Outcome(lines(f"trainledger {__version__}", {"version": __version__})), as_json)
    rest = list(words)
    rest.remove(first)
    several = [command for command in COMMANDS if command.startswith(f"{first} ")]
    if several:
        second = next((each for each in rest if each != "--json"), "")
        if f"{first} {second}" in several:
            rest.remove(second)
            return _call(f"{first} {second}", rest, as_json)
        if second in ("-h", "--help"):
            text = "\n".join(f"trainledger {each:<19} {COMMANDS[each][1]}" for each in several)
            return _show(Outcome(lines(text, {"help": text})), as_json)
        return _failed(f"trainledger {first} is one of: {', '.join(several)}", WRONG_INPUT, as_json)
    if first not in COMMANDS:
        near = nearest_text(first, COMMANDS)
        sentence = f"trainledger has no verb {shown(first)}" + (f"; nearest: {near}" if near else "")
        return _failed(sentence, WRONG_INPUT, as_json, after="\ntrainledger --help lists them all")
    served = first == "plan" and any(word.partition("=")[0] == "--phase" for word in rest)
    return _call("inference" if served else first, rest, as_json)


def _of_the_other_phase(words: list[str], verb: str) -> list[Problem]:
    """Options of training that stand beside --phase, or options of a served model without it; of these verbs alone."""
    if verb not in ("plan", "inference"):
        return []
    served = verb == "inference"
    training, serving = (
        {flag_of(option) for option in question_named(name).options.values()} for name in ("plan", "inference")
    )
    other = training - serving if served else serving - training
    rule, near = "is for a served model; give --phase too", "--phase decode"
    if served:
        rule, near = "is for training; a served model has no MFU: leave it out", ""
    parted = zip((word.partition("=") for word in words), [*words[1:], ""], strict=True)
    return [Problem(flag, value or after, rule, near or None) for (flag, _, value), after in parted if flag in other]


def question_named(name: str) -> Question:
    """The question of a name of `COMMANDS`, its module imported."""
    module = import_module(f"trainledger.{COMMANDS[name][2]}")
    return question_of(getattr(module, name.replace(" ", "_") + "_" * iskeyword(name)))


def _call(name: str, rest: list[str], as_json: bool) -> int:
    """One verb: its arguments read, its question asked, its document shown."""
    try:
        question = question_named(name)
        parser = parser_of(name, question)
        if not {"-h", "--help"}.isdisjoint(rest) and as_json:
            return _show(Outcome(lines("", {"help": parser.format_help()})), as_json)
        args = parser.read(rest, intermixed=question.intermixed)
        outcome = ask(question, args)
        while_waiting()("")
        return _show(outcome, args.json, vars(args).get("plot"), full=args.full)
    except InvalidInput as error:
        while_waiting()("")  # a line of long work that broke off
        others = _of_the_other_phase(rest, name)
        return _complain(InvalidInput(others) if others else error, as_json)
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        package = f"'trainledger[{extra}]'" if extra else error.name  # of no extra that a user wants
        return _failed(f"trainledger {name} needs {error.name}: pip install {package}", FAILED, as_json)
    except BrokenPipeError:
        raise
    except OSError as error:
        sentence, code = _of_system(error)
        return _failed(f"trainledger {name}: {sentence}", code, as_json)


def _show(outcome: Outcome, as_json: bool, plot: str | None = None, *, full: bool = False) -> int:
    """The document on standard output, then on standard error what qualifies it; the exit code."""
    if outcome.document is None:
        return outcome.code
    problem = outcome.problem
    document = outcome.document.document() if isinstance(outcome.document, Answer) else outcome.document
    error = None if problem is None else InvalidInput([problem])
    if error is not None:
        answer = document.data
        document = replace(document, data=lambda: {**answer(), **error_json(error)})
    if as_json or document.sections:
        show(document, as_json=as_json, full=full, plot=plot, width=outcome.width)
    for remark in outcome.remarks:
        say(remark, wrap=True)
    if error is not None:
        sys.stdout.flush()  # the document comes before it
        _complain(error)
    return outcome.code


def _complain(error: InvalidInput, as_json: bool = False) -> int:
    """Each problem in a sentence on standard error, and for programs on standard output; the exit code."""
    sentences = str(error)
    if sys.stderr.isatty():
        sentences = "\n".join(wrapped(part) for part in sentences.split("\n"))
    print(sentences, file=sys.stderr)
    if as_json:
        show(lines("", error_json(error)), as_json=True)
    return WRONG_INPUT


def _failed(sentence: str, code: int, as_json: bool, *, before: str = "", after: str = "") -> int:
    """Say a failure, to a program in the form that wrong input has; the exit code."""
    if as_json:
        show(lines("", error_json(InvalidInput([Problem("", None, sentence)]))), as_json=True)
        sys.stdout.flush()  # where the output is what failed, it fails again, and `main` says so, once
    print(printable(f"{before}{sentence}{after}"), file=sys.stderr)
    return code


def _help() -> str:
    texts = ["trainledger VERB ...", "", "What a training run costs: before it starts, while it runs, and afterwards."]
    for group in dict.fromkeys(group for group, _, _ in COMMANDS.values()):
        texts += ["", f"{group}:"]
        texts += [f"  {name:<16} {summary}" for name, (at, summary, _) in COMMANDS.items() if at == group]
    return "\n".join([*texts, "", "trainledger VERB --help says more. Every verb has --json.", "", EXIT_CODES])
