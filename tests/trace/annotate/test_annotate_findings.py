"""What is planted is found at its line, and a clean program is let alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainledger.trace.annotate.annotate import annotate
from trainledger.trace.annotate.annotation import Annotation, Finding

torch.set_num_threads(1)
PROGRAMS = Path(__file__).parent / "programs"
CLEAN = sorted(each.stem for each in PROGRAMS.glob("clean_*.py"))
PLANTED = {
    "hidden copy": "hidden copy", "upcast": "fp32 copy of logits", "zero_grad": "forgotten zero_grad",
    "graph": "graph kept alive", "item": "synchronization in a loop",
}  # fmt: skip


def line_with(file: Path, comment: str) -> int:
    return next(at for at, text in enumerate(file.read_text().splitlines(), 1) if text.endswith(f"  # {comment}"))


def only(annotation: Annotation, kind: str) -> Finding:
    found = [each for each in annotation.findings if each.kind == kind]
    assert len(found) == 1, annotation.findings
    return found[0]


def line_of(function: Callable[..., object], words: str) -> int:
    """The number of the first line of a function with these words."""
    first = function.__code__.co_firstlineno
    text = Path(function.__code__.co_filename).read_text().splitlines()
    return next(at for at, each in enumerate(text[first - 1 :], first) if words in each)


# The five


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
def test_five_things_planted_are_found_with_their_lines(fake: bool) -> None:
    file = PROGRAMS / "planted.py"
    annotation = annotate(file, fake=fake)
    assert annotation.ended == ""
    assert annotation.steps == 8
    found = {each.kind: each.line for each in annotation.problems}
    assert found == {
        kind: f"{annotation.script}:{line_with(file, comment)}" for comment, kind in PLANTED.items()
    }  # fmt: skip
    by_kind = {each.kind: each for each in annotation.problems}
    B, T, V, D = 4, 32, 512, 32
    assert (by_kind["hidden copy"].times, by_kind["hidden copy"].nbytes) == (8, 8 * 4 * B * T * D)
    assert (by_kind["fp32 copy of logits"].times, by_kind["fp32 copy of logits"].nbytes) == (8, 8 * 4 * B * T * V)
    assert by_kind["synchronization in a loop"].times == 8
    assert by_kind["forgotten zero_grad"].times == 7
    assert by_kind["graph kept alive"].times == 7
    assert "`losses` (list)" in by_kind["graph kept alive"].what


def test_the_page_says_what_is_found() -> None:
    page = (Path(__file__).parents[3] / "docs" / "annotate.md").read_text()
    rows = re.findall(r"^\| (\d+) \| ([\w ]+) \|", page, flags=re.MULTILINE)
    planted = {kind: str(line_with(PROGRAMS / "planted.py", comment)) for comment, kind in PLANTED.items()}
    assert {kind: line for line, kind in rows} == planted


@pytest.mark.parametrize("comment", PLANTED)
def test_each_is_gone_when_it_is_mended(comment: str, tmp_path: Path) -> None:
    mended = {
        "hidden copy": "        y = y.transpose(1, 2).contiguous().view(B, T, D)",
        "upcast": "        logits = logits[:, :, :V]",
        "zero_grad": "        optimizer.zero_grad(); loss.backward()",
        "graph": "        losses.append(loss.detach())",
        "item": "        total = loss.detach()",
    }
    source = (PROGRAMS / "planted.py").read_text()
    changed = re.sub(rf"^.*  # {comment}$", mended[comment], source, flags=re.MULTILINE)
    assert changed != source
    file = tmp_path / "mended.py"
    file.write_text(changed)
    annotation = annotate(file)
    assert annotation.ended == ""
    assert {each.kind for each in annotation.problems} == set(PLANTED.values()) - {PLANTED[comment]}


# Steps that the program takes itself


BY_HAND = {
    "zero_grad": "forgotten zero_grad", "graph": "graph kept alive", "item": "synchronization in a loop",
}  # fmt: skip
FOREACH = """            torch._foreach_add_([w, b], [w.grad, b.grad], alpha=-LR)
            w.clamp_(-9, 9)
"""
WAYS = {
    "in place": "            w -= LR * w.grad  # step\n            b -= LR * b.grad\n",
    "data": "            w.data.add_(w.grad, alpha=-LR)\n            b.data -= LR * b.grad.data\n",
    "foreach": FOREACH,
    "copied": "            w.copy_(w - LR * w.grad)\n            torch.sub(b, LR * b.grad, out=b)\n",
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.long
def test_steps_by_hand_have_the_findings_of_steps(way: str, tmp_path: Path) -> None:
    source = (PROGRAMS / "planted_by_hand.py").read_text()
    assert WAYS["in place"] in source
    file = tmp_path / "planted_by_hand.py"
    file.write_text(source.replace(WAYS["in place"], WAYS[way]))
    for fake in (False, True):
        annotation = annotate(file, fake=fake)
        assert (annotation.ended, annotation.steps) == ("", 8)
        assert {each.kind: (each.line, each.times) for each in annotation.problems} == {
            kind: (f"{annotation.script}:{line_with(file, comment)}", 8 if comment == "item" else 7)
            for comment, kind in BY_HAND.items()
        }
        found = only(annotation, "forgotten zero_grad")
        assert found.nbytes == 7 * 4 * (16 * 5 + 5)
        assert "set the .grad of each parameter to None" in found.instead


@pytest.mark.parametrize("comment", BY_HAND)
def test_each_is_gone_by_hand_when_it_is_mended(comment: str, tmp_path: Path) -> None:
    mended = {
        "zero_grad": "        w.grad = b.grad = None; loss.backward()",
        "graph": "        losses.append(loss.detach())",
        "item": "        total = loss.detach()",
    }
    source = (PROGRAMS / "planted_by_hand.py").read_text()
    changed = re.sub(rf"^.*  # {comment}$", mended[comment], source, flags=re.MULTILINE)
    file = tmp_path / "mended.py"
    file.write_text(changed)
    annotation = annotate(file)
    assert (annotation.ended, annotation.steps) == ("", 8)
    assert {each.kind for each in annotation.problems} == set(BY_HAND.values()) - {BY_HAND[comment]}


def test_steps_by_hand_end_the_program_as_asked() -> None:
    annotation = annotate(PROGRAMS / "planted_by_hand.py", steps=3)
    assert (annotation.steps, annotation.ended) == (3, "stopped after 3 optimizer steps, as asked")
    assert only(annotation, "synchronization in a loop").times == 3  # also that behind the third step


def test_gradients_that_are_asked_for_are_steps_too() -> None:
    def program() -> None:
        weight = torch.ones(4, requires_grad=True)
        total = 0.0
        for _ in range(6):
            loss = (weight * 2).sum()
            (gradient,) = torch.autograd.grad(loss, [weight])
            with torch.no_grad():
                weight.sub_(0.1 * gradient)
            total += loss.item()

    annotation = annotate(program)
    assert annotation.steps == 6
    assert [each.kind for each in annotation.problems] == ["synchronization in a loop"]


def test_only_what_comes_from_gradients_is_a_step() -> None:
    """Weights that are put in order between the backward passes of one step use no gradient."""

    def program() -> None:
        model = nn.Linear(4, 4)
        for _ in range(6):
            for _ in range(2):
                model(torch.ones(2, 4)).sum().backward()
                with torch.no_grad():
                    model.weight.div_(model.weight.norm())
                    model.bias.copy_(torch.zeros(4))
            for each in model.parameters():
                assert each.grad is not None
                each.data.sub_(0.1 * each.grad)
                each.grad.zero_()

    annotation = annotate(program)
    assert (annotation.steps, annotation.problems) == (6, ())


def test_two_models_that_are_trained_in_turn_by_hand() -> None:
    def program() -> None:
        one, two = nn.Linear(4, 4), nn.Linear(4, 1)
        for _ in range(6):
            for trained in (two, one):
                trained.zero_grad()
                two(one(torch.ones(2, 4))).sum().backward()
                with torch.no_grad():
                    for each in trained.parameters():
                        assert each.grad is not None
                        each -= 0.1 * each.grad

    annotation = annotate(program)
    assert (annotation.steps, annotation.problems) == (12, ())


def test_what_else_is_written_beside_an_optimizer_is_no_step() -> None:
    def program() -> None:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            for each in model.parameters():
                each.data.clamp_(-1, 1)

    assert annotate(program).steps == 3


def test_a_program_that_only_asks_for_gradients_takes_no_step() -> None:
    def program() -> None:
        model = nn.Linear(4, 1)
        nn.init.zeros_(model.weight)
        for _ in range(4):
            x = torch.ones(2, 4, requires_grad=True)
            model(x).sum().backward()
            assert x.grad is not None
            x.grad.zero_()

    assert annotate(program).steps == 0


# None where there is none


@pytest.mark.parametrize("name", CLEAN)
@pytest.mark.long
def test_a_clean_program_is_let_alone(name: str) -> None:
    annotation = annotate(PROGRAMS / f"{name}.py")
    assert annotation.ended == ""
    assert annotation.steps >= 6
    assert annotation.problems == ()
    assert annotation.uncounted == ()


# Gradients


def steps(clear: Callable[[nn.Module, torch.optim.Optimizer], None], *, count: int = 4, micro: int = 1) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(count):
        for _ in range(micro):
            (model(torch.ones(2, 4)).sum() / micro).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        clear(model, optimizer)


def by_hand(model: nn.Module, optimizer: object) -> None:
    for each in model.parameters():
        each.grad = None


def in_place(model: nn.Module, optimizer: object) -> None:
    for each in model.parameters():
        assert each.grad is not None
        each.grad.zero_()


def by_filling(model: nn.Module, optimizer: object) -> None:
    for each in model.parameters():
        assert each.grad is not None
        each.grad.data.fill_(0)


@pytest.mark.parametrize("clear", [
    lambda model, optimizer: optimizer.zero_grad(), lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    lambda model, optimizer: model.zero_grad(), by_hand, in_place, by_filling,
])  # fmt: skip
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.long
def test_every_way_to_clear_gradients_counts(clear: Callable[[nn.Module, object], None], micro: int) -> None:
    assert annotate(lambda: steps(clear, micro=micro)).problems == ()


def test_clipping_clears_nothing() -> None:
    found = only(annotate(lambda: steps(lambda model, optimizer: None, count=5, micro=2)), "forgotten zero_grad")
    assert found.line.endswith(f":{line_of(steps, '.backward()')}")
    assert f":{line_of(steps, 'optimizer.step()')}" in found.why
    assert found.times == 4
    assert found.nbytes == 4 * (16 + 4) * 4


def test_one_step_cannot_show_it() -> None:
    assert annotate(lambda: steps(lambda model, optimizer: None, count=1)).problems == ()


# Graphs


def test_a_sum_of_losses_keeps_all_graphs() -> None:
    def program() -> None:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        total = torch.zeros(())
        for _ in range(6):
            loss = model(torch.ones(2, 4)).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total = total + loss

    found = only(annotate(program), "graph kept alive")
    assert found.line.endswith(f":{line_of(program, 'total = total + loss')}")
    assert "`total` (variable)" in found.what


def test_losses_in_an_attribute_and_without_any_optimizer() -> None:
    class History:
        def __init__(self) -> None:
            self.losses: list[Tensor] = []

        def add(self, loss: Tensor) -> None:
            self.losses.append(loss)

    def program() -> None:
        weight = torch.ones(4, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        history = History()
        for _ in range(6):
            loss = (weight * 2).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.add(loss)

    found = only(annotate(program), "graph kept alive")
    assert found.line.endswith(f":{line_of(History.add, 'losses.append')}")
    assert "`history.losses`" in found.what


def test_activations_that_no_backward_frees_are_weighed() -> None:
    def program() -> None:
        weight = torch.ones(64, 64, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        kept = []
        for _ in range(8):
            optimizer.zero_grad()
            (weight * 2).sum().backward()
            optimizer.step()
            kept.append(torch.exp(weight))

    found = only(annotate(program), "graph kept alive")
    assert found.nbytes == 7 * 4 * 64 * 64 or found.nbytes == 6 * 4 * 64 * 64
    assert "16.38 kB more with each step" in found.why


def test_the_line_that_adds_is_looked_for_in_the_function_first() -> None:
    def other() -> None:
        kept: list[float] = []
        kept.append(1.0)

    def program() -> None:
        other()
        weight = torch.ones(4, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        kept = []
        for _ in range(6):
            loss = (weight * 2).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            kept.append(loss)

    found = only(annotate(program), "graph kept alive")
    assert found.line.endswith(f":{line_of(program, 'kept.append(loss)')}")


# Copies


def test_why_a_copy_is_made() -> None:
    def program() -> None:
        x = torch.ones(8, 8)
        x.t().flatten()
        x.bfloat16()
        x.clone()
        x[None].expand(4, 8, 8).reshape(32, 8)
        torch.cat([x, x])
        x[[0, 1]]
        x.view(64)
        x.contiguous()

    annotation = annotate(program)
    first = program.__code__.co_firstlineno + 2
    marks = [[(each.kind, each.why) for each in annotation.line(first + at).marks] for at in range(8)]
    assert marks == [
        [("view", "t, unsafe_view"), ("copy", "non-contiguous by flatten")],
        [("copy", "dtype, fp32[8, 8] to bf16 by bfloat16")],
        [("copy", "clone by clone")],
        [("view", "unsqueeze, expand, unsafe_view"), ("copy", "expanded by reshape")],
        [("copy", "joined by cat")],
        [("copy", "indexing by []")],
        [("view", "view")],
        [],
    ]
    assert {each.kind for each in annotation.problems} == {"hidden copy", "broadcast written out"}


def test_a_copy_that_is_asked_for_is_a_remark() -> None:
    def program() -> None:
        x = torch.ones(16, 16)
        x.t().contiguous()
        x.t()[None] @ x

    annotation = annotate(program)
    assert annotation.problems == ()
    assert [each.expression for each in annotation.remarks] == ["x.t().contiguous()"]


def test_a_large_broadcast_is_found_and_a_small_one_is_not() -> None:
    def distances(n: int) -> Tensor:
        x, y = torch.randn(n, 8), torch.randn(n, 8)
        near = (x[:, None] - y[None]).square().sum(-1)
        return near.argmin(1)

    found = only(annotate(distances, [256]), "broadcast written out")
    assert found.expression == "x[:, None] - y[None]"
    assert found.nbytes == 4 * 256 * 256 * 8
    assert annotate(distances, [12]).problems == ()


def test_a_hidden_copy_inside_a_library_is_not_the_programs() -> None:
    def program() -> None:
        layer = nn.MultiheadAttention(8, 2, batch_first=True)
        x = torch.ones(2, 5, 8)
        layer(x, x, x)

    assert annotate(program).problems == ()


# Upcasts


def test_logits_that_autocast_turns_into_fp32() -> None:
    def program() -> None:
        model = nn.Linear(16, 512)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(torch.randn(64, 16))
            loss = F.cross_entropy(logits, torch.zeros(64, dtype=torch.int64))
        loss.backward()

    found = only(annotate(program), "fp32 copy of logits")
    assert found.line.endswith(f":{line_of(program, 'F.cross_entropy')}")
    assert found.nbytes == 4 * 64 * 512


def test_an_upcast_that_no_loss_reads_is_none() -> None:
    def program() -> None:
        x = torch.ones(64, 64, dtype=torch.bfloat16)
        torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True)).bfloat16()

    assert annotate(program).findings == ()


# Synchronizations


def test_every_way_to_wait_is_told_by_its_name() -> None:
    def program() -> None:
        x = torch.arange(3.0)
        for _ in range(4):
            x.sum().item()
            x.tolist()
            if x[0] > 0:
                break
            float(x[1])
            x.nonzero()
            print(x)
            torch.equal(x, x)
            x[x > 0]
            x.numpy()

    annotation = annotate(program)
    what = [each.what.split(" 4 times")[0] for each in annotation.problems]
    assert what == [
        ".item()", ".tolist()", "reads a number off a tensor", "float(tensor)", ".nonzero()", "print of a tensor",
        "torch.equal", "counts what a mask picks", ".numpy()",
    ]  # fmt: skip


def test_once_in_a_while_is_let_alone() -> None:
    def program(every: int) -> None:
        weight = torch.ones(4, requires_grad=True)
        optimizer = torch.optim.Adam([weight])
        for step in range(12):
            optimizer.zero_grad()
            loss = weight.sum()
            loss.backward()
            optimizer.step()
            if step % every == 0:
                loss.item()

    assert annotate(program, [4]).problems == ()
    assert only(annotate(program, [1]), "synchronization in a loop").times == 12


def test_programs_are_parsed() -> None:
    """A program with a typing error would pass for one that ends early."""
    for each in PROGRAMS.glob("*.py"):
        ast.parse(each.read_text())


def test_of_a_librarys_upcasts_only_that_of_the_logits_is_told() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x.float().mul(2).bfloat16()
            logits = x.repeat(1, 8).float()
            return F.cross_entropy(logits, torch.zeros(64, dtype=torch.int64))

    def program() -> None:
        Model()(torch.ones(64, 16, dtype=torch.bfloat16))

    found = only(annotate(program, files=["no such file"]), "fp32 copy of logits")
    assert (found.times, found.nbytes) == (1, 4 * 64 * 128)
    assert "bf16[64, 128]" in found.what


# A tensor that outlives its step


class Output:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


def trained(kind: str) -> None:
    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 1024, bias=False))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step() -> None:
        logits = net(torch.ones(64, 16))
        logits.square().mean().backward()

    for _ in range(4):
        optimizer.zero_grad()
        if kind == "function":
            step()
        elif kind == "attribute":
            output = Output(net(torch.ones(64, 16)))
            output.logits.square().mean().backward()
        else:
            logits = net(torch.ones(64, 16))
            logits.square().mean().backward()
            if kind == "deleted":
                del logits
        optimizer.step()


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
@pytest.mark.parametrize(
    ("kind", "name"), [("variable", "logits"), ("attribute", "output"), ("function", ""), ("deleted", "")]
)
def test_a_variable_that_holds_a_large_tensor_into_the_next_step_is_named(kind: str, name: str, fake: bool) -> None:
    annotation = annotate((lambda: trained(kind)) if fake else trained, () if fake else (kind,), fake=fake)
    assert annotation.ended == ""
    kept = [each for each in annotation.findings if each.kind == "kept over the step"]
    assert [(each.what.split()[0], each.times, each.nbytes) for each in kept] == [
        (f"`{name}`", 3, 4 * 64 * 1024)
    ] * bool(name)
    for finding in kept:
        number = int(finding.line.rpartition(":")[2])
        assert Path(__file__).read_text().splitlines()[number - 1].strip().startswith(f"{name} = ")
