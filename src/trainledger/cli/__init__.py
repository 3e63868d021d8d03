"""The command line: a table of verbs, each in a module of its own that is imported when it is called.

Exit codes: 0 done; 1 it was tried and failed; 2 the input was wrong, with a sentence for each problem;
3 a training diverged; 4 the disk is full; 130 interrupted; 141 the reader of the output went away; 143 told to end.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

DONE, FAILED, WRONG_INPUT, INTERRUPTED, NO_READER = 0, 1, 2, 130, 141

COMMANDS: dict[str, tuple[str, str, str]] = {
    # verb: (group, what it does, module)
    "init": ("Plan", "write a commented run file", "init"),
    "napkin": ("Plan", "days, FLOPs and bytes from five numbers, or the one left out", "napkin"),
    "plan": ("Plan", "what a run file will cost, from closed forms", "plan"),
    "trace": ("Plan", "the same from the real model on fake tensors", "trace"),
    "catalog": ("Plan", "the models and devices that are known", "catalog"),
    "demo": ("Train", "forecast, train, sample and reconcile a small run", "demo"),
    "data": ("Train", "tokenize a corpus and say what is in it", "data"),
    "train": ("Train", "train what a run file says", "train"),
    "sample": ("Train", "let a trained model write", "sample"),
    "measure": ("Look back", "measure this machine, or one step of a run", "measure"),
    "reconcile": ("Look back", "forecast beside measurement, with the unexplained rest", "reconcile"),
    "runs": ("Look back", "the runs so far", "runs"),
    "export": ("Look back", "write a model that transformers opens", "export_model"),
    "import": ("Look back", "read a model that transformers wrote", "import_model"),
}
LIGHT = ("init", "napkin", "plan", "catalog", "runs")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code; without ``argv`` the process is the command's own."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(words, own_process=argv is None)
        if sys.stdout is not None:  # None where the process was started with it closed
            sys.stdout.flush()
        if argv is None and words and words[0] in LIGHT:
            from trainledger.cli.startup import leave

            leave(code)
        return code
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Python flushes standard output once more on its way out; let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NO_READER
    except OSError as error:
        print(f"trainledger: {error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _run(words: list[str], own_process: bool) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return DONE
    if words[0] in ("-V", "--version"):
        from trainledger import __version__

        print(f"trainledger {__version__}")
        return DONE
    verb, rest = words[0], words[1:]
    if verb not in COMMANDS:
        from trainledger.spec.problem import nearest_text, shown

        near = nearest_text(verb, COMMANDS)
        print(f"trainledger has no verb {shown(verb)}" + (f"; nearest: {near}" if near else ""), file=sys.stderr)
        print("trainledger --help lists them all", file=sys.stderr)
        return WRONG_INPUT
    return _call(verb, rest, own_process)


def _call(verb: str, rest: list[str], own_process: bool) -> int:
    from importlib import import_module

    if own_process and verb in LIGHT:
        from trainledger.cli.startup import start_light

        start_light()
    from trainledger.cli.arguments import Parser
    from trainledger.spec.problem import InvalidInput

    _, does, module_name = COMMANDS[verb]
    as_json = "--json" in rest
    try:
        module = import_module(f"trainledger.cli.{module_name}")
        parser = Parser(prog=f"trainledger {verb}", description=module.__doc__ or does)
        module.configure(parser)
        code: int = module.execute(parser.parse_args(rest))
        return code
    except InvalidInput as error:
        return _complain(error, as_json)
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        print(f"trainledger {verb} needs {error.name}: pip install 'trainledger[{extra}]'", file=sys.stderr)
        return FAILED
    except BrokenPipeError:
        raise
    except OSError as error:
        print(f"trainledger {verb}: {error}", file=sys.stderr)
        return FAILED


_EXTRAS = {
    "torch": "train", "tokenizers": "train", "safetensors": "train", "tensorboard": "train", "zstandard": "train",
    "pyarrow": "train", "plotly": "web", "transformers": "dev",
}  # fmt: skip


def _complain(error: Exception, as_json: bool) -> int:
    from trainledger.spec.problem import InvalidInput

    assert isinstance(error, InvalidInput)
    print(error, file=sys.stderr)
    if as_json:
        from trainledger.cli.arguments import print_json

        problems = [{"field": each.field, "rule": each.rule, "sentence": str(each)} for each in error.problems]
        print_json({"error": problems, "where": error.where})
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
