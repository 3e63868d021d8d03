from dataclasses import replace

import pytest

from trainledger import catalog
from trainledger.answers.load import load
from trainledger.forecast.predict.run import conditions
from trainledger.spec.calibration import Calibration

H100 = catalog.device("h100-sxm")


def run(**changes):
    recipe = {"seq_len": 1024, "global_batch": 64, "micro_batch": 1, "steps": 10}
    table = {"model": {"preset": "gpt2"}, "recipe": recipe, "cluster": {"device": "h100-sxm", "count": 64}}
    return load({**table, "layout": {"shard": 64}}, changes)


def test_what_the_run_file_says_goes_before_what_was_published():
    answer = conditions(run(), H100)
    assert answer.mtbf_seconds == pytest.approx(50677 * 3600 / 64)
    assert answer.restart_seconds == 660
    assert answer.storage_bytes_per_second == 64 * 122e6
    assert answer.host_bytes_per_second == H100.fabric.host.reached
    said = {"cluster.mtbf_device_hours": 6400, "cluster.restart_seconds": "2min",
            "cluster.storage_bytes_per_second": "5GB"}  # fmt: skip
    own = conditions(run(**said), H100)
    assert own.mtbf_seconds == 100 * 3600
    assert own.restart_seconds == 120
    assert own.storage_bytes_per_second == 5e9  # of all devices together
    assert own.notes == ()


def test_what_is_assumed_is_named_with_its_source():
    (note,) = conditions(run(), H100).notes
    assert note == (
        "assumed, since the run file does not say: an interruption every 50,677 device-hours "
        "[Llama 3 (arXiv 2407.21783)]; 11 min to restart [Lablup 2026 (arXiv 2605.09370)]; "
        "checkpoints at 122 MB/s for each device [Llama 3 (arXiv 2407.21783)]; [cluster] has fields to set them"
    )
    (more,) = conditions(run(**{"recipe.compile": True}), H100).notes
    assert "19.37 s to compile [vllm-project/vllm#11005]" in more


def test_a_machine_that_was_measured_has_its_own_storage_and_no_failures():
    machine = Calibration(
        title="a machine", backend="cpu", date="2026-01-01", torch_version="2", threads=1, kernels=(),
        storage_bytes_per_second=3e8,
    )  # fmt: skip
    answer = conditions(run(), machine)
    assert (answer.storage_bytes_per_second, answer.mtbf_seconds, answer.notes) == (3e8, None, ())
    (compiling,) = conditions(run(**{"recipe.compile": True}), machine).notes
    assert compiling == "compilation is not included: its time was not measured here"
    own = conditions(run(**{"cluster.mtbf_device_hours": 64, "cluster.storage_bytes_per_second": "1GB"}), machine)
    assert (own.storage_bytes_per_second, own.mtbf_seconds) == (1e9, 3600.0)


def test_every_published_number_has_a_source_and_a_device_of_the_catalog():
    known = {name: catalog.published(name) for name in catalog.device_names()}
    rates = {name for name, found in known.items() if any(each.name == "mtbf_device_hours" for each in found)}
    assert rates == {"h100-sxm", "a100-sxm-40gb", "a100-sxm-80gb", "b200"}
    for found in known.values():
        assert len({each.name for each in found}) == len(found)
        assert all(each.value > 0 and each.source and each.date and each.what for each in found)
    assert conditions(run(), replace(H100, published=())).mtbf_seconds is None
