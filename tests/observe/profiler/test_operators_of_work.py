"""Which operator launched a kernel, what it is a matmul of, and which collective: by ids, by time, by names."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from trainledger.observe.profiler.flops import multiplied
from trainledger.observe.profiler.kinds import OTHERS, SENDS, collectives
from trainledger.observe.profiler.profile import profile
from trainledger.observe.profiler.read import read_profile
from trainledger.observe.profiler.recording import NONE

TRACES = Path(__file__).parent / "traces"


@pytest.mark.parametrize("name", ["h100_qwen_forward", "mi300_resnet_checkpointed_ddp8", "a100_ddp_2ranks"])
def test_without_ids_of_operators_the_launch_says_by_its_time_who_made_it(name):
    """Older profilers give kernels and launches the number of the launch in the place of an operator's."""
    recording = read_profile(TRACES / f"{name}.json.gz")
    work, launches = (replace(each, operators=each.links + 10**9) for each in (recording.work, recording.launches))
    older = replace(recording, work=work, launches=launches)
    known = recording.operator_of_work != NONE
    agreed = older.operator_of_work[known] == recording.operator_of_work[known]
    assert known.mean() > 0.7
    assert agreed.mean() > 0.98
    assert profile(older).step.parts_ns == pytest.approx(profile(recording).step.parts_ns, rel=0.02)


def test_callers_are_the_innermost_operators_around():
    recording = read_profile(TRACES / "a100_ddp_2ranks.json.gz")
    operators, callers = recording.operators, recording.callers
    chosen = np.flatnonzero(callers != NONE)[::97]
    for at in chosen.tolist():
        lane = operators.lanes[:at] == operators.lanes[at]
        around = np.flatnonzero(lane & (operators.ends_ns[:at] > operators.begins_ns[at]))
        assert callers[at] == around[-1]


def written(folder: Path, events: list[dict]) -> Path:
    (folder / "trace.json").write_text(json.dumps({"traceEvents": events}))
    return folder / "trace.json"


def event(category: str, name: str, begin: float, length: float, lane: int, **args: object) -> dict:
    return {"ph": "X", "cat": category, "name": name, "tid": lane, "ts": begin, "dur": length, "args": args}


@pytest.mark.parametrize(
    ("around", "kind"),
    [
        ("## alltoall_fwd_single ##", "all-to-all"), ("nccl:send 0->1", SENDS), ("nccl:recv 0<-1", SENDS),
        ("forward", OTHERS), ("nccl:all_reduce", "all-reduce"),
    ],
)  # fmt: skip
def test_a_kernel_of_many_names_is_what_it_was_launched_in(tmp_path, around, kind):
    found = collectives(
        read_profile(
            written(
                tmp_path,
                [
                    event("user_annotation", around, 0, 50, 1),
                    event("cuda_runtime", "cudaLaunchKernel", 10, 5, 1, correlation=7),
                    event("kernel", "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t", 20, 90, 7, correlation=7, stream=7),
                ],
            )
        )
    )
    assert found.kinds == (kind,)


def test_matmuls_in_fp32_that_round_to_tf32_are_of_that_format(tmp_path):
    kernels = {"sm80_xmma_gemm_f32f32_tf32f32_f32_tn": "tf32", "ampere_sgemm_128x64_nn": "fp32"}
    events = []
    for at, name in enumerate(kernels):
        begin = 100 * at
        shapes = {"Input Dims": [[64, 32], [32, 16 + at]], "Input type": ["float", "float"]}
        events += [
            event("cpu_op", "aten::mm", begin, 50, 1, **{"External id": at + 1}, **shapes),
            event("cuda_runtime", "cudaLaunchKernel", begin + 10, 5, 1, correlation=at + 7, **{"External id": at + 1}),
            event("kernel", name, begin + 20, 30, 7, correlation=at + 7, stream=7, **{"External id": at + 1}),
        ]
    found = multiplied(read_profile(written(tmp_path, events)))
    assert [each.dtype for each in found.matmuls.values()] == list(kernels.values())
    assert [each.flops for each in found.matmuls.values()] == [2 * 64 * 32 * 16, 2 * 64 * 32 * 17]
