import marimo

__generated_with = "0.25.2"
app = marimo.App(app_title="6. Where tensors live")

with app.setup:
    import tempfile
    import time
    from pathlib import Path
    from random import Random

    import marimo as mo

    import trainledger as tl
    from trainledger import catalog
    from trainledger.catalog.host_copies import measured
    from trainledger.report import lesson
    from trainledger.report.chart import COLOURS, Axis, Bars, Chart
    from trainledger.report.lesson import Claim, Exercise

    LARGE = 2**28  # bytes of the copies that were measured
    IMAGES = 256 * 3 * 224 * 224  # elements of a batch of images
    GPT2 = {"recipe.micro_batch": 12, "recipe.global_batch": 480, "recipe.seq_len": 1024}
    EIGHT = GPT2 | {"recipe.tokens": "300B", "layout.replicate": 8}
    ONE = {"recipe.steps": 1, "recipe.precision": "bf16-mixed"}
    XL = {"recipe.micro_batch": 8, "recipe.global_batch": 8, "recipe.seq_len": 1024} | ONE

    if lesson.HAS_TORCH:
        import torch


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # 6. Where tensors live, and what moving costs

    A colleague has read that pinned memory makes loading nine times as fast. He has put `pin_memory=True` and
    `non_blocking=True` everywhere into your GPT-2 training, and asks you to approve it. The ninefold is true, and
    measured below. But is it a ninefold of anything?

    A batch of 12 sequences of 1,024 tokens goes to the GPU as int64. A step takes some tenths of a second. Guess before
    you read on: for how many microseconds of it does the copy of the tokens last, from memory that is not pinned?
    """)
    return


@app.cell(hide_code=True)
def _():
    guess = mo.ui.text(label="microseconds:")
    guess
    return (guess,)


@app.cell(hide_code=True)
def _(guess):
    tokens = tl.copy_seconds(12 * 1024 * 8, "h200", pinned=False)
    mo.md(lesson.against(guess.value, tokens.seconds * 1e6, "us") if guess.value else "")
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Two memories

    A GPU has a memory of its own, and its kernels see no other. A tensor is made in the host's memory unless you say
    where; it moves when you say so, and each move is a copy through a cable. An operation on tensors of two devices is
    an error, not a copy. That is a kindness: a copy that nobody asked for would be found much later. There is one more
    device on every machine, `meta`: it has shapes and no memory, and shows the rules without a GPU.
    """)
    return


@app.cell
def _():
    if lesson.HAS_TORCH:
        made = torch.ones(2, 3)  # in the host's memory
        there = torch.ones(2, 3, device="meta")  # made where it is wanted: nothing is copied
        try:
            made + there
        except RuntimeError as error:
            print(made.device, there.device, error, sep="\n")
    return


@app.cell(hide_code=True)
def _():
    pageable, pinned = (tl.copy_seconds(LARGE, "h200", pinned=each) for each in (False, True))
    mo.md(rf"""
    ## What a copy costs

    $$\text{{seconds}} = \frac{{\text{{bytes}}}}{{\text{{bytes per second of the slowest part of the way}}}}$$

    The cable is PCI Express. Version 5 sends 32 Gbit/s on each of 16 lanes, of which 128 of 130 bits are yours: 63
    GB/s. A copy on a real H200 of {LARGE / 1e6:.0f} MB took {pinned.seconds * 1e3:.2f} ms from *pinned* memory:
    {pinned.bytes_per_second / 1e9:.1f} GB/s, so the cable is the slowest part. From ordinary, *pageable* memory it took
    {pageable.seconds * 1e3:.2f} ms: {pageable.bytes_per_second / 1e9:.1f} GB/s. The cable is the same one.

    The system may move a page of ordinary memory at any time, or write it to disk. The GPU's copy engine works
    without asking the processor, so it must be sure that the page stays. The driver therefore copies your data into a
    small buffer that is pinned, piece by piece, and the engine copies from there. The processor's copy is what is
    slow. And the program waits for it: `non_blocking=True` from pageable memory is accepted, and blocks.
    """)
    return


@app.cell(hide_code=True)
def _():
    size = mo.ui.slider(steps=[1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10], value=1e8, label="bytes", show_value=True)
    device = mo.ui.dropdown(["h200", "h100-sxm", "a100-sxm-80gb", "rtx-4090", "gh200"], value="h200", label="device")
    mo.hstack([size, device], justify="start")
    return device, size


@app.cell
def _(device, size):
    mo.md("\n\n".join(str(tl.copy_seconds(int(size.value), device.value, pinned=each)) for each in (False, True)))
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    How fast does a processor copy? Here, from one place in memory to another:
    """)
    return


@app.cell
def _():
    if lesson.HAS_TORCH:
        source, target = torch.ones(2**26, dtype=torch.uint8), torch.ones(2**26, dtype=torch.uint8)
        laps = []
        for _lap in range(9):
            began = time.perf_counter()
            target.copy_(source)
            laps.append(time.perf_counter() - began)
        print(f"{2**26 / sorted(laps)[4] / 1e9:.1f} GB/s, the median of nine copies of 67 MB")
    return


@app.function(hide_code=True)
def claims_rates() -> list[Claim]:
    pageable, pinned = (tl.copy_seconds(LARGE, "h200", pinned=each) for each in (False, True))
    a100 = tl.copy_seconds(LARGE, "a100-sxm-80gb")
    fifth, fourth = catalog.link("pcie5").bytes_per_second, catalog.link("pcie4").bytes_per_second
    beside = {each.what: each for each in measured("h200")}["to device, pinned, beside matmuls"]
    hidden = (pinned.seconds + 4.128e-3 - beside.seconds) / pinned.seconds  # the matmuls alone take 4.128 ms
    return [
        Claim("PCI Express 5, 16 lanes, by 128 of 130 bits", fifth, 32e9 * 16 / 8 * 128 / 130, 0.02, "B/s"),
        Claim("268 MB to an H200, pageable", pageable.seconds * 1e3, 43.75, 1e-3, "ms"),
        Claim("pinned: times as fast", pageable.seconds / pinned.seconds, 43.75 / 4.93, 2e-3),
        Claim("the share of the cable that pinned memory reaches", pinned.bytes_per_second / fifth, 0.85, 0.01),
        Claim("an A100, by the same share of its cable", a100.bytes_per_second, 54.45e9 * fourth / fifth, 1e-3, "B/s"),
        Claim("beside matmuls: the share of the pinned copy that is hidden", hidden, 0.829, 2e-3),
    ]


@app.cell
def _():
    lesson.claims(claims_rates())
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Copy while you compute

    The copy engine is a unit of its own. So the next batch can travel while this one is computed, if three things are
    true: the source is pinned, the copy is `non_blocking`, and somebody starts it early, on a stream of its own. In
    the measurement above 82.9 % of the copy was hidden behind matmuls. Here are three steps of 60 ms on 256 images,
    in fp32:
    """)
    return


@app.function
def ends(compute: float, copy: float, *, overlapped: bool, steps: int = 3) -> list[tuple[float, float, float]]:
    """Of each step when its copy begins, when its compute begins, and when that ends."""
    found, free, began = [], 0.0, 0.0
    for _ in range(steps):
        starts = began if overlapped else free  # overlapped: when the step before begins to compute
        began = max(starts + copy, free)
        free = began + compute
        found.append((starts, began, free))
    return found


@app.cell(hide_code=True)
def _():
    def drawn():
        marks = []
        for row, pinned in enumerate((False, True)):
            copy = tl.copy_seconds(IMAGES * 4, "h200", pinned=pinned).seconds * 1e3
            steps = ends(60.0, copy, overlapped=pinned)
            at = [row - 0.2 if pinned else row] * 3
            moved, computed = [each[0] for each in steps], [each[1] for each in steps]
            marks.append(Bars(at, moved, [each + copy for each in moved], "" if row else "copy", COLOURS[5], thick=0.2))
            at = [row + 0.1] * 3 if pinned else at
            marks.append(
                Bars(at, computed, [each[2] for each in steps], "" if row else "compute", COLOURS[0], thick=0.3)
            )
        names = ("pageable, in turn", "pinned, ahead")
        return Chart("Three steps on 256 images", tuple(marks), Axis("ms", zero=True), Axis(names=names))

    drawn()
    return


@app.cell(hide_code=True)
def _():
    loop = tl.loop("gpt2", EIGHT, device="h100-sxm", count=8)
    batch = 2 * 12 * 1024 * 8
    copy = tl.copy_seconds(batch, "h100-sxm", pinned=False).seconds
    micro = loop.step_seconds / loop.micro_batches
    images = tl.copy_seconds(IMAGES * 4, "h200", pinned=False).seconds
    mo.md(rf"""
    ## When does it matter?

    Divide. The 256 images are {IMAGES * 4 / 1e6:.0f} MB and take {images * 1e3:.0f} ms pageable, in turn with 60 ms of
    computing: {images / (images + 0.06):.0%} of the loop. Pin them, send them as uint8, and it is gone.

    Your colleague's tokens and their targets are {batch:,} bytes. Pageable they take {copy * 1e6:.0f} us, of
    {micro * 1e3:.0f} ms that the micro-batch computes: {copy / micro:.3%}. So the ninefold is of less than a
    thousandth. Starting a copy at all costs some microseconds, pinned or not. Approve it, as it does no
    harm; but look for the time elsewhere.
    """)
    return


@app.function(hide_code=True)
def claims_batches() -> list[Claim]:
    run = tl.load("gpt2", GPT2 | ONE, device="h200", count=1)
    held = dict(tl.account(run).resident)["batch"]
    loop = tl.loop("gpt2", EIGHT, device="h100-sxm", count=8)
    share = 40 * tl.copy_seconds(2 * 12 * 1024 * 8, "h100-sxm", pinned=False).seconds / 8 / loop.step_seconds
    plain, offloaded = (
        tl.load("gpt2-xl", XL | {"recipe.activation_checkpointing": kind}, device="a100-sxm-80gb")
        for kind in ("none", "offload")
    )
    moved = sum(each.read * each.times for each in tl.account(offloaded).entries if each.kind == "transfer")
    copied = tl.copy_seconds(moved, "a100-sxm-80gb").seconds
    by_tokens = loop.loader_tokens_per_second / 8 * 16 / 6.136e9
    longer = tl.predict(offloaded).step_seconds - tl.predict(plain).step_seconds
    return [
        Claim("a step's 40 micro-batches of tokens and targets, int64", held, 40 * 2 * 12 * 1024 * 8, unit="bytes"),
        Claim("share of GPT-2's step in pageable copies: below a thousandth", share < 1e-3, True),
        Claim("by tokens: 16 bytes each, at the tokens of a second", share, by_tokens, 1e-3),
        Claim("gpt2-xl on an A100, activations in host memory: longer by", longer, copied, 0.1, "s"),
    ]


@app.cell
def _():
    lesson.claims(claims_batches())
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    The last row is the other end of the scale. Activations can be kept in host memory until backward wants them
    ([chapter 12](12_checkpointing.html)). Those of GPT-2 XL are some 26 GB, they go there and back, and the step takes
    more than four times as long. The cable decides; no pinning helps any more.

    ## Find the needless copies

    `annotate` runs a script line by line and can pretend that there is a GPU. This one has three mistakes:
    """)
    return


@app.function(hide_code=True)
def script() -> str:
    """A training script with three mistakes."""
    return """import torch
device = "cuda"
model = torch.nn.Linear(256, 256).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
total = 0.0
for step in range(8):
    batch = torch.randn(64, 256)
    there = batch.to(device, non_blocking=True)
    noise = torch.zeros(64, 256).to(device)
    loss = model(there + noise).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total += loss.item()
"""


@app.function(hide_code=True)
def findings():
    """What `annotate` finds in the script, as if on one GPU."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.py"
        path.write_text(script())
        return tl.annotate(str(path), device="cuda").findings


@app.cell(hide_code=True)
def _():
    def told() -> str:
        rows = [f"| {each.line.rsplit(':', 1)[1]} | {each.what} | {each.instead} |" for each in findings()]
        return "\n".join([f"```python\n{script()}```", "", "| line | finding | instead |", "|--:|---|---|", *rows])

    mo.md(told() if lesson.HAS_TORCH else "This needs torch.")
    return


@app.function(hide_code=True)
def claims_torch() -> list[Claim]:
    if not lesson.HAS_TORCH:
        return []
    x = torch.ones(4)
    try:
        x + torch.ones(4, device="meta")
        said = "nothing"
    except RuntimeError as error:
        said = type(error).__name__
    wrong = ("non_blocking", "zeros(", ".item()")
    planted = {at for at, line in enumerate(script().splitlines(), 1) if any(each in line for each in wrong)}
    named = {int(each.line.rsplit(":", 1)[1]) for each in findings()}
    return [
        Claim("where a tensor is made if nobody says", str(x.device), "cpu"),
        Claim("`.to` of where it already is gives the tensor itself", x.to("cpu") is x, True),
        Claim("adding tensors of two devices", said, "RuntimeError"),
        Claim("lines that annotate names", str(sorted(named)), str(sorted(planted))),
    ]


@app.cell(hide_code=True)
def _():
    mo.md("This table needs torch.") if not lesson.HAS_TORCH else lesson.claims(claims_torch())
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    **Find the mistake.** "`x.to("cuda", non_blocking=True)` makes the copy asynchronous", says many a tutorial. From
    pageable memory it does not, on line 8 above as everywhere. The other way it is worse:
    `y.to("cpu", non_blocking=True)` from the GPU *is* asynchronous into pinned memory, and who reads `y` before a
    `torch.cuda.synchronize()` reads what was there before.

    ## Exercises

    A new seed gives new numbers. After a first miss there is a hint, after a second the derivation.
    """)
    return


@app.function(hide_code=True)
def exercise_copy(seed: int) -> Exercise:
    draw = Random(seed)
    images, side, pinned = draw.choice([64, 128, 512]), draw.choice([224, 384]), draw.choice([True, False])
    nbytes = images * 3 * side * side * 4
    ms = tl.copy_seconds(nbytes, "h200", pinned=pinned).seconds * 1e3
    other = tl.copy_seconds(nbytes, "h200", pinned=not pinned).seconds * 1e3
    return Exercise(
        f"{images} images of 3 x {side} x {side} in fp32 go to an H200 from {'pinned' if pinned else 'pageable'} "
        "memory (54.45 GB/s pinned, 6.136 pageable): ms?",
        ms,
        f"{images} x 3 x {side} x {side} x 4 = {nbytes:,} bytes, over the rate.",
        hint="Four bytes an element.",
        unit="ms",
        mistakes={other: "That is the other memory.", ms / 4: "fp32 has four bytes."},
    )


@app.function(hide_code=True)
def exercise_rate(seed: int) -> Exercise:
    draw = Random(seed)
    text, images, side = draw.choice([200, 400, 800]), draw.choice([1500, 2500, 4000]), draw.choice([224, 256])
    answer = images * 3 * side * side / (text * 1000 * 2)
    return Exercise(
        f"A language run takes {text},000 tokens a second of 2 bytes, a vision run {images:,} images of 3 x {side} x "
        f"{side} bytes. How many times as many bytes a second does the second read?",
        answer,
        f"{images:,} x {3 * side * side:,} / ({text},000 x 2).",
        hint="Bytes a second of each, and divide.",
        mistakes={answer * 2: "A token on disk has two bytes.", answer * 4: "These images are uint8, not fp32."},
    )


@app.function(hide_code=True)
def exercise_step(seed: int) -> Exercise:
    draw = Random(seed)
    compute, megabytes = draw.choice([10, 20, 40]), draw.choice([300, 600, 1200, 2400])
    slow, fast = (tl.copy_seconds(megabytes * 10**6, "h200", pinned=each).seconds * 1e3 for each in (False, True))
    answer = (compute + slow) / max(compute, fast)
    return Exercise(
        f"A step computes {compute} ms and copies {megabytes} MB, pageable and in turn (6.136 GB/s). Pinned (54.45 "
        "GB/s) and wholly overlapped: how many times as fast is the loop?",
        answer,
        f"({compute} + {slow:.1f}) / max({compute}, {fast:.1f}).",
        hint="Overlapped, the longer of the two remains.",
        mistakes={(compute + slow) / (compute + fast): "That is pinned, but still in turn."},
    )


@app.function(hide_code=True)
def exercise_useful(seed: int) -> Exercise:
    draw = Random(seed)
    cases = {
        "tokens of a language run": (draw.choice([8, 16]) * 2048 * 8, 200.0),
        "images in fp32": (draw.choice([128, 256]) * 3 * 224 * 224 * 4, 60.0),
        "the learning rate": (4, 300.0),
        "weights, once at the start": (draw.choice([6, 14]) * 10**9, 4e7),
    }

    def saved(case: tuple[float, float]) -> float:
        slow, fast = (tl.copy_seconds(int(case[0]), "h200", pinned=each).seconds * 1e3 for each in (False, True))
        return (slow - fast) / case[1]

    said = "; ".join(f"{name}: {nbytes:,} bytes every {ms:g} ms" for name, (nbytes, ms) in cases.items())
    return Exercise(
        f"For which of these is pinned memory worth most? {said}.",
        max(cases, key=lambda name: saved(cases[name])),
        "Saved share: " + ", ".join(f"{name} {saved(case):.2%}" for name, case in cases.items()) + ".",
        hint="Divide the milliseconds that it saves by those between two copies.",
        choices=tuple(cases),
    )


@app.class_definition(hide_code=True)
class Counted:
    """A number that counts how often it is moved to a device, and how often somebody waits for its value."""

    moves = waits = 0

    def __init__(self, value: float, place: str = "cpu") -> None:
        self.value, self.place = value, place

    def to(self, place: str) -> "Counted":
        Counted.moves += place != self.place
        return Counted(self.value, place)

    def item(self) -> float:
        Counted.waits += self.place != "cpu"
        return self.value

    def __add__(self, other: "Counted") -> "Counted":
        if self.place != other.place:
            raise RuntimeError(f"one is on {self.place}, the other on {other.place}")
        return Counted(self.value + other.value, self.place)


@app.function(hide_code=True)
def check_moves(text: str) -> str:
    """What is wrong with a loop that adds batches on a device; empty where it moves and waits no more than it must."""
    names: dict = {}
    Counted.moves = Counted.waits = 0
    try:
        exec(text, names)
        total = names["total"]([Counted(each) for each in (3.0, 4.0, 5.0)], Counted(10.0), "cuda")
    except Exception as error:
        return f"It does not run: {type(error).__name__}: {error}"
    if total != 42.0:
        return f"The sum is {total}, not 42.0."
    if Counted.moves > 4 or Counted.waits > 1:
        return f"{Counted.moves} moves where 4 are enough, {Counted.waits} waits where 1 is enough."
    return ""


@app.function(hide_code=True)
def exercise_moves(seed: int) -> Exercise:
    head, end = "def total(batches, bias, device):\n", "    return {}\n"
    each_time = "    for batch in batches:\n        here = batch.to(device) + bias.to(device)\n"
    reading = head + "    total = 0.0\n" + each_time + "        total += here.item()\n" + end.format("total")
    adding = (head + "    total = None\n" + each_time + "        total = here if total is None else total + here\n"
              + end.format("total.item()"))  # fmt: skip
    back = head + "    total = 0.0\n" + each_time + "        total += here.to('cpu').item()\n" + end.format("total")
    solution = (head + "    bias, total = bias.to(device), None\n    for batch in batches:\n"
                "        here = batch.to(device) + bias\n        total = here if total is None else total + here\n"
                + end.format("total.item()"))  # fmt: skip
    return Exercise(
        "Three batches are moved to the device, each is added to the bias, and the sum is read. Let the loop move four "
        "times and wait once.",
        solution,
        "The bias goes once, before the loop; the sum stays on the device and is read once, behind it.",
        hint="What is moved again that is there already? What is read before it is needed?",
        start=(reading, adding, back)[seed % 3],
        check=check_moves,
    )


@app.cell(hide_code=True)
def _():
    EXERCISES = [exercise_copy, exercise_rate, exercise_step, exercise_useful, exercise_moves]
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

    A copy is bytes over the slowest part of the way: 54 GB/s pinned, 6 pageable. Divide it by the step before you
    improve it.

    On the command line: `trainledger catalog h200`, `trainledger measure copy`, `trainledger annotate --device cuda
    train.py`. Next: [gradients and what they cost](07_gradients.html).
    """)
    return


if __name__ == "__main__":
    app.run()
