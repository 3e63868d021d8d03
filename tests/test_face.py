"""The Python face: one flat list of names, each imported when it is used."""

import subprocess
import sys

import pytest

import trainledger as tl
from models import spec_of
from trainledger.answers.machine import machine_of

RECIPE = {"seq_len": 128, "global_batch": 4, "steps": 10}


def fresh(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


def test_importing_the_package_imports_nothing_heavy():
    done = fresh(
        "import trainledger, sys; bad = {'torch', 'numpy', 'rich', 'argparse'} & set(sys.modules); assert not bad, bad"
    )
    assert done.returncode == 0, done.stderr


def test_the_test_of_light_imports_can_fail():
    done = fresh("import trainledger, numpy, sys; bad = {'torch', 'numpy'} & set(sys.modules); assert not bad, bad")
    assert "AssertionError: {'numpy'}" in done.stderr


@pytest.mark.parametrize("name", sorted(tl._WHERE))
def test_every_public_name_is_there(name):
    if name in ("inspect", "meter", "trace"):
        pytest.importorskip("torch")
    assert name in dir(tl)
    assert callable(getattr(tl, name))


def test_a_name_that_is_also_a_room_stays_the_function():
    rooms = "import trainledger.observe.reconcile, trainledger.forecast.predict.forecast"
    done = fresh(f"{rooms}; import trainledger as tl; assert callable(tl.reconcile); assert callable(tl.predict)")
    assert done.returncode == 0, done.stderr


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'trainledger' has no attribute 'nothing'"):
        _ = tl.nothing


def test_load_from_a_dict_and_from_a_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[model]\npreset = "gpt2"\n[recipe]\nseq_len = 128\nglobal_batch = 4\nsteps = 10\n')
    changes = {"recipe.micro_batch": 2, "model.n_layers": 3}
    run = tl.load(path, changes)
    assert run == tl.load(str(path), ["recipe.micro_batch=2", "model.n_layers=3"])
    assert run == tl.load({"model": {"preset": "gpt2"}, "recipe": RECIPE}, changes)
    assert (run.model.d_model, run.model.n_layers, run.grad_accum) == (768, 3, 2)


def test_preset_device_and_fields_are_wrong_in_one_go():
    with pytest.raises(tl.InvalidInput) as caught:
        tl.load({"model": {"preset": "gtp2"}, "recipe": {**RECIPE, "seed": -1}, "cluster": {"device": "h200x"}})
    assert [each.field for each in caught.value.problems] == ["model.preset", "recipe.seed", "cluster.device"]


def test_load_of_a_hugging_face_config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(
        '{"model_type": "gpt2", "vocab_size": 300, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}'
    )
    run = tl.load({"model": {"config": str(path), "n_layers": 3}, "recipe": RECIPE})
    assert (run.model.vocab_size, run.model.d_model, run.model.n_layers, run.model.positions.kind) == (
        300,
        64,
        3,
        "learned",
    )
    with pytest.raises(tl.InvalidInput):
        tl.load({"model": {"config": str(tmp_path / "nothing.json")}, "recipe": RECIPE})


def test_model_of_the_catalog_with_changes():
    assert tl.model("gpt2", n_layers=1).n_layers == 1
    with pytest.raises(tl.InvalidInput, match="nearest that works: 12"):
        tl.model("gpt2", **{"attention.n_heads": 11})


def test_the_machine_of_a_run_is_the_catalogs_or_none_before_it_was_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TRAINLEDGER_CALIBRATION", raising=False)
    source = {"model": {"preset": "gpt2"}, "recipe": RECIPE}
    assert tl.device_of(tl.load(source, {"cluster.device": "l4"})) == tl.device("l4")
    assert tl.device_of(tl.load(source)) is None
    with pytest.raises(
        tl.InvalidInput, match=r"cluster.device = 'l40x': is not in the catalog; nearest that works: l40"
    ):
        tl.load(source, {"cluster.device": "l40x"})


def test_the_machine_of_a_run_is_its_calibration_once_measured(tmp_path, monkeypatch):
    from trainledger.spec.calibration import Calibration, KernelTime, calibration_path, write_calibration

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TRAINLEDGER_CALIBRATION", raising=False)
    matmul = KernelTime(kind="matmul", dtype="fp32", shape=(8, 8, 8), flops=1024, nbytes=768, seconds=1e-6)
    measured = Calibration(
        title="a processor", backend="cpu", date="2026-01-01", torch_version="2.13.0", threads=2, kernels=(matmul,)
    )
    write_calibration(measured, calibration_path("cpu"))
    run = tl.load({"model": {"preset": "gpt2"}, "recipe": RECIPE})
    assert machine_of(run) == measured
    device = tl.device_of(run)
    assert device.peak_flops_per_second == {"fp32": pytest.approx(1.024e9)}
    assert device.basis == "measured"


def test_an_account_of_fields_that_contradict_each_other_is_refused() -> None:
    from trainledger.spec.layout import Layout

    model = spec_of(V=64, D=64, L=2, H=4, F=128, T=64)
    batch = {"seq_len": 16, "steps": 1}
    with pytest.raises(tl.InvalidInput, match=r"recipe\.global_batch"):
        tl.account(tl.Run(model=model, recipe=tl.Recipe(global_batch=3, micro_batch=2, **batch)))
    spread = tl.Run(model=model, recipe=tl.Recipe(global_batch=4, **batch), layout=Layout(tensor=3))
    with pytest.raises(tl.InvalidInput, match=r"layout\.tensor = 3"):
        tl.account(spread)
    assert tl.account(tl.Run(model=model, recipe=tl.Recipe(global_batch=4, **batch), layout=Layout(tensor=2))).flops
    nonsense = tl.Run(model=model, recipe=tl.Recipe(global_batch=4, precision="nope", **batch))
    with pytest.raises(tl.InvalidInput, match="precision"):
        tl.account(nonsense)


def test_an_account_takes_the_kernels_of_the_runs_device() -> None:
    table = {"model": {"preset": "gpt2"}, "recipe": {"seq_len": 64, "global_batch": 1, "steps": 1}}
    ours = tl.account(tl.load({**table, "cluster": {"device": "h100-sxm"}}))
    here = tl.account(tl.load(table), backend="cpu")
    assert len(ours) < len(here)  # an update of the optimizer, and of clipping, is one kernel there
    assert any("efficient_attention" in each.name for each in ours)
    assert any(each.name.endswith("for_cpu") for each in here)


def test_a_traceback_ends_with_the_sentence_alone() -> None:
    done = fresh("""
import pickle, trainledger as tl
try:
    tl.plan("gpt2", device="h100", count=0)
except tl.InvalidInput as error:
    raise pickle.loads(pickle.dumps(error))
""")
    *above, last = done.stderr.splitlines()
    assert last == "trainledger.InvalidInput: cluster.count = 0: must be at least 1; nearest that works: 1"
    assert not any("During handling" in each for each in above)
    error = tl.InvalidInput([tl.Problem("a", 1, "must be 2")])
    assert error._render_traceback_() == ["InvalidInput: a = 1: must be 2"]  # in a notebook


WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("numpy", "yaml", "rich"):
            raise ModuleNotFoundError(name=name)
sys.meta_path.insert(0, Missing())
import trainledger as tl
from trainledger.cli import main
"""


def test_the_core_answers_without_numpy_yaml_and_rich():
    """As in a browser, where the wheel does not require them."""
    code = """
assert tl.napkin(params="70B", tokens="15T", device="h100-sxm", count=1024, mfu=0.5).days > 143
assert tl.plan("gpt2", device="h100-sxm").forecast.step_seconds
assert tl.plan("llama-3-8b", {"layout.shard": 4, "layout.tensor": 2}, device="h100-sxm", count=8).forecast.step_seconds
assert tl.account("gpt2").peak().nbytes and tl.parameters(tl.model("gpt2")).total == 124439808
assert "gpt2-xl" in str(tl.compare("gpt2", "gpt2-xl", device="h100-sxm"))
assert len(tl.compare("gpt2", over="recipe.precision", device="h100-sxm").rows) > 10
assert "<table" in tl.optimal(flops="1e21")._repr_html_()
for words in (["einsum", "ij,jk->ik", "4,5", "5,6"], ["tensor", "fp32[4,8]", "t"], ["dtype", "bf16"], ["rules", "gpt2"],
              ["explain", "memory", "gpt2"], ["breaks", "gpt2", "--device", "h100-sxm"], ["catalog", "h200"]):
    assert main(words) == 0, words
assert main(["layouts", "llama-3-8b", "--device", "h100-sxm", "--count", "8"]) == 2
try:
    tl.layouts("llama-3-8b", device="h100-sxm", count=8)
except tl.InvalidInput as error:
    print(error, file=sys.stderr)
assert not {"numpy", "yaml", "rich"} & set(sys.modules)
"""
    done = fresh(WITHOUT + code)
    assert done.returncode == 0, done.stderr[-2000:]
    sentence = "is searched for with numpy, which is not installed"
    assert done.stderr.count(sentence) == 2
