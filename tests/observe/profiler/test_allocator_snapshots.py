"""Snapshots of CUDA's caching allocator: the peak against the account of the same step, and what is refused."""

import gzip
import os
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import trainledger as tl
from trainledger.answers.pages.allocator import page
from trainledger.observe.profiler.allocator import BEFORE, allocator_peak, origin_of

H200 = Path(__file__).parent / "snapshots" / "h200_gpt2_two_steps.pickle.gz"
MEASURED_PEAK_NBYTES = 9_880_190_464  # torch.cuda.max_memory_allocated(), which counts blocks


@pytest.fixture(scope="module")
def account():
    recipe = {"seq_len": 1024, "global_batch": 8, "steps": 1, "precision": "bf16-mixed"}
    return tl.account(tl.load({"model": {"preset": "gpt2"}, "recipe": recipe}), backend="sm90").peak()


def test_the_peak_of_a_gpu_is_that_of_the_account(account):
    found, told = allocator_peak(H200).by_category, account.by_category
    assert found["parameters"] == told["parameters"] == 497_759_232
    assert found["optimizer state"] == told["optimizer state"]
    # Autograd's copies of the logits have no stack.
    assert found["logits and loss"] + found["backward"] == told["logits and loss"]
    assert found["activations"] == told["activations"]
    assert found["other"] == told["batch"]
    assert found[BEFORE] == 69_206_016  # cuBLAS' workspace of another model, 66 MiB
    assert sum(found.values()) == allocator_peak(H200).nbytes


def test_blocks_are_a_little_larger_than_what_was_asked_for():
    found = allocator_peak(H200)
    assert found.nbytes < MEASURED_PEAK_NBYTES < 1.01 * found.nbytes
    assert found.nbytes < found.reserved_nbytes <= found.most_reserved_nbytes
    assert found.during == ""  # in backward, which is no annotation
    assert found.doubts == ()


def test_lines_are_those_of_the_program():
    sites = allocator_peak(H200).sites
    assert sites[0].category == "backward"
    assert {each.line for each in sites if each.category == "optimizer state"} == {"train/step.py:213"}
    assert all(each.count > 0 and each.nbytes > 0 for each in sites)


def test_the_document_sets_the_forecast_beside_it(account):
    made = page(allocator_peak(H200), account.by_category)
    assert made.data()["predicted_by_category"]["parameters"] == 497_759_232
    (table,) = [part for each in made.sections for part in each.parts if getattr(part, "name", "") == "categories"]
    parameters = next(row for row in table.rows if row[0] == "parameters")
    assert parameters[1:] == (497_759_232, 497_759_232, 0)


def written(tmp_path, data, packed=False):
    path = tmp_path / "snapshot.pickle"
    whole = pickle.dumps(data)
    path.write_bytes(gzip.compress(whole) if packed else whole)
    return path


def event(action, address, size, at=0):
    return {"action": action, "addr": address, "size": size, "time_us": at, "stream": 0, "frames": []}


class Runs:
    def __reduce__(self):
        return os.system, ("touch /tmp/trainledger-was-here",)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (Runs(), "is no pickle of plain data: it names posix.system"),
        ({"device_traces": [[Path("x")]]}, "is no pickle of plain data: it names pathlib"),
        ([1, 2], "is no snapshot of CUDA's allocator"),
        ({"segments": []}, "is no snapshot of CUDA's allocator"),
        ({"device_traces": [[]], "segments": []}, "has no events: record them with"),
        ({"device_traces": [[{"action": "alloc"}]], "segments": []}, "is damaged: KeyError 'addr'"),
    ],
)
def test_what_is_refused(tmp_path, data, sentence):
    Path("/tmp/trainledger-was-here").unlink(missing_ok=True)
    with pytest.raises(tl.InvalidInput, match=sentence):
        allocator_peak(written(tmp_path, data))
    assert not Path("/tmp/trainledger-was-here").exists()


@given(st.integers(0, 2000))
def test_a_file_that_breaks_off_is_refused(tmp_path_factory, length):
    path = tmp_path_factory.getbasetemp() / "broken.pickle"
    whole = gzip.decompress(H200.read_bytes())
    path.write_bytes(whole[: len(whole) * length // 2001])
    with pytest.raises(tl.InvalidInput):
        allocator_peak(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(tl.InvalidInput, match="cannot be read: No such file or directory"):
        allocator_peak(tmp_path / "none.pickle")


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 2**34)), min_size=1, max_size=60), st.data())
def test_the_peak_is_the_most_that_is_live(tmp_path_factory, moves, data):
    live, events, now, most = {}, [], 0, 0
    for number, (frees, size) in enumerate(moves):
        if frees and live:
            address = data.draw(st.sampled_from(sorted(live)))
            events.append(event("free_completed", address, live.pop(address)))
        else:
            live[number] = size
            events.append(event("alloc", number, size))
        now = sum(live.values())
        most = max(most, now)
    blocks = [{"state": "active_allocated", "requested_size": size, "size": size} for size in live.values()]
    blocks.append({"state": "active_allocated", "requested_size": 77, "size": 512})  # there before the recording
    segments = [{"device": 0, "total_size": 2**40, "blocks": blocks}]
    path = written(tmp_path_factory.getbasetemp(), {"device_traces": [events], "segments": segments}, packed=True)
    found = allocator_peak(path)
    assert found.nbytes == most + 77
    assert found.by_category[BEFORE] == 77
    assert found.end_nbytes == now + 77


def frame(name, file, line=1):
    return {"name": name, "filename": file, "line": line}


@pytest.mark.parametrize(
    ("frames", "origin"),
    [
        ([], ("backward", "")),
        ([frame("forward", "/usr/lib/python3.12/site-packages/torch/nn/modules/linear.py"),
          frame("forward", "/home/me/model.py", 7)], ("activations", "me/model.py:7")),
        ([frame("_init_group", "/x/site-packages/torch/optim/adam.py"),
          frame("step", "/x/site-packages/torch/optim/adam.py"),
          frame("train", "/home/me/train.py", 9)], ("optimizer state", "me/train.py:9")),
        ([frame("cross_entropy", "/x/site-packages/torch/nn/functional.py"), frame("train", "/home/me/train.py", 8)],
         ("logits and loss", "me/train.py:8")),
        ([frame("__init__", "/x/site-packages/torch/nn/modules/linear.py"), frame("main", "/home/me/train.py", 3)],
         ("parameters", "me/train.py:3")),
        ([frame("get_batch", "/home/me/train.py", 5)], ("other", "me/train.py:5")),
    ],
)  # fmt: skip
def test_what_memory_is_for(frames, origin):
    assert tuple(origin_of(frames)) == origin
