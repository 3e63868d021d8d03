"""Scripts run as Python runs them, however they end."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from trainledger.spec.problem import InvalidInput
from trainledger.trace.annotate.annotate import annotate

torch.set_num_threads(1)
PROGRAMS = Path(__file__).parent / "programs"


def script(folder: Path, source: str, name: str = "script.py") -> Path:
    file = folder / name
    file.write_text(textwrap.dedent(source))
    return file


def test_a_script_sees_what_python_would_show_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script(tmp_path, "NAME = __name__\n", "beside_the_script.py")
    file = script(
        tmp_path,
        """
        import pickle, sys
        import beside_the_script
        class Mine: pass
        print(sys.argv[1:], __name__, __file__ == sys.modules["__main__"].__file__, __spec__, __package__)
        print(sys.path[0], beside_the_script.NAME, type(pickle.loads(pickle.dumps(Mine()))).__name__)
        """,
    )
    before = sys.argv, sys.path[:], sys.modules["__main__"]
    assert annotate(file, ["--lr", 3]).ended == ""
    assert (sys.argv, sys.path, sys.modules["__main__"]) == before
    told = capsys.readouterr().out.replace("__builtins__", "")
    python = subprocess.run(
        [sys.executable, str(file), "--lr", "3"], capture_output=True, text=True, check=True, cwd=tmp_path
    )  # fmt: skip
    assert told == python.stdout
    del sys.modules["beside_the_script"]


def test_lines_of_modules_beside_the_script_are_told_and_those_of_libraries_not(tmp_path: Path) -> None:
    (tmp_path / "lib" / "site-packages").mkdir(parents=True)
    script(tmp_path, "import torch\ndef double(x):\n    return x * 2\n", "beside_as_well.py")
    script(tmp_path / "lib" / "site-packages", "def triple(x):\n    return x * 3\n", "a_library_of_test.py")
    file = script(
        tmp_path,
        """
        import sys, torch
        sys.path.append(sys.path[0] + "/lib/site-packages")
        import beside_as_well, a_library_of_test
        x = torch.ones(10)
        beside_as_well.double(x)
        a_library_of_test.triple(x)
        """,
    )
    annotation = annotate(file)
    assert [Path(each.name).name for each in annotation.files] == ["script.py", "beside_as_well.py"]
    assert annotation.line(3, "beside_as_well.py").own.flops == 10
    assert annotation.line(6).own.flops == 0
    assert annotation.line(7).own.flops == 10  # a library's work stands at the line that called it
    for name in ("beside_as_well", "a_library_of_test"):
        del sys.modules[name]
    only = annotate(file, files=["script.py"])
    assert [Path(each.name).name for each in only.files] == ["script.py"]
    assert only.line(6).own.flops == 10
    for name in ("beside_as_well", "a_library_of_test"):
        del sys.modules[name]
    also = annotate(file, files=["a_lib*.py"])
    assert [Path(each.name).name for each in also.files] == ["script.py", "a_library_of_test.py"]
    assert (also.line(6).own.flops, also.line(2, "a_library_of_test.py").own.flops) == (10, 10)
    for name in ("beside_as_well", "a_library_of_test"):
        del sys.modules[name]


@pytest.mark.parametrize(
    ("last", "outcome", "ended"),
    [
        ("1 / 0", "failed", "ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", "failed", "the script exited with 3"),
        ("raise SystemExit('no data')", "failed", "the script exited with 'no data'"),
        ("raise SystemExit", "done", ""),
        ("import sys; sys.exit(0)", "done", ""),
        ("raise KeyboardInterrupt", "interrupted", "interrupted at "),
        ("torch.ones(2) @ torch.ones(3)", "failed", "inconsistent tensor size"),
    ],
)
def test_however_it_ends_what_ran_is_told(last: str, outcome: str, ended: str, tmp_path: Path) -> None:
    file = script(tmp_path, f"import torch\nx = torch.ones(8) * 2\n{last}\ny = x * 3\n")
    told: list[str] = []
    annotation = annotate(file, on_error=told.append)
    assert annotation.outcome == outcome
    assert ended in annotation.ended
    assert annotation.total.flops == 8
    assert [annotation.line(number).runs for number in (1, 2, 3, 4)] == [1, 1, 1, 0]
    if "Error" in ended:
        assert "script.py:3" in annotation.ended
        assert "Traceback" in told[0]
        assert "runs.py" not in told[0]


def test_so_many_steps_and_no_more(tmp_path: Path) -> None:
    annotation = annotate(PROGRAMS / "clean_accumulation.py", steps=2)
    assert (annotation.steps, annotation.outcome) == (2, "stopped")
    assert annotation.ended == "stopped after 2 optimizer steps, as asked"
    assert annotation.problems == ()


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("x = (\n", "is not Python: '(' was never closed at line 1"),
        ("x = '\0'\n", "is not Python"),
        (None, "cannot be read"),
    ],
)
def test_what_is_no_script_is_refused(source: str | None, rule: str, tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    if source is not None:
        file.write_text(source)
    with pytest.raises(InvalidInput, match="script = ") as error:
        annotate(file)
    assert rule in str(error.value)
    with pytest.raises(InvalidInput, match="is a directory; name the file to run"):
        annotate(tmp_path)


def test_arguments_that_make_no_sense_are_refused() -> None:
    with pytest.raises(InvalidInput, match="must be one that can be pretended; nearest that works: cuda"):
        annotate(PROGRAMS / "planted.py", device="tpu")
    with pytest.raises(InvalidInput, match="steps = 0: must be at least 1"):
        annotate(PROGRAMS / "planted.py", steps=0)
    with pytest.raises(InvalidInput, match="is not written in Python"):
        annotate(print)
    with pytest.raises(InvalidInput, match="on fake tensors creates its own"):
        annotate(lambda x: x, [1], fake=True)


def test_nothing_stays_behind(tmp_path: Path) -> None:
    before = torch.compile, torch.Tensor.__repr__, torch.Tensor.tolist, torch.load, torch.save, sys.gettrace()
    available = torch.cuda.is_available
    annotate(PROGRAMS / "trainer_for_gpu.py", fake=True, device="cuda", on_error=lambda _: None)
    assert (torch.compile, torch.Tensor.__repr__, torch.Tensor.tolist, torch.load, torch.save, sys.gettrace()) == before
    assert torch.cuda.is_available is available
    assert not hasattr(torch.zeros(1), "constant")
    assert torch.ones(2).tolist() == [1.0, 1.0]
    assert str(torch.ones(1).device) == "cpu"


def test_runs_of_lines_and_of_statements_over_several(tmp_path: Path) -> None:
    file = script(
        tmp_path,
        """\
        import torch
        def f(x):
            return x + 1
        for i in range(3):
            y = f(
                torch.ones(4),
            )
        z = [f(y) for _ in range(5)]
        while i > 0: i -= 1
        with torch.no_grad():
            w = sum(
                each
                for each in z
            )
        """,
    )
    annotation = annotate(file)
    runs = {at: annotation.line(at).runs for at in (1, 3, 4, 5, 8, 10, 11)}
    assert runs == {1: 1, 3: 8, 4: 4, 5: 3, 8: 1, 10: 1, 11: 1}
    assert annotation.line(9).runs == 2  # turns of a loop that stands on one line
    assert annotation.line(2).runs == 0
    assert annotation.line(6).own.allocated == 3 * 16
    assert annotation.line(3).own.flops == 8 * 4


def test_an_executable_lecture_runs_unchanged_and_teaches() -> None:
    file = PROGRAMS / "lecture.py"
    annotation = annotate(file, shapes=True)
    assert annotation.ended == ""
    source = file.read_text().splitlines()

    def line(words: str):  # type: ignore[no-untyped-def]
        return annotation.line(next(at for at, text in enumerate(source, 1) if words in text))

    assert line("x = torch.zeros(64, 128)").own.allocated == 4 * 64 * 128
    assert line("dtype=torch.bfloat16)").own.allocated == 2 * 64 * 128
    assert line("torch.empty(256, 256)").own.moved == 0
    turned = line("turned = x.transpose(0, 1)")
    assert [each.kind for each in turned.marks] == ["view"]
    assert turned.own.operations == 0
    assert [(each.shape, each.stride) for each in turned.tensors] == [((32, 64), (1, 32))]
    assert line("expand(64, 16, 32)").tensors[-1].stride == (32, 0, 1)
    assert [each.why for each in line("turned.reshape(-1)").marks if each.kind == "copy"] == [
        "non-contiguous by reshape"
    ]
    assert line("z.mul_(2)").own.allocated == 0
    matmul = line("y = x @ w")
    assert matmul.own.flops == 2 * 64 * 128 * 32
    assert matmul.own.intensity == 2 * 64 * 128 * 32 / (4 * (64 * 128 + 128 * 32 + 64 * 32))
    assert line("torch.relu(x)").own.intensity == 1 / 8
    assert line("torch.relu(x @ layer)").runs == 3
    assert line("torch.relu(x @ layer)").backward.flops > 0
    assert [each.kind for each in annotation.problems] == ["hidden copy"]


def test_the_thread_of_a_device_is_served_by_the_programs_line() -> None:
    """Autograd runs a GPU's nodes on a thread of its own, which has no frame of the program's."""
    import threading

    from trainledger.trace.annotate.source import Callers, Files

    callers = Callers(Files(__file__))
    found: list[object] = []
    worker = threading.Thread(target=eval(compile("lambda: found.append(callers.now())", "<engine>", "eval"), locals()))
    worker.start()
    worker.join()
    caller = found[0]
    assert caller is not None
    assert caller.file.endswith("test_annotate_scripts.py")  # type: ignore[attr-defined]
