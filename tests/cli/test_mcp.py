"""`trainledger mcp` as an assistant uses it: the SDK's own client, over the standard streams of a process."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from trainledger.cli import main
from trainledger.cli.command_line import question_named
from trainledger.cli.mcp import TOOLS, answered, schema_of
from trainledger.spec.problem import InvalidInput

anyio = pytest.importorskip("anyio")
mcp = pytest.importorskip("mcp")
pytestmark = pytest.mark.process

H100 = {"device": "h100-sxm"}
CALLS: dict[str, dict[str, Any]] = {
    "fits": {"run": "qlora.yml", "device": "rtx-4090"},
    "plan": {"run": "gpt2", "device": "h100-sxm", "count": 1, "set": ["recipe.global_batch=8"]},
    "explain": {"what": "memory", "run": "gpt2", **H100},
    "advise": {"run": "gpt2", **H100, "together": 1},
    "layouts": {"run": "gpt2", **H100, "count": "4", "keep": 2, "set": ["recipe.seq_len=512"]},
    "compare": {"a": "gpt2", "changes_b": ["recipe.seq_len=512"], **H100},
    "napkin": {"params": "70B", "tokens": "15T", "device": "h100-sxm", "count": "1024", "mfu": "0.5"},
    "catalog": {"what": "h100-sxm"},
    "trace": {"run": "mine:build", "input": ["fp32[32,64]"], "loss": "mean", "device": "h100-sxm"},
}
FILE = (
    "base_model: meta-llama/Meta-Llama-3-8B\nadapter: qlora\nload_in_4bit: true\nlora_r: 16\nsequence_len: 2048\n"
    "micro_batch_size: 1\ngradient_checkpointing: true\nlora_target_linear: true\nbf16: true\nlearning_rate: 0.0002\n"
)


CODE = """
import torch
print("answer of trainledger: hello")
def build():
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, WIDTH))
"""


def test_an_assistant_lists_the_tools_and_calls_each_as_the_command_line_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mcp import Client
    from mcp.client.stdio import StdioServerParameters

    (tmp_path / "qlora.yml").write_text(FILE)
    (tmp_path / "mine.py").write_text(CODE.replace("WIDTH", "8"))
    command = ["-m", "trainledger", "mcp", "--allow-trace", "."]
    server = StdioServerParameters(command=sys.executable, args=command, cwd=tmp_path)
    replies: dict[str, Any] = {}

    async def talk() -> None:
        async with Client(server) as client:
            replies["tools"] = (await client.list_tools()).tools
            replies["instructions"] = client.instructions
            for name, given in CALLS.items():
                replies[name] = await client.call_tool(name, given)
            replies["wrong"] = await client.call_tool("plan", {"run": "gpt2", "device": "h100-sxn"})
            replies["again"] = await client.call_tool("plan", CALLS["plan"])
            (tmp_path / "mine.py").write_text(CODE.replace("WIDTH", "16"))
            replies["edited"] = await client.call_tool("trace", CALLS["trace"])
            replies["outside"] = await client.call_tool("trace", CALLS["trace"] | {"run": "os:system"})
            replies["unknown"] = await client.call_tool("plane", {"run": "gpt2"})

    anyio.run(talk)
    assert [tool.name for tool in replies["tools"]] == list(TOOLS) == list(CALLS)
    for tool in replies["tools"]:
        assert tool.annotations.read_only_hint is (tool.name != "trace")
        assert set(tool.input_schema["required"]) <= set(CALLS[tool.name]) <= set(tool.input_schema["properties"])
    assert "fits" in replies["instructions"]
    monkeypatch.chdir(tmp_path)
    words = {
        "plan": ["gpt2", "--device", "h100-sxm", "--count", "1", "--set", "recipe.global_batch=8"],
        "fits": ["qlora.yml", "--device", "rtx-4090"],
        "napkin": ["--params", "70B", "--tokens", "15T", "--device", "h100-sxm", "--count", "1024", "--mfu", "0.5"],
        "compare": ["gpt2", "--set-b", "recipe.seq_len=512", "--device", "h100-sxm"],
    }
    for name in CALLS:
        reply = replies[name]
        assert not reply.is_error, reply
        (part,) = reply.content
        assert len(part.text.splitlines()) < 100
        assert reply.structured_content
        if name in words:
            assert main([name, *words[name]]) == 0
            out, err = capsys.readouterr()
            assert part.text == (out.rstrip("\n") + "\n\n" + err.rstrip("\n")).strip()
            assert main([name, *words[name], "--json"]) == 0
            assert reply.structured_content == json.loads(capsys.readouterr().out)
    assert replies["again"].structured_content == replies["plan"].structured_content
    assert replies["wrong"].is_error
    assert replies["wrong"].content[0].text.startswith("cluster.device = 'h100-sxn': ")
    assert "nearest that works: h100-sxm" in replies["wrong"].content[0].text
    assert replies["wrong"].structured_content["error"][0]["nearest"] == "h100-sxm"
    parameters = [replies[name].structured_content["parameters"] for name in ("trace", "edited")]
    assert parameters == [64 * 64 + 64 + 64 * width + width for width in (8, 16)]  # each call imports what is there
    assert replies["outside"].is_error
    assert "must be a module below" in replies["outside"].content[0].text
    assert replies["unknown"].is_error
    assert "nearest that works: plan" in replies["unknown"].content[0].text


HOSTILE: list[dict[str, Any]] = [
    {}, {"run": ""}, {"run": 3}, {"run": ["gpt2"]}, {"run": "gpt2", "set": "recipe.seq_len=1"},
    {"run": "gpt2", "set": [1]}, {"run": "gpt2", "set": ["x"]}, {"run": "gpt2", "count": {}},
    {"run": "gpt2", "count": True}, {"run": "gpt2", "device": 5}, {"run": "nothing.toml"}, {"run": "/"},
    {"run": "gpt2", "what": "memory", "top": "x", "goal": 7, "over": [], "keep": -1, "chance": 2},
]  # fmt: skip


@pytest.mark.parametrize("name", TOOLS)
@pytest.mark.parametrize("given", HOSTILE, ids=str)
def test_a_wrong_call_is_a_sentence(name: str, given: dict[str, Any]) -> None:
    if name == "catalog" and not given:
        return
    said, data, wrong = answered(name, given)
    assert wrong, said
    assert said.strip()
    assert "Traceback" not in said
    assert data["error"][0]["sentence"] in said


def test_no_code_is_imported_unless_the_server_was_started_to(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit(3)")
    (tmp_path / "link.py").symlink_to(json.__file__)
    said, data, wrong = answered("trace", CALLS["trace"])
    assert wrong
    assert said.startswith("trace: imports your code, which this server was not started to do")
    for run in ("link:load", "..mine:build", "mine", "/mine:build", "gpt2", "mine:build:x"):
        said, data, wrong = answered("trace", {"run": run}, tmp_path)
        assert data["error"][0]["rule"].startswith("must be a module below"), run
    said, _, wrong = answered("trace", CALLS["trace"], tmp_path)
    assert (wrong, "mine:build" in said) == (True, True)
    with pytest.raises(InvalidInput, match="is no folder"):
        question_named("mcp").ask(allow_trace=str(tmp_path / "none"))


def test_a_schema_names_what_the_question_takes_and_no_file_to_write() -> None:
    for name in TOOLS:
        asked = question_named(name)
        properties = schema_of(asked)["properties"]
        options = {option.name for option in asked.options.values() if not option.suffix}
        assert options <= set(properties) or name == "trace"
        assert not {"memory_viz", "output", "hf", "args"} & set(properties)
        assert all(schema["description"] for schema in properties.values())


def test_the_skill_is_printed_to_be_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mcp", "--skill"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("---\nname: trainledger\ndescription: ")
    assert all(f"`{name}`" in text for name in TOOLS)
