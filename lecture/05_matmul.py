import marimo

__generated_with = "0.25.2"
app = marimo.App(app_title="5. FLOPs, bytes, seconds")

with app.setup:
    from random import Random
    from textwrap import dedent, indent
    from time import perf_counter

    import marimo as mo

    import trainledger as tl
    from trainledger.answers.einsum import einsum_times
    from trainledger.answers.pages.einsum_figures import INTENSITY, RATE, roof, roofline_chart
    from trainledger.forecast.plan.napkin import HIGHEST_PUBLISHED_MFU
    from trainledger.forecast.predict.roofline import hfu, mfu
    from trainledger.report import lesson
    from trainledger.report.chart import COLOURS, Chart, Line
    from trainledger.report.lesson import Claim, Exercise
    from trainledger.spec.frozen import frozen
    from trainledger.spec.units import format_flops_per_second, format_seconds
    from trainledger.tensors.einsum import Einsum, Tensor, einsum

    if lesson.HAS_TORCH:
        import torch

        torch.set_num_threads(1)

    LOOP = dedent("""\
        call()
        synchronize()
        start = clock()
        for _ in range(100):
            call()
        synchronize()
        seconds = (clock() - start) / 100
    """)
    FAULTS = {
        "there is no warm-up: the first call is timed": LOOP.replace("call()\n", "", 1),
        "nothing waits for the warm-up before the clock starts": LOOP.replace("synchronize()\n", "", 1),
        "nothing waits for the device before the clock stops": LOOP.replace("    call()\nsynchronize()", "    call()"),
        "the seconds are those of all calls, not of one": LOOP.replace(" / 100", ""),
    }


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # 5. FLOPs, bytes, seconds

    You have an H100 for an hour, and you time a matmul: 1,024 rows of activations, 4,096 wide, times a weight of
    4,096 x 4,096, in bf16. The notebook prints 4,300 TFLOP/s. The data sheet promises 989. Somebody has made a mistake,
    and it is not the data sheet.

    To see it at a glance you need three numbers for every operation: FLOPs, bytes, seconds. Guess one of them before
    you read on. How many microseconds does that matmul take on an H100 *at least*?
    """)
    return


@app.cell(hide_code=True)
def _():
    guess = mo.ui.text(label="microseconds:")
    guess
    return (guess,)


@app.cell(hide_code=True)
def _(guess):
    least = einsum_times(matmul(1024, 4096, 4096), [tl.device("h100-sxm")])[0].bound_seconds
    mo.md(lesson.against(guess.value, least * 1e6, "microseconds") if guess.value else "")
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## FLOPs

    A *FLOP* is one addition or one multiplication of floating-point numbers. *FLOPs* are several: an amount, like
    metres. *FLOP/s* is a rate, like metres per second. "FLOPS" is written for both; this lecture does not use it.

    Multiply a matrix of $m \times k$ with one of $k \times n$. The result has $m n$ elements. Each is a sum of $k$
    products: $k$ multiplications and $k - 1$ additions, which everybody counts as $k$, since a machine adds to a zero
    that it started with. So

    $$\text{FLOPs} = 2 \, m n k.$$

    More dims in front are a batch, and multiply it. Operations on single elements (ReLU, a square, an addition) take
    one FLOP for each. Double all sizes of a square matmul, and its FLOPs grow by eight; those of an operation on
    elements by four. This is why large models are matmuls, as far as FLOPs go.
    """)
    return


@app.function
def matmul(m: int, k: int, n: int, dtype: str = "bf16") -> Einsum:
    """The account of an [m, k] @ [k, n]: FLOPs, bytes, intensity."""
    return einsum("mk,kn->mn", [(m, k), (k, n)], dtype)


@app.function(hide_code=True)
def claims_flops() -> list[Claim]:
    squares = Tensor("fp32", (1024, 512)).elementwise_flops
    batched = einsum("abmk,kn->abmn", [(4, 8, 16, 32), (32, 2)])
    rows = [
        Claim("1024 x 512 times 512 x 256: FLOPs", matmul(1024, 512, 256).flops, 268_435_456),
        Claim("so many times those of squaring each element", matmul(1024, 512, 256).flops / squares, 2.0 * 256),
        Claim("(4, 8, 16, 32) times (32, 2): FLOPs", batched.flops, 2 * (4 * 8 * 16) * 2 * 32),
        Claim("twice the sizes: FLOPs grow by", matmul(512, 512, 512).flops / matmul(256, 256, 256).flops, 2.0**3),
    ]
    if not lesson.HAS_TORCH:
        return rows
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        torch.randn(4, 8, 16, 32) @ torch.randn(32, 2)
    return [*rows, Claim("the same, counted by PyTorch while it runs", batched.flops, counter.get_total_flops())]


@app.cell
def _():
    lesson.claims(claims_flops())
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    **Find the mistake.** Three public accounts of this lecture, one error each. "A matmul is one multiplication and one
    addition per output element": per *term*, and each element has $k$ of them. "(4, 8, 16, 32) @ (32, 2) takes 131,072
    FLOPs": twice what the table has. And "a matmul does about 300 FLOPs per byte": that number is explained below.

    ## Bytes

    A device computes on what it has in registers and caches; the tensors lie in its memory. A matmul has to read both
    factors once and to write the result once, at best. In bf16, 2 bytes an element:

    $$\text{bytes} = 2 \, (m k + k n + m n), \qquad
      \text{intensity} = \frac{\text{FLOPs}}{\text{bytes}} = \frac{2 m n k}{2 (m k + k n + m n)}.$$

    For $m = n = k$ this is $n / 3$. The intensity belongs to the operation and its shape: 341 at $n = 1024$, 1 if there
    is a single row, and 0.25 for a ReLU, which reads 2 bytes, writes 2, and does one FLOP between.

    ## Seconds

    Both take time, and they happen side by side, so that the longer one counts:

    $$\text{seconds} \ge \max\left(\frac{\text{FLOPs}}{\text{peak FLOP/s}}, \;
      \frac{\text{bytes}}{\text{bytes/s}}\right).$$

    They are equal at one intensity, the *ridge point*, peak over bandwidth. For an H100 in bf16 it is
    $989.5 \times 10^{12} / 3.35 \times 10^{12} = 295$ FLOPs per byte. That is the "300": a property of the machine. An
    operation above it is *compute-bound*, one below *memory-bound*. FLOP/s drawn over the intensity rise and then meet
    a roof, the peak; the figure is called the *roofline*. Move your matmul:
    """)
    return


@app.cell(hide_code=True)
def _():
    sizes = [1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
    m = mo.ui.slider(steps=sizes, value=1024, label="m (rows, tokens)", show_value=True)
    k = mo.ui.slider(steps=sizes, value=4096, label="k", show_value=True)
    n = mo.ui.slider(steps=sizes, value=4096, label="n", show_value=True)
    mo.hstack([m, k, n], justify="start")
    return k, m, n


@app.cell
def _(k, m, n):
    yours = matmul(m.value, k.value, n.value)
    times = einsum_times(yours, [tl.device("h100-sxm"), tl.device("a100-sxm-80gb")])
    roofline_chart(yours.intensity, times, f"{m.value:,} x {k.value:,} x {n.value:,} in bf16 under two roofs")
    return times, yours


@app.cell(hide_code=True)
def _(times, yours):
    rows = "\n    ".join(
        f"| {each.title} | {each.ridge:.0f} | {each.bound} | {format_seconds(each.bound_seconds)} | "
        f"{format_seconds(each.seconds)} | {each.flops_per_second / each.peak_flops_per_second:.0%} |"
        for each in times
    )
    mo.md(f"""
    {yours.flops:,} FLOPs, {yours.nbytes:,} bytes, {yours.intensity:.1f} FLOPs per byte.

    | device | ridge point | bound by | at least | predicted | of the peak |
    |---|--:|---|--:|--:|--:|
    {rows}
    """)
    return


@app.cell(hide_code=True)
def _():
    good, bad = (einsum_times(matmul(size, size, size), [tl.device("h100-sxm")])[0] for size in (4096, 4001))
    mo.md(rf"""
    *At least* is arithmetic, and no machine beats it. *Predicted* is more. The work is cut into tiles, dealt to the
    multiprocessors in waves, of which the last is seldom full. The clock falls under load. And odd sizes spoil the
    alignment that tensor cores want: for 4,096 x 4,096 x 4,096 an H100 is predicted {format_seconds(good.seconds)}, for
    4,001 each, with fewer FLOPs, {format_seconds(bad.seconds)}. This is why a vocabulary of 50,257 is padded to 50,304.

    Now let m become 1. A model that writes one token for one reader multiplies one row with every weight. It reads two
    bytes for two FLOPs, and the device idles at a three hundredth of its peak. Serving is the art of getting more rows.
    """)
    return


@app.function(hide_code=True)
def claims_roofline() -> list[Claim]:
    h100, a100 = tl.device("h100-sxm"), tl.device("a100-sxm-80gb")
    layer = einsum_times(matmul(1024, 4096, 4096), [h100, a100])
    compute_bound = next(n for n in range(1, 9999) if einsum_times(matmul(n, n, n), [h100])[0].bound == "compute")
    plain = einsum_times(matmul(1024, 4096, 4096, "fp32"), [h100])[0]
    return [
        Claim("ReLU in bf16: FLOPs per byte", Tensor("bf16", (1024, 512)).elementwise_intensity, 1 / (2 + 2)),
        Claim("one row times 4096 x 4096: FLOPs per byte", matmul(1, 4096, 4096).intensity, 0.9995, 1e-4),
        Claim("(1024, 4096, 4096): FLOPs per byte", matmul(1024, 4096, 4096).intensity, 682.7, 1e-4),
        Claim("ridge point of an H100 in bf16", layer[0].ridge, 989.5e12 / 3.35e12, 1e-9, "FLOP/byte"),
        Claim("in fp32, where there are no tensor cores", plain.ridge, 67 / 3.35, 1e-9, "FLOP/byte"),
        Claim("of an A100 in bf16", layer[1].ridge, 153.0, 1e-3, "FLOP/byte"),
        Claim("smallest n from which an n x n matmul is compute-bound on an H100: 3 x 295.4", compute_bound, 887),
        Claim("(1024, 4096, 4096) on an H100, at least", layer[0].bound_seconds * 1e6, 34.36e9 / 989.5e6, 1e-3, "us"),
    ]


@app.cell
def _():
    lesson.claims(claims_roofline())
    return


@app.cell(hide_code=True)
def _():
    large = [
        each.flops_per_second / each.peak_flops_per_second
        for each in einsum_times(matmul(8192, 8192, 8192), [tl.device("a100-sxm-80gb"), tl.device("h100-sxm")])
    ]
    mo.md(rf"""
    ## How much of the peak: MFU

    Divide what was needed by what the device could have done in the time, and you have a *utilization*. For a matmul it
    is FLOPs / (seconds x peak). For a training step the *model FLOPs utilization* is

    $$\text{{MFU}} = \frac{{6 N \times \text{{tokens of the step}}}}{{\text{{seconds of the step}} \times
      \text{{devices}} \times \text{{peak FLOP/s}}}},$$

    with $6 N$ for the FLOPs that the model needs for a token: for each of $N$ parameters 2 in forward, and 4 in
    backward, which takes two products for each one of forward. The peak is that of the dtype that computes, and the
    *dense* one: data sheets print twice as much, "with sparsity", which nobody trains with. *Hardware FLOPs
    utilization* (HFU) counts also what is computed a second time to save memory; it looks better and trains no faster.
    Only MFU compares runs.

    No kernel reaches 1. For a large matmul alone the prediction is {large[0]:.0%} on an A100 and {large[1]:.0%} on an
    H100. A training run with an MFU of a half is well made. Ask what a printed MFU counts: the highest that trainledger
    has collected, {HIGHEST_PUBLISHED_MFU:.0%} of FlashAttention-2 on A100 (arXiv 2307.08691, table 1), has the
    FLOPs of the attention on top of $6 N$, 12 x layers x hidden size x context a token; with a context of 8,192 they
    are a third. By the formula above that run has 48 %. What is missing has gone to memory-bound operations,
    communication, small kernels, a program that launches too slowly, or to waiting for data. A utilization above 1
    means that the time, the FLOPs or the peak is wrong.
    """)
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Measuring: ways to be wrong

    So 4,300 TFLOP/s is a time that is wrong. A GPU takes orders: PyTorch writes the kernel on a queue, which takes some
    microseconds, and goes on while the device works. A clock that is read now has timed the order.

    You need no GPU to see it. Here is a device in simulated seconds: a call costs the program 8 us and runs on the
    device behind those before it, and the first takes longer. `synchronize` waits until the last one is done, as
    `torch.cuda.synchronize` does; on a CPU calls return when they are done, and it is `lambda: None`.
    """)
    return


@app.class_definition
class SimulatedDevice:
    """A device with a queue, in simulated seconds: of a launch, of a kernel, of the first kernel."""

    def __init__(self, kernel_seconds: float, first_seconds: float, launch_seconds: float = 8e-6) -> None:
        self.kernel_seconds, self.next_seconds = kernel_seconds, first_seconds
        self.launch_seconds, self.now, self.done = launch_seconds, 0.0, 0.0

    def call(self) -> None:
        """Launch a kernel; it starts when those before it are done."""
        self.now += self.launch_seconds
        self.done = max(self.now, self.done) + self.next_seconds
        self.next_seconds = self.kernel_seconds

    def synchronize(self) -> None:
        """Wait until the last kernel is done."""
        self.now = max(self.now, self.done)

    def clock(self) -> float:
        """Seconds since the program began."""
        return self.now


@app.function
def timed_by(loop: str, device: SimulatedDevice) -> float:
    """Seconds that a loop finds on a simulated device."""
    written = {"call": device.call, "synchronize": device.synchronize, "clock": device.clock}
    exec(loop, written)
    return written["seconds"]


@app.cell(hide_code=True)
def _():
    found = [
        (fault, timed_by(loop, SimulatedDevice(58.2e-6, 0.1))) for fault, loop in {"nothing": LOOP, **FAULTS}.items()
    ]
    outcomes = "\n    ".join(
        f"| {fault} | {format_seconds(seconds)} | {format_flops_per_second(34.36e9 / seconds)} |"
        for fault, seconds in found
    )
    mo.md(f"""
    Your matmul on an H100, 58.2 us a call as predicted and 0.1 s the first, timed by a loop that is right and by
    copies of it with one fault each:

    ```python
{indent(LOOP, "    ")}
    ```

    | what is wrong | it finds | which would be |
    |---|--:|--:|
    {outcomes}

    There are the 4,300 TFLOP/s: 8 us, the time of a launch. And a first call loads libraries, allocates memory, chooses
    kernels, and with `torch.compile` it compiles. With a real clock:
    """)
    return


@app.function
def seconds_of(call, times: int = 10, synchronize=lambda: None) -> list[float]:
    """Seconds of each of several calls, the quickest first; one before them warms up and is not counted."""
    call()
    synchronize()
    found = []
    for _ in range(times):
        start = perf_counter()
        call()
        synchronize()
        found.append(perf_counter() - start)
    return sorted(found)


@app.cell
def _():
    calls = {}
    if lesson.HAS_TORCH:
        square = torch.randn(256, 256)
        compiled = torch.compile(lambda x: torch.relu(x @ x), backend="aot_eager")
        start = perf_counter()
        compiled(square)
        calls["first call of a compiled function"] = perf_counter() - start
        every = seconds_of(lambda: compiled(square), times=30)
        calls |= {"then the quickest of 30": every[0], "their median": every[15], "the slowest": every[-1]}
    {name: format_seconds(each) for name, each in calls.items()} or mo.md("needs torch")
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    The last three are the same work, thirty times; other programs, clocks and caches are in between. So do not believe
    *one* call: take the median, or the quickest if you ask what the machine can do. And time nothing else with it:
    making the inputs, finding memory for the result, printing, a `.item()`.

    ## The experiment: your machine's roofline

    A large copy, a ReLU, matmuls from small to large, and thin ones, all on one core and into memory that is there
    already (`out=`). The roof is the best that was found, for nobody prints the peak of this processor; so what you
    read off is a share of the best, and no MFU.
    """)
    return


@app.function
def measured(sizes: list[int], times: int) -> tuple[float, list[tuple[str, float, float]]]:
    """Bytes per second of a large copy; and of operations in fp32 the name, FLOPs per byte and FLOP/s."""
    large, result = torch.randn(2**23), torch.empty(2**23)
    copied = 2 * large.nbytes / seconds_of(lambda: result.copy_(large), times)[0]
    relu = Tensor("fp32", (2**23,))
    seconds = seconds_of(lambda: torch.clamp_min(large, 0, out=result), times)[0]
    found = [("ReLU", relu.elementwise_intensity, relu.elementwise_flops / seconds)]
    shapes = [(size, size, size) for size in sizes] + [(rows, sizes[-1], sizes[-1]) for rows in (1, 4, 16)]
    for m, k, n in shapes:
        left, right, out = torch.randn(m, k), torch.randn(k, n), torch.empty(m, n)
        seconds = seconds_of(lambda a=left, b=right, out=out: torch.matmul(a, b, out=out), times)[0]
        one = matmul(m, k, n, "fp32")
        found.append((f"{m} x {k} x {n}", one.intensity, one.flops / seconds))
    return copied, found


@app.cell
def _():
    cubes, repeats = ([64, 128, 256, 512], 5) if lesson.QUICK else ([64, 128, 256, 512, 1001, 1024], 10)
    copied, points = measured(cubes, repeats) if lesson.HAS_TORCH else (0.0, [])
    return copied, points


@app.cell(hide_code=True)
def _(copied, points):
    if points:
        best = max(rate for *_, rate in points)
        said = [f"{name}: {format_flops_per_second(rate)}" for name, _, rate in points]
        names, where, reached = zip(*((name, at, rate / 1e12) for name, at, rate in points), strict=True)
        here = roof("roof", "this machine", best, copied, (0.1, 512), COLOURS[0])
        dots = Line(where, reached, "measured", COLOURS[5], 0, symbol="circle", said=said, texts=names)
        lines = "\n        ".join(
            f"| {name} | {at:.3g} | {format_flops_per_second(rate)} | {rate / best:.1%} | "
            f"{rate / min(best, copied * at):.0%} |"
            for name, at, rate in points
        )
        table = mo.md(f"""
        A large copy moves {copied / 1e9:.1f} GB/s.

        | | FLOPs per byte | reached | of the best | of its roof |
        |---|--:|--:|--:|--:|
        {lines}

        More than 100 % of its roof is possible left of the ridge: a tensor that fits a cache does not come from memory.
        What is missing elsewhere is the fixed cost of a call, and whatever else this machine is doing at the moment.
        """)
        drawn = mo.vstack([Chart("This machine, in fp32", (here, dots), INTENSITY, RATE), table])
    drawn if points else mo.md("needs torch")
    return


@app.function(hide_code=True)
def claims_utilization() -> list[Claim]:
    a100, h100 = (tl.device(name).peak_flops_per_second["bf16"] for name in ("a100-sxm-80gb", "h100-sxm"))
    step = {"seconds": 3.317, "peak_flops_per_second": 1024 * h100}
    needed = 6 * 70e9 * 4e6
    recomputed = hfu(8 / 6 * needed, **step) / mfu(needed, **step)
    weights, attention = 6 * 2.7e9, 12 * 32 * 2560 * 8192  # FLOPs of a token: GPT3-2.7B has 32 layers, 2,560 wide
    flash = mfu(225e12 * weights / (weights + attention), 1.0, a100)
    early = timed_by(FAULTS["nothing waits for the device before the clock stops"], SimulatedDevice(58.2e-6, 0.1))
    return [
        Claim("70B, 4M tokens a step in 3.317 s on 1,024 H100: MFU", mfu(needed, **step), 0.4999, 1e-3),
        Claim("all layers recomputed, 8 N in place of 6 N: HFU over MFU", recomputed, 4 / 3, 1e-9),
        Claim("FlashAttention-2, printed 225 TFLOP/s and 72 %: the MFU by 6 N", flash, 0.48, 0.01),
        Claim("34.36 GFLOP, by a clock that stops too early: utilization", mfu(34.36e9, early, h100), 4.34, 0.01),
    ]


@app.cell
def _():
    lesson.claims(claims_utilization())
    return


@app.class_definition(hide_code=True)
@frozen
class TimesRightly:
    """The check of a function ``seconds(call, synchronize, clock)``: it finds the seconds of a kernel within 5 %."""

    kernel_seconds: float
    first_seconds: float

    def __call__(self, text: str) -> str:
        device, written = SimulatedDevice(self.kernel_seconds, self.first_seconds), {}
        try:
            exec(text, written)
            found = float(written["seconds"](device.call, device.synchronize, device.clock))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        if abs(found / self.kernel_seconds - 1) <= 0.05:
            return ""
        early = found < self.kernel_seconds
        why = "The clock stopped before the device did." if early else "More was timed than a call."
        return f"It finds {format_seconds(found)}, and a call takes {format_seconds(self.kernel_seconds)}. {why}"


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Exercises

    A new seed gives new numbers. After a first miss there is a hint, after a second the derivation. Peaks in bf16 are
    989.5 TFLOP/s for an H100 and 312 for an A100; their memories move 3.35 and 2.039 TB/s.
    """)
    return


@app.function(hide_code=True)
def exercise_batch(seed: int) -> Exercise:
    draw = Random(seed)
    width, name = draw.choice([2048, 4096, 5120, 8192]), draw.choice(["h100-sxm", "a100-sxm-80gb"])
    device = tl.device(name)
    rows = next(b for b in range(1, 9999) if einsum_times(matmul(b, width, width), [device])[0].bound == "compute")
    ridge = einsum_times(matmul(1, width, width), [device])[0].ridge
    return Exercise(
        f"Decoding multiplies one row per sequence with bf16 weights of {width:,} x {width:,} on {device.title}. From "
        "how many sequences on is this matmul compute-bound?",
        rows,
        f"b rows have 2 b n^2 / (2 (2 b n + n^2)) = b n / (2 b + n) FLOPs per byte. That is the ridge r = {ridge:.1f} "
        f"at b = r n / (n - 2 r) = {ridge * width / (width - 2 * ridge):.1f}.",
        hint="Write the intensity of b rows and set it equal to the ridge point. Do not leave out the rows' own bytes.",
        tolerance=0.006,
        mistakes={
            ridge: "That leaves out the bytes of the rows themselves, read and written.",
            ridge / 2: "Two FLOPs a weight, but two bytes as well.",
        },
    )


@app.function(hide_code=True)
def exercise_mfu(seed: int) -> Exercise:
    draw = Random(seed)
    billions, count, target = draw.choice([1.5, 7, 13, 70]), draw.choice([8, 64, 512]), draw.uniform(0.25, 0.55)
    tokens = draw.choice([0.5e6, 1e6, 4e6])
    peak = count * tl.device("h100-sxm").peak_flops_per_second["bf16"]
    seconds = float(f"{6 * billions * 1e9 * tokens / (peak * target):.3g}")
    share = mfu(6 * billions * 1e9 * tokens, seconds, peak)
    return Exercise(
        f"{billions:g}B parameters, {tokens / 1e6:g}M tokens a step, {count} H100, {seconds:g} s a step, and every "
        "layer is computed twice to save memory. The MFU?",
        share,
        f"6 x {billions:g}e9 x {tokens:g} / ({seconds:g} x {count} x 989.5e12). Recomputation does not count.",
        hint="What the model needs over what the devices could have done: 6 N per token.",
        mistakes={
            hfu(8 * billions * 1e9 * tokens, seconds, peak): "That counts the recomputation: it is the HFU.",
            share / 2: "That is of the sparse peak.",
            share / 3: "That is forward alone: 2 N.",
        },
    )


@app.function(hide_code=True)
def exercise_batched(seed: int) -> Exercise:
    draw = Random(seed)
    m, k, n = (draw.choice([128, 256, 512, 1024, 4096]) for _ in range(3))
    batch = draw.choice([8, 16, 32])
    one = einsum("bmk,bkn->bmn", [(batch, m, k), (batch, k, n)])
    return Exercise(
        f"`torch.bmm` of ({batch}, {m}, {k}) and ({batch}, {k}, {n}): FLOPs?",
        one.flops,
        f"2 x {batch} x {m} x {n} x {k} = {one.flops:,}.",
        hint="Each element of the result is a sum over the inner size; the batch multiplies.",
        mistakes={
            one.flops / 2: "An addition for each multiplication, too.",
            one.flops / batch: "That is one matmul of the batch.",
            one.flops * batch: "The batch dim is shared by both factors and counts once.",
            2 * batch * m * n: "Two FLOPs per term; each element has as many terms as the inner size.",
        },
    )


@app.function(hide_code=True)
def exercise_loop(seed: int) -> Exercise:
    draw = Random(seed)
    fault, kernel, first = draw.choice(list(FAULTS)), draw.choice([5e-5, 2e-4, 1e-3]), draw.choice([0.2, 0.5, 2.0])
    seconds = timed_by(FAULTS[fault], SimulatedDevice(kernel, first))
    return Exercise(
        f"A kernel takes {format_seconds(kernel)}, its first call {format_seconds(first)}, a launch 8 us. This loop "
        f"finds {format_seconds(seconds)}:\n\n```\n{FAULTS[fault]}```\n\nWhat is wrong with it?",
        fault,
        f"It finds {format_seconds(seconds)} in place of {format_seconds(kernel)}: {fault}.",
        hint="Is it a launch, a hundred calls, or a hundredth of the first call too much? If so, why was that timed?",
        choices=tuple(FAULTS),
    )


@app.function(hide_code=True)
def exercise_write_timing(seed: int) -> Exercise:
    draw = Random(seed)
    kernel, first = draw.choice([2e-4, 1e-3, 5e-3]), draw.choice([0.05, 0.3, 2.0])
    head = "def seconds(call, synchronize, clock):\n"
    solution = (
        f"{head}    call()\n    synchronize()\n    start = clock()\n    for _ in range(50):\n        call()\n"
        "    synchronize()\n    return (clock() - start) / 50"
    )
    return Exercise(
        f"Repair `seconds(call, synchronize, clock)` so that it finds what a call takes on a device with a queue. It "
        f"will be tried on one whose kernel takes {format_seconds(kernel)} and its first {format_seconds(first)}.",
        solution,
        f"Warm up, wait, read the clock, call often, wait, read the clock, divide.\n\n```\n{solution}\n```",
        hint="A call returns when it is launched. And the first one is not like the others.",
        start=f"{head}    start = clock()\n    call()\n    return clock() - start",
        check=TimesRightly(kernel, first),
    )


@app.cell(hide_code=True)
def _():
    EXERCISES = [exercise_batched, exercise_batch, exercise_mfu, exercise_loop, exercise_write_timing]
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

    A matmul takes 2 m n k FLOPs; FLOPs per byte against the ridge point say whether computing or moving counts, and the
    longer of both is the least time. Warm up, synchronize, repeat; if the utilization is above 1, look at the clock.

    On the command line: `trainledger einsum "mk,kn->mn" 1024,4096 4096,4096 --dtype bf16 --device h100-sxm`, and
    `trainledger measure matmul` for your own roofline. On the page:
    [Matmul and roofline](../?calculator=matmul&m=1024). Next: [where tensors live, and what moving
    costs](06_devices.html).
    """)
    return


if __name__ == "__main__":
    app.run()
