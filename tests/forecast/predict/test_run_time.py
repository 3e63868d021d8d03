import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainledger.forecast.predict.run import Conditions, daly, expected_seconds, occasions, run_time
from trainledger.spec.cluster import Cluster
from trainledger.spec.layout import Layout
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run

MODEL = from_fields(
    ModelSpec,
    {"vocab_size": 16, "d_model": 8, "n_layers": 1, "attention.n_heads": 2, "feed_forward.d_ff": 16, "max_seq_len": 8},
)


def run(count=1, layout=None, **recipe):
    fields = {"seq_len": 8, "global_batch": 4, "steps": 10, "evaluation.sequences": 8, **recipe}
    return Run(model=MODEL, recipe=from_fields(Recipe, fields), cluster=Cluster(count=count), layout=layout or Layout())


def test_a_run_is_its_steps_its_evaluations_and_its_checkpoints():
    whole = run_time(
        run(count=2, **{"evaluation.every": 4, "checkpoints.every": 5}), 3.0, forward_seconds=1.0,
        checkpoint_nbytes=10_000,
        conditions=Conditions(storage_bytes_per_second=5000.0),
    )  # fmt: skip
    # Evaluations after steps 4, 8 and 10, each of 8 sequences where a step's forward has 4; checkpoints after 5 and 10.
    # Two devices share all but the saving.
    assert whole.steps_seconds == 15.0
    assert whole.parts == {"data": 0.0, "evaluation": 3.0, "warm-up": 0.0, "checkpoints": 4.0}
    assert whole.total_seconds == 22.0
    assert whole.goodput == 15 / 22
    assert whole.tokens_per_second == 2 * 32 / 3
    assert whole.notes == (
        "assuming that 2 devices share the work without loss: the run has no [layout]; --set layout=auto looks for one",
        "micro_batch is not given: assuming that each device holds all 4 sequences at once; "
        "--set recipe.micro_batch=1 splits them",
    )


def test_ranks_evaluate_whole_sequences():
    # 9 sequences on 4 ranks take as long as 12; a step's 4 take one second.
    whole = run_time(run(count=4, layout=Layout(shard=4), **{"evaluation.sequences": 9}), 3.0, forward_seconds=1.0)
    assert whole.parts["evaluation"] == 3.0
    assert whole.step_seconds == 3.0


@pytest.mark.parametrize(("every", "times"), [(None, 1), (4, 3), (5, 2), (10, 1), (20, 1)])
def test_the_end_of_a_run_counts_once(every, times):
    assert occasions(10, every) == times


def test_what_a_run_time_leaves_out_is_named():
    assert run_time(run(), 1.0).notes == (
        "evaluation is not included: the step is not split by phase",
        "checkpoints and failures are not included: the rate of the storage is not known "
        "(cluster.storage_bytes_per_second)",
    )


def test_a_step_waits_for_tokens_that_come_too_slowly():
    # A step has 32 tokens of two bytes; loaders bring 16 a second, or storage 8 bytes.
    for slow in (Conditions(loader_tokens_per_second=16.0), Conditions(storage_bytes_per_second=32.0)):
        held = run_time(run(), 1.5, conditions=slow)
        assert (held.parts["data"], held.waiting_seconds) == (10 * 0.5, 0.5)
        free = run_time(run(), 2.5, conditions=slow)
        assert (free.parts["data"], free.waiting_seconds) == (0.0, 0.0)


def test_an_evaluation_waits_for_the_same_loader():
    # Three evaluations of 8 sequences, 64 tokens or 128 bytes: computed in 2 s, read in 4 s.
    for slow in (Conditions(loader_tokens_per_second=16.0), Conditions(storage_bytes_per_second=32.0)):
        assert (
            run_time(run(**{"evaluation.every": 4}), 3.0, forward_seconds=1.0, conditions=slow).parts["evaluation"]
            == 3 * 4.0
        )
    enough = Conditions(loader_tokens_per_second=64.0, storage_bytes_per_second=128.0)
    assert (
        run_time(run(**{"evaluation.every": 4}), 3.0, forward_seconds=1.0, conditions=enough).parts["evaluation"]
        == 3 * 2.0
    )


def test_failures_cost_what_is_done_again_and_the_restarts():
    around = Conditions(mtbf_seconds=500.0, restart_seconds=7.0, storage_bytes_per_second=5000.0, compile_seconds=3.0)
    whole = run_time(run(steps=100, **{"checkpoints.every": 10}), 1.0, checkpoint_nbytes=10_000, conditions=around)
    # Ten intervals of 10 s, 2 s to save each; a restart takes 7 s, reading 2 s, and 3 s to compile again.
    mean = expected_seconds(100.0, 10.0, write=2.0, restart=12.0, mtbf=500.0)
    assert whole.parts["checkpoints"] == 20.0
    assert whole.parts["failures"] == pytest.approx(mean - 120.0)
    assert whole.parts["warm-up"] == 3.0
    assert whole.total_seconds == pytest.approx(mean + 3.0)
    assert whole.interruptions == pytest.approx(mean / 500.0)
    assert whole.checkpoint_every == 10


def test_where_the_run_file_is_silent_checkpoints_are_written_as_often_as_costs_least():
    around = Conditions(mtbf_seconds=1000.0, storage_bytes_per_second=1e4)
    whole = run_time(run(steps=10_000), 1.0, checkpoint_nbytes=10_000, conditions=around)
    assert whole.checkpoint_every == round(daly(1.0, 1000.0)) == 44
    assert whole.parts["checkpoints"] == 228.0  # after every 44 of 10,000 steps, and at the end
    assert whole.notes[-1] == (
        "assuming checkpoints every 44 steps (44 s), the interval that costs the least time (Daly 2006); "
        "--set recipe.checkpoints.every=44 makes it explicit"
    )
    others = [
        run_time(run(steps=10_000, **{"checkpoints.every": each}), 1.0, checkpoint_nbytes=10_000,
                 conditions=around) for each in (5, 20, 90, 400)
    ]  # fmt: skip
    assert all(whole.total_seconds < each.total_seconds for each in others)
    short = run_time(run(steps=20), 1.0, checkpoint_nbytes=10_000, conditions=around)
    assert (short.checkpoint_every, short.parts["checkpoints"]) == (None, 1.0)


def test_an_asynchronous_checkpoint_holds_the_run_up_for_its_copy_alone():
    around = Conditions(mtbf_seconds=1e6, storage_bytes_per_second=1e3, host_bytes_per_second=1e4)
    ways = [
        run_time(run(steps=100, **{"checkpoints.every": 20, "checkpoints.asynchronous": each}), 1.0,
                 checkpoint_nbytes=10_000, conditions=around) for each in (False, True)
    ]  # fmt: skip
    assert [each.parts["checkpoints"] for each in ways] == [50.0, 5.0]
    # What fails meanwhile is lost: work since the checkpoint before, for 9 seconds longer, and reading takes 10.
    mean = expected_seconds(100.0, 20.0, write=1.0, restart=19.0, mtbf=1e6)
    assert ways[1].parts["failures"] == pytest.approx(mean - 105.0)
    # A checkpoint each 4 s where one takes 10 s to write: the next waits.
    often = run(steps=100, **{"checkpoints.every": 4, "checkpoints.asynchronous": True})
    held = run_time(often, 1.0, checkpoint_nbytes=10_000, conditions=around)
    assert held.parts["checkpoints"] == 25 * 6.0


def test_a_run_that_fails_faster_than_it_saves_has_no_end():
    around = Conditions(mtbf_seconds=1.0, storage_bytes_per_second=1.0)
    whole = run_time(run(steps=10**6, **{"checkpoints.every": 10**6}), 1.0, checkpoint_nbytes=1, conditions=around)
    assert whole.total_seconds == float("inf")


@given(
    step=st.floats(1e-3, 100.0), mtbf=st.floats(1e4, 1e9), storage=st.floats(1e2, 1e12),
    every=st.none() | st.integers(1, 10**4), steps=st.integers(1, 10**6),
)  # fmt: skip
def test_better_conditions_never_take_longer(step, mtbf, storage, every, steps):
    def of(**better):
        around = Conditions(**{"mtbf_seconds": mtbf, "restart_seconds": 60.0, "storage_bytes_per_second": storage,
                               "loader_tokens_per_second": 100.0, **better})  # fmt: skip
        return run_time(
            run(steps=steps, **{"checkpoints.every": every}), step, forward_seconds=step / 3, checkpoint_nbytes=10**4,
            conditions=around,
        )  # fmt: skip

    answer = of()
    assert answer.total_seconds == answer.steps_seconds + sum(answer.parts.values())
    assert all(each >= 0 for each in answer.parts.values())
    # An interval in whole steps, and a checkpoint more or less at the end, may move the best by a little.
    slack = 1 + 1e-9 if every is not None else 1.02
    for better in ({"mtbf_seconds": 2 * mtbf}, {"storage_bytes_per_second": 2 * storage}, {"restart_seconds": 30.0},
                   {"loader_tokens_per_second": 200.0}):  # fmt: skip
        seen = of(**better)
        if answer.total_seconds != float("inf") and steps > 1000 * (answer.checkpoint_every or 0):
            assert seen.total_seconds <= answer.total_seconds * slack
