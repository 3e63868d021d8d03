import marimo

__generated_with = "0.25.2"
app = marimo.App(app_title="15. A loop that survives")

with app.setup:
    import os
    import pickle
    import subprocess
    import sys
    import tempfile
    import time
    from functools import cache
    from hashlib import sha256
    from math import cos, pi, sqrt
    from pathlib import Path
    from random import Random

    import marimo as mo

    import trainledger as tl
    from trainledger.forecast.predict.run import daly, expected_seconds, run_mtbf, young
    from trainledger.report import lesson
    from trainledger.report.chart import COLOURS, Axis, Band, Chart, Line
    from trainledger.report.lesson import Claim, Exercise
    from trainledger.spec.recipe import learning_rate

    STEPS = 24 if lesson.QUICK else 60
    EVERY = STEPS // 4  # steps between checkpoints
    HOUR = 3600.0
    EIGHT = {"layout.replicate": 8, "recipe.micro_batch": 64, "recipe.global_batch": 4096, "recipe.seq_len": 1024}
    LONG = EIGHT | {"recipe.tokens": "300B"}
    GIVEN = {"recipe.seq_len": 1024, "recipe.global_batch": 512, "recipe.precision": "bf16-mixed", "recipe.steps": 100}
    WEIGHTS, STATE = "model.safetensors", "optimizer.safetensors"

    if lesson.HAS_TORCH:
        import email

        import torch

        from trainledger.engine.data.loader import halves
        from trainledger.engine.data.mixture import train_batch
        from trainledger.engine.data.prepare import prepare
        from trainledger.engine.nn.init import initialize
        from trainledger.engine.nn.transformer import build
        from trainledger.engine.train.engine import train
        from trainledger.engine.train.records import read_lines
        from trainledger.engine.train.step import derive
        from trainledger.spec.runfile import to_toml


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # 15. A loop that survives

    It is 3:12 at night, and a power supply has died. With it died one process of your run, and so all of them. There is
    a checkpoint from 2:40. You type `--resume`, the loss goes on where it was, and you go back to sleep.

    In the morning somebody asks: is it still the same run? The curve cannot tell you. Momentum that began anew, a
    learning rate that warmed up twice, a batch seen again: all three heal in some hundred steps, and all three leave
    another model. There is one honest test. Kill a run, resume it, and compare the final weights with those of a run
    that was never stopped, bit for bit. This chapter does that, to a real training.

    Guess first. A model of N parameters trains with AdamW in fp32. How many bytes per parameter must the checkpoint
    have, for that test to pass?
    """)
    return


@app.cell(hide_code=True)
def _():
    guess = mo.ui.text(label="bytes per parameter:")
    guess
    return (guess,)


@app.cell(hide_code=True)
def _(guess):
    gpt2 = tl.loop("gpt2", LONG, device="a100-sxm-80gb", count=8)
    n = tl.parameters(tl.model("gpt2")).total
    mo.md(lesson.against(guess.value, gpt2.checkpoint_nbytes / n, "bytes") if guess.value else "")
    return (gpt2,)


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## A loop, written out

    Six things happen in a step, and the order matters: set the learning rate, forward, backward, clip, update, forget
    the gradients. Here they are, in a page of plain PyTorch:
    """)
    return


@app.function
def plain(run, cache) -> list[float]:
    """The losses of a loop as a person writes it, from the formulas."""
    recipe = run.recipe
    store = prepare(run.data, vocab_size=None, progress=False)
    model = build(run.model, recipe)
    initialize(model, seed=derive(recipe.seed, "init"))
    decayed = [each for each in model.parameters() if each.ndim >= 2]
    others = [each for each in model.parameters() if each.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    losses = []
    for step in range(recipe.total_steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, peak=2e-3, warm=5, steps=recipe.total_steps)
        rows = train_batch(store, seed=recipe.seed, step=step, global_batch=8, seq_len=64)
        x, y = halves(rows)
        loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    **The learning rate.** Adam's second moment is an average over some twenty to a thousand steps. In the first of them
    it knows nothing, and a full step would be a jump; so the rate climbs in a line over $w$ steps. From there it falls
    along half a cosine to a tenth of the peak:

    $$\eta_k = \eta \cdot \frac{k+1}{w} \;(k < w), \qquad
    \eta_k = \eta \left(0.1 + 0.9 \cdot \tfrac{1}{2}\left(1 + \cos \pi \tfrac{k - (w-1)}{K-1-(w-1)}\right)\right).$$
    """)
    return


@app.function
def rate(step: int, *, peak: float, warm: int, steps: int) -> float:
    """The learning rate of a step (the first is 0): the formula above."""
    if step < warm:
        return peak * (step + 1) / warm
    progress = (step - (warm - 1)) / (steps - 1 - (warm - 1))
    return peak * (0.1 + 0.9 * (1 + cos(pi * progress)) / 2)


@app.cell(hide_code=True)
def _():
    warm = mo.ui.slider(steps=[0, 100, 500, 1000, 2000, 5000], value=1000, label="warm-up steps", show_value=True)
    kind = mo.ui.dropdown(["cosine", "linear", "wsd", "constant"], value="cosine", label="schedule")
    mo.hstack([warm, kind], justify="start")
    return kind, warm


@app.cell
def _(kind, warm):
    schedule = {"kind": kind.value, "warmup_steps": warm.value}
    tl.loop("gpt2", {"recipe.steps": 20_000, "recipe.schedule": schedule}).document().figures()[0]
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    **Clipping.** One norm over all gradients together, $\sqrt{\sum g^2}$. If it is above 1, every gradient is divided
    by it: the step keeps its direction. It comes after backward and before the update, and after *all* micro-batches
    have been added up. Clipping each tensor alone would turn the direction.

    **Keeping an eye on it.** `loss.item()` waits until the device has finished all that was queued. Once a step, a GPU
    that is fast enough stands still at each. Keep the tensor, and read it every few steps.

    **The guard.** One bad batch may give a loss that is not a number, and after one update with it no weight is one.
    So look at loss and norm *before* the update, and leave it out if one is not finite. All ranks must decide alike.
    """)
    return


@app.function(hide_code=True)
def claims_loop() -> list[Claim]:
    given = GIVEN | {"recipe.steps": 100_000, "recipe.schedule.warmup_steps": 1000, "recipe.learning_rate": 6e-4}
    run = tl.load("gpt2", given)
    at = {"peak": 6e-4, "warm": 1000, "steps": 100_000}
    gpt2 = tl.loop("gpt2", LONG, device="a100-sxm-80gb", count=8)
    saved, nbytes = gpt2.checkpointing, gpt2.checkpoint_nbytes
    by_hand = 12 * tl.parameters(run.model).total + 4 * (16 * 12 + 4)  # tensors of 12 layers, and outside of them
    pause, mtbf = saved.pause_seconds, saved.mtbf_seconds
    by_young = sqrt(2 * pause * mtbf) / 60
    tried = [60.0 * each for each in range(20, 200)]
    best = min(tried, key=lambda each: expected_seconds(1e7, each, write=pause, restart=600.0, mtbf=mtbf))
    lost = [expected_seconds(1e7, best * each, write=pause, restart=0.0, mtbf=mtbf) / 1e7 - 1 for each in (1, 2)]
    return [
        Claim("the rate of step 499 of 1,000 of warm-up", learning_rate(run.recipe, 499), rate(499, **at), 1e-9),
        Claim("of step 50,000 of 100,000", learning_rate(run.recipe, 50_000), rate(50_000, **at), 1e-9),
        Claim("of the last step: a tenth of the peak", learning_rate(run.recipe, 99_999), 6e-4 / 10, 1e-9),
        Claim("a checkpoint of gpt2: 4 + 8 bytes a parameter, a counter a tensor", nbytes, by_hand, unit="bytes"),
        Claim("Young's interval on 8 A100", saved.young_seconds / 60, by_young, 1e-9, "min"),
        Claim("Daly's, and the best of 180 in whole minutes", saved.daly_seconds / 60, best / 60, 0.03, "min"),
        Claim("at twice the best interval the loss is (1/2 + 2) / 2 times the least", lost[1] / lost[0], 1.25, 0.01),
    ]


@app.cell
def _():
    lesson.claims(claims_loop())
    return


@app.cell(hide_code=True)
def _(gpt2):
    minutes = gpt2.checkpointing.daly_seconds / 60
    mo.md(rf"""
    ## How often to save

    Save too often, and the run stands still while it writes; too rarely, and each failure throws much away. With a
    pause of $w$ for each checkpoint and a time $m$ between failures, an interval $t$ loses the share

    $$\frac{{w}}{{t}} + \frac{{t}}{{2 m}}, \qquad \text{{least at }} t = \sqrt{{2 w m}} \text{{ (Young)}}.$$

    A failure comes in the middle of an interval on average, hence the 2. For GPT-2 on 8 A100 the checkpoint is
    {gpt2.checkpoint_nbytes / 1e9:.2f} GB, saving it takes {gpt2.checkpointing.pause_seconds:.2f} s, something fails
    every {gpt2.checkpointing.mtbf_seconds / HOUR / 24:.0f} days, and the best interval is {minutes:.0f} minutes. The
    curve is flat at its bottom: half or double of it loses a quarter more. It is steep where people live, at one a day.
    """)
    return


@app.cell
def _(gpt2):
    gpt2.document().figures()[1]
    return


@app.cell(hide_code=True)
def _():
    mo.md(rf"""
    ## Kill it

    Now the test. A model of 438,000 parameters trains for {STEPS} steps on Python's `email` package, three
    times: once to its end; once in a process of its own that gets SIGKILL while it trains, which no program can
    catch; and then on, from the newest checkpoint that the killed process left. The plain loop above runs, too.
    """)
    return


@app.function(hide_code=True)
def hashes(checkpoint) -> dict[str, str]:
    """The SHA-256 of the weights and of the optimizer's state in a checkpoint."""
    return {name: sha256((checkpoint / name).read_bytes()).hexdigest()[:16] for name in (WEIGHTS, STATE)}


@app.function(hide_code=True)
def losses(run_dir) -> dict[int, float]:
    """The loss of each step that a run has recorded, by its number."""
    path = run_dir / "metrics.jsonl"
    found = read_lines(path) if path.exists() else []
    return {each["step"]: each["loss"] for each in found if "learning_rate" in each}


@app.function
def killed(run_file, folder, *, after: int):
    """The directory of a run whose process was killed once it had done so many steps."""
    command = [sys.executable, "-m", "trainledger", "train", str(run_file), "--dir", str(folder), "--no-preflight"]
    threads = str(torch.get_num_threads())  # other threads would add up in another order
    with open(folder.parent / "said.txt", "w") as said:
        child = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": threads}, stdout=said, stderr=said)
        while child.poll() is None:
            run_dirs = [each.parent for each in folder.glob("*/metrics.jsonl")]
            if run_dirs and len(losses(run_dirs[0])) >= after:
                child.kill()
                child.wait()
            time.sleep(0.005)
    assert child.returncode == -9, (folder.parent / "said.txt").read_text()
    return run_dirs[0]


@app.function
@cache
def experiment() -> dict:
    """A run to its end, one that was killed and resumed, and a plain loop: their losses and hashes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fields = {
            "model": {"preset": "teach-gpt-1m", "vocab_size": 257, "n_layers": 2, "max_seq_len": 64},
            "recipe": {"seq_len": 64, "global_batch": 8, "steps": STEPS, "learning_rate": 2e-3, "precision": "fp32",
                       "schedule.warmup_steps": 5, "checkpoints.every": EVERY, "evaluation.every": STEPS},
            "data": {"path": str(Path(email.__file__).parent), "cache": str(folder / "cache")},
            "cluster": {"backend": "cpu"},
        }  # fmt: skip
        run, said = tl.load(fields), []
        (folder / "run.toml").write_text(to_toml(run))
        whole = train(run, folder / "whole", say=said.append)
        run_dir = killed(folder / "run.toml", folder / "killed", after=2 * EVERY + EVERY // 2)
        before = losses(run_dir)
        saved = max(int(each.name.removeprefix("step-")) for each in (run_dir / "checkpoints").glob("step-*"))
        resumed = train(run, run_dir, resume=True, say=said.append)
        return {
            "whole": losses(folder / "whole"),
            "before": before,
            "saved": saved,
            "after": losses(run_dir),
            "whole hashes": hashes(whole.checkpoint),
            "resumed hashes": hashes(resumed.checkpoint),
            "plain": plain(run, folder / "cache"),
        }


@app.function(hide_code=True)
def claims_resume() -> list[Claim]:
    if not lesson.HAS_TORCH:
        return []
    found = experiment()
    whole, again = found["whole hashes"], found["resumed hashes"]
    engine = list(found["whole"].values())
    twice = max(found["before"]) - found["saved"]
    apart = max(abs(one - other) for one, other in zip(engine, found["plain"], strict=True))
    twice = max(found["before"]) - found["saved"]
    with tempfile.TemporaryDirectory() as folder:
        for step in (100, 200, 300):
            torch.save({"step": step}, Path(folder) / "checkpoint_step_{step}.pt")  # as it was printed
        left = len(list(Path(folder).iterdir()))
        script = Path(folder) / "loop.py"
        script.write_text(
            "import torch\nmodel = torch.nn.Linear(8, 8)\noptimizer = torch.optim.SGD(model.parameters())\n"
            "for step in range(8):\n    loss = model(torch.randn(4, 8)).square().mean()\n    loss.backward()\n"
            "    optimizer.step()\n    optimizer.zero_grad()\n    loss.item()\n"
        )
        findings = ", ".join(each.kind for each in tl.annotate(str(script)).findings)
    with torch.device("meta"):
        tensors = len(list(build(tl.model("gpt2-xl"), tl.load("gpt2-xl", GIVEN).recipe).parameters()))
    return [
        Claim("killed, resumed: SHA-256 of the weights, and of a run never stopped", again[WEIGHTS], whole[WEIGHTS]),
        Claim("of the optimizer's state", again[STATE], whole[STATE]),
        Claim("steps done twice are fewer than between two checkpoints", 0 <= twice < EVERY, True),
        Claim("engine and plain loop: no loss of a step differs by 0.00001", apart < 1e-5, True),
        Claim("annotate, of a loop that reads its loss in each step", findings, "synchronization in a loop"),
        Claim("gpt2-xl: tensors that one norm of the gradients is over", tensors, 16 * 48 + 4),
        Claim('three saves to "checkpoint_step_{step}.pt" without the f: files', left, 1),
    ]


@app.cell(hide_code=True)
def _():
    mo.md("This table needs torch.") if not lesson.HAS_TORCH else lesson.claims(claims_resume())
    return


@app.cell(hide_code=True)
def _():
    def drawn():
        found = experiment()
        whole, before, saved = found["whole"], found["before"], found["saved"]
        after = {step: loss for step, loss in found["after"].items() if step > saved}
        marks = (
            Line(list(whole), list(whole.values()), "never stopped", COLOURS[7], 5),
            Line(list(before), list(before.values()), "until it was killed", COLOURS[0]),
            Line(list(after), list(after.values()), "resumed", COLOURS[5], 0, symbol="circle", size=5),
            Band("x", saved, text="checkpoint"),
            Band("x", max(before), text="killed"),
        )
        return Chart("A run that was killed, over one that was not", marks, Axis("step"), Axis("loss, nats per token"))

    drawn() if lesson.HAS_TORCH else mo.md("This figure needs torch.")
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    Equal hashes, to the last bit of the last weight. What it took is less than people think, because the engine keeps
    less state than people have:

    | | saved | why |
    |---|---|---|
    | weights | yes | |
    | both moments, and the count of steps in each | yes | or Adam begins anew, with its bias correction |
    | step | yes | learning rate and batch are functions of it |
    | order of the data | no | a function of seed and step ([chapter 14](14_data.html)) |
    | dropout masks | no | a seed for each step and micro-batch |
    | learning rate | no | a function of the step |

    A loop with one generator has to save its state; a loop with an iterator over shuffled data has to save how far it
    was. And a file may be half written when the power fails: write to another name, sync, rename. A checkpoint is then
    whole or absent. The engine also stores the SHA-256 of each file, and takes the checkpoint before if one differs.

    **Find the mistakes.** A public account of this lecture saves with
    `torch.save(state, "checkpoint_step_{step}.pt")`. An f is missing: every save has the same name, braces included,
    and overwrites the one before. And it resumes by `start_step = state["step"] + 1`. That is right if `step` is the
    index of the step just done, and leaves out a batch if it is their count. No loss curve shows either. The hash does.
    """)
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Exercises

    A new seed gives new numbers. After a first miss there is a hint, after a second the derivation.
    """)
    return


@app.function(hide_code=True)
def exercise_rate(seed: int) -> Exercise:
    draw = Random(seed)
    warm, steps = draw.choice([500, 1000, 2000]), draw.choice([10_000, 20_000, 50_000])
    step = draw.choice([warm // 4 - 1, steps // 2, steps // 4, 3 * steps // 4])
    recipe = tl.load("gpt2", GIVEN | {"recipe.steps": steps, "recipe.schedule.warmup_steps": warm}).recipe
    answer = learning_rate(recipe, step) / recipe.learning_rate
    return Exercise(
        f"{steps:,} steps, {warm:,} of warm-up, then a cosine to a tenth: what share of the peak at step {step:,}?",
        answer,
        f"{(step + 1) / warm:.3f} = {step + 1} / {warm}."
        if step < warm
        else f"p = ({step} - {warm - 1}) / ({steps - 1} - {warm - 1}); 0.1 + 0.45 (1 + cos(pi p)) = {answer:.4f}.",
        hint="Is it in the warm-up? If not, how far between its end and the last step?",
        tolerance=0.005,
        mistakes={(step + 1) / steps: "Not in a line over all steps."},
    )


@app.function(hide_code=True)
def exercise_interval(seed: int) -> Exercise:
    draw = Random(seed)
    gigabytes, speed, devices = draw.choice([100, 400, 1600]), draw.choice([5, 10, 40]), draw.choice([512, 2048, 8192])
    pause, mtbf = gigabytes / speed, run_mtbf(50_000 * HOUR, devices)
    minutes = young(pause, mtbf) / 60
    return Exercise(
        f"{devices:,} devices, each failing once in 50,000 hours; a checkpoint of {gigabytes} GB, written at {speed} "
        "GB/s while the run stands still. Minutes between checkpoints, by Young?",
        minutes,
        f"sqrt(2 x {pause:g} s x {mtbf:,.0f} s) = {minutes * 60:,.0f} s. Daly: {daly(pause, mtbf) / 60:.1f} minutes.",
        hint="The run fails when any device does; the pause is bytes over speed.",
        unit="min",
        mistakes={minutes * sqrt(devices): "That is one device alone.", minutes / sqrt(2): "Half an interval is lost."},
    )


@app.function(hide_code=True)
def exercise_lost(seed: int) -> Exercise:
    draw = Random(seed)
    pause, mtbf = draw.choice([10, 20, 60]), draw.choice([3, 8, 24])
    every = draw.choice([1, 2, 4])
    hours = 365 * 24 * (pause / (every * HOUR) + every / 2 / mtbf)
    return Exercise(
        f"A checkpoint every {every} h with a pause of {pause} s, a failure every {mtbf} h: hours lost in a year, to "
        "first order, without restarts?",
        hours,
        f"8,760 x ({pause} / {every * 3600} + {every} / (2 x {mtbf})).",
        hint="Add the share of the pauses and the share of work that is done twice.",
        unit="h",
        mistakes={365 * 24 * (pause / (every * HOUR) + every / mtbf): "On average half an interval is lost."},
    )


@app.function(hide_code=True)
def exercise_clip(seed: int) -> Exercise:
    draw = Random(seed)
    norms = [draw.choice([0.6, 0.9, 1.2, 2.0, 3.0]) for _ in range(3)]
    whole = sqrt(sum(each**2 for each in norms))
    return Exercise(
        f"Three tensors have gradients of norm {norms}; clipping is at 1. By what is each gradient multiplied?",
        1 / whole,
        f"1 / sqrt({' + '.join(f'{each}^2' for each in norms)}) = 1 / {whole:.3f}, all three alike.",
        hint="There is one norm, over all elements of all tensors.",
        mistakes={1 / sum(norms): "Norms add by their squares.", 1 / max(norms): "That is one tensor alone."},
    )


@app.function(hide_code=True)
def exercise_missing(seed: int) -> Exercise:
    kinds = {
        "The loss jumps up after the resume and is back after some hundred steps": "the moments of the optimizer",
        "The learning rate climbs once more, from 0": "the step",
        "The training loss goes on lower than before, the held-out loss does not": "the order of the data",
        "With dropout the losses differ a little, without it they are equal": "the generator of the masks",
    }
    sign = Random(seed).choice(list(kinds))
    return Exercise(
        f"A run of somebody else is resumed. {sign}. What was missing in the checkpoint?",
        kinds[sign],
        "Momentum shows in the loss, the step in the schedule, a repeated batch as one known by heart, masks as noise.",
        hint="What does each state do in the first step after the resume?",
        choices=tuple(kinds.values()),
    )


@app.function(hide_code=True)
def toy(run: dict, steps: int) -> dict:
    """A training in small: a weight, its velocity, a schedule, and noise from a generator."""
    for _ in range(steps):
        gradient = run["weight"] - 3 + run["generator"].gauss(0, 1)
        run["velocity"] = 0.9 * run["velocity"] + gradient
        run["weight"] -= 0.1 * (1 - run["step"] / 40) * run["velocity"]
        run["step"] += 1
    return run


@app.function(hide_code=True)
def check_resume(text: str) -> str:
    """What is wrong with a function that says what to save; empty where a killed run ends as one that never was."""
    names: dict = {}

    def begun() -> dict:
        return {"weight": 0.0, "velocity": 0.0, "step": 0, "generator": Random(7)}

    try:
        exec(text, names)
        saved = pickle.dumps(names["save"](toy(begun(), 13)))
        resumed = toy(begun() | pickle.loads(saved), 27)["weight"]
    except Exception as error:
        return f"It does not run: {type(error).__name__}: {error}"
    whole = toy(begun(), 40)["weight"]
    return "" if resumed == whole else f"The resumed run ends at {resumed!r}, the one that never stopped at {whole!r}."


@app.function(hide_code=True)
def exercise_resume(seed: int) -> Exercise:
    keys = ["weight", "velocity", "step", "generator"]
    left = [each for each in keys if each != keys[1 + seed % 3]]
    program = "def save(run):\n    return {{name: run[name] for name in {}}}\n"
    return Exercise(
        "`run` has a weight, a velocity, a step and a generator of its noise. This is saved after step 13 and laid "
        "over a run that begins anew. Make it end with the bits of a run that never stopped.",
        program.format(keys),
        f"Without {keys[1 + seed % 3]} the run goes on with that of the beginning.",
        hint="What does a new run have that the killed one had otherwise?",
        start=program.format(left),
        check=check_resume,
    )


@app.cell(hide_code=True)
def _():
    EXERCISES = [exercise_rate, exercise_interval, exercise_lost, exercise_clip, exercise_missing, exercise_resume]
    seed = mo.ui.number(1, 9999, value=1, label="seed")
    seed
    return EXERCISES, seed


@app.cell(hide_code=True)
def _(EXERCISES, seed):
    fields = lesson.fields(EXERCISES, seed.value)
    return (fields,)


@app.cell(hide_code=True)
def _(EXERCISES, fields, seed):
    lesson.sheet(EXERCISES, seed.value, fields)
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## What to remember

    A checkpoint is 12 bytes per parameter, and it is proved by a hash: kill, resume, compare. Save every
    $\sqrt{2 w m}$ seconds.

    On the command line: `trainledger train run.toml`, and after a crash `--resume`; `trainledger loop gpt2 --device
    a100-sxm-80gb --count 8`. On the page: [Data and loop](../?calculator=data). Next:
    [many devices](16_many_devices.html).
    """)
    return


if __name__ == "__main__":
    app.run()
