import marimo

__generated_with = "0.25.2"
app = marimo.App(app_title="1. What can this budget buy?")

with app.setup:
    from random import Random

    import marimo as mo

    import trainledger as tl
    from trainledger.report import lesson
    from trainledger.report.lesson import Claim, Exercise


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # 1. What can this budget buy?

    It is Monday. Your team has been promised 1,024 H100 for a 70B model, and your manager asks how long the 15 trillion
    tokens will take. There is no time to run anything. Two lines of arithmetic answer it, and this chapter is about
    those two lines: where they come from, what else they answer, and what they leave out.

    Guess before you read on. How many days, at half of the peak FLOP/s?
    """)
    return


@app.cell(hide_code=True)
def _():
    guess = mo.ui.text(label="days:")
    guess
    return (guess,)


@app.cell(hide_code=True)
def _(guess):
    llama = tl.napkin(params=70e9, tokens=15e12, device="h100-sxm", count=1024, mfu=0.5)
    mo.md(lesson.against(guess.value, llama.days, "days") if guess.value else "")
    return (llama,)


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Six FLOPs per parameter and token

    Most of a Transformer's parameters sit in matrices that every token is multiplied with. One weight meets one element
    of a token's vector once in forward: a multiplication and an addition, 2 FLOPs. Backward needs that product twice
    more, once for the gradient of the input and once for the gradient of the weight: 4 FLOPs. So a training step costs

    $$C = (2 + 4) \, N D = 6 N D$$

    for N parameters and D tokens. A device that reaches a share of its peak, the *model FLOPs utilization* (MFU), does
    $\text{peak} \times \text{MFU}$ of them in a second, and so

    $$\text{seconds} = \frac{6 N D}{\text{devices} \times \text{peak} \times \text{MFU}}.$$

    `tl.napkin` is these two lines. Give it all but one of the five quantities and it solves for the fifth:
    """)
    return


@app.cell
def _(llama):
    llama
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    The peak is the *dense* one. Data sheets print 1,979 TFLOP/s for bf16 on this device, in small type "with sparsity":
    nobody trains with it, and half of it is what counts. Move your own numbers:
    """)
    return


@app.cell(hide_code=True)
def _():
    params = mo.ui.slider(steps=[1e9, 3e9, 8e9, 13e9, 30e9, 70e9, 175e9, 405e9], value=8e9, label="parameters")
    count = mo.ui.slider(steps=[1, 8, 64, 256, 1024, 4096, 16384], value=64, label="devices")
    mfu = mo.ui.slider(0.2, 0.7, 0.05, value=0.4, label="MFU", show_value=True)
    mo.hstack([params, count, mfu], justify="start")
    return count, mfu, params


@app.cell
def _(count, mfu, params):
    tl.napkin(params=params.value, tokens="20x", device="h100-sxm", count=count.value, mfu=mfu.value)
    return


@app.function(hide_code=True)
def claims_time() -> list[Claim]:
    run = {"device": "h100-sxm", "params": 70e9, "tokens": 15e12, "count": 1024}
    h100 = tl.device("h100-sxm").peak_flops_per_second["bf16"]
    gpt3 = tl.napkin(device="h100-sxm", params=175e9, tokens=300e9, count=1, mfu=0.5).flops
    llama3 = tl.napkin(device="h100-sxm", params=70e9, tokens=15e12, count=1, mfu=0.5).flops
    teaching = tl.napkin(device="a100-sxm-80gb", params=1.28e9, tokens=300e9, count=64, mfu=0.2)
    return [
        Claim("70B parameters, 15T tokens: 6 N D", tl.napkin(**run, mfu=0.5).flops, 6 * 70 * 10**9 * 15 * 10**12),
        Claim("on 1,024 H100 at half the peak", tl.napkin(**run, mfu=0.5).days, 143.9, 1e-3, "days"),
        Claim("the peak is half of the sparse figure on the data sheet", h100, 1979e12 / 2, 1e-9, "FLOP/s"),
        Claim("the same run in 88 days needs this MFU", tl.napkin(**run, days=88).mfu, 0.818, 1e-3),
        Claim(
            "32 H100, two weeks, MFU 0.5, 20 tokens a parameter: the largest model",
            tl.napkin(device="h100-sxm", count=32, days="2w", mfu=0.5, tokens="20x").params,
            12.63e9,
            1e-3,
        ),
        Claim("8 H100, two weeks, at the peak: FLOPs (4.79e21 is one week)", 8 * h100 * 14 * 86400, 9.575e21, 1e-3),
        Claim("GPT-3 (175B, 300B tokens) is this many teaching runs", gpt3 / teaching.flops, 136.7, 1e-3),
        Claim("Llama 3 70B is this many", llama3 / teaching.flops, 2734.4, 1e-3),
    ]


@app.cell
def _():
    lesson.claims(claims_time())
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    **Find the mistake.** A press release says: "we trained the 70B model on 15T tokens with 1,024 H100 in 88 days". The
    table above has the MFU that this needs. No published run of a dense model of this size is near it: either
    there were more devices, or fewer tokens, or the precision was fp8. Arithmetic cannot say which; it can say that the
    sentence is not true as it stands.

    ## Will it fit?

    The second question of every Monday. A parameter trained by AdamW in fp32 is four numbers of four bytes:

    | | bytes |
    |---|--:|
    | the parameter | 4 |
    | its gradient | 4 |
    | first moment | 4 |
    | second moment | 4 |

    16 bytes per parameter, shared by however many devices hold them, so eight devices of 80 GB hold at most
    8 x 80 GB / 16 = 40B parameters. In bf16 with fp32 moments it is 2 + 2 + 4 + 4 = 12, and 53.3B. One device holds 5B:
    "tens of billions on one GPU", which a public account of this lecture prints, is off by a factor of eight.
    """)
    return


@app.function(hide_code=True)
def claims_memory() -> list[Claim]:
    per_billion = tl.napkin(device="h100-sxm", params=1e9, tokens=1e9, count=1, mfu=0.5).static_nbytes
    gpt3 = tl.napkin(device="h100-sxm", params=175e9, tokens=1e9, count=1, mfu=0.5)
    eight = 8 * tl.device("h100-sxm").memory_nbytes
    return [
        Claim("1B parameters, AdamW, fp32", per_billion["fp32-adamw"], 16 * 10**9, unit="bytes"),
        Claim("bf16 autocast keeps all four in fp32: masters included", per_billion["bf16-master-adamw"], 16 * 10**9),
        Claim("everything in bf16, which is not mixed precision", per_billion["bf16-adamw"], 8 * 10**9),
        Claim("largest model on 8 x 80 GB at 16 bytes", eight // 16, 40 * 10**9),
        Claim("at 12 bytes", eight / 12, 53.33e9, 1e-3),
        Claim(
            "GPT-3's 175B need this many 80 GB devices for the states alone", gpt3.devices_for_static["fp32-adamw"], 35
        ),
    ]


@app.cell
def _():
    lesson.claims(claims_memory())
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## What the two lines leave out

    The MFU was a guess, and the 16 bytes are only what stays from step to step. A step also keeps activations for
    backward, sends gradients, waits for data, writes checkpoints, and 1,024 devices fail now and then. `tl.plan` has
    each as a bar of its own, from 6 N D at the peak to the days on the calendar:
    """)
    return


@app.cell
def _():
    plan = tl.plan("llama-3-8b", {"recipe.tokens": "160B"}, device="h100-sxm", count=64)
    plan.document().figures()[0]
    return (plan,)


@app.cell(hide_code=True)
def _(plan):
    napkin = plan.napkin
    mo.md(rf"""
    The napkin said {napkin.days:.1f} days at an assumed MFU of {napkin.mfu:.0%}; the plan says
    {plan.forecast.total_seconds / 86400:.1f} days, and where they go. The rest of this lecture is that figure, bar by
    bar.
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
def exercise_days(seed: int) -> Exercise:
    draw = Random(seed)
    billions, per_parameter, count = (
        draw.choice([3, 7, 13, 34]),
        draw.choice([20, 50, 100]),
        draw.choice([64, 128, 256]),
    )
    tokens = billions * per_parameter * 1e9
    days = tl.napkin(device="h100-sxm", params=billions * 1e9, tokens=tokens, count=count, mfu=0.4).days
    return Exercise(
        f"{billions}B parameters, {per_parameter} tokens a parameter, {count} H100 (989.5 TFLOP/s) at MFU 0.4: days?",
        days,
        f"6 x {billions}e9 x {tokens:.3g} / ({count} x 989.5e12 x 0.4) seconds, divided by 86,400.",
        hint="The FLOPs are 6 N D; the tokens are given per parameter.",
        unit="days",
        mistakes={
            days / 2: "That is with the sparse peak of the data sheet.",
            days / 3: "That is forward alone: 2 N D.",
            days * 24: "Those are hours.",
        },
    )


@app.function(hide_code=True)
def exercise_press_release(seed: int) -> Exercise:
    draw = Random(seed)
    runs = [(70, 15, 2048, 80), (8, 15, 512, 50), (34, 4, 512, 40), (13, 2, 128, 35)]
    billions, trillions, count, days = draw.choice(runs)
    mfu = tl.napkin(device="h100-sxm", params=billions * 1e9, tokens=trillions * 1e12, count=count, days=days).mfu
    return Exercise(
        f'"We trained {billions}B parameters on {trillions}T tokens with {count:,} H100 in {days} days." The MFU?',
        mfu,
        f"6 x {billions}e9 x {trillions}e12 FLOPs / ({count} x 989.5e12 FLOP/s x {days} x 86,400 s).",
        hint="Divide the FLOPs that the model needs by those that the devices could have done.",
        mistakes={mfu / 2: "That is of the sparse peak, which nobody trains with.", mfu / 3: "2 N D is forward alone."},
    )


@app.function(hide_code=True)
def exercise_largest(seed: int) -> Exercise:
    draw = Random(seed)
    count, gigabytes, nbytes = draw.choice([2, 4, 8]), draw.choice([24, 48, 80, 141]), draw.choice([8, 12, 16])
    largest = count * gigabytes * 1e9 / nbytes
    return Exercise(
        f"{count} devices of {gigabytes} GB, {nbytes} bytes of states per parameter: the largest N?",
        largest,
        f"{count} x {gigabytes}e9 / {nbytes} = {largest:.3g}, before any activation.",
        hint="All devices together; the states are shared.",
        mistakes={largest / count: "That is one device alone.", largest * nbytes: "Those are bytes, not parameters."},
    )


@app.function(hide_code=True)
def exercise_bill(seed: int) -> Exercise:
    draw = Random(seed)
    billions, price = draw.choice([1, 3, 7, 13]), draw.choice([2.0, 2.5, 3.0])
    run = tl.napkin(device="h100-sxm", params=billions * 1e9, tokens="20x", count=64, mfu=0.4, price=price)
    assert run.money is not None
    return Exercise(
        f"{billions}B parameters on 20 tokens each, MFU 0.4 on H100, {price} per device-hour: the bill?",
        run.money,
        f"6 x {billions}e9 x {20 * billions}e9 / (989.5e12 x 0.4) / 3600 device-hours x {price}. "
        "How many devices share them does not matter.",
        hint="How many devices there are cancels.",
        mistakes={run.money / price: "Those are device-hours."},
    )


@app.function(hide_code=True)
def exercise_impossible(seed: int) -> Exercise:
    draw = Random(seed)
    peak = tl.device("h100-sxm").peak_flops_per_second["bf16"]

    def sentence(mfu: float) -> str:
        billions, count = draw.choice([7, 13, 34, 70]), draw.choice([128, 256, 512])
        days = 6 * billions * 1e9 * 2e12 / (count * peak * mfu) / 86400
        return f"{billions}B on 2T tokens, {count} H100, bf16, {days:.0f} days"

    wrong = sentence(draw.uniform(1.1, 1.5))
    options = [sentence(draw.uniform(0.35, 0.5)) for _ in range(3)] + [wrong]
    draw.shuffle(options)
    return Exercise(
        "Which of these is impossible?",
        wrong,
        "Its MFU is above 1: 6 N D / (devices x 989.5e12 x seconds).",
        hint="Work out the MFU of each.",
        choices=tuple(options),
    )


@app.cell(hide_code=True)
def _():
    EXERCISES = [exercise_days, exercise_press_release, exercise_largest, exercise_bill, exercise_impossible]
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

    FLOPs are 6 N D, seconds are FLOPs over devices x dense peak x MFU, states are 16 bytes a parameter. Ask a press
    release for its MFU before you believe it.

    On the command line: `trainledger napkin --params 70B --tokens 15T --device h100-sxm --count 1024 --mfu 0.5`. On the
    page: [Training time](../?calculator=time). Next: [numbers with few bits](02_numbers.html).
    """)
    return


if __name__ == "__main__":
    app.run()
