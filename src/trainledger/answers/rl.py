"""A step of post-training by reinforcement: memory and time of its phases, who waits, and the fewest devices."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from math import floor
from typing import Annotated, Any, Unpack

from trainledger.answers.defaults import assumptions, size_of
from trainledger.answers.load import Source, names_model, resolve
from trainledger.answers.machine import device_of, kernels_of
from trainledger.answers.pages.interval import ends, fits
from trainledger.answers.pages.plain_data import plain, run_data
from trainledger.answers.question import count, length, question, question_of, share, text
from trainledger.answers.source import METHOD, OfCluster, also, by_field, listed, with_cluster
from trainledger.answers.trainers import read_trainer, run_of_read
from trainledger.forecast.plan.post_training import Phase, PostTraining, Rollout, post_training
from trainledger.forecast.predict.interval import LIKELY
from trainledger.report.document import Document, Facts, Table, details, notes, section, sections
from trainledger.report.table import sentence
from trainledger.spec.convert.trainers import generating, values_of
from trainledger.spec.device import Device
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.reading import Overrides
from trainledger.spec.run import Run
from trainledger.spec.units import ceil_div, counted, format_nbytes, format_percent, format_seconds

_LEARNING_RATE = 1e-6  # of TRL's GRPOConfig
_MOST_DEVICES = 1024
_PROMPTS, _MEAN, _LONGEST = 16, 512, 1024  # of a step; tokens of an answer
_SHARE = 0.3  # of a device, vLLM's in TRL


def why_too_large(answer: PostTraining) -> Problem | None:
    """Why the step does not fit, with the devices on which it would; None where it does."""
    if answer.fits:
        return None
    rule = f"does not fit: {answer.peak.name} needs {format_nbytes(answer.peak.nbytes)} of a device"
    ways = [f"--utilization {answer.fitting_utilization:g}"] if answer.fitting_utilization else []
    if devices := answer.fewest_devices:
        few = devices > answer.rollout.sequences  # each trains one
        ways += [f"--count {devices}" + f" --prompts {ceil_div(devices, answer.rollout.group)}" * few]
    rule += "" if ways else "; adapters (recipe.lora.rank=16), sharding (layout.shard) or more devices need less"
    return Problem("memory", None, rule, " or ".join(ways) or None)


@question(impossible=why_too_large, plots=False)
def rl(
    run: Source,
    overrides: Overrides = (),
    *,
    prompts: Annotated[int | None, count("prompts of a step", default_text="16")] = None,
    group: Annotated[int | None, count("answers to each prompt; TRL's num_generations", default_text="8")] = None,
    prompt: Annotated[int | None, length("tokens of a prompt", default_text="512")] = None,
    completion: Annotated[
        int | None, length("mean tokens of an answer", default_text="512, at most the longest")
    ] = None,
    longest: Annotated[
        int | None,
        length(
            "tokens of the longest answer; TRL's max_completion_length",
            default_text="1,024, or what the model takes after a prompt",
        ),
    ] = None,
    utilization: Annotated[
        float | None, share("of a device's memory for the engine; vLLM's gpu_memory_utilization", default_text="30%")
    ] = None,
    engine_tensor: Annotated[
        int | None, count("tensor ranks of an engine", default_text="the fewest that hold a group")
    ] = None,
    generation_devices: Annotated[
        int, count("devices that only generate, besides those that train; 0 = all do both", least=0)
    ] = 0,
    awake: Annotated[bool, text("the engine keeps its memory in training (TRL without sleep mode)")] = False,
    overlapped: Annotated[bool, text("generate while training on the answers of the step before")] = False,
    reference: Annotated[bool, text("a frozen reference takes log-probabilities too (beta above 0)")] = False,
    critic: Annotated[bool, text("PPO: a critic as large as the policy is trained as well")] = False,
    packed: Annotated[bool, text("answers are trained without padding")] = False,
    parked: Annotated[
        bool, text("weights and optimizer wait in host memory during a rollout (verl's offload)")
    ] = False,
    **cluster: Unpack[OfCluster],
) -> PostTraining:
    """One step of GRPO or PPO by its phases: rollout, log-probabilities, update, refit; memory of each, no sum of them.

    A model that is named alone is trained in full with FSDP over its devices, blocks recomputed, one sequence at a
    time, and one update of all answers in a step; a run file gives recipe and layout of the update, whose
    ``recipe.global_batch`` is that of one update. A launch of TRL's GRPO says both; options come before what it says.
    `forecast.plan.post_training` has the method. Raises `InvalidInput`.
    """
    overrides = with_cluster(overrides, **cluster)
    given = by_field(overrides)
    trained, said = _of_launch(run, overrides)
    group = group or said.get("group", 8)
    prompt = prompt or said.get("prompt", 512)
    longest = longest or said.get("longest")
    completion = completion or min(_MEAN, longest or _MEAN)
    utilization = said.get("utilization", _SHARE) if utilization is None else utilization
    if longest is not None and longest < completion:
        rule = f"is shorter than the mean answer of {completion:,} tokens"
        raise InvalidInput([Problem("longest", longest, rule, completion)])
    alone = False
    if trained is not None:
        prompts = prompts or ceil_div(trained.recipe.global_batch, group)
    elif named := names_model(run):
        preset: dict[str, Any] = {
            METHOD: "full",
            "layout.shard": size_of(given.get("cluster.count")),
            "recipe.global_batch": (prompts or _PROMPTS) * group,
            "recipe.learning_rate": _LEARNING_RATE,
        }
        preset = {name: value for name, value in preset.items() if name not in given}
        if any(name.startswith("layout") for name in given):
            preset.pop("layout.shard", None)
        overrides, alone = also(overrides, preset), "layout.shard" in preset
    if trained is None:
        trained = resolve(run, overrides)
        if named and METHOD not in given:
            trained = replace(trained, origin=replace(trained.origin, method=""))
    most = trained.model.max_seq_len
    if longest is None:
        longest = max(completion, min(_LONGEST, most - prompt))
    if prompt + longest > most:
        rule = f"and a prompt of {prompt:,} tokens are longer than model.max_seq_len = {most:,}"
        raise InvalidInput(
            [Problem("longest", longest, rule, most - prompt if most > prompt else "a shorter --prompt")]
        )
    if (said or names_model(run)) and "recipe.seq_len" not in given:
        trained = replace(trained, recipe=replace(trained.recipe, seq_len=prompt + longest))
    machine = device_of(trained)
    if machine is None:
        rule = "was not measured yet (trainledger measure machine), and its memory is not known"
        raise InvalidInput([Problem("cluster.device", trained.cluster.device, rule, "h100-sxm")])
    rollout = Rollout(
        prompts=prompts or _PROMPTS, group=group, prompt=prompt, completion=completion, longest=longest,
        utilization=utilization, tensor=engine_tensor or said.get("engine_tensor"), devices=generation_devices,
        sleep=not (awake or said.get("awake", False)), overlapped=overlapped,
        reference=reference or bool(said.get("reference")), critic=critic, packed=packed, parked=parked,
    )  # fmt: skip
    backend = kernels_of(trained)
    answer = post_training(trained, rollout, machine, backend=backend)
    fewest = _fewest(trained, rollout, machine, backend) if alone and not generation_devices else None
    return replace(answer, fewest_devices=fewest, fitting_utilization=_fitting(answer, machine, backend))


def _of_launch(run: Source, overrides: Overrides) -> tuple[Run | None, dict[str, Any]]:
    """The update of a launch that generates text, and what it says of the options of `rl`; None for any other run."""
    launch = values_of(os.fsdecode(run)) if isinstance(run, str | os.PathLike) else None
    launch = None if launch is None else generating(launch)
    if launch is None:
        return None, {}
    named, options, problems = os.fsdecode(run), question_of(rl).options, list[Problem]()  # type: ignore[arg-type]
    table, read = read_trainer(named, listed(overrides), launch)
    said = {name: options[name].read(value, problems, name) for name, value in read.rollout.items()}
    if problems:
        raise InvalidInput(problems, "the launch line")
    return run_of_read(named, listed(overrides), table, read), said


def _fitting(answer: PostTraining, machine: Device, backend: str) -> float | None:
    """The largest share of the engine, in percent, with which every phase fits; None where it fits, or none does."""
    if answer.fits:
        return None
    held = max(phase.nbytes - phase.engine_nbytes for phase in answer.phases if phase.engine_nbytes)
    share = floor(100 * (1 - held / answer.usable_nbytes)) / 100
    if not 0 < share < answer.rollout.utilization:
        return None
    try:
        lower = post_training(answer.run, replace(answer.rollout, utilization=share), machine, backend=backend)
    except InvalidInput:  # no engine is left room
        return None
    return share if lower.fits else None


def _fewest(run: Run, rollout: Rollout, machine: Device, backend: str) -> int | None:
    """The fewest devices, powers of two, on which every phase is likely to fit with FSDP over all of them."""
    devices = 1
    while devices <= _MOST_DEVICES:
        batch = max(1, run.recipe.global_batch // devices) * devices * (run.recipe.micro_batch or 1)
        spread = replace(
            run,
            layout=replace(run.layout, auto=False, shard=devices, replicate=1, tensor=1, pipeline=1, context=1),
            cluster=replace(run.cluster, count=devices),
            recipe=replace(run.recipe, global_batch=batch),
        )
        try:
            step = post_training(spread, rollout, machine, backend=backend)
            if step.fits and (step.chance_of_fitting is None or step.chance_of_fitting >= LIKELY):
                return devices
        except InvalidInput:
            pass
        devices *= 2
    return None


def page(answer: PostTraining) -> Document:
    """The verdict, the phases with what they hold, and what waits."""
    rows = tuple((phase.name, phase.seconds, phase.nbytes, phase.devices, _parts(phase)) for phase in answer.phases)
    columns = ("phase", "seconds", "of a device", "runs on", "most of it")
    return Document(
        title=f"A step of {'PPO' if answer.rollout.critic else 'GRPO'} of {answer.run.model.name}",
        verdict=_verdict(answer),
        sections=sections(
            section("", Facts(tuple(_facts(answer)))),
            section("", Table("phases", columns, rows, units=("", "seconds", "nbytes", "", ""), align="lrrll")),
            *details("notes", notes(map(sentence, (*answer.notes, *answer.run.origin.notes, *_assumed(answer))))),
        ),
        about=(answer.run.model.name,),
        data=lambda: {
            "run": run_data(answer.run),
            **{name: plain(value) for name, value in vars(answer).items() if name not in ("run", "update")},
            "fits": answer.fits,
            "peak": answer.peak.name,
            "peak_nbytes": answer.peak.nbytes,
            "generated_per_second": answer.generated_per_second,
            "trained_per_second": answer.trained_per_second,
        },
        more=("plan RUN for the update alone",),
    )


def _assumed(answer: PostTraining) -> Iterator[str]:
    if text := assumptions(answer.run):
        yield f"assuming {text}"


def _parts(phase: Phase) -> str:
    largest = sorted(phase.parts, key=lambda part: -part[1])[:2]
    return ", ".join(f"{name} {format_nbytes(int(nbytes))}" for name, nbytes in largest)


def _verdict(answer: PostTraining) -> str:
    fitting = fits(answer.fits, answer.chance_of_fitting)
    usable = f"of {format_nbytes(answer.usable_nbytes)} usable"
    most = f"{answer.peak.name} needs most, {format_nbytes(answer.peak.nbytes)} of a device, {usable}"
    says = f"{fitting[0].upper()}{fitting[1:]}: {most}"
    return f"{says}; a step takes {format_seconds(answer.seconds)}." if answer.seconds is not None else f"{says}."


def _facts(answer: PostTraining) -> Iterator[tuple[str, str]]:
    rollout, run = answer.rollout, answer.run
    asked = f"{rollout.prompts:,} prompts of {rollout.prompt:,} tokens x {rollout.group} answers of "
    asked += f"{rollout.completion:,} (longest {rollout.longest:,}), {counted(answer.updates, 'update')}"
    where = f"{run.layout.devices:,} x {run.cluster.device}"
    where += f", {counted(rollout.devices, 'device')} to generate" if rollout.devices else ""
    yield "step", f"{asked}; {where}"
    engines = f"{answer.engines:,} on {counted(answer.tensor, 'device')} each"
    yield "engines", f"{engines}, {answer.concurrent:,} answers at once, {answer.cached_tokens:,} tokens of cache"
    if answer.generated_per_second is not None and answer.trained_per_second is not None:
        generated = f"{answer.generated_per_second:,.0f} tokens/s generated in the rollout"
        yield "speed", f"{generated}, {answer.trained_per_second:,.0f} trained in the update"
    for kind, idle in answer.idle.items():
        if rollout.devices:
            yield "waiting", f"{kind} devices wait for {format_percent(idle)} of a step"
    if answer.interval is not None:
        of_peak = f"{format_nbytes(answer.peak.nbytes)} ({ends(answer.interval, format_nbytes)}) in {answer.peak.name}"
        yield "memory", f"{of_peak}; times have no interval: too few steps of rollouts are published"
    if answer.fewest_devices is not None:
        yield "fewest", f"{counted(answer.fewest_devices, 'device')} of this kind (FSDP over all, powers of two)"
