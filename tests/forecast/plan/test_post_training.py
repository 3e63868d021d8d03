"""A step of GRPO or PPO by phases: what each holds, that none is added to another, and who waits."""

from __future__ import annotations

from statistics import median
from typing import Any

import post_training
import pytest

import trainledger as tl
from trainledger.answers.load import resolve
from trainledger.answers.rl import why_too_large
from trainledger.forecast.plan.post_training import PostTraining
from trainledger.forecast.predict.interval import LIKELY
from trainledger.ledger.ranks import account_run
from trainledger.ledger.step import forwards
from trainledger.spec.problem import InvalidInput

SMALL: dict[str, Any] = {"device": "a100-sxm-80gb", "count": 4}


def phases(answer: PostTraining) -> dict[str, int]:
    return {phase.name: phase.nbytes for phase in answer.phases}


@pytest.fixture(scope="module")
def asleep() -> PostTraining:
    return tl.rl("qwen2.5-1.5b", **SMALL)


def parts(answer: PostTraining, name: str) -> dict[str, int]:
    return dict(next(phase.parts for phase in answer.phases if phase.name == name))


def test_the_peak_is_that_of_one_phase(asleep: PostTraining) -> None:
    held = phases(asleep)
    assert list(held) == ["rollout", "log-probabilities", "update", "refit"]
    assert asleep.peak.nbytes == max(held.values()) < sum(held.values())
    assert asleep.seconds == pytest.approx(sum(phase.seconds or 0 for phase in asleep.phases))
    plan = tl.plan(asleep.run)
    answers = parts(asleep, "update")["answers and their log-probabilities"]
    assert held["update"] == (plan.forecast.device_nbytes or 0) + answers
    assert parts(asleep, "update")["training step"] == plan.peak.nbytes


def test_an_engine_that_stays_is_held_in_every_phase(asleep: PostTraining) -> None:
    awake = tl.rl("qwen2.5-1.5b", awake=True, **SMALL)
    share = int(0.3 * 79.14 * 2**30)  # of what torch.cuda.mem_get_info reports, as vLLM takes it
    for name in ("log-probabilities", "update"):
        assert phases(awake)[name] - phases(asleep)[name] == share
    assert phases(awake)["rollout"] == phases(asleep)["rollout"]
    parked = tl.rl("qwen2.5-1.5b", parked=True, **SMALL)
    states = dict(asleep.phases[0].parts)["training states"]
    assert phases(asleep)["rollout"] - phases(parked)["rollout"] == states


def test_further_models(asleep: PostTraining) -> None:
    reference, critic, adapters = (
        tl.rl("qwen2.5-1.5b", **SMALL, **more)
        for more in ({"reference": True}, {"critic": True}, {"reference": True, "method": "lora"})
    )
    parameters = tl.parameters(asleep.run.model).total
    assert parts(reference, "update")["reference"] == -(-2 * parameters // 4)
    more = 32 * 1024 * 4  # log-probabilities of a rank's answers by the reference
    assert phases(reference)["update"] - phases(asleep)["update"] == -(-2 * parameters // 4) + more
    assert "reference" in phases(reference)
    states = dict(account_run(asleep.run, backend="cuda").ranks[0].ledger.resident)
    critics = states["parameters"] + states["optimizer state"] + states["buffers"]
    assert phases(critic)["update"] - phases(asleep)["update"] == critics + more
    assert phases(critic)["values"] == phases(critic)["log-probabilities"]
    assert not any(name == "reference" for phase in adapters.phases for name, _ in phase.parts)
    assert parts(adapters, "update")["training step"] < parts(asleep, "update")["training step"]


def test_devices_of_their_own_wait_unless_phases_overlap() -> None:
    split, overlapped = (
        tl.rl("qwen2.5-1.5b", **SMALL, generation_devices=4, overlapped=overlapped) for overlapped in (False, True)
    )
    assert split.seconds is not None
    assert overlapped.seconds is not None
    assert overlapped.seconds < split.seconds
    assert split.idle["generation"] > 0 < split.idle["training"]
    assert min(overlapped.idle.values()) == 0
    assert dict(split.phases[0].parts) == {"engine": int(0.3 * 79.14 * 2**30)}


GRPO = "trl grpo --model_name_or_path Qwen/Qwen2.5-1.5B --use_vllm --per_device_train_batch_size 4 --bf16"


def test_a_launch_of_grpo_is_read() -> None:
    said = "--vllm_mode colocate --num_generations 4 --gradient_accumulation_steps 2 --max_completion_length 384"
    answer = tl.rl(f"{GRPO} {said} --beta 0.04 --vllm_gpu_memory_utilization 0.4", **SMALL)
    rollout, recipe = answer.rollout, answer.run.recipe
    assert (rollout.prompts, rollout.group, rollout.prompt, rollout.completion, rollout.longest) == (
        8,
        4,
        512,
        384,
        384,
    )
    assert (rollout.utilization, rollout.sleep, rollout.reference) == (0.4, False, True)
    assert (recipe.global_batch, recipe.micro_batch, recipe.seq_len, answer.run.layout.replicate) == (32, 4, 896, 4)
    assert tl.rl(f"{GRPO} {said}", group=8, **SMALL).rollout.prompts == 4
    with pytest.raises(InvalidInput, match=r"TRL's GRPO: generates text between steps, which `trainledger rl` plans"):
        tl.plan(GRPO)
    with pytest.raises(InvalidInput, match="use_vllm = false: generates with transformers"):
        tl.rl(GRPO.replace("--use_vllm ", ""), **SMALL)


def test_the_chance_is_that_of_the_least_likely_phase(asleep: PostTraining) -> None:
    assert asleep.chance_of_fitting is not None
    assert asleep.chance_of_fitting > 0.95
    assert asleep.interval is not None
    assert asleep.interval.low < asleep.peak.nbytes < asleep.interval.high
    tight = tl.rl("qwen2.5-7b", device="h100-sxm", count=8, utilization=0.9)
    assert not tight.fits
    assert (tight.chance_of_fitting or 1) < 0.5
    assert ((tight.interval and tight.interval.low) or 0) > dict(tight.phases[0].parts)["engine"]  # which is set
    assert tight.fitting_utilization == 0.84
    assert tl.rl("qwen2.5-7b", device="h100-sxm", count=8, utilization=0.84).fits
    assert not tl.rl("qwen2.5-7b", device="h100-sxm", count=8, utilization=0.85).fits
    assert str(why_too_large(tight)).endswith("nearest that works: --utilization 0.84 or --count 16")


def test_a_step_that_fits_barely_says_its_chance() -> None:
    """Of a phase that an engine shares, the chance is of the rest: what an engine takes is set."""
    barely, easily = (tl.rl("qwen3-8b", device="rtx-5090", count=count) for count in (8, 16))
    assert (barely.fits, easily.fits) == (True, True)
    assert barely.chance_of_fitting is not None
    assert easily.chance_of_fitting is not None
    assert barely.chance_of_fitting < LIKELY < easily.chance_of_fitting
    assert f"fit (chance {round(100 * barely.chance_of_fitting)} %): update needs most, " in str(barely)
    assert not str(barely).startswith("Fits")
    assert barely.fewest_devices == easily.fewest_devices == 16


@pytest.mark.long
def test_fewest_devices_hold_every_phase_and_half_of_them_do_not() -> None:
    answer = tl.rl("llama-3-8b", device="rtx-4090", count=64, utilization=0.75)
    fewest = answer.fewest_devices
    assert fewest is not None
    assert tl.rl("llama-3-8b", device="rtx-4090", count=fewest, utilization=0.75, prompts=64).fits
    try:
        half = tl.rl("llama-3-8b", device="rtx-4090", count=fewest // 2, utilization=0.75, prompts=64)
        assert not half.fits or (half.chance_of_fitting is not None and half.chance_of_fitting < LIKELY)
    except InvalidInput:
        pass


def test_log_probabilities_need_no_saved_activations() -> None:
    for layout in ({}, {"shard": 4}, {"tensor": 2, "shard": 2}):
        fields = {"cluster.device": "a100-sxm-80gb", "cluster.count": 4 if layout else 1, "recipe.seq_len": 512}
        fields |= {"recipe.activation_checkpointing": "none", "recipe.precision": "bf16"}
        run = resolve("qwen2.5-0.5b", {**fields, **{f"layout.{axis}": size for axis, size in layout.items()}})
        resident = sum(nbytes for _, nbytes in account_run(run, backend="cuda").heaviest.resident)
        forward = forwards(run, backend="cuda")
        assert resident < forward < account_run(run, backend="cuda").peak.nbytes
        deeper = resolve(run, {"model.n_layers": 48})
        more = sum(nbytes for _, nbytes in account_run(deeper, backend="cuda").heaviest.resident) - resident
        assert forwards(deeper, backend="cuda") - forward == pytest.approx(more, rel=0.01)


def test_sizes_that_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"longest = 128: is shorter than the mean answer of 512 tokens"):
        tl.rl("qwen2.5-1.5b", **SMALL, longest=128, completion=512)
    with pytest.raises(InvalidInput, match=r"longer than model.max_seq_len = 1,024; nearest that works: 512"):
        tl.rl("gpt2", **SMALL, longest=768)
    with pytest.raises(InvalidInput, match=r"utilization = 0.01: leaves an engine no room"):
        tl.rl("qwen2.5-1.5b", **SMALL, utilization=0.01)
    with pytest.raises(InvalidInput, match=r"utilization = 0.3: .* at most 1 tensor rank, as a choice of keys"):
        tl.rl("glm-5", device="h200-sxm", count=64)
    with pytest.raises(InvalidInput, match="trainledger rl"):
        tl.plan("qwen2.5-1.5b", {"method": "grpo", "cluster.device": "h100-sxm"})


# Half of the rows were added after the method was fixed: steps one step off policy, and DeepSeek-V3 on 512 devices.
@pytest.mark.long
def test_published_steps_are_within_thirty_percent_in_the_median() -> None:
    table, errors = post_training.table()
    assert table.path.read_text(encoding="utf-8") == table.text
    assert len(errors) == 11
    assert median(map(abs, errors)) <= 0.30
    assert max(map(abs, errors)) <= 0.5


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("model", "count"),
    [("gemma-4-26b-a4b", 8), ("gemma-4-26b-a4b", 1), ("llama-3-70b", 1), ("qwen3-8b", 1), ("falcon-7b", 1)],
)
def test_what_rl_proposes_works(model: str, count: int) -> None:
    """Where no engine has room the proposal is taken; where a step does not fit it does with the proposal."""
    asked: dict[str, Any] = {"count": count}
    refused = {None: ["utilization", "memory", None], "utilization": ["memory", None], "memory": [None]}
    field: str | None = None
    while True:
        try:
            problem = why_too_large(tl.rl(model, device="h100-sxm", **asked))
        except InvalidInput as error:
            (problem,) = error.problems
        now = None if problem is None else problem.field
        assert now in refused[field], (asked, problem)
        if problem is None:
            return
        assert problem.nearest is not None
        way = str(problem.nearest).split(" or ")[-1]
        words = way.split() if "--" in way else [problem.field, way]
        asked |= {name.strip("-"): float(text) for name, text in zip(words[::2], words[1::2], strict=True)}
        field = now
