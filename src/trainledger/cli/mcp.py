"""A server of the Model Context Protocol: questions as tools of an assistant, over standard input and output.

A tool is made of the signature of its question; its answer is the page of the terminal, with what ``--json`` prints.
Nothing is written, trained or measured, and no code of the user's is imported.
"""

from __future__ import annotations

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

TOOLS = ("fits", "plan", "explain", "advise", "layouts", "compare", "napkin", "catalog")
_SKILL = Path(__file__).with_name("skill.md")
_TEXT, _WORDS = {"type": "string"}, {"type": "array", "items": {"type": "string"}}
_QUANTITY = {"type": ["number", "string"]}
Schema = dict[str, Any]


@question(plots=False)
def mcp(
    *, skill: Annotated[bool, text("print a SKILL.md for assistants instead: when to ask what")] = False
) -> Outcome:
    """Answer an assistant's questions by the Model Context Protocol over standard input and output, until they close.

    Its tools are questions of trainledger, which read files and write none: fits, plan, explain, advise, layouts,
    compare, napkin, catalog. Paths are from the directory in which it is started.
    """
    if skill:
        content = _SKILL.read_text(encoding="utf-8")
        return Outcome(lines(content.rstrip("\n"), {"skill": content}))
    import anyio
    from mcp.server.lowlevel import Server
    from mcp.server.stdio import stdio_server
    from mcp_types import CallToolResult, ListToolsResult, TextContent, Tool, ToolAnnotations

    reads = ToolAnnotations(read_only_hint=True, idempotent_hint=True, open_world_hint=False)
    one_by_one = anyio.CapacityLimiter(1)

    async def list_tools(_context: Any, _page: Any) -> Any:
        tools = ((name, description_of(_question(name)), schema_of(_question(name))) for name in TOOLS)
        return ListToolsResult(
            tools=[Tool(name=name, description=said, input_schema=of, annotations=reads) for name, said, of in tools]
        )

    async def call_tool(_context: Any, call: Any) -> Any:
        said, data, wrong = await anyio.to_thread.run_sync(
            answered, call.name, call.arguments or {}, limiter=one_by_one
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


def answered(name: str, given: Mapping[str, Any]) -> tuple[str, dict[str, Any], bool]:
    """The answer to a call of a tool as text and as data, and whether the call was wrong: then both say why.

    >>> said, data, wrong = answered("fits", {"run": "gpt2", "device": "t4"})
    >>> said.partition(":")[0], data["verdict"], wrong
    ('Fits (chance over 99 %)', True, False)
    >>> answered("fits", {"run": "gpt2", "devise": "t4"})[0]
    'devise: is no argument of fits; nearest that works: device'
    """
    try:
        if name not in TOOLS:
            raise InvalidInput([Problem("tool", name, "must be one of " + ", ".join(TOOLS), nearest_text(name, TOOLS))])
        outcome = ask(_question(name), Namespace(**_arguments(name, given), json=True))
    except InvalidInput as error:
        return str(error), error_json(error), True
    except OSError as error:
        return f"{error.filename or name}: {error.strerror or error}", {}, True
    assert outcome.document is not None
    document = outcome.document.document() if isinstance(outcome.document, Answer) else outcome.document
    remarks, data = list(outcome.remarks), finite(dict(document.data()))
    if outcome.problem is not None:
        why = InvalidInput([outcome.problem])
        remarks.append(str(why))
        data |= error_json(why)
    return "\n\n".join([printed(document), "\n".join(map(wrapped, remarks))]).rstrip(), data, False


def schema_of(asked: Question) -> Schema:
    """What a tool takes, as a JSON schema.

    >>> from trainledger.answers.napkin import napkin
    >>> from trainledger.answers.question import question_of
    >>> schema_of(question_of(napkin))["properties"]["mfu"]
    {'type': 'string', 'description': 'share of the peak that is reached, such as 0.5 or 50%'}
    """
    properties = dict(_properties(asked))
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
