"""Programs on fake tensors, and programs for a GPU where there is none."""

from __future__ import annotations

import copy
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

from trainledger.trace.annotate.annotate import annotate
from trainledger.trace.recorder.storages import is_gpu

torch.set_num_threads(1)
PROGRAMS = Path(__file__).parent / "programs"


def script(folder: Path, source: str) -> Path:
    file = folder / "script.py"
    file.write_text(textwrap.dedent(source))
    return file


@pytest.mark.parametrize("name", ["clean_accumulation", "clean_gan", "clean_recurrent", "clean_evaluated"])
@pytest.mark.long
def test_fake_books_are_those_of_real_values(name: str) -> None:
    real, fake = (annotate(PROGRAMS / f"{name}.py", fake=fake, steps=4) for fake in (False, True))
    assert fake.problems == ()
    assert fake.total == real.total
    assert fake.peak_nbytes == real.peak_nbytes
    for mine, theirs in zip(fake.files[0].lines, real.files[0].lines, strict=True):
        assert (mine.own, mine.backward, mine.alive, mine.runs) == (
            theirs.own,
            theirs.backward,
            theirs.alive,
            theirs.runs,
        )


def test_a_model_that_fits_nowhere(tmp_path: Path) -> None:
    file = script(
        tmp_path,
        """
        import torch
        from torch import nn
        model = nn.Sequential(*(nn.Linear(65536, 65536, bias=False) for _ in range(8))).to(torch.bfloat16)
        model(torch.randn(4, 65536, dtype=torch.bfloat16)).sum().backward()
        """,
    )
    annotation = annotate(file, fake=True)
    weights = 8 * 65536**2
    assert annotation.ended == ""
    assert annotation.peak_nbytes > 4 * weights
    assert annotation.line(5).own.flops == 2 * 4 * weights + 4 * 65536


def test_weights_that_are_tied_stay_so_when_converted(tmp_path: Path) -> None:
    file = script(
        tmp_path,
        """
        import torch
        from torch import nn
        a, b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        b.weight = a.weight
        model = nn.Sequential(a, b).to(torch.bfloat16)
        assert a.weight is b.weight and a.weight.dtype is torch.bfloat16
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        """,
    )
    assert annotate(file, fake=True).ended == ""


@pytest.mark.parametrize(
    ("line", "ended"),
    [
        ("torch.load('weights.pt')", "No such file or directory: 'weights.pt'"),
        ("import pickle; pickle.dumps(x)", "pickling a tensor reads its values, which fake tensors do not have"),
        ("x.numpy()", "a numpy array needs values, which fake tensors do not have; annotate without --fake"),
        ("x.to(int).bincount()", "bincount has as many bins as its largest value, which fake tensors do not have"),
    ],
)
def test_what_needs_values_ends_it_with_a_sentence(line: str, ended: str, tmp_path: Path) -> None:
    file = script(tmp_path, f"import torch\nx = torch.ones(8) * 2\n{line}\n")
    told: list[str] = []
    annotation = annotate(file, fake=True, on_error=told.append)
    assert annotation.outcome == "failed"
    assert ended in annotation.ended
    assert "script.py:3" in annotation.ended
    assert annotation.total.flops == 8


def test_pretrained_weights_are_neither_fetched_nor_read(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    file = script(
        tmp_path,
        """
        from transformers import GPT2LMHeadModel
        GPT2LMHeadModel.from_pretrained("nobody/nothing")
        """,
    )
    annotation = annotate(file, fake=True, on_error=lambda _: None)
    assert "build GPT2LMHeadModel from its config, or run without --fake" in annotation.ended
    assert "script.py:3" in annotation.ended


def test_values_that_are_guessed_are_told(tmp_path: Path) -> None:
    file = script(
        tmp_path,
        """
        import torch
        x = torch.rand(8)
        for _ in range(3):
            if x.sum() > 4: x = x + 1
        print(x.tolist(), f"{x[0]:.2f}")
        """,
    )
    annotation = annotate(file, fake=True)
    assert annotation.ended == ""
    (said,) = annotation.notes
    assert said.startswith("5 values read at ")
    assert "script.py:5 (3), 6 (2) assumed to be 0" in said
    assert annotate(file).notes == ()


def test_a_checkpoint_of_fake_tensors_is_not_written(tmp_path: Path) -> None:
    file = script(tmp_path, f"import torch\ntorch.save(torch.ones(3), r'{tmp_path / 'kept.pt'}')\n")
    annotation = annotate(file, fake=True)
    assert not (tmp_path / "kept.pt").exists()
    assert any(each.startswith("torch.save wrote nothing") for each in annotation.notes)
    annotate(file)
    assert (tmp_path / "kept.pt").exists()


def test_random_places_give_whole_pieces(tmp_path: Path) -> None:
    file = script(
        tmp_path,
        """
        import torch
        data = torch.randint(0, 100, (1000,))
        x = torch.stack([data[i : i + 64] for i in torch.randint(900, (4,))])
        assert x.shape == (4, 64)
        """,
    )
    assert annotate(file, fake=True).ended == ""


def test_loaders_with_workers_run_in_this_process(tmp_path: Path) -> None:
    file = script(
        tmp_path,
        """
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        data = TensorDataset(torch.randn(16, 4))
        for (x,) in DataLoader(data, batch_size=4, num_workers=2, pin_memory=True, persistent_workers=True):
            assert x.shape == (4, 4)
        """,
    )
    annotation = annotate(file, fake=True)
    assert annotation.ended == ""
    assert any("workers were left out" in each for each in annotation.notes)


# A GPU that is not there


@pytest.mark.parametrize("fake", [True, False], ids=["fake", "real"])
@pytest.mark.long
def test_a_trainer_for_a_gpu_runs_unchanged(fake: bool, capsys: pytest.CaptureFixture[str]) -> None:
    file = PROGRAMS / "trainer_for_gpu.py"
    source = file.read_text().splitlines()
    annotation = annotate(file, ["--steps", "4"], fake=fake, device="cuda")
    assert annotation.ended == ""
    assert (annotation.steps, annotation.device, annotation.uncounted) == (4, "cuda", ())

    def line(words: str):  # type: ignore[no-untyped-def]
        return annotation.line(next(at for at, text in enumerate(source, 1) if words in text))

    moved = [each for each in line("x.pin_memory().to(device").marks if each.kind == "copy"]
    assert [(each.why, each.times, each.nbytes) for each in moved] == [("device by to", 8, 2 * 4 * 4 * 64 * 8)]
    of_model = [each for each in line("model.to(device)").marks if each.kind == "copy"]
    assert len(of_model) == 1
    assert of_model[0].why == "device by to"
    assert of_model[0].nbytes == line("model.to(device)").own.allocated
    assert [each.why for each in line("torch.cuda.synchronize()").marks] == ["torch.cuda.synchronize"]
    assert not any(each.kind == "sync" for each in line("for i in ix").marks)  # places are read on the host
    assert {each.kind for each in annotation.problems} == {"fp32 copy of logits"}
    assert "torch.compile was left out" in annotation.notes[0]
    most = [int(each.split()[-1]) for each in capsys.readouterr().out.splitlines()[1:3]]
    assert 0 < most[0] <= most[1] < annotation.peak_nbytes


def test_kernels_are_those_of_cuda_on_fake_tensors(tmp_path: Path) -> None:
    source = """
        import torch, torch.nn.functional as F
        q = torch.randn(2, 4, 64, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
        """
    on_gpu = annotate(script(tmp_path, source), fake=True, device="cuda")
    assert on_gpu.ended == ""
    assert on_gpu.line(4).own.flops >= 2 * 2 * 2 * 4 * 64 * 64 * 16


def test_where_tensors_pass_for_the_gpus(tmp_path: Path) -> None:
    file = script(
        tmp_path,
        """
        import torch
        a = torch.ones(4)
        b = a.cuda()
        c = torch.zeros(4, device="cuda:0")
        with torch.device("cuda"):
            d = torch.rand(4)
        e, f, g = b + c, a.to(b), (b * c).to("cpu")
        for there in (b, c, d, e, f, torch.zeros_like(d), b.new_zeros(3), b[:2], b.t()):
            assert there.device.type == "cuda" and there.is_cuda and there.device == torch.device("cuda:0")
        for here in (a, g, a + 1, torch.zeros_like(b, device="cpu"), b.cpu(), b.detach().cpu()):
            assert here.device.type == "cpu" and not here.is_cuda
        assert a.cuda(0, non_blocking=True).to(torch.float16).dtype is torch.float16
        assert b.to("cuda", torch.bfloat16).dtype is torch.bfloat16 and b.to("cuda") is b
        assert torch.cuda.memory_allocated() >= 5 * 16
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() < 1000 and torch.cuda.mem_get_info()[1] == 80 * 10**9
        """,
    )
    for fake in (False, True):
        annotation = annotate(file, fake=fake, device="cuda")
        assert annotation.ended == "", annotation.ended
        assert [each.why for each in annotation.line(4).marks] == ["device by cuda"]
        assert [(each.kind, each.why) for each in annotation.line(11).marks if each.kind == "sync"] == [
            ("sync", ".cpu()")
        ]


def test_what_names_a_gpu() -> None:
    assert [each for each in ("cuda", "cuda:3", 0, torch.device("cuda"), "cpu", True, None) if is_gpu(each)] == [
        "cuda", "cuda:3", 0, torch.device("cuda"),
    ]  # fmt: skip


def test_a_function_that_makes_its_own_model() -> None:
    def step() -> None:
        model = nn.Linear(30_000, 30_000)
        model(torch.ones(1, 30_000)).sum().backward()

    assert annotate(step, fake=True).peak_nbytes > 2 * 4 * 30_000**2


def test_what_is_written_in_place_is_no_new_memory() -> None:
    """Of a copied fake parameter some in-place operations come back as another tensor."""

    def step() -> None:
        model = nn.Linear(3, 3)
        average = copy.deepcopy(model)
        with torch.no_grad():
            average.weight.lerp_(model.weight, 0.1)

    line = step.__code__.co_firstlineno + 4
    assert [annotate(step, fake=fake).line(line).own.allocated for fake in (False, True)] == [0, 0]


def test_a_loop_that_waits_for_a_value_ends(tmp_path: Path) -> None:
    file = script(
        tmp_path,
        """
        import torch
        left = torch.ones(4)
        while not (left.sum() < 1):
            left = left * 0.5
        """,
    )
    assert annotate(file).ended == ""
    assert "a loop would never end" in annotate(file, fake=True).ended
