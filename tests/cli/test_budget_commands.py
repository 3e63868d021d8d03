"""The verbs lock and check on run files, in a directory of their own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainledger.answers.budgets.lockfile import read_lock
from trainledger.answers.load import load
from trainledger.cli import main
from trainledger.ledger.step import account

RUN = """
[model]
vocab_size = 256
d_model = 32
n_layers = 2
attention.n_heads = 4
feed_forward.d_ff = 64
max_seq_len = 32
[recipe]
seq_len = 32
global_batch = 8
micro_batch = 2
steps = 10
"""
SPREAD = RUN + '[layout]\nshard = 2\n[cluster]\ndevice = "h100-sxm"\ncount = 2\n'


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 2
    return capsys.readouterr().err


def test_a_run_file_alone(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without targets it is run.toml; the figures are those of the closed form."""
    assert main(["lock"]) == 0
    assert "run.toml" in capsys.readouterr().out
    ledger = account(load("run.toml"))
    totals = read_lock(project / "trainledger.lock")["run.toml"].summary.totals
    assert totals["parameters"] == ledger.parameters
    assert totals["flops"] == ledger.flops
    assert totals["model_flops"] == ledger.model_flops
    assert totals["kept"] == ledger.kept_nbytes
    assert totals["peak"] == ledger.peak().nbytes
    written = (project / "trainledger.lock").read_bytes()
    assert main(["lock"]) == 0
    assert (project / "trainledger.lock").read_bytes() == written
    assert main(["check"]) == 0
    assert capsys.readouterr().out.endswith("run.toml: as locked (5 figures)\n")


def test_more_fails_and_less_is_reported(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["lock"])
    capsys.readouterr()
    (project / "run.toml").write_text(RUN.replace("d_ff = 64", "d_ff = 96"))
    assert main(["check"]) == 1
    printed = capsys.readouterr().out
    # Of 2 layers x 64 tokens x 32 more columns in fp32, gate and up keep one matrix each, silu and the product another.
    assert "kept +32.77 kB at layers.*.mlp (mul, silu)\nkept +16.38 kB at layers.*.mlp.gate_proj (mm)\n" in printed
    assert max(len(line) for line in printed.splitlines()) <= 80
    (project / "run.toml").write_text(RUN.replace("d_ff = 64", "d_ff = 48"))
    assert main(["check"]) == 0
    assert "To lock the lower figures: `trainledger lock run.toml`." in capsys.readouterr().out
    assert main(["check", "--tight"]) == 1
    assert main(["lock", "--json"]) == 0
    capsys.readouterr()
    assert main(["check", "--tight"]) == 0


def test_tolerances_of_the_command_line(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["lock"])
    (project / "run.toml").write_text(RUN.replace("seq_len = 32", "seq_len = 31"))
    assert main(["check"]) == 0  # shorter: less
    (project / "run.toml").write_text(RUN.replace("micro_batch = 2", "micro_batch = 4"))
    assert main(["check", "--allow", "kept=100%"]) == 1
    assert main(["check", "--allow", "kept=101%", "--allow", "peak=1MB"]) == 0
    assert "--allow.kep = '1%': is not a quantity" in refused(["check", "--allow", "kep=1%"], capsys)


def test_json(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lock", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["targets"]["run.toml"]["state"] == "new"
    assert answer["targets"]["run.toml"]["totals"]["parameters"] == account(load("run.toml")).parameters
    assert main(["check", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    (project / "run.toml").write_text(RUN.replace("n_layers = 2", "n_layers = 3"))
    assert main(["check", "--json"]) == 1
    (target,) = json.loads(capsys.readouterr().out)["targets"]
    assert target["ok"] is False
    judged = {row["quantity"]: row for row in target["rows"] if not row["part"]}
    assert {row["verdict"] for row in judged.values()} == {"more"}
    for quantity in ("kept", "flops"):
        assert (
            sum(each["change"] for each in target["moves"] if each["quantity"] == quantity)
            == judged[quantity]["change"]
        )


def test_collectives_of_a_layout(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "run.toml").write_text(SPREAD)
    assert main(["lock"]) == 0
    entries = [each for each in account(load("run.toml"), backend="cuda") if each.kind == "collective"]
    locked = read_lock(project / "trainledger.lock")["run.toml"].summary.collectives
    assert sum(each.count for each in locked.values()) == sum(each.times for each in entries) > 0
    assert sum(each.payload for each in locked.values()) == sum(each.payload * each.times for each in entries)
    (project / "run.toml").write_text(SPREAD.replace("global_batch = 8", "global_batch = 16"))
    capsys.readouterr()
    assert main(["check"]) == 1
    out = capsys.readouterr().out
    assert "all_gather" in out
    assert "reduce_scatter" in out


def test_the_engines_own_step(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By trace the same run has the same parameters, kept bytes and model FLOPs: the first invariant, from a lock."""
    (project / "pyproject.toml").write_text(
        '[tool.trainledger.targets]\nclosed = { run = "run.toml" }\ntraced = { run = "run.toml", by = "trace" }\n'
    )
    assert main(["lock"]) == 0
    locked = read_lock(project / "trainledger.lock")
    closed, traced = locked["closed"].summary, locked["traced"].summary
    for name in ("parameters", "model_flops", "kept"):
        assert closed.totals[name] == traced.totals[name]
    kept = [{each.key: each.amount("kept") for each in found.places if each.kept} for found in (closed, traced)]
    assert kept[0] == kept[1]
    assert "torch" in locked["traced"].versions
    assert "torch" not in locked["closed"].versions
    (project / "run.toml").write_text(SPREAD)
    assert "leave [layout] out, or lock traced in closed form" in refused(["lock", "traced"], capsys)


def test_a_lock_that_does_not_fit(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not there; `trainledger lock` writes it" in refused(["check"], capsys)
    targets = '[tool.trainledger.targets]\na = { run = "run.toml" }\n'
    (project / "pyproject.toml").write_text(targets)
    main(["lock"])
    (project / "pyproject.toml").write_text(targets.replace("a =", "b ="))
    sentence = refused(["check"], capsys)
    assert (
        "targets.a: is locked, but pyproject.toml has no such target now; `trainledger lock` takes it out" in sentence
    )
    assert "targets.b: is not in trainledger.lock; `trainledger lock b` adds it" in sentence
    assert "target = 'c': is not in trainledger.lock" in refused(["check", "c"], capsys)
    assert "targets.b: is not in trainledger.lock" in refused(["check", "b"], capsys)
    assert main(["lock"]) == 0
    assert "a is no longer a target and was removed" in capsys.readouterr().out
    assert set(read_lock(project / "trainledger.lock")) == {"b"}
    (project / "trainledger.lock").write_text("format = 7")
    assert "use the version that wrote it" in refused(["check"], capsys)
    assert "use the version that wrote it" in refused(["lock"], capsys)


def test_a_lock_that_is_a_link_stays_one(project: Path) -> None:
    (project / "locks").mkdir()
    (project / "trainledger.lock").symlink_to("locks/mine.lock")
    for _ in range(2):
        assert main(["lock"]) == 0
        assert (project / "trainledger.lock").is_symlink()
        assert list(read_lock(project / "locks/mine.lock")) == ["run.toml"]
    assert main(["check"]) == 0


def test_a_run_file_that_went(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "other.toml").write_text(RUN)
    main(["lock", "run.toml", "other.toml"])
    (project / "other.toml").unlink()
    assert "there is no file other.toml now" in refused(["check"], capsys)
    assert main(["check", "run.toml"]) == 0
    assert main(["lock"]) == 0
    assert set(read_lock(project / "trainledger.lock")) == {"run.toml"}


def test_another_target_of_the_same_name_fails(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Figures of another input are no comparison, even where they are less."""
    targets = '[tool.trainledger.targets]\na = { run = "run.toml", set = "recipe.micro_batch=2" }\n'
    (project / "pyproject.toml").write_text(targets)
    main(["lock"])
    (project / "pyproject.toml").write_text(targets.replace("batch=2", "batch=1"))
    capsys.readouterr()
    assert main(["check"]) == 1
    out = capsys.readouterr().out
    assert "a: is no longer the target that was locked" in out
    assert "set was locked as recipe.micro_batch=2 and is now recipe.micro_batch=1" in out


def test_what_cannot_be_locked(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "auto.toml").write_text(RUN + '[layout]\nauto = true\n[cluster]\ndevice = "h100-sxm"\ncount = 2\n')
    assert "is a search, which may find another layout tomorrow" in refused(["lock", "auto.toml"], capsys)
    assert "target = 'runn': is no target of pyproject.toml" in refused(["lock", "runn"], capsys)
    assert "cannot be read" in refused(["lock", "none.toml"], capsys)
    assert "--input: says what one target is" in refused(["lock", "--input", "int64[8]"], capsys)
    assert "run.toml.input = ('int64[8]',): is for a target with module or hf" in refused(
        ["lock", "run.toml", "--input", "int64[8]"], capsys
    )
    assert "model.attention.n_heads" in refused(["lock", "run.toml", "--set", "model.attention.n_heads=5"], capsys)
    (project / "run.toml").unlink()
    assert "has no target to lock" in refused(["lock"], capsys)
    assert not (project / "trainledger.lock").exists()


def test_other_targets_stay_as_they_were_locked(project: Path) -> None:
    (project / "other.toml").write_text(RUN)
    main(["lock", "run.toml", "other.toml"])
    before = read_lock(project / "trainledger.lock")
    for name in ("run.toml", "other.toml"):
        (project / name).write_text(RUN.replace("d_ff = 64", "d_ff = 96"))
    main(["lock", "other.toml"])
    after = read_lock(project / "trainledger.lock")
    assert after["run.toml"] == before["run.toml"]
    assert after["other.toml"] != before["other.toml"]


def test_this_machines_measurements_do_not_move_a_lock(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A laptop with a measured GPU and a CI machine without one lock the same."""
    main(["lock"])
    monkeypatch.setattr("trainledger.answers.machine.kernels_of", lambda run: "cuda")
    assert main(["check", "--tight"]) == 0


def test_modules_are_refused_with_the_names_of_their_fields(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "budget_model_a.py").write_text("from torch import nn\n\ndef build():\n    return nn.Linear(4, 4)\n")
    targets = '[tool.trainledger.targets]\na = { module = "budget_model_a:build", input = "fp32[2,4]", loss = "sum" }\n'
    for old, new, sentence in (
        ("model_a:build", "model_z:build", "targets.a.module = 'budget_model_z:build': no module 'budget_model_z'"),
        ("model_a:build", "model_a:bild", "has no 'bild'; nearest that works: build"),
        ("fp32[2,4]", "fp32[2,5]", "targets.a.input"),
        ("fp32[2,4]", "fp33[2,4]", "targets.a.input = 'fp33': is not a number format that torch knows"),
        ("sum", "summ", "targets.a.loss = 'summ'"),
        ("sum", "sum', step = 'adamq", "targets.a.step = 'adamq'"),
    ):
        (project / "pyproject.toml").write_text(targets.replace(old, new).replace("'", '"'))
        assert sentence in refused(["lock"], capsys).replace('"', "'"), new
    (project / "pyproject.toml").write_text(targets)
    assert main(["lock"]) == 0
    assert main(["check", "--tight"]) == 0


NOISY = """
import torch
from torch import nn

print("what a module says while it is imported")


@torch.library.custom_op("budget_test::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


twice.register_fake(torch.empty_like)


class Model(nn.Module):
    def forward(self, x):
        y = twice(x)
        return y if y.sum().item() else y
"""


def test_what_a_module_says_and_what_is_not_known_of_it(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own output goes to standard error; guesses and operations without a rule are reported with their lines."""
    (project / "budget_model_c.py").write_text(NOISY)
    call = ["budget_model_c:Model", "--input", "fp32[3,8]", "--step", "forward"]
    assert main(["lock", *call, "--json"]) == 0
    printed = capsys.readouterr()
    notes = json.loads(printed.out)["notes"]
    assert "what a module says" in printed.err
    assert any("read at budget_model_c.py:19" in each for each in notes)
    assert any("twice at budget_model_c.py:18 has no rule" in each for each in notes)
    locked = read_lock(project / "trainledger.lock")["budget_model_c:Model"]
    assert sum(locked.summary.uncounted.values()) == 1
    assert locked.target.step == "forward"
    assert main(["check", "--json"]) == 0
    (checked,) = json.loads(capsys.readouterr().out)["targets"]
    assert [f"budget_model_c:Model: {each}" for each in checked["notes"]] == notes
    assert main(["check"]) == 0


@pytest.mark.parametrize("where", ["import", "building", "forward"])
def test_a_module_that_ends_the_process_is_no_success(where, project, capsys):
    """Exit code 0 of a script that was named by mistake must not be that of a check."""
    ends = {each: "sys.exit(0)" if each == where else "pass" for each in ("import", "building", "forward")}
    (project / f"budget_model_{where}.py").write_text(
        f"import sys\nfrom torch import nn\n\n{ends['import']}\n\n\nclass Model(nn.Module):\n"
        f"    def __init__(self):\n        super().__init__()\n        {ends['building']}\n\n"
        f"    def forward(self, x):\n        {ends['forward']}\n        return x + 1\n"
    )
    sentence = refused(["lock", f"budget_model_{where}:Model", "--input", "fp32[2]", "--step", "forward"], capsys)
    assert "ended the process" in sentence or "SystemExit" in sentence


def test_a_step_that_cannot_be_traced_whole_is_not_locked(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "budget_model_e.py").write_text(
        "from torch import nn\n\n\nclass Model(nn.Linear):\n    def __init__(self):\n        super().__init__(4, 4)\n\n"
        "    def forward(self, x):\n        y = super().forward(x)\n"
        "        return y * (y > 0).flatten().long().bincount().sum()\n"
    )
    sentence = refused(["lock", "budget_model_e:Model", "--input", "fp32[2,4]", "--loss", "sum"], capsys)
    assert "is traced only in part, and a part has no total" in sentence
    assert "budget_model_e.py:10" in sentence
    assert not (project / "trainledger.lock").exists()


PROGRAM = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters()), torch.zeros(8, 64), lambda output: output.sum()
"""


def test_collectives_of_a_program_of_many_ranks(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """64 ranks of FSDP2: of each layer two gathers and one reduction, the bytes those of all its parameters."""
    (project / "budget_model_f.py").write_text(PROGRAM)
    assert main(["lock", "budget_model_f:main", "--world-size", "64"]) == 0
    found = read_lock(project / "trainledger.lock")["budget_model_f:main"].summary
    layers = 4 * (64 * 256 + 256), 4 * (256 * 64 + 64)
    assert {kind: (each.count, each.payload) for kind, each in found.collectives.items()} == {
        "all_gather over shard": (4, 2 * sum(layers)), "reduce_scatter over shard": (2, sum(layers)),
    }  # fmt: skip
    # Gathered once instead of twice: less is sent, and the gathered parameters are kept. Told with its line.
    (project / "budget_model_g.py").write_text(PROGRAM.replace("forward=True", "forward=False"))
    lock = (project / "trainledger.lock").read_text()
    (project / "trainledger.lock").write_text(lock.replace("budget_model_f", "budget_model_g"))
    capsys.readouterr()
    assert main(["check"]) == 1
    printed = capsys.readouterr().out
    assert "budget_model_g.py:14\n    fully_shard(layer, mesh=mesh, reshard_after_forward=False)\n" in printed
    assert "--world-size" in refused(["lock", "a:b", "c:d", "--world-size", "4"], capsys)
    (project / "budget_model_h.py").write_text("def main():\n    return 3\n")
    printed = refused(["lock", "budget_model_h:main", "--world-size", "4"], capsys)
    assert "targets.budget_model_h:main.module" in printed


def test_a_lock_takes_words_as_trace_does(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first input without a name is the model's main one, beside others that have one."""
    config = {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 64, "n_positions": 16, "n_embd": 8,
        "n_layer": 1, "n_head": 2,
    }  # fmt: skip
    (project / "config.json").write_text(json.dumps(config))
    words = ["--input", "int64[2,8]", "--input", "attention_mask=int64[2,8]", "--step", "sgd"]
    assert main(["trace", "--hf", "config.json", *words, "--json"]) == 0
    traced = json.loads(capsys.readouterr().out)
    assert main(["lock", "config.json", *words]) == 0
    totals = read_lock(project / "trainledger.lock")["config.json"].summary.totals
    assert (totals["parameters"], totals["flops"]) == (traced["parameters"], traced["flops"])
    assert "labels of shape [2, 8] are given to it" in capsys.readouterr().out
    assert main(["check"]) == 0


def test_memory_in_cycles_is_reported_the_same_whenever_it_is_collected(project: Path) -> None:
    import gc

    (project / "budget_model_b.py").write_text(
        "import torch\nfrom torch import nn\n\n\n"
        "class Cycle(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.up = nn.Linear(8, 8)\n\n"
        "    def forward(self, x):\n        h = self.up(x)\n        ring = [h * 2]\n        ring.append(ring)\n"
        "        return h.exp()\n"
    )
    before = gc.get_threshold()
    locks = []
    try:
        for most in (1, 10**6):
            gc.set_threshold(most)
            assert main(["lock", "budget_model_b:Cycle", "--input", "fp32[3,8]", "--loss", "sum"]) == 0
            locks.append((project / "trainledger.lock").read_bytes())
            (project / "trainledger.lock").unlink()
    finally:
        gc.set_threshold(*before)
    assert locks[0] == locks[1]
    assert gc.isenabled()


def test_run_files_need_no_torch(project: Path) -> None:
    code = (
        "import sys\nfrom trainledger.cli import main\n"
        "assert main(['lock']) == 0 and main(['check']) == 0\nprint('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=project, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n")
