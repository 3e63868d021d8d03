import marimo

__generated_with = "0.25.2"
app = marimo.App(app_title="12. Keep or recompute")

with app.setup:
    from collections.abc import Callable, Sequence
    from random import Random

    import marimo as mo

    import trainledger as tl
    from trainledger.ledger.memory.timeline import highest_by_category
    from trainledger.report import lesson
    from trainledger.report.chart import Axis, Band, Chart, Line
    from trainledger.report.lesson import Claim, Exercise

    if lesson.HAS_TORCH:
        import torch
        from torch import Tensor, nn
        from torch.nn import functional as F
        from torch.utils.checkpoint import checkpoint


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # 12. Keep or recompute

    It is Friday. Eight sequences of GPT-2 XL need 54 GB in a step, and the only device that is free has 40. More than
    half of those bytes are activations, written in forward and read once in backward, most of a step later. You could
    throw them away and compute them again when backward comes by. Every layer then runs forward twice.

    Forward is a third of a step. Guess: by how many percent does the step get longer?
    """)
    return


@app.cell(hide_code=True)
def _():
    guess = mo.ui.text(label="percent:")
    guess
    return (guess,)


@app.cell(hide_code=True)
def _(guess, sweep):
    full_row = next(row for row in sweep.rows if row.value == "full")
    mo.md(lesson.against(guess.value, 100 * (full_row.relative - 1), "percent (predicted)") if guess.value else "")
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## What one checkpoint keeps

    *Activation checkpointing* of a layer keeps its input and nothing else. When backward arrives, the layer's forward
    runs again from that input, keeps what it would have kept at first, backward consumes it, and all of it is freed
    before the next layer's turn. For $L$ layers that keep $a$ bytes each and have inputs of $i$ bytes:

    | | kept at the end of forward | at most, during backward | forward runs of a layer |
    |---|--:|--:|--:|
    | keep all | L a | L a | 1 |
    | checkpoint every layer | L i | L i + a | 2 |
    | checkpoint segments of k layers | (L / k) i | (L / k) i + k a | 2 |
    | keep nothing, start from the embedding | i | i + a | up to L |

    In chapter 11 you counted $a$ for a layer of GPT-2: $16 D$ numbers for each token with flash attention. The input is
    $D$ numbers. So checkpointing every layer leaves a sixteenth of the activations, and one layer more.

    In PyTorch it is one call:
    """)
    return


@app.function
def residual_mlps(d: int, layers: int, segment: int) -> "nn.Module":
    """A stack of MLPs; ``segment`` layers share a checkpoint, 0 keeps everything."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(d)
            self.up, self.down = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(F.gelu(self.up(self.norm(x))))

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(layers))

        def forward(self, x: Tensor) -> Tensor:
            for first in range(0, layers, segment or layers):
                part = nn.Sequential(*self.layers[first : first + (segment or layers)])
                # nothing here draws random numbers, so their generator's state need not be kept
                x = checkpoint(part, x, use_reentrant=False, preserve_rng_state=False) if segment else part(x)
            return x.square().mean()

    torch.manual_seed(0)
    return Stack()


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    And one word in a run file: `recipe.activation_checkpointing`. This is the step of the story under each of them, on
    an A100:
    """)
    return


@app.cell
def _():
    batch = {"recipe.micro_batch": 8, "recipe.global_batch": 8}
    sweep = tl.compare("gpt2-xl", None, batch, over="recipe.activation_checkpointing", device="a100-sxm-80gb")
    sweep
    return batch, sweep


@app.cell(hide_code=True)
def _(sweep):
    rows = {row.value: row for row in sweep.rows if row.memory_nbytes is not None}
    mo.md(rf"""
    Every layer recomputed: {rows["full"].memory_nbytes / 1e9:.1f} GB instead of
    {rows["none"].memory_nbytes / 1e9:.1f} GB, and the step takes {rows["full"].relative - 1:.0%} longer. Not 33 %, for
    three reasons. The head and the loss, and the optimizer, do not run again. Backward's own work is more than two
    thirds, because flash attention recomputes its scores anyway. And PyTorch stops a recomputation *early*: as soon as
    everything that backward needs is there. The last matrix of the MLP is needed by nobody, for what it computes is the
    input of the next layer, which was kept. A fifth of a step is what remains.

    *Offload* copies activations to the host's memory. It recomputes nothing, and here it is the slowest: what it saves
    has to pass through PCIe twice. *Selective* keeps what is expensive (attention and every second matmul) and
    recomputes the rest: {rows["selective"].memory_nbytes / 1e9:.1f} GB, {rows["selective"].relative - 1:.0%} longer.

    ## All of them on one sheet
    """)
    return


@app.cell
def _(batch, sweep):
    segments = tl.compare(
        "gpt2-xl",
        None,
        batch | {"recipe.activation_checkpointing": "segments"},
        over="recipe.activation_checkpointing.n_blocks=2,3,4,6,12,24",
        device="a100-sxm-80gb",
    )
    shown = [row for row in sweep.rows if row.memory_nbytes is not None and row.value not in ("offload", "attention")]
    Chart(
        "GPT-2 XL, 8 sequences, A100: memory against time",
        (
            Line(
                [100 * row.relative - 100 for row in shown],
                [row.memory_nbytes / 1e9 for row in shown],
                width=0,
                symbol="circle",
                texts=[row.value for row in shown],
            ),
            Line(
                [100 * (row.step_seconds / shown[0].step_seconds - 1) for row in segments.rows],
                [row.memory_nbytes / 1e9 for row in segments.rows],
                "segments of 2, 3, 4, 6, 12, 24 layers",
                "#E69F00",
                symbol="square",
            ),
            Band("y", 40, text="40 GB"),
        ),
        Axis("% longer than keeping everything", ends=(-1, 32)),
        Axis("memory of the device (GB)", ends=(20, 60)),
        height=300,
    )
    return


@app.cell(hide_code=True)
def _(rows, segments):
    three = next(row for row in segments.rows if row.value == "3")
    seven, full = rows["segments of 7"], rows["full"]
    mo.md(rf"""
    Down and to the left is better. Segments of three buy {(full.memory_nbytes - three.memory_nbytes) / 1e9:.1f} GB more
    than a checkpoint for every layer, for {three.step_seconds / full.step_seconds - 1:.0%} more time: fewer layers end
    their recomputation early. Segments of seven, which is the root of 48 and what texts recommend, cost
    {seven.step_seconds / full.step_seconds - 1:.0%} and buy {(full.memory_nbytes - seven.memory_nbytes) / 1e9:.1f} GB.
    That deserves a derivation.

    ## Where the square root comes from, and why it is not 7 here

    With segments of $k$ layers the activations at the worst moment of backward are $(L/k) \, i + k \, a$. The
    derivative is zero where $L i / k^2 = a$:

    $$k = \sqrt{{L \cdot \frac{{i}}{{a}}}}.$$

    The famous $\sqrt L$ of Chen et al. (2016) is the case $i = a$: layers that keep no more than their input. A
    Transformer layer keeps 16 times its input, so $k = \sqrt{{L / 16}}$: for 48 layers 1.7, not 7. You would need 784
    layers before seven in a segment were best. (Three, not two, win above: autocast
    keeps the inside of a layer in two bytes and its input in four, so that a / i is 11, and the logits count as well.)
    """)
    return


@app.cell(hide_code=True)
def _():
    depth = mo.ui.slider(steps=[12, 24, 48, 96, 192, 784], value=48, label="layers", show_value=True)
    kept_per_input = mo.ui.slider(1, 24, 1, value=16, label="a / i", show_value=True)
    mo.hstack([depth, kept_per_input], justify="start")
    return depth, kept_per_input


@app.cell(hide_code=True)
def _(depth, kept_per_input):
    sizes = list(range(1, min(depth.value, 33)))
    in_inputs = [depth.value / k + k * kept_per_input.value for k in sizes]
    best = best_segment(depth.value, kept_per_input.value)
    Chart(
        f"Activations in units of one input: best with {best} in a segment",
        (Line(sizes, in_inputs, symbol="circle", size=4), Band("x", best, text=str(best))),
        Axis("layers in a segment (k)"),
        Axis("L / k + k a / i", zero=True),
    )
    return


@app.function
def best_segment(layers: int, kept_per_input: float) -> int:
    """The number of layers in a segment with the fewest activations at once."""
    return min(range(1, layers + 1), key=lambda k: layers / k + k * kept_per_input)


@app.function
def step_of(checkpointing: str, segment: int | None = None, model: str = "gpt2-xl", **recipe: object) -> tl.Ledger:
    """The account of a step of 8 sequences in fp32, with flash attention."""
    fields: dict[str, object] = {"precision": "fp32", "micro_batch": 8, "global_batch": 8}
    fields["activation_checkpointing" if segment is None else "activation_checkpointing.kind"] = checkpointing
    if segment is not None:
        fields["activation_checkpointing.n_blocks"] = segment
    fields |= recipe
    return tl.account(model, {f"recipe.{name}": value for name, value in fields.items()}, device="a100-sxm-80gb")


@app.function
def claims_account() -> list[Claim]:
    tokens, d, layers = 8 * 1024, 1600, 48
    full, two, three = step_of("full"), step_of("segments", 2), step_of("segments", 3)
    most = {k: highest_by_category(step_of("segments", k))["activations"] for k in (12, 24)}
    again = {run: step_of(run).filter(lambda entry: entry.phase == "recompute") for run in ("full", "attention")}
    scores = 4 * tokens * 1024 * d
    start = step_of("from-start")
    in_layers = {
        phase: start.filter(lambda entry, of=phase: entry.phase == of and "layers" in entry.path).matmul_flops
        for phase in ("forward", "recompute")
    }
    llama = {"model": "llama-7b", "precision": "bf16-mixed", "seq_len": 2048}
    unfused = step_of("none", attention="math", **llama).peak().by_category["activations"]
    flash = step_of("none", **llama).peak().by_category["activations"]
    return [
        Claim(
            "segments of 2 keep 24 inputs of 4 B T D bytes fewer than every layer",
            full.kept_nbytes - two.kept_nbytes,
            24 * 4 * tokens * d,
            unit="bytes",
        ),
        Claim(
            "segments of 3: 8 fewer than segments of 2",
            two.kept_nbytes - three.kept_nbytes,
            8 * 4 * tokens * d,
            unit="bytes",
        ),
        Claim(
            "a layer keeps 16 D + H + 4 numbers of a token: 12 more, 2 inputs fewer",
            most[24] - most[12],
            4 * tokens * (12 * (16 * d + 25 + 4) - 2 * d),
            2e-3,
            "bytes",
        ),
        Claim(
            "recomputed: each matmul of a layer but its last",
            again["full"].matmul_flops,
            layers * (2 * tokens * (4 * d * d + 4 * d * d) + scores),
            unit="FLOPs",
        ),
        Claim("attention alone: 4 B T² D a layer", again["attention"].matmul_flops, layers * scores, unit="FLOPs"),
        Claim(
            "from the start: (L + 1) / 2 forwards more, some of them ended early",
            in_layers["recompute"] / in_layers["forward"],
            (layers + 1) / 2,
            0.05,
        ),
        Claim(
            "llama-7b: flash attention drops 4 + 2 bytes of each score, and keeps 4 of each row",
            unfused - flash,
            32 * 8 * 32 * 2048 * (6 * 2048 - 4),
            1e-8,
            "bytes",
        ),
    ]


@app.cell
def _():
    lesson.claims(claims_account())
    return


@app.cell(hide_code=True)
def _():
    start, none = (
        tl.predict(
            "gpt2-xl",
            {"recipe.precision": "fp32", "recipe.micro_batch": 8, "recipe.global_batch": 8}
            | {"recipe.activation_checkpointing": kind},
            device="a100-sxm-80gb",
        )
        for kind in ("from-start", "none")
    )
    unfused, flash = (
        step_of("none", None, "llama-7b", precision="bf16-mixed", seq_len=2048, attention=kernel).peak()
        for kernel in ("math", "sdpa")
    )
    unfused, flash = unfused.by_category["activations"], flash.by_category["activations"]
    mo.md(rf"""
    ## Find the mistake

    A video summary of this lecture says that checkpointing "halves the memory", and that in the extreme, with nothing
    kept, it costs "a factor of $L^2$" in compute.

    Both are off. Halving is what a poor choice gives: checkpointing every layer left a sixteenth of the activations and
    one layer. And the extreme costs $L (L + 1) / 2$ forwards of a layer, because layer $i$'s input is made from the
    first one by $i - 1$ others. That is *work* in the order of $L^2$; as a *factor* on $L$ forwards it is about
    $L / 2$, and on a step, where backward stays as it was, less: for GPT-2 XL in fp32
    {start.step_seconds / none.step_seconds:.1f} times the step, not {48**2:,} times.

    The same summary forgets the cheapest saving of all. With the attention written out, the scores are most of what a
    layer keeps; a kernel that never writes them (flash attention) is a checkpoint of the attention alone, and it is
    *faster*. In the last claim it takes {1 - flash / unfused:.0%} of llama-7b's activations away. Use it first.

    ## Try it here

    Sixteen layers on this CPU, kept whole, checkpointed one by one and in segments: the forecast of a trace, a step
    that really runs under a meter, and the gradient, which must not change by a bit.
    """)
    return


@app.function
def measured(segment: int) -> "tuple[tl.Ledger, tl.Ledger, Tensor]":
    """The ledger of a step traced and metered, and its gradients in one row."""
    d, layers = (32, 8) if lesson.QUICK else (128, 16)
    model = residual_mlps(d, layers, segment)
    x = torch.randn(4 * d, d)
    traced = tl.trace(model, (x,), blocks="all")
    with tl.meter(model) as metered:
        model(x).backward()
    gradients = [weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]
    return traced, metered.ledger, torch.cat(gradients)


@app.cell
def _():
    def row(segment: int) -> str:
        _, metered, _ = measured(segment)
        again = metered.filter(lambda entry: entry.phase == "recompute").matmul_flops
        most = highest_by_category(metered).get("activations", 0)
        name = f"segments of {segment}" if segment else "keep all"
        return f"| {name} | {metered.kept_nbytes / 1e6:.2f} | {most / 1e6:.2f} | {again / metered.matmul_flops:.1%} |"

    table = "| | kept by forward, MB | most at once, MB | of all FLOPs recomputed |\n|---|--:|--:|--:|\n"
    mo.md(table + "\n".join(row(segment) for segment in (0, 1, 2, 4)) if lesson.HAS_TORCH else "needs torch")
    return


@app.function
def claims_measured() -> list[Claim]:
    if not lesson.HAS_TORCH:
        return []
    rows, (_, _, expected) = [], measured(0)
    for segment in (1, 4):
        traced, metered, gradient = measured(segment)
        name = f"segments of {segment}"
        rows.append(Claim(f"{name}: the peak, traced and as it ran", traced.peak().nbytes, metered.peak().nbytes))
        rows.append(Claim(f"{name}: the gradient has the same bits", bool(torch.equal(gradient, expected)), True))
    return rows


@app.cell
def _():
    lesson.claims(claims_measured())
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    A last word on honesty. Recomputed FLOPs are real work of the device and no progress of the model. *MFU* counts the
    model's FLOPs only, and checkpointing lowers it; *HFU* counts all, and it stays. A text that reports a high
    utilization and checkpoints every layer should say which of the two it means.

    ## Exercises
    """)
    return


@app.function(hide_code=True)
def exercise_kept(seed: int) -> Exercise:
    draw = Random(seed)
    name, d, layers = draw.choice([("gpt2-medium", 1024, 24), ("gpt2-large", 1280, 36), ("gpt2-xl", 1600, 48)])
    sequences = draw.choice([4, 8, 16])
    sizes = {"micro_batch": sequences, "global_batch": sequences}
    one, two = (step_of("segments", k, name, **sizes).kept_nbytes for k in (1, 2))
    answer = 2 * (one - two) / 1e9
    return Exercise(
        f"{name} (L = {layers}, D = {d}) in fp32, {sequences} sequences of 1,024 tokens, a checkpoint for every layer: "
        "GB of layer inputs kept?",
        answer,
        f"{layers} x 4 x {sequences} x 1024 x {d} bytes.",
        "One input of D numbers for each token and layer.",
        "GB",
        mistakes={answer * 16: "That is what the layers keep without checkpoints.", answer / layers: "One layer."},
    )


@app.function(hide_code=True)
def exercise_segment(seed: int) -> Exercise:
    layers, ratio = Random(seed).choice([(96, 16), (400, 16), (784, 16), (144, 1), (100, 4), (256, 16), (64, 1)])
    answer = best_segment(layers, ratio)
    mistakes = {round(layers**0.5): "That is right for a = i only."} if ratio > 1 else {1: "L + 1 inputs: too many."}
    return Exercise(
        f"{layers} layers, each keeps {ratio} times its input. How many in a segment, for the fewest activations at "
        "once? (A whole number.)",
        answer,
        f"The root of {layers} / {ratio} is {(layers / ratio) ** 0.5:.2f}.",
        "Minimize L / k + k a / i.",
        mistakes=mistakes,
    )


@app.function(hide_code=True)
def exercise_recomputed(seed: int) -> Exercise:
    draw = Random(seed)
    name, d, layers = draw.choice([("gpt2", 768, 12), ("gpt2-medium", 1024, 24), ("gpt2-large", 1280, 36)])
    tokens = draw.choice([512, 1024])
    run = step_of("full", None, name, seq_len=tokens, micro_batch=1, global_batch=1)
    answer = run.filter(lambda entry: entry.phase == "recompute").matmul_flops / 1e9
    last = layers * 8 * tokens * d * d / 1e9
    return Exercise(
        f"{name} (L = {layers}, D = {d}, F = 4 D), one sequence of {tokens} tokens, every layer checkpointed. PyTorch "
        "stops each recomputation before the layer's last matmul. How many GFLOP are recomputed?",
        answer,
        f"{layers} x (2 x {tokens} x (4 + 4) x {d}² + 4 x {tokens}² x {d}).",
        "q, k, v, out and the MLP's first matrix (4 D² each group), and the scores.",
        "GFLOP",
        mistakes={answer + last: "The last matrix does not run again.", answer * 3: "That is a whole step."},
    )


@app.function(hide_code=True)
def exercise_from_start(seed: int) -> Exercise:
    layers = Random(seed).choice([8, 12, 16, 24, 32, 48])
    answer = sum(range(1, layers + 1))
    return Exercise(
        f"{layers} layers, and nothing kept but the input of the first. For each layer, from the last to the first, "
        "all layers up to it run again. How many forwards of a layer does backward cost?",
        answer,
        f"{layers} + {layers - 1} + ... + 1 = {layers} x {layers + 1} / 2.",
        "The last layer needs all of them, the one before it one fewer.",
        mistakes={layers**2: "That would be all layers for each layer.", layers: "Each only once: every layer kept."},
    )


@app.function(hide_code=True)
def exercise_policy(seed: int) -> Exercise:
    sequences, gigabytes = Random(seed).choice([(8, 40), (8, 80), (8, 28), (4, 28), (16, 80), (16, 40)])
    batch = {"recipe.micro_batch": sequences, "recipe.global_batch": sequences}
    over = "recipe.activation_checkpointing=none,full,selective,offload"
    rows = tl.compare("gpt2-xl", None, batch, over=over, device="a100-sxm-80gb").rows
    fitting = [row for row in rows if row.memory_nbytes is not None and row.memory_nbytes <= gigabytes * 1e9]
    return Exercise(
        f"GPT-2 XL on an A100, {sequences} sequences, {gigabytes} GB: which of these fits and is fastest? "
        f"`tl.compare('gpt2-xl', None, {batch}, over='{over}', device='a100-sxm-80gb')` has the table.",
        min(fitting, key=lambda row: row.step_seconds or 0.0).value,
        ", ".join(f"{row.value} {(row.memory_nbytes or 0) / 1e9:.1f} GB, {row.relative or 0:.2f} x" for row in rows)
        + ".",
        "First what fits, then the shortest step.",
        choices=tuple(row.value for row in rows),
    )


@app.function(hide_code=True)
def exercise_write(seed: int) -> Exercise:
    k = Random(seed).choice([2, 3, 4, 5])
    return Exercise(
        f"Write `run(layers, x, k)`: it runs the layers in order, and each {k} (in general k) share a checkpoint. "
        "`checkpoint(function, x)` is PyTorch's, and already there.",
        "def run(layers, x, k):\n"
        "    for first in range(0, len(layers), k):\n"
        "        def segment(x, part=layers[first : first + k]):\n"
        "            for layer in part:\n"
        "                x = layer(x)\n"
        "            return x\n"
        "        x = checkpoint(segment, x)\n"
        "    return x\n",
        "A function over one segment goes to `checkpoint`; the last segment may be shorter.",
        "Slice the layers by k; beware of a closure over the loop's variable, which the second run would see changed.",
        start=f"def run(layers, x, k={k}):\n    for layer in layers:\n        x = layer(x)\n    return x\n",
        check=fault_of_segments,
    )


@app.function(hide_code=True)
def fault_of_segments(text: str) -> str:
    """What is wrong with a function ``run(layers, x, k)``; empty where it checkpoints segments of k layers."""
    if not lesson.HAS_TORCH:
        return "This one needs torch."
    torch.manual_seed(0)
    calls = [0]

    def counted(function: "Callable[[Tensor], Tensor]", x: "Tensor") -> "Tensor":
        calls[0] += 1
        return checkpoint(function, x, use_reentrant=False)

    def gradient(run: "Callable[[Sequence[nn.Module], Tensor, int], Tensor]", k: int) -> "Tensor":
        for layer in layers:
            layer.zero_grad()
        run(layers, x, k).square().mean().backward()
        return torch.cat([layer.weight.grad.flatten() for layer in layers])

    def plain(layers: "Sequence[nn.Module]", x: "Tensor", _: int) -> "Tensor":
        return nn.Sequential(*layers)(x)

    written: dict[str, Callable[..., Tensor]] = {}
    layers, x = [nn.Linear(8, 8) for _ in range(7)], torch.randn(4, 8)
    try:
        exec(text, {"checkpoint": counted, "torch": torch}, written)
        for k in (2, 3, 7):
            calls[0] = 0
            if not torch.allclose(gradient(written["run"], k), gradient(plain, k)):
                return f"7 layers, k = {k}: the gradients differ from those without checkpoints."
            if calls[0] != -(-7 // k):
                return f"7 layers, k = {k}: {calls[0]} checkpoints in place of {-(-7 // k)}."
    except Exception as error:
        return f"It should define run(layers, x, k); it ends with {type(error).__name__}: {error}."
    return ""


@app.cell(hide_code=True)
def _():
    EXERCISES = [
        exercise_kept,
        exercise_segment,
        exercise_recomputed,
        exercise_from_start,
        exercise_policy,
        exercise_write,
    ]
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

    Flash attention first, then a checkpoint for every layer: a fifth of a step for fifteen sixteenths of the
    activations. Segments pay only where a layer keeps little more than its input.

    On the command line: `trainledger compare gpt2-xl --device a100-sxm-80gb --over recipe.activation_checkpointing
    --set recipe.micro_batch=8 --set recipe.global_batch=8`. On the page:
    [Memory](../?calculator=memory&model=gpt2-xl&recipe.micro_batch=8&recipe.activation_checkpointing=full). Next:
    [mixed precision as a recipe](13_mixed_precision.html).
    """)
    return


if __name__ == "__main__":
    app.run()
