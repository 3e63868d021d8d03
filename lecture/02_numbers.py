import marimo

__generated_with = "0.25.2"
app = marimo.App(app_title="2. Numbers with few bits")

with app.setup:
    from itertools import count
    from math import erf, log10, sqrt
    from random import Random

    import marimo as mo

    import trainledger as tl
    from trainledger.answers.pages.format_figures import bits_chart, steps_chart
    from trainledger.report import lesson
    from trainledger.report.lesson import Claim, Exercise, Gives
    from trainledger.spec.dtypes import BLOCK_FORMATS, FORMATS, NumberFormat
    from trainledger.tensors.number import in_block, overflows_from, zero_up_to

    if lesson.HAS_TORCH:
        import torch


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # 2. Numbers with few bits

    You switch a run from fp32 to fp16, because matmuls are faster there. The loss falls as before. A day later somebody
    prints the gradient of a rare token's embedding, and it is zero: not small, zero. It has been zero for a day, and
    nothing complained. In bf16, with exactly as many bits, the same gradient is there.

    Guess before you read on. 100,000 gradients are drawn from a normal distribution with deviation $10^{-8}$ and stored
    in fp16. How many of them, in percent, become zero?
    """)
    return


@app.cell(hide_code=True)
def _():
    guess = mo.ui.text(label="percent:")
    guess
    return (guess,)


@app.cell(hide_code=True)
def _(guess):
    lost = 100 * erf(zero_up_to(FORMATS["fp16"]) / 1e-8 / sqrt(2))
    mo.md(lesson.against(guess.value, lost, "percent") if guess.value else "")
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Three fields

    A floating-point number is a sign, an exponent and a mantissa. With $m$ mantissa bits and a bias that puts 1 in the
    middle of the exponents,

    $$x = \pm \, 2^{\,\text{exponent} - \text{bias}} \times 1.\text{mantissa}, \qquad \text{bias} = 2^{e-1} - 1.$$

    The $e$ exponent bits decide how far a format reaches, the $m$ mantissa bits how finely it steps. Everything else
    follows by hand. Take fp16, with $e = 5$, $m = 10$, and so a bias of 15:

    - the step from 1 to the next number is $2^{-10}$, the *machine epsilon*;
    - the highest exponent is spent on infinity, so the largest number is $(2 - 2^{-10}) \times 2^{15} = 65{,}504$;
    - the smallest *normal* number is $2^{1-15} = 6.1 \times 10^{-5}$;
    - below it the leading 1 is given up, and numbers go on in even steps of $2^{-14-10} = 6 \times 10^{-8}$. These are
      the *subnormal* numbers;
    - half of the last step is the end: up to $2^{-25} = 2.98 \times 10^{-8}$ everything is rounded to zero.

    bf16 has $e = 8$, $m = 7$: the reach of fp32, paid for with three bits of mantissa. Type a number, and see where its
    bits go:
    """)
    return


@app.cell(hide_code=True)
def _():
    number = mo.ui.text(value="0.1", label="number:")
    number
    return (number,)


@app.cell(hide_code=True)
def _(number):
    try:
        typed = float(number.value)
    except ValueError:
        typed = 0.1
    bits_chart(
        typed, [FORMATS[name] for name in ("fp32", "bf16", "fp16", "e4m3", "e5m2")], [], [], f"{typed:g} in bits"
    )
    return (typed,)


@app.cell
def _(typed):
    {
        name: f"{each.value:.9g}, {each.fate}"
        for name in ("fp32", "bf16", "fp16", "e4m3", "e5m2")
        for each in [FORMATS[name].rounded(typed)]
    }
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    Nobody stops you from making a format of your own. Move bits from the exponent to the mantissa, and watch reach turn
    into precision. 5 and 10 are fp16, 8 and 7 bf16, 8 and 10 what tensor cores make of fp32 (tf32):
    """)
    return


@app.cell(hide_code=True)
def _():
    exponent = mo.ui.slider(2, 8, value=6, label="exponent bits", show_value=True)
    mantissa = mo.ui.slider(1, 23, value=9, label="mantissa bits", show_value=True)
    mo.hstack([exponent, mantissa], justify="start")
    return exponent, mantissa


@app.cell
def _(exponent, mantissa):
    mine = NumberFormat("yours", exponent.value, mantissa.value)
    {
        "bits": mine.bits,
        "largest": f"{mine.largest:.5g}",
        "smallest normal": f"{mine.smallest_normal:.4g}",
        "zero up to": f"{zero_up_to(mine):.4g}",
        "epsilon": f"{mine.epsilon:.4g}",
        "decimal digits": f"{(mine.mantissa_bits + 1) * log10(2):.1f}",
    }
    return (mine,)


@app.cell
def _(mine):
    steps_chart([FORMATS[name] for name in ("bf16", "fp16", "e4m3", "e5m2")] + [mine], 1e-4)
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    Read the figure from right to left. Each format has a flat stretch, where its steps are a fixed share of the number:
    there it is a floating-point format, and lower is more precise. To the left of its smallest normal number the share
    grows, until one step is the whole number and the line ends. bf16 lies higher and goes on beyond the figure;
    fp16 lies low and ends at $6 \times 10^{-8}$, just above the gradients of the beginning.
    """)
    return


@app.function(hide_code=True)
def claims_reach() -> list[Claim]:
    fp16, bf16, e4m3, e5m2 = (FORMATS[name] for name in ("fp16", "bf16", "e4m3", "e5m2"))
    return [
        Claim("the largest number of fp16", int(fp16.largest), 65504),
        Claim("of E4M3, which has one NaN and no infinity", e4m3.largest, 448.0),
        Claim("fp16 becomes infinite half a step later, from 65,520 on", int(overflows_from(fp16)), 65520),
        Claim("6e-5 is below the smallest normal number of fp16, and is", fp16.rounded(6e-5).fate, "subnormal"),
        Claim("fp16 is zero up to half of its smallest step, 2^-25", zero_up_to(fp16), 2.0**-25),
        Claim("1e-8 in bf16", bf16.rounded(1e-8).value, 1.00117e-8, 1e-5),
        Claim("decimal digits of E5M2: three significant bits", (e5m2.mantissa_bits + 1) * log10(2), 0.9, 0.01),
    ]


@app.cell
def _():
    lesson.claims(claims_reach())
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    **Find the mistake.** A public account of this lecture says: "fp16 rounds every value below 6e-5 to exactly zero".
    $6 \times 10^{-5}$ is where precision begins to fade. Zero comes two thousand times lower. And the table of the same
    account gives E5M2 half a decimal digit; a format that tells 1 from 1.25 has nine tenths of one.

    ## The experiment: gradients that vanish

    Ten lines of PyTorch settle the question of the beginning. The remedy is as old as fp16 training: multiply the loss
    by a large power of two, so that all gradients move up by it, and divide before the update. A power of two changes
    the exponent alone, so nothing is rounded on the way.
    """)
    return


@app.function
def zero_share(dtype_name: str, scale: float = 1.0) -> float:
    """The share of 100,000 gradients of deviation 1e-8 that a dtype of torch stores as zero."""
    gradients = 1e-8 * torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    return ((scale * gradients).to(getattr(torch, dtype_name)) == 0).double().mean().item()


@app.cell
def _():
    shares = {}
    if lesson.HAS_TORCH:
        shares = {
            "fp16": zero_share("float16"),
            "fp16, loss times 2^16": zero_share("float16", scale=2.0**16),
            "bf16": zero_share("bfloat16"),
        }
    shares or mo.md("needs torch")
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## The price of bf16: small updates

    bf16 does not lose small numbers. It loses small *differences*. Its step above 1 is $2^{-7} = 0.0078$, and an update
    of less than half a step rounds back to where it came from. Let a weight of 1 be pushed down by 0.001, a thousand
    times. It should arrive at 0:
    """)
    return


@app.function
def pushed(dtype_name: str, times: int = 1000) -> float:
    """A weight of 1 after so many updates of -0.001 in a dtype of torch."""
    weight = torch.ones((), dtype=getattr(torch, dtype_name))
    for _ in range(times):
        weight -= 0.001
    return weight.item()


@app.cell
def _():
    {name: pushed(name) for name in ("float32", "float16", "bfloat16")} if lesson.HAS_TORCH else mo.md("needs torch")
    return


@app.function(hide_code=True)
def claims_rounding() -> list[Claim]:
    bf16, fp16 = FORMATS["bf16"], FORMATS["fp16"]
    first_lost = next(whole for whole in count(1) if bf16.rounded(whole).value != whole)
    rows = [
        Claim("1 + 0.0039 in bf16: less than half a step", bf16.rounded(1 + 0.0039).value, 1.0),
        Claim("1 + 0.004: one step", bf16.rounded(1 + 0.004).value, 1 + 2.0**-7),
        Claim("the first whole number that bf16 cannot hold, 2^8 + 1", first_lost, 257),
    ]
    if not lesson.HAS_TORCH:
        return rows
    draw = Random(0)
    numbers = [draw.choice((-1, 1)) * 10 ** draw.uniform(-9, 4) for _ in range(2000)]
    alike = 0
    for each, dtype in ((bf16, torch.bfloat16), (fp16, torch.float16)):
        by_torch = torch.tensor(numbers, dtype=torch.float64).to(dtype).tolist()
        alike += sum(each.rounded(x).value == cast for x, cast in zip(numbers, by_torch, strict=True))
    by_the_normal_distribution = erf(2.0**-25 / 1e-8 / sqrt(2))
    return [
        *rows,
        Claim("of 4,000 roundings to bf16 and fp16, torch does so many as the formula", alike, 4000),
        Claim("gradients lost in fp16: counted, and expected", zero_share("float16"), by_the_normal_distribution, 1e-3),
        Claim("lost in bf16", zero_share("bfloat16"), 0.0),
        Claim("the weight in bf16 after a thousand updates of -0.001", pushed("bfloat16"), 1.0),
    ]


@app.cell
def _():
    lesson.claims(claims_rounding())
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    The weight in bf16 has not moved at all. This is why *mixed* precision keeps a copy of the weights in fp32, the
    *master weights*, and the optimizer's moments with it: matmuls read bf16, updates are added up where they are not
    lost. Chapter 13 trains with and without it.

    ## Eight bits and four

    With eight bits you choose: E4M3 has the digits (weights and activations), E5M2 the reach (gradients). Neither is
    used alone. A tensor is divided by a *scale*, so that its largest element meets the largest number of the format.
    With four bits one scale for a tensor is not enough, and blocks of 16 or 32 elements have one each. A number then
    depends on its neighbours: 0.3 in a block of mxfp4 whose largest element is 6 becomes
    """)
    return


@app.cell
def _():
    in_block("mxfp4", 0.3, 6.0).value, in_block("mxfp4", 0.3, 0.4).value
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    and beside 0.4 it is much nearer to itself. The scales cost bits as well: four-bit elements are 4.25 or 4.5 bits.

    What do fewer bits buy? Bytes, in proportion, and FLOP/s, out of proportion, because tensor cores take narrow
    numbers only. How much depends on the device. Three statements that go round are checked here: that fp8 is 8 times
    fp32 on an H100, that bf16 is 16 times, and that fp8 is for H100 only.
    """)
    return


@app.function(hide_code=True)
def claims_bits() -> list[Claim]:
    h100, a100 = (tl.device(name).peak_flops_per_second for name in ("h100-sxm", "a100-sxm-80gb"))
    with_fp8 = [name for name in ("l4", "rtx-4090", "b200", "mi300x") if "fp8" in tl.device(name).peak_flops_per_second]
    return [
        Claim("fp8 against fp32 on an H100: 1,979 / 67, not 8", h100["fp8"] / h100["fp32"], 29.5, 2e-3),
        Claim("bf16 against fp32 on an H100", h100["bf16"] / h100["fp32"], 14.8, 3e-3),
        Claim("the 16 that is printed for it is the A100's: 312 / 19.5", a100["bf16"] / a100["fp32"], 16.0),
        Claim(
            'fp64 in place of fp32 is said to "triple memory"; times', FORMATS["fp64"].bits / FORMATS["fp32"].bits, 2.0
        ),
        Claim("of L4, RTX 4090, B200 and MI300X so many have an fp8 peak", len(with_fp8), 4),
        Claim("bits of an element of nvfp4: 4, and a scale of 8 for 16", BLOCK_FORMATS["nvfp4"].bits_per_element, 4.5),
    ]


@app.cell
def _():
    lesson.claims(claims_bits())
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Exercises

    A new seed gives new numbers. After a first miss there is a hint, after a second the derivation.
    """)
    return


@app.function(hide_code=True)
def exercise_rounded(seed: int) -> Exercise:
    draw = Random(seed)
    bf16 = FORMATS["bf16"]
    number = next(
        x for _ in range(1000) for x in [round(draw.uniform(1, 9), 3)] if abs(bf16.rounded(x).relative_error) > 1e-3
    )
    one = bf16.rounded(number)
    return Exercise(
        f"{number} in bf16 (7 mantissa bits): the value that is stored, with all its digits?",
        one.value,
        f"Between powers of two the step is 2^(exponent - 7), here {one.spacing}; {number} / {one.spacing} = "
        f"{number / one.spacing:.3f} is rounded to {one.value / one.spacing:.0f} steps.",
        hint="Find the power of two below it; a step is that over 128. How many steps is the number?",
        tolerance=2e-5,
        mistakes={
            number: "That is the number itself; it lies between two values of bf16.",
            one.value + (one.spacing if one.value < number else -one.spacing): "That is the neighbour that is farther.",
        },
    )


@app.function(hide_code=True)
def exercise_update(seed: int) -> Exercise:
    draw = Random(seed)
    name, weight = draw.choice(["bf16", "fp16"]), draw.choice([3.0, 5.0, 12.0, 0.75, 0.375, 0.1875])
    one = FORMATS[name].rounded(weight)
    return Exercise(
        f"A weight of {weight} in {name}. From which size on does an update change it?",
        one.spacing / 2,
        f"The step at {weight} is {one.spacing:g}; more than half of it rounds to the next value.",
        hint="What is the step between the power of two below the weight and the one above it?",
        mistakes={
            one.spacing: "That is the whole step; half of it is enough to round to the next value.",
            FORMATS[name].epsilon / 2: "That is at a weight between 1 and 2; steps change with the power of two.",
        },
    )


@app.function(hide_code=True)
def exercise_scale(seed: int) -> Exercise:
    draw = Random(seed)
    deviation = draw.choice([1e-9, 3e-9, 1e-8, 3e-8, 1e-7, 3e-7])

    def lost(power: int) -> float:
        return erf(zero_up_to(FORMATS["fp16"]) / (deviation * 2**power) / sqrt(2))

    power = next(each for each in range(40) if lost(each) < 0.01)
    return Exercise(
        f"Normal gradients of deviation {deviation:g} in fp16. The smallest power k so that a loss scale of 2^k leaves "
        "fewer than 1 % of them zero?",
        power,
        f"What is below 2^-25 becomes zero. 1 % of a normal distribution is within 0.0125 deviations of 0, so "
        f"2^k x {deviation:g} x 0.0125 has to pass 2.98e-8. At k = {power - 1} {lost(power - 1):.2%} are lost, "
        f"at k = {power} {lost(power):.2%}.",
        hint="fp16 is zero up to 2^-25; 1 % of a normal distribution is nearer to 0 than 0.0125 deviations.",
        mistakes={power - 1: f"That loses {lost(power - 1):.2%}.", power + 1: f"That works, but {power} does too."},
    )


@app.function(hide_code=True)
def exercise_fate(seed: int) -> Exercise:
    draw = Random(seed)
    fates = {
        "exact": "it is stored as it is",
        "rounded": "it is rounded, to full precision",
        "subnormal": "it is rounded, with fewer digits than usual",
        "underflow": "it becomes zero",
        "overflow": "it is too large",
    }
    name = draw.choice(["fp16", "bf16", "e4m3", "e5m2"])
    number = draw.choice([1e-8, 1e-6, 1e-4, 0.0009, 0.004, 0.1, 0.75, 1.3, 300.0, 500.0, 60000.0, 70000.0])
    one = FORMATS[name].rounded(number)
    return Exercise(
        f"What happens to {number:g} in {name} ({one.format.exponent_bits} exponent and {one.format.mantissa_bits} "
        "mantissa bits)?",
        fates[one.fate],
        f"{name} goes from {one.format.smallest_subnormal:.3g} ({one.format.smallest_normal:.3g} at full precision) "
        f"to {one.format.largest:g}. It stores {one.value:.6g}.",
        hint="Work out its largest number, its smallest normal and half of its smallest step.",
        choices=tuple(fates.values()),
    )


@app.function(hide_code=True)
def exercise_write_rounding(seed: int) -> Exercise:
    draw = Random(seed)
    name = draw.choice(["bf16", "fp16", "e4m3"])
    one = FORMATS[name]
    numbers = [0.1, 1.0, 3.14159, -2.7, 100.3, *(draw.uniform(0.5, 200) for _ in range(20))]
    head = "from math import frexp\n\ndef rounded(x):\n"
    start = f"{head}    # x with {one.mantissa_bits} mantissa bits ({name})\n    return x"
    solution = f"{head}    step = 2.0 ** (frexp(x)[1] - 1 - {one.mantissa_bits})\n    return round(x / step) * step"
    return Exercise(
        f"Write `rounded(x)`: a number between -200 and 200, not near 0, as {name} stores it "
        f"({one.mantissa_bits} mantissa bits). `frexp(x)[1] - 1` is the exponent of x.",
        solution,
        f"The step at x is 2^(exponent - {one.mantissa_bits}): count steps, round, multiply.\n\n```\n{solution}\n```",
        hint="How large is a step between 2^k and 2^(k+1), if there are 2^m of them?",
        start=start,
        check=Gives("rounded", tuple(((x,), one.rounded(x).value) for x in numbers)),
    )


@app.cell(hide_code=True)
def _():
    EXERCISES = [exercise_rounded, exercise_update, exercise_scale, exercise_fate, exercise_write_rounding]
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

    Exponent bits are reach, mantissa bits are precision: fp16 loses small gradients (scale the loss), bf16 loses small
    updates (keep fp32 master weights). What a format does to a number can be worked out before you round it.

    On the command line: `trainledger dtype 1e-8`, `trainledger dtype bf16`. On the page:
    [Number formats](../?calculator=formats&value=1e-8). Next: [a tensor is a rule for finding
    elements](03_tensors.html).
    """)
    return


if __name__ == "__main__":
    app.run()
