"""A server of the Model Context Protocol: questions as tools of an assistant, over standard input and output.

A tool is made of the signature of its question; its answer is the page of the terminal, with what ``--json`` prints.
Nothing is written, trained or measured. Code of the user's is imported by ``trace`` alone, in a process of its own, and
only below the folder that ``--allow-trace`` names.
"""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from trainledger import __version__
from trainledger.answers.pages.plain_data import error_json
from trainledger.answers.question import Option, Question, question, text
from trainledger.cli.arguments import RUN_OR_MODEL, Outcome, description_of, short_for
from trainledger.cli.asking import ask, lines
from trainledger.report.document import Answer
from trainledger.report.table import wrapped
from trainledger.report.terminal import text as printed
from trainledger.spec.plain import finite
from trainledger.spec.problem import InvalidInput, Problem, nearest_text

TOOLS = ("fits", "plan", "explain", "advise", "layouts", "compare", "napkin", "catalog", "trace")
_OF_TRACE = ("run", "by", "top", "tensors", "input", "loss", "label", "step", "autocast", "dtype", "device")
_TRACE_SECONDS = 600.0
_ANSWER = "answer of trainledger: "  # before the line of a process that traces, which code of the user's may print in
_SKILL = Path(__file__).with_name("skill.md")
_TEXT, _WORDS = {"type": "string"}, {"type": "array", "items": {"type": "string"}}
_QUANTITY = {"type": ["number", "string"]}
Schema = dict[str, Any]


@question(plots=False)
def mcp(
    *,
    skill: Annotated[bool, text("print a SKILL.md for assistants instead: when to ask what")] = False,
    allow_trace: Annotated[
        str | None,
        text("let the tool trace import modules below this folder, each time in a new process", metavar="DIR"),
    ] = None,
) -> Outcome:
    """Answer an assistant's questions by the Model Context Protocol over standard input and output, until they close.

    Its tools are questions of trainledger, which read files and write none: fits, plan, explain, advise, layouts,
    compare, napkin, catalog; and, with --allow-trace, trace. Paths are from the directory in which it is started.
    """
    folder = None if allow_trace is None else Path(allow_trace)
    if folder is not None and not folder.is_dir():
        raise InvalidInput([Problem("--allow-trace", allow_trace, "is no folder", ".")])
    if skill:
        content = _SKILL.read_text(encoding="utf-8")
        return Outcome(lines(content.rstrip("\n"), {"skill": content}))
    import anyio
    from mcp.server.lowlevel import Server
    from mcp.server.stdio import stdio_server
    from mcp_types import CallToolResult, ListToolsResult, TextContent, Tool, ToolAnnotations

    imports = ToolAnnotations(read_only_hint=False, destructive_hint=False, open_world_hint=False)
    reads = ToolAnnotations(read_only_hint=True, idempotent_hint=True, open_world_hint=False)
    one_by_one = anyio.CapacityLimiter(1)

    async def list_tools(_context: Any, _page: Any) -> Any:
        tools = ((name, description_of(_question(name)), schema_of(_question(name))) for name in TOOLS)
        return ListToolsResult(
            tools=[
                Tool(name=name, description=said, input_schema=of, annotations=imports if name == "trace" else reads)
                for name, said, of in tools
            ]
        )

    async def call_tool(_context: Any, call: Any) -> Any:
        said, data, wrong = await anyio.to_thread.run_sync(
            answered, call.name, call.arguments or {}, folder, limiter=one_by_one
        )
        content = [TextContent(type="text", text=said)]
        return CallToolResult(content=content, structured_content=data, is_error=wrong)

    async def serve() -> None:
        instructions = _SKILL.read_text(encoding="utf-8").rpartition("---\n")[2]
        server = Server(
            "trainledger",
            version=__version__,
            instructions=instructions,
            on_list_tools=list_tools,
            on_call_tool=call_tool,
        )
        async with stdio_server() as (read, write):
            await server.run(read, write, server.create_initialization_options())

    anyio.run(serve)
    return Outcome(None)


def answered(name: str, given: Mapping[str, Any], folder: Path | None = None) -> tuple[str, dict[str, Any], bool]:
    """The answer to a call of a tool as text and as data, and whether the call was wrong: then both say why.

    ``folder`` has the modules that may be traced; None for no module.

    >>> said, data, wrong = answered("fits", {"run": "gpt2", "device": "t4"})
    >>> said.partition(":")[0], data["verdict"], wrong
    ('Fits (chance over 99 %)', True, False)
    >>> answered("fits", {"run": "gpt2", "devise": "t4"})[0]
    'devise: is no argument of fits; nearest that works: device'
    """
    try:
        if name not in TOOLS:
            raise InvalidInput([Problem("tool", name, "must be one of " + ", ".join(TOOLS), nearest_text(name, TOOLS))])
        arguments = _arguments(name, given)
        if name == "trace":
            return _traced(given, folder)
        outcome = ask(_question(name), Namespace(**arguments, json=True))
    except InvalidInput as error:
        return str(error), error_json(error), True
    except OSError as error:
        return f"{error.filename or name}: {error.strerror or error}", {}, True
    return _told(outcome)


def _told(outcome: Outcome) -> tuple[str, dict[str, Any], bool]:
    assert outcome.document is not None
    document = outcome.document.document() if isinstance(outcome.document, Answer) else outcome.document
    remarks, data = list(outcome.remarks), finite(dict(document.data()))
    if outcome.problem is not None:
        why = InvalidInput([outcome.problem])
        remarks.append(str(why))
        data |= error_json(why)
    return "\n\n".join([printed(document), "\n".join(map(wrapped, remarks))]).rstrip(), data, False


def _traced(given: Mapping[str, Any], folder: Path | None) -> tuple[str, dict[str, Any], bool]:
    """The answer of a process that traces a module below a folder; raises `InvalidInput`."""
    if folder is None:
        rule = "imports your code, which this server was not started to do"
        raise InvalidInput([Problem("trace", None, rule, "trainledger mcp --allow-trace DIR")])
    module, _, name = str(given["run"]).partition(":")
    path, root = folder.joinpath(*module.split(".")), folder.resolve()
    files = [file for file in (path.parent / f"{path.name}.py", path / "__init__.py") if file.is_file()]
    named = name.isidentifier() and all(part.isidentifier() for part in module.split("."))
    if not (named and files and files[0].resolve().is_relative_to(root)):
        rule = f"must be a module below {folder} and a function of it that makes a module or a TrainingStep"
        raise InvalidInput([Problem("run", given["run"], rule, "package.module:build")])
    command = (sys.executable, "-c", "from trainledger.cli.mcp import trace_alone; trace_alone()")
    try:
        done = subprocess.run(
            command, cwd=folder, input=json.dumps(dict(given)), capture_output=True, text=True, timeout=_TRACE_SECONDS
        )
    except subprocess.TimeoutExpired:
        rule = f"was not traced in {_TRACE_SECONDS:.0f} s"
        raise InvalidInput([Problem("run", given["run"], rule, "a smaller --input")]) from None
    answers = [line for line in done.stdout.splitlines() if line.startswith(_ANSWER)]
    if not answers:
        last = (done.stderr.strip().splitlines() or ["without a word"])[-1]
        raise InvalidInput([Problem("run", given["run"], f"ended the process that traced it: {last}")])
    said, data, wrong = json.loads(answers[-1].removeprefix(_ANSWER))
    return said, data, wrong


def trace_alone() -> None:
    """Trace the code that a call on standard input names, and print the answer on a line."""
    given = json.load(sys.stdin)
    try:
        answer = _told(ask(_question("trace"), Namespace(**_arguments("trace", given), json=True)))
    except InvalidInput as error:
        answer = str(error), error_json(error), True
    print(f"\n{_ANSWER}{json.dumps(answer)}", flush=True)


def schema_of(asked: Question) -> Schema:
    """What a tool takes, as a JSON schema.

    >>> from trainledger.answers.napkin import napkin
    >>> from trainledger.answers.question import question_of
    >>> schema_of(question_of(napkin))["properties"]["mfu"]
    {'type': 'string', 'description': 'share of the peak that is reached, such as 0.5 or 50%'}
    """
    properties = dict(_properties(asked))
    if asked is _question("trace"):
        properties = {name: properties[name] for name in _OF_TRACE}
        properties["run"] = _TEXT | {
            "description": "package.module:build, a function that makes a module or a TrainingStep"
        }
    needed = [name for name, option in asked.options.items() if option.required]
    required = [name for name in properties if name in ("run", "a", *needed)]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _properties(asked: Question) -> Iterator[tuple[str, Schema]]:
    for parameter in dict.fromkeys((*asked.takes, *asked.options)):
        option = asked.options.get(parameter)
        if option is not None and not option.suffix:
            yield parameter, _kind(option) | {"description": option.says}
        elif parameter == "run" and option is None:
            yield "run", _TEXT | {"description": RUN_OR_MODEL}
    if "overrides" in asked.takes:
        says = "fields to change, each as SECTION.FIELD=VALUE, such as recipe.micro_batch=2"
        yield "set", _WORDS | {"description": says}
        for name, (_, says) in short_for(asked).items():
            yield name, _QUANTITY | {"description": says}


def _kind(option: Option) -> Schema:
    if option.is_switch:
        return {"type": "boolean", "default": option.default}
    if option.several:
        return _WORDS
    return _QUANTITY if option.parse else _TEXT | ({"enum": list(option.choices)} if option.choices else {})


def _arguments(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments as the command line would have them; raises `InvalidInput` with every problem."""
    asked = _question(name)
    schema = schema_of(asked)
    known, problems = schema["properties"], []
    for key in (key for key in schema["required"] if given.get(key) in (None, "")):
        problems.append(Problem(key, None, f"is missing, which {name} needs", "llama-3-8b" if key in "run" else None))
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key not in known:
            problems.append(Problem(key, None, f"is no argument of {name}", nearest_text(key, known)))
        elif value is not None and not _is_a(value, known[key]["type"]):
            problems.append(Problem(key, value, f"must be {_TYPES[str(known[key]['type'])]}"))
        elif value is not None:
            values[key] = value
    if problems:
        raise InvalidInput(problems)
    if "overrides" in asked.takes:
        short = short_for(asked)
        more = [f"{field}={values.pop(key)}" for key, (field, _) in short.items() if key in values]
        values["overrides"] = [*values.pop("set", ()), *more]
    return values


_TYPES = {
    "string": "text",
    "boolean": "true or false",
    "array": "a list of texts",
    str(_QUANTITY["type"]): "a number, or text such as 20%",
}


def _is_a(value: object, kind: str | list[str]) -> bool:
    if kind == "array":
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if kind == "boolean":
        return isinstance(value, bool)
    return isinstance(value, str) or (isinstance(value, int | float) and not isinstance(value, bool))


def _question(name: str) -> Question:
    from trainledger.cli.command_line import question_named

    return question_named(name)
