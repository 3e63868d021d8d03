"""The command line: a table of verbs, each a function of arguments that answers with a document.

Exit codes: 0 done; 1 it was tried and failed; 2 the input was wrong or what it describes cannot run, with a sentence
for each problem; 3 a training diverged; 4 the disk is full; 130 interrupted; 141 the reader of the output is gone;
143 ended by SIGTERM.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module

from trainledger import __version__
from trainledger.answers.pages.plain_data import error_json
from trainledger.answers.question import Question, question_of
from trainledger.cli.arguments import DISK_FULL, EXIT_CODES, FAILED, INTERRUPTED, NO_READER, WRONG_INPUT, Outcome, Verb
from trainledger.cli.asking import flag_of, lines, say, verb_of_question, while_waiting
from trainledger.engine.remarks import Unheard, unheard
from trainledger.report.document import Answer
from trainledger.report.show import show
from trainledger.report.table import wrapped
from trainledger.spec.durable import is_full
from trainledger.spec.problem import InvalidInput, Problem, nearest_text, printable, shown

# A verb: the module of its question, or its group, its summary, and the module of its function in `cli`.
COMMANDS: dict[str, str | tuple[str, str, str]] = {
    "init": ("Plan", "write a commented run file", "train"),
    "napkin": ("Plan", "days, FLOPs and bytes from five numbers, or the one left out", "numbers"),
    "plan": "answers.plan",
    "inference": "answers.inference",
    "loop": "answers.loop",
    "explain": ("Plan", "every line of an account with its formula and source", "explain"),
    "rules": ("Plan", "rules of thumb and their errors against the ledger", "explain"),
    "compare": ("Plan", "two plans side by side, and why they differ", "explain"),
    "breaks": "answers.breaks",
    "advise": "answers.advise",
    "layouts": "answers.layouts",
    "fit": "answers.fit",
    "optimal": "answers.budget",
    "catalog": ("Plan", "the models and devices that are known", "numbers"),
    "serve": ("Plan", "the calculators as a page", "serve"),
    "trace": ("Your code", "the account of a step of real modules, on fake tensors", "code"),
    "annotate": ("Your code", "run a script and print what each line costs", "code"),
    "lock": ("Your code", "write what targets cost into trainledger.lock", "budgets"),
    "check": ("Your code", "fail where a target costs more than its lock", "budgets"),
    "dtype": ("Tensors", "a number in every format, and the range of each", "numbers"),
    "tensor": ("Tensors", "bytes and strides of a tensor, and which operations copy it", "numbers"),
    "einsum": ("Tensors", "FLOPs, bytes and the cheapest order of an einsum", "numbers"),
    "demo": ("Train", "forecast, train, sample and reconcile a small run", "train"),
    "data": ("Train", "tokenize a corpus and describe it", "train"),
    "train": ("Train", "train the model of a run file", "train"),
    "sample": ("Train", "continue a prompt with a trained model", "trained"),
    "evaluate": ("Train", "the loss of a trained model on documents", "trained"),
    "quantize": ("Train", "write a model in 8 or 4 bits, with the change in perplexity", "trained"),
    "export": ("Train", "write a model that transformers opens", "trained"),
    "import": ("Train", "read a model that transformers wrote", "trained"),
    "measure machine": ("Measure", "this machine's rates, kept for forecasts", "measure"),
    "measure matmul": ("Measure", "matmuls by shape, dtype and layout, and their roofline", "measure_rates"),
    "measure copy": ("Measure", "copies by layout and size, host and device, disk", "measure_rates"),
    "measure loader": ("Measure", "tokens per second of the data loader by workers", "measure_rates"),
    "measure collectives": ("Measure", "collectives by size and group: bus bandwidth, latency", "measure_rates"),
    "measure step": ("Measure", "one real step with random tokens, operation by operation", "measure"),
    "reconcile": ("Measure", "forecast and measurement, with the unexplained rest", "measure"),
    "runs": ("Measure", "the runs so far", "measure"),
}
_EXTRAS = (
    dict.fromkeys(("resvg_py", "fastapi", "uvicorn"), "web")
    | {"transformers": "", "torchao": "quantize"}
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
    first = next((each for each in words if each != "--json"), "help")
    if first in ("-h", "--help", "help"):
        return _show(Outcome(lines(_help(), {"help": _help()})), as_json)
    if first in ("-V", "--version"):
        return _show(Outcome(lines(f"trainledger {__version__}", {"version": __version__})), as_json)
    rest = list(words)
    rest.remove(first)
    several = [each for each in COMMANDS if each.startswith(f"{first} ")]
    if several:
        second = next((each for each in rest if each != "--json"), "")
        if f"{first} {second}" in several:
            rest.remove(second)
            return _call(f"{first} {second}", rest, as_json)
        if second in ("-h", "--help"):
            text = "\n".join(f"trainledger {each:<19} {described(each)[1]}" for each in several)
            return _show(Outcome(lines(text, {"help": text})), as_json)
        return _failed(f"trainledger {first} is one of: {', '.join(several)}", WRONG_INPUT, as_json)
    if first not in COMMANDS:
        near = nearest_text(first, COMMANDS)
        sentence = f"trainledger has no verb {shown(first)}" + (f"; nearest: {near}" if near else "")
        return _failed(sentence, WRONG_INPUT, as_json, after="\ntrainledger --help lists them all")
    if first == "plan":
        served = any(word.partition("=")[0] == "--phase" for word in rest)
        if problems := _of_the_other_phase(rest, served):
            return _complain(InvalidInput(problems), as_json)
        first = "inference" if served else "plan"
    return _call(first, rest, as_json)


def _of_the_other_phase(words: list[str], served: bool) -> list[Problem]:
    """Options of training that stand beside --phase, or options of a served model without it."""
    mine, other = ("inference", "plan") if served else ("plan", "inference")
    known = {"--full", "--json", *(flag for each in verb_of(mine).arguments for flag in getattr(each, "flags", ()))}
    parted = zip((word.partition("=") for word in words), [*words[1:], ""], strict=True)
    odd = [(flag, value or after) for (flag, _, value), after in parted if flag[:2] == "--" and flag not in known]
    flags = {flag_of(option) for option in _question(other, f"answers.{other}").options.values()} if odd else ()
    rule, near = "is for a served model; give --phase too", "--phase decode"
    if served:
        rule, near = "is for training; a served model has no MFU: leave it out", ""
    return [Problem(flag, value, rule, near or None) for flag, value in odd if flag in flags]


def verb_of(name: str) -> Verb:
    """The verb of a name of `COMMANDS`, its module imported."""
    row = COMMANDS[name]
    if isinstance(row, str):
        return verb_of_question(_question(name, row))
    module = import_module(f"trainledger.cli.{row[2]}")
    verb: Verb = getattr(module, name.replace(" ", "_") + "_" * (name == "import"))
    return verb


def _question(name: str, module: str) -> Question:
    return question_of(getattr(import_module(f"trainledger.{module}"), name))


def described(name: str) -> tuple[str, str]:
    """The group and the summary of a verb."""
    row = COMMANDS[name]
    if isinstance(row, str):
        question = _question(name, row)
        return question.group, question.summary
    return row[0], row[1]


def _call(name: str, rest: list[str], as_json: bool) -> int:
    """One verb: its arguments read, its question asked, its document shown."""
    try:
        verb = verb_of(name)
        parser = verb.parser(name)
        if not {"-h", "--help"}.isdisjoint(rest) and as_json:
            return _show(Outcome(lines("", {"help": parser.format_help()})), as_json)
        args = parser.read(rest, intermixed=verb.intermixed)
        reply = verb.ask(args)
        while_waiting()("")
        outcome = reply if isinstance(reply, Outcome) else Outcome(reply)
        return _show(outcome, args.json, vars(args).get("plot"), full=args.full)
    except InvalidInput as error:
        while_waiting()("")  # a line of long work that broke off
        return _complain(error, as_json)
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
    made, problem = outcome.document, outcome.problem
    document = made.document() if isinstance(made, Answer) else made
    error = None if problem is None else InvalidInput([problem])
    if error is not None:
        answer = document.data
        document = replace(document, data=lambda: {**answer(), **error_json(error)})
    if as_json or document.sections:
        show(document, as_json=as_json, full=full, plot=plot, width=outcome.width)
    for each in outcome.remarks:
        say(each, wrap=True)
    if error is not None:
        sys.stdout.flush()  # the document comes before it
        _complain(error)
    return outcome.code


def _complain(error: InvalidInput, as_json: bool = False) -> int:
    """Each problem in a sentence on standard error, and for programs on standard output; the exit code."""
    sentences = str(error)
    if sys.stderr.isatty():
        sentences = "\n".join(wrapped(each) for each in sentences.split("\n"))
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
    verbs = {name: described(name) for name in COMMANDS}
    texts = ["trainledger VERB ...", "", "What a training run costs: before it starts, while it runs, and afterwards."]
    for group in dict.fromkeys(group for group, _ in verbs.values()):
        texts += ["", f"{group}:"]
        texts += [f"  {name:<16} {summary}" for name, (at, summary) in verbs.items() if at == group]
    return "\n".join([*texts, "", "trainledger VERB --help says more. Every verb has --json.", "", EXIT_CODES])
