"""A model of the user's own, named on the command line: found, built without weights, and given a step."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import trainledger as tl
from trainledger.spec.problem import InvalidInput
from trainledger.trace.loss import OPTIMIZERS, WAYS, optimizer_named
from trainledger.trace.target import (
    TrainingStep,
    build,
    checkpoint_modules,
    input_of,
    inputs_of,
    load_target,
    trace_target,
)

pytestmark = pytest.mark.torch

CODE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=16, depth=3):
        super().__init__()
        self.steps = torch.linspace(0, 1, depth)
        self.rates = [each.item() for each in self.steps] if {values} else []
        self.embed = nn.Embedding(50, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 50)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for each in self.layers:
            x = torch.relu(each(x))
        return self.head(x)

def build():
    return Net()

def own_loss(output):
    return output.square().mean()

def nothing():
    return 3

class Inner:
    build = build
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("my_net", "my_net_of_values", "broken_net", "leaving_net"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "my_net.py").write_text(CODE.replace("{values}", "False"))
    (tmp_path / "my_net_of_values.py").write_text(CODE.replace("{values}", "True"))
    (tmp_path / "broken_net.py").write_text("import torch\nraise OSError('no such disk')\n")
    (tmp_path / "leaving_net.py").write_text("import sys\nsys.exit(4)\n")
    return tmp_path


TOKENS = inputs_of(["int64[2,8]"])


@pytest.mark.parametrize("name", ["my_net:build", "my_net:Net", "my_net:Inner.build", "my_net_of_values:build"])
def test_a_module_is_built_without_memory_and_keeps_its_ties(here: Path, name: str) -> None:
    model = build(load_target(name))
    assert isinstance(model, nn.Module)
    assert all(each.is_meta for each in model.parameters())
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize("name", ["my_net", "my_net_of_values"])
def test_its_step_is_that_of_the_real_module(here: Path, name: str) -> None:
    label = input_of("int64[2,8]")[1]
    traced = trace_target(load_target(f"{name}:build"), inputs=TOKENS, loss="cross_entropy", label=label)
    real = load_target(f"{name}:Net")()
    batch = torch.zeros(2, 8, dtype=torch.int64)
    with tl.meter(real, optimizer := torch.optim.AdamW(real.parameters())):
        pass
    same = tl.trace(
        real, batch, optimizer=optimizer, label=torch.zeros(2, 8, dtype=torch.int64),
        loss=lambda x, y: nn.functional.cross_entropy(x.flatten(0, 1), y.flatten()),
    )  # fmt: skip
    assert (traced.parameters, traced.flops, traced.kept_nbytes) == (same.parameters, same.flops, same.kept_nbytes)
    assert traced.peak().nbytes == same.peak().nbytes
    assert traced.partial == ""


@pytest.mark.parametrize(
    ("loss", "flops"), [("mean", True), ("sum", True), ("my_net:own_loss", True), ("cross_entropy", True)]
)
def test_losses_by_name(here: Path, loss: str, flops: bool) -> None:
    given = load_target(loss) if ":" in loss else loss
    label = input_of("int64[2,8]")[1] if loss == "cross_entropy" else None
    ledger = trace_target(load_target("my_net:build"), inputs=TOKENS, loss=given, label=label, step="backward")
    phases = ledger.by("phase")
    assert phases["forward"] > 0
    assert phases["backward"] > phases["forward"]
    assert "optimizer" not in phases


def test_a_forward_alone_needs_no_loss(here: Path) -> None:
    ledger = trace_target(load_target("my_net:build"), inputs=TOKENS, step="forward")
    assert set(ledger.by("phase")) == {"forward"}


@pytest.mark.parametrize("name", [*OPTIMIZERS, *(f"adamw-{way}" for way in WAYS)])
def test_every_optimizer_makes_a_step(name: str) -> None:
    ledger = trace_target(nn.Linear(4, 4), inputs=inputs_of(["fp32[2,4]"]), loss="sum", step=name)
    assert ledger.by("phase")["optimizer"] > 0
    assert ledger.partial == ""


def test_checkpointing_runs_chosen_modules_again() -> None:
    def mlp() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3)))

    plain = trace_target(mlp, inputs=inputs_of(["fp32[4,8]"]), loss="sum", step="backward")
    again = trace_target(mlp, inputs=inputs_of(["fp32[4,8]"]), loss="sum", step="backward", checkpointing=["?"])
    assert "recompute" not in plain.by("phase")
    matmuls = again.filter(lambda each: each.kind == "matmul").by("phase")
    assert matmuls["recompute"] == 3 * 2 * 4 * 8 * 32  # the last matmul of a block is not needed again
    assert again.model_flops == plain.model_flops
    inputs, states = 2 * 4 * 8 * 4, 3 * torch.get_rng_state().nbytes  # the first block's input is the batch
    assert again.kept_nbytes == inputs + states + 4  # and the loss


def test_a_step_of_the_users_own_has_several_models_and_optimizers() -> None:
    """A GAN: the generator's gradients go through the discriminator, which has an optimizer of its own."""

    def build_gan() -> TrainingStep:
        generator, judge = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        ours, theirs = torch.optim.Adam(generator.parameters()), torch.optim.SGD(judge.parameters(), momentum=0.9)

        def run(noise: Tensor, real: Tensor) -> None:
            theirs.zero_grad()
            (judge(generator(noise).detach()).mean() - judge(real).mean()).backward()
            theirs.step()
            ours.zero_grad()
            (-judge(generator(noise)).mean()).backward()
            ours.step()

        return TrainingStep(run, {"generator": generator, "judge": judge}, [ours, theirs])

    ledger = trace_target(build_gan, inputs=inputs_of(["fp32[5,4]", "fp32[5,8]"]))
    assert ledger.parameters == 4 * 8 + 8 + 8 * 8 + 8 + 8 + 1
    resident = dict(ledger.resident)
    assert resident["optimizer state"] == 4 * 2 * 40 + 2 * 4 + 4 * 81  # two moments and steps, one momentum
    matmuls = ledger.filter(lambda each: each.kind == "matmul").by("phase")
    once_g, once_j = 2 * 5 * 4 * 8, 2 * 5 * 8 * 8 + 2 * 5 * 8
    assert matmuls["forward"] == 2 * once_g + 3 * once_j
    # The judge's own step needs no gradient of its input; the generator's step goes through the judge to the weights.
    first = 2 * (once_j + 2 * 5 * 8)
    second = 2 * once_j + once_g
    assert matmuls["backward"] == first + second
    assert {each.path.partition(".")[0] for each in ledger if each.kind == "matmul"} == {"generator", "judge"}


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("my_net", "RUN = 'my_net': must name a module and something in it; nearest that works: package.module:build"),
        ("my_net:", "must name a module and something in it"),
        ("my_net:buidl", "my_net has no 'buidl'; nearest that works: build"),
        ("no_such_module:build", "no module 'no_such_module' can be imported from here"),
        ("broken_net:build", "the import ended at broken_net.py:2: OSError: no such disk"),
        ("leaving_net:build", "the import ended at leaving_net.py:2: SystemExit: 4"),
        ("my_net:a-b", "must name a module"),
        ("my_net.py:build", "no module 'my_net.py' can be imported from here; nearest that works: my_net:build"),
        ("./my_net.py:Net", "must name a module and something in it; nearest that works: my_net:Net"),
        ("../a/my_net.py:Net", "must name a module and something in it; nearest that works: package.module:Net"),
    ],
)
def test_targets_that_are_none(here: Path, target: str, sentence: str) -> None:
    with pytest.raises(InvalidInput) as told:
        load_target(target, "RUN")
    assert sentence in str(told.value)


def test_what_a_target_must_give(here: Path) -> None:
    with pytest.raises(InvalidInput, match=r"must give an nn.Module or a trainledger.TrainingStep, not int"):
        build(load_target("my_net:nothing"))
    with pytest.raises(InvalidInput, match="must be a module, a function that builds one"):
        build(3)

    def wrong() -> nn.Module:
        return nn.Linear("four", 4)  # type: ignore[arg-type]

    with pytest.raises(InvalidInput, match=r"building ended at .*test_target.py:\d+: TypeError"):
        build(wrong)


def test_inputs_that_do_not_fit(here: Path) -> None:
    with pytest.raises(InvalidInput, match="too many positional arguments; forward takes tokens"):
        trace_target(load_target("my_net:build"), inputs=inputs_of(["int64[2]", "int64[2]"]))
    with pytest.raises(InvalidInput, match=r"required argument: 'tokens'; forward takes tokens, .*--input tokens=fp32"):
        trace_target(load_target("my_net:build"))
    with pytest.raises(InvalidInput, match=r"the loss must be a scalar tensor, not fp32"):
        trace_target(load_target("my_net:build"), inputs=TOKENS)
    with pytest.raises(InvalidInput, match=r"the step ended at my_net.py:16: RuntimeError: Expected tensor"):
        trace_target(load_target("my_net:build"), inputs=inputs_of(["fp32[2,8]"]), loss="sum")


def test_names_that_are_none() -> None:
    linear, x = nn.Linear(4, 4), inputs_of(["fp32[2,4]"])
    with pytest.raises(InvalidInput, match=r"--step = 'adamx'.*nearest that works: adam"):
        trace_target(linear, inputs=x, loss="sum", step="adamx")
    with pytest.raises(InvalidInput, match="--step = 'adafactor-fused': torch refuses it"):
        optimizer_named("adafactor-fused", linear.parameters())
    with pytest.raises(InvalidInput, match=r"is no loss of torch.nn.functional.*nearest that works: cross_entropy"):
        trace_target(linear, inputs=x, loss="cross_entrpy")
    with pytest.raises(InvalidInput, match=r"--loss: mse_loss needs a label .* works: --label fp32\[2,4\]"):
        trace_target(linear, inputs=x, loss="mse_loss")
    with pytest.raises(InvalidInput, match=r"no module of the model has such a path; nearest that works: 0\.\*"):
        checkpoint_modules(nn.Sequential(nn.ModuleList([linear])), ["layers.*"])
    with pytest.raises(InvalidInput, match="the model has no parameter to train; nearest that works: forward"):
        optimizer_named("sgd", [])


class _Wrapped(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.inner, self.wrap = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50)), wrap

    def forward(self, ids):
        return self.wrap(self.inner(ids))


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 10)), "fp32[32,12]"),
        (lambda: _Wrapped(lambda logits: logits), "int64[2,16]"),
        (lambda: _Wrapped(lambda logits: {"logits": logits, "loss": None}), "int64[3,5]"),
        (lambda: _Wrapped(lambda logits: (logits, None)), "int64[2,16]"),
        (lambda: nn.Conv2d(3, 10, 3, padding=1), "fp32[4,3,8,8]"),
    ],
)
@pytest.mark.parametrize("loss", [None, "cross_entropy", "mse_loss"])
def test_a_label_that_is_proposed_fits_the_batch(model, text: str, loss: str | None) -> None:
    with pytest.raises(InvalidInput) as refused:
        trace_target(model, inputs=inputs_of([text]), loss=loss)
    (problem,) = refused.value.problems
    label = re.search(r"--label (\w+\[[\d,]+\])", str(problem.nearest))
    assert label is not None
    ledger = trace_target(model, inputs=inputs_of([text]), loss=loss or "cross_entropy", label=input_of(label[1])[1])
    assert not ledger.partial
    assert ledger.total("kept")


@pytest.mark.parametrize(
    ("texts", "sentence"),
    [
        (["int64"], "must be a format and a shape in brackets, with or without a name in front; nearest that works"),
        (["int46[2]"], "is not a number format that torch knows; nearest that works: int64"),
        (["int64[2,x]"], "has a dim that is no whole number (x)"),
        (["int64[2,-1]"], "has a dim that is no whole number (-1)"),
        (["int64[2]", "y=int64[2]"], "must all have names or none"),
        (["y=int64[2]", "y=int64[2]"], "names one input twice"),
        (["int64[1T,1T]"], "has more than 1,000,000,000,000,000 elements"),
    ],
)
def test_inputs_that_are_none(texts: list[str], sentence: str) -> None:
    with pytest.raises(InvalidInput) as told:
        inputs_of(texts)
    assert sentence in str(told.value)


def test_only_what_is_named_is_imported(here: Path) -> None:
    package = here / "named_package"
    package.mkdir()
    for name in ("__init__", "other", "setup"):
        (package / f"{name}.py").write_text("" if name == "__init__" else "raise SystemExit('imported')")
    (package / "net.py").write_text(CODE.replace("{values}", "False"))
    (here / "conftest.py").write_text("raise SystemExit('imported')")
    before = set(sys.modules)
    build(load_target("named_package.net:build"))
    ours = {each for each in set(sys.modules) - before if each.startswith(("named_package", "conftest"))}
    assert ours == {"named_package", "named_package.net"}


def test_nothing_is_unpickled_anywhere() -> None:
    source = Path(tl.__file__).parent
    found = []
    for path in source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "pickle.load", "pickle.loads", "pickle.Unpickler", "torch.load", "joblib.load", "marshal.loads",
            ):  # fmt: skip
                found.append(f"{path.name}:{node.lineno}")
    assert found == []


def test_a_loss_that_holds_the_batch_itself_counts_it_once() -> None:
    model, x = nn.Linear(64, 64), torch.zeros(1024, 64)
    optimizer = torch.optim.SGD(model.parameters())
    held = tl.trace(model, x, loss=lambda y: nn.functional.mse_loss(y, x), optimizer=optimizer)
    given = tl.trace(model, x, loss=nn.functional.mse_loss, label=x, optimizer=optimizer)
    assert dict(held.resident)["batch"] == dict(given.resident)["batch"] == 1024 * 64 * 4
    assert held.peak().nbytes == given.peak().nbytes
    tokens = torch.zeros(4, 65, dtype=torch.int64)
    embed = nn.Embedding(10, 10)
    of_slices = tl.trace(embed, tokens[:, :-1], loss=lambda y: nn.functional.cross_entropy(y.mT, tokens[:, 1:]))
    assert dict(of_slices.resident)["batch"] <= tokens.nbytes


def test_models_of_a_step_may_be_a_list() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    ledger = tl.trace_step(lambda x: second(first(x)).sum().backward(), [first, second], torch.zeros(2, 4))
    assert ledger.parameters == 40
    assert {each.path for each in ledger if each.kind == "matmul"} == {"0", "1"}


def test_what_a_step_of_ones_own_says_itself_is_refused() -> None:
    step = TrainingStep(lambda x: None, nn.Linear(4, 4))
    with pytest.raises(InvalidInput, match="--loss: is not used with a TrainingStep"):
        trace_target(step, inputs=inputs_of(["fp32[2,4]"]), loss="mean")
    with pytest.raises(InvalidInput, match=r"contains modules and is never called itself; .* works: layers\.\*"):
        checkpoint_modules(nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4)])}), ["layers"])


def test_an_input_without_name_is_the_main_one() -> None:
    inputs = inputs_of(["int64[2,8]", "labels=int64[2]"], main="input_ids")
    assert isinstance(inputs, dict)
    assert list(inputs) == ["input_ids", "labels"]
