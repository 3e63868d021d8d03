import marimo

__generated_with = "0.25.2"
app = marimo.App(app_title="16. Many devices")

with app.setup:
    import json
    import os
    import subprocess
    import sys
    import tempfile
    from functools import cache
    from math import ceil
    from pathlib import Path
    from random import Random

    import marimo as mo

    import trainledger as tl
    from trainledger.forecast.predict.pipeline import Chunk, Stage, pipeline_ends
    from trainledger.ledger.memory.timeline import highest_by_category
    from trainledger.report import lesson
    from trainledger.report.chart import COLOURS, Axis, Chart, stacked
    from trainledger.report.lesson import Claim, Exercise, Gives

    BATCH = {"recipe.global_batch": 64, "recipe.micro_batch": 8, "recipe.seq_len": 1024, "recipe.steps": 1}
    FP32 = BATCH | {"recipe.precision": "fp32"}
    WAYS = {
        "replicas (DDP)": {"layout.replicate": 8},
        "ZeRO 1": {"layout.shard": 8, "layout.zero": 1},
        "ZeRO 2": {"layout.shard": 8, "layout.zero": 2},
        "ZeRO 3 (FSDP)": {"layout.shard": 8, "layout.zero": 3},
    }
    TIMES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}  # how often the bytes go round a ring
    STATES = ("parameters", "gradients", "optimizer state")

    if lesson.HAS_TORCH:
        import email

        from trainledger.engine.train.engine import train
        from trainledger.engine.train.records import read_lines
        from trainledger.spec.runfile import to_toml


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # 16. Many devices

    You have trained GPT-2 XL on one H100 and it was slow, so you have asked for eight. They have come: 640 GB. You
    launch the same script on all eight, it is nearly eight times as fast, and now you want the 40B model, since 40
    billion times 16 bytes are 640 GB. It dies before its first step, with "out of memory" on every device.

    Nothing is wrong with the arithmetic. Eight devices have 640 GB *together*, and your eight processes share nothing:
    each has all parameters, all gradients, all moments. This chapter is about sharing them, and about what has to
    be sent for it.

    Guess first. If every device keeps an eighth of everything, and asks the others for each layer when it needs it, how
    many times as many bytes go over the links, compared with eight full copies?
    """)
    return


@app.cell(hide_code=True)
def _():
    guess = mo.ui.text(label="times as many bytes:")
    guess
    return (guess,)


@app.cell(hide_code=True)
def _(guess):
    mo.md(lesson.against(guess.value, 1.5, "times") if guess.value else "")
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Adding up a gradient

    Replicas (data parallelism, DDP) each see other sequences and must add up their gradients: an *all-reduce*. The
    naive way sends everything to one device and back, and that device has $n$ times the traffic. A ring does it
    evenly. Cut the gradient into $n$ parts. For $n - 1$ rounds each device sends one part to its right neighbour, who
    adds it to its own: then each device has one part complete. That half is a *reduce-scatter*. For $n - 1$ more rounds
    the complete parts go round: an *all-gather*. Each device has sent

    $$2 \, \frac{n-1}{n} \times \text{bytes},$$

    hardly twice the gradient, however many devices there are. You can write it down:
    """)
    return


@app.function
def ring_all_reduce(gradients):
    """The sum in every place, and how many numbers each device has sent. ``gradients`` are n lists of n parts."""
    n = len(gradients)
    have = [[list(part) for part in each] for each in gradients]
    sent = 0
    for turn in range(2 * (n - 1)):
        moving = [have[device][(device - turn) % n] for device in range(n)]  # all send at once
        sent += len(moving[0])
        for device in range(n):
            part, right = (device - turn) % n, (device + 1) % n
            if turn < n - 1:  # reduce-scatter: add
                have[right][part] = [a + b for a, b in zip(have[right][part], moving[device], strict=True)]
            else:  # all-gather: copy
                have[right][part] = list(moving[device])
    return have, sent


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Sharing the states: ZeRO

    Look at the two halves. Between them each device has a complete eighth of the gradient, and that is all it needs to
    update an eighth of the parameters. So let it keep the moments of this eighth alone, update, and gather *parameters*
    in the second half in place of gradients. The same bytes are sent, and seven eighths of the moments are gone from
    every device. This is ZeRO, stage 1 (Rajbhandari et al. 2020). Two more steps follow:

    | | each device keeps whole | and an eighth of | sent in a step |
    |---|---|---|---|
    | replicas | parameters, gradients, moments | | reduce-scatter + all-gather of gradients |
    | ZeRO 1 | parameters, gradients | moments | reduce-scatter of gradients, all-gather of parameters |
    | ZeRO 2 | parameters | gradients, moments | the same |
    | ZeRO 3 | | all three | all-gather in forward, again in backward, reduce-scatter |

    Stage 3 gathers each layer just before it computes and frees it afterwards. It has to do this twice: three passes
    of the ring where there were two. That is the answer to the question above, and the reason why this is used so much:
    an eighth of the memory for half as much traffic again.
    """)
    return


@app.function
def account(way: str, preset: str = "gpt2-xl", given: dict = FP32):
    """The ledger of a rank's step on 8 H100."""
    return tl.account(tl.load(preset, given | WAYS.get(way, {}), device="h100-sxm", count=8))


@app.function
def sent_nbytes(ledger) -> float:
    """Bytes that a rank sends in a step, by rings."""
    calls = [each for each in ledger.entries if each.kind == "collective"]
    return sum(TIMES[each.name] * each.payload * each.times * (each.ranks - 1) / each.ranks for each in calls)


@app.cell(hide_code=True)
def _():
    def drawn():
        ledgers = [highest_by_category(account(way)) for way in WAYS]
        parts = {state: [each[state] / 1e9 for each in ledgers] for state in STATES}
        colours = dict(zip(STATES, COLOURS, strict=False))
        marks = stacked(parts, colours, lambda state, row: f"{state}: {parts[state][row]:.2f} GB")
        return Chart(
            "GPT-2 XL on eight devices: states of one", tuple(marks), Axis("GB", zero=True), Axis(names=tuple(WAYS))
        )

    drawn()
    return


@app.function(hide_code=True)
def claims_states() -> list[Claim]:
    n = tl.parameters(tl.model("gpt2-xl")).total
    ledgers = {way: account(way) for way in WAYS}
    held = {way: highest_by_category(each) for way, each in ledgers.items()}
    ddp, one, two, three = WAYS
    sent = {way: sent_nbytes(each) for way, each in ledgers.items()}
    whole = [[[float(device + part)] * 3 for part in range(8)] for device in range(8)]
    reduced, numbers = ring_all_reduce(whole)
    added = [[sum(each[part][0] for each in whole)] * 3 for part in range(8)]
    seventy = tl.napkin(device="h100-sxm", params=70e9, tokens=1e12, count=64, mfu=0.4).static_nbytes["fp32-adamw"]
    return [
        Claim("the ring leaves the sum with each of eight devices", all(each == added for each in reduced), True),
        Claim("numbers that each has sent of its 24", numbers, 2 * 7 / 8 * 24),
        Claim("replicas: parameters of each, 4 N", held[ddp]["parameters"], 4 * n, 1e-3, "bytes"),
        Claim("ZeRO 1: moments of each, 8 N / 8", held[one]["optimizer state"], 8 * n / 8, 1e-4, "bytes"),
        Claim("ZeRO 2: gradients of each, 4 N / 8", held[two]["gradients"], 4 * n / 8, 1e-3, "bytes"),
        Claim("ZeRO 3: all three, 16 N / 8", sum(held[three][each] for each in STATES), 16 * n / 8, 1e-4, "bytes"),
        Claim("replicas send two passes of 7/8 of the gradients", sent[ddp], 2 * 7 / 8 * 4 * n, 1e-4, "bytes"),
        Claim("ZeRO 1 and 2 over replicas", max(sent[one], sent[two]) / sent[ddp], 1.0, 1e-4),
        Claim("ZeRO 3 over replicas (the last layer is still there)", sent[three] / sent[ddp], 3 / 2, 0.03),
        Claim("70B on 64 devices: states of one", seventy / 64, 16 * 70e9 / 64, unit="bytes"),
    ]


@app.cell
def _():
    lesson.claims(claims_states())
    return


@app.cell(hide_code=True)
def _():
    mixed = sent_nbytes(account("ZeRO 3 (FSDP)", given=BATCH | {"recipe.precision": "bf16-sharded"}))
    full = sent_nbytes(account("replicas (DDP)", given=BATCH | {"recipe.precision": "bf16-mixed"}))
    mo.md(rf"""
    In practice it is better still: the parameters are gathered in bf16, of two bytes, while replicas under autocast
    add up gradients of four. Then ZeRO 3 sends {mixed / 1e9:.2f} GB a step and the replicas {full / 1e9:.2f}.

    **Find the mistake.** A public account of this lecture says that 16 bytes a parameter and 80 GB "give tens of
    billions of parameters per device". They give {80 / 16:.0f}B. Eight devices hold 40B *if all three states are
    shared*, and not one activation; as replicas they hold {80 / 16:.0f}B still.

    ## Does it really send that?

    You need no GPU for this. Two processes on this machine train one model as ZeRO 3, over gloo. Each meters one of its
    steps, every collective with its bytes. The other side is the account, which has never seen a tensor.
    """)
    return


@app.function
@cache
def two_ranks(**layout) -> dict:
    """What two processes metered, what the account says, and their losses beside those of one process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fields = {
            "model": {"preset": "teach-gpt-1m", "vocab_size": 257, "n_layers": 2, "max_seq_len": 64},
            "recipe": {"seq_len": 64, "global_batch": 8, "micro_batch": 4, "steps": 4, "precision": "fp32"},
            "data": {"path": str(Path(email.__file__).parent), "cache": str(folder / "cache")},
            "cluster": {"backend": "cpu"},
        }
        alone = train(tl.load(fields), folder / "alone", say=[].append)
        run = tl.load(fields | {"layout": layout, "cluster": {"backend": "cpu", "count": 2}})
        (folder / "run.toml").write_text(to_toml(run))
        command = [sys.executable, "-m", "trainledger", "train", str(folder / "run.toml")]
        words = ["--ranks", "2", "--dir", str(folder / "runs"), "--no-preflight"]
        threads = {"OMP_NUM_THREADS": "1"}
        ended = subprocess.run(
            [*command, *words], env=os.environ | threads, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stderr
        (run_dir,) = (each.parent for each in (folder / "runs").glob("*/metrics.jsonl"))
        ranks = [json.loads(each.read_text()) for each in sorted((run_dir / "ranks").glob("*.json"))]
        lines = [
            [each for each in read_lines(at / "metrics.jsonl") if "learning_rate" in each]
            for at in (run_dir, alone.run_dir)
        ]
        apart = max(abs(one["loss"] - other["loss"]) for one, other in zip(*lines, strict=True))
        return {
            "metered": [each["measured"] for each in ranks],
            "account": [each["predicted"] for each in ranks],
            "apart": apart,
            "parameters": tl.parameters(run.model).total,
        }


@app.function(hide_code=True)
def claims_ranks() -> list[Claim]:
    if not lesson.HAS_TORCH:
        return []
    found = two_ranks(shard=2)
    first, account_of_first = found["metered"][0], found["account"][0]
    return [
        Claim(
            "bytes in collectives: metered, and by the account", first["sent_nbytes"], account_of_first["sent_nbytes"]
        ),
        Claim("the peak of a rank", first["peak_nbytes"], account_of_first["peak_nbytes"], unit="bytes"),
        Claim("by hand: three passes of 4 N", first["sent_nbytes"], 3 * 4 * found["parameters"], 0.06, "bytes"),
        Claim("both ranks sent the same", first["sent_nbytes"] == found["metered"][1]["sent_nbytes"], True),
        Claim("no loss differs by 0.00001 from that of one process", found["apart"] < 1e-5, True),
    ]


@app.cell(hide_code=True)
def _():
    mo.md("This table needs torch.") if not lesson.HAS_TORCH else lesson.claims(claims_ranks())
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Sharing a layer, and sharing the depth

    **Tensor parallelism** cuts each matrix, so that every device computes a part of each layer for the same tokens. The
    parts have to be added up: after attention and after the MLP, in forward and in backward. These are four all-reduces
    a layer of all activations, $B\,T\,D$ elements each, and nothing can be computed meanwhile. So it wants the fastest
    links there are, and stays within a node.

    **Pipeline parallelism** gives each device some of the layers. Little is sent, $B\,T\,D$ elements at each border.
    But the last device has nothing to do until the first micro-batch has come through, and the first one nothing at
    the end. With $p$ stages and $m$ micro-batches the share that is waited is

    $$\text{bubble} = \frac{p - 1}{m + p - 1}.$$
    """)
    return


@app.cell(hide_code=True)
def _():
    stages = mo.ui.slider(2, 16, value=4, label="stages", show_value=True)
    micro = mo.ui.slider(1, 64, value=8, label="micro-batches", show_value=True)
    mo.hstack([stages, micro], justify="start")
    return micro, stages


@app.function
def bubble(stages: int, micro_batches: int, schedule: str = "1f1b") -> float:
    """The share of a pipeline's time that is waited: by following each forward (1 s) and backward (2 s)."""
    end = max(pipeline_ends([Stage((Chunk(1.0, 2.0),))] * stages, micro_batches, schedule, 0.0))
    return 1 - micro_batches * 3.0 / end


@app.cell(hide_code=True)
def _(micro, stages):
    mo.md(
        f"{stages.value} stages, {micro.value} micro-batches: **{bubble(stages.value, micro.value):.1%}** of the time "
        "is waited."
    )
    return


@app.function(hide_code=True)
def claims_layers() -> list[Claim]:
    tensor = account("", "llama-3-8b", FP32 | {"layout.tensor": 8})
    layers = [each for each in tensor.entries if each.kind == "collective" and each.path.startswith("layers")]
    added_up = sum(each.payload * each.times for each in layers)
    activations = 64 * 1024 * 4096 * 4  # B T D elements of 4 bytes
    return [
        Claim("tensor parallelism in llama-3-8b: bytes all-reduced in layers", added_up, 4 * 32 * activations),
        Claim("bubble of 4 stages and 8 micro-batches", bubble(4, 8), 3 / 11, 1e-9),
        Claim("of 16 stages and 16, all forwards first", bubble(16, 16, "gpipe"), 15 / 31, 1e-9),
    ]


@app.cell
def _():
    lesson.claims(claims_layers())
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Which one?

    Replicate while it fits. Shard when it does not. Add tensor parallelism within a node when even one layer's
    activations are too many, or when a micro-batch of one sequence a device is already too large a batch; a pipeline
    between nodes when links are slow. Those are rules of thumb. A search tries all of them, with a bound for each
    layout and an exact account of the best:
    """)
    return


@app.cell
def _():
    preset, devices = ("gpt2-xl", 8) if lesson.QUICK else ("llama-3-70b", 256)
    if lesson.HAS_TORCH:
        found = tl.layouts(preset, device="h100-sxm", count=devices, keep=5, limit_seconds=3.0)
    else:
        found = mo.md("The search needs numpy.")
    found
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Exercises

    A new seed gives new numbers. After a first miss there is a hint, after a second the derivation.
    """)
    return


@app.function(hide_code=True)
def exercise_least(seed: int) -> Exercise:
    draw = Random(seed)
    billions, memory, left = draw.choice([30, 70, 120]), draw.choice([40, 80]), draw.choice([10, 20])
    devices = ceil(16 * billions / (memory - left))
    return Exercise(
        f"{billions}B parameters, AdamW in fp32, ZeRO 3 on devices of {memory} GB of which activations and all "
        f"else take {left}. The least number of devices?",
        devices,
        f"16 x {billions} GB / ({memory} - {left}) GB, rounded up.",
        hint="All states are shared; what is left of a device is for them.",
        tolerance=0.001,
        mistakes={ceil(16 * billions / memory): "Something has to be left for activations."},
    )


@app.function(hide_code=True)
def exercise_one(seed: int) -> Exercise:
    draw = Random(seed)
    billions, devices, stage = draw.choice([1, 3, 7]), draw.choice([8, 32, 64]), draw.choice([1, 2, 3])
    shared = {1: 8, 2: 12, 3: 16}[stage]
    gigabytes = billions * (16 - shared + shared / devices)
    return Exercise(
        f"{billions}B parameters in fp32 with AdamW, ZeRO {stage} on {devices} devices: GB of states on each?",
        gigabytes,
        f"{billions} x ({16 - shared} + {shared} / {devices}) GB.",
        hint="Which of 4 (parameters), 4 (gradients) and 8 (moments) are shared?",
        unit="GB",
        mistakes={billions * 16: "Those are replicas."},
    )


@app.function(hide_code=True)
def exercise_bubble(seed: int) -> Exercise:
    draw = Random(seed)
    stages, most = draw.choice([4, 8, 16]), draw.choice([0.1, 0.2, 0.05])
    micro = next(each for each in range(1, 2000) if bubble(stages, each) <= most + 1e-9)
    return Exercise(
        f"A pipeline of {stages} stages: how many micro-batches, at least, for a bubble of at most {most:.0%}?",
        micro,
        f"({stages} - 1) / (m + {stages} - 1) <= {most}: m = ({stages} - 1) (1 / {most} - 1).",
        hint="Solve the bubble for m.",
        tolerance=0.001,
        mistakes={micro + stages - 1: "That is m + p - 1."},
    )


@app.function(hide_code=True)
def exercise_bound(seed: int) -> Exercise:
    draw = Random(seed)
    flops, link = draw.choice([400e12, 500e12]), draw.choice([25e9, 50e9, 200e9])
    tokens = 2 * 4 / link / (6 / flops)
    return Exercise(
        f"Many replicas add up gradients of 4 bytes over links of {link / 1e9:.0f} GB/s, and each does "
        f"{flops / 1e12:.0f} TFLOP/s. From how many tokens per device and step does computing take longer?",
        tokens,
        f"Sending: 2 x 4 N / {link:.3g} s. Computing: 6 N t / {flops:.3g} s. N cancels: t = {tokens:,.0f}.",
        hint="How many bytes per parameter go round, and how many FLOPs has a token for each parameter?",
        unit="tokens",
        mistakes={tokens / 2: "An all-reduce goes round twice.", tokens * 3: "Backward computes, too: 6 N, not 2 N."},
    )


@app.function(hide_code=True)
def exercise_fits(seed: int) -> Exercise:
    draw = Random(seed)
    devices = draw.choice([8, 16, 32])
    each = [16, 8 + 8 / devices, 4 + 12 / devices, 16 / devices]  # bytes per parameter on a device
    at = draw.randrange(3)
    billions = round(80 / (each[at] * each[at + 1]) ** 0.5, 1)  # between what this way holds and what the next does
    return Exercise(
        f"{billions}B parameters in fp32 with AdamW on {devices} devices of 80 GB. Which is the first that fits?",
        list(WAYS)[at + 1],
        f"Bytes a parameter: {', '.join(f'{way} {size:.1f}' for way, size in zip(WAYS, each, strict=True))}; times N.",
        hint="Work out the bytes per parameter of each, and take the one that sends and shares least.",
        choices=tuple(WAYS),
    )


@app.function(hide_code=True)
def exercise_shard(seed: int) -> Exercise:
    draw = Random(seed)
    wrong = draw.choice(
        ["n // ranks * rank, n // ranks * (rank + 1)", "rank * n // ranks, n", "rank, rank + n // ranks"]
    )
    cases = tuple(((n, ranks, rank), (rank * n // ranks, (rank + 1) * n // ranks))
                  for n, ranks in ((12, 4), (10, 4), (7, 8)) for rank in range(ranks))  # fmt: skip
    program = "def shard(n, ranks, rank):\n    return {}\n"
    return Exercise(
        "n rows are shared by ranks: rank r has rows from floor(r n / ranks) to floor((r + 1) n / ranks), the end not "
        "included, so that none is left over. Repair the function.",
        program.format("rank * n // ranks, (rank + 1) * n // ranks"),
        "Begin and end are the same formula for r and r + 1, so that one rank ends where the next begins.",
        hint="Try 10 rows on 4 ranks: are all rows somebody's?",
        start=program.format(wrong),
        check=Gives("shard", cases),
    )


@app.cell(hide_code=True)
def _():
    EXERCISES = [exercise_least, exercise_one, exercise_bubble, exercise_bound, exercise_fits, exercise_shard]
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

    An all-reduce sends twice the bytes, however many devices. ZeRO 1 and 2 save memory for nothing, ZeRO 3 saves
    all of it for half as much traffic again.

    On the command line: `trainledger compare gpt2-xl --device h100-sxm --count 8 --set layout.shard=8 --set-a
    layout.zero=1 --set-b layout.zero=3`, `trainledger layouts llama-3-70b --device h100-sxm --count 256`. On the page:
    [Layouts](../?calculator=layouts). Next: [what to train](17_what_to_train.html).
    """)
    return


if __name__ == "__main__":
    app.run()
