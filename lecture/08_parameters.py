import marimo

__generated_with = "0.25.2"
app = marimo.App(app_title="8. Parameters and where they start")

with app.setup:
    from math import erf, exp, log, pi, sqrt
    from random import Random

    import marimo as mo

    import trainledger as tl
    from trainledger.report import lesson
    from trainledger.report.chart import COLOURS, Axis, Chart, Line
    from trainledger.report.lesson import Claim, Exercise

    if lesson.HAS_TORCH:
        import torch
        from torch import nn

        from trainledger.engine.nn import init, transformer


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # 8. Parameters and where they start

    You have written a net of ten square layers, 512 wide, and filled every matrix with `torch.randn`. The inputs have
    deviation 1, and so have the weights: nothing looks large. The first loss is about 1e14.

    Guess before you read on. Forget the loss: what is the standard deviation of the output of the tenth layer?
    """)
    return


@app.cell(hide_code=True)
def _():
    guess = mo.ui.text(label="deviation:")
    guess
    return (guess,)


@app.cell(hide_code=True)
def _(guess):
    mo.md(lesson.against(guess.value, deviation_after(10, 512, 1.0)) if guess.value else "")
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## A parameter is a tensor with a name

    Before values, names. An `nn.Parameter` is a leaf tensor that requires a gradient. Assigned to an attribute of an
    `nn.Module` it is *registered* under that name; modules in attributes are registered too, and so a model is a tree
    whose leaves have names such as `layers.0.up.weight`. Everything else goes by this tree: `parameters()` is what the
    optimizer gets, `state_dict()` is what a checkpoint stores, `.to(device)` is what moves. A linear layer is one line:
    """)
    return


@app.cell
def _():
    if lesson.HAS_TORCH:

        class Linear(nn.Module):
            def __init__(self, d_in: int, d_out: int) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.randn(d_out, d_in) / sqrt(d_in))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x @ self.weight.T

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList([Linear(1024, 512), Linear(512, 1024)])
                self.hidden = [Linear(512, 512)]  # a plain list: not registered
                self.scale = torch.ones(512)  # a plain tensor: not registered
                self.register_buffer("mask", torch.ones(512))  # stored and moved, not trained

        for name, value in Net().state_dict().items():
            print(f"{name:16} {list(value.shape)}")
        print(f"trained: {sum(each.numel() for each in Net().parameters()):,}")
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    Two tensors of this net are missing from its own books. A plain list hides `hidden` from the optimizer: it computes,
    it gets gradients, and it never learns; use `nn.ModuleList`. A plain tensor stays on the CPU when the model moves;
    use a buffer, or a parameter if it should learn.

    One parameter may have two names: *tying* uses one V x d matrix both as embedding and as head. `parameters()` yields
    it once, `state_dict()` lists both names over the same storage. At V = 50,257 and d = 1,024 that is one matrix of
    51 million parameters less. A public account of this lecture makes it "53.6M = 51.9M x 4 bytes = 207 MB", which does
    not agree with itself; the table below has the right numbers.
    """)
    return


@app.function(hide_code=True)
def claims_names() -> list[Claim]:
    tied, untied = (tl.parameters(tl.model("gpt2-medium", tie_embeddings=tie)).total for tie in (True, False))
    rows = [
        Claim("tying saves at V = 50,257, d = 1,024: parameters", untied - tied, 50_257 * 1_024),
        Claim("in fp32: bytes", 4 * (untied - tied), 205.9e6, 1e-3),
    ]
    if not lesson.HAS_TORCH:
        return rows
    linear = sum(each.numel() for each in nn.Linear(1024, 512, bias=False).parameters())
    agree = sum(count_of_parameters(seed) == exercise_count(seed).answer for seed in range(1, 21))
    return [
        Claim("parameters of Linear(1024, 512)", linear, 512 * 1024),
        *rows,
        Claim("of 20 drawn modules, torch and the rules above count the same in", agree, 20),
    ]


@app.cell
def _():
    lesson.claims(claims_names())
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Variance through one layer

    Now the values. One output is a sum over the d inputs, $y_k = \sum_d x_d w_{dk}$. Where all factors are independent
    with mean 0, the variance of a product is the product of the variances, and that of a sum is the sum:

    $$\operatorname{Var}(y) = d \, \sigma_x^2 \, \sigma_w^2, \qquad
    \text{deviation } \sigma_y = \sqrt{d}\,\sigma_w\,\sigma_x.$$

    With $\sigma_w = 1$ a layer multiplies by $\sqrt d$: 16 for d = 256, 32 for 1,024, 64 for 4,096. After L layers it
    is $d^{L/2}$, and that is your 1e14. To keep the deviation, choose

    $$\sigma_w = \frac{1}{\sqrt{d}},$$

    d being the *fan-in*, the number of inputs that are summed. (Xavier's rule is this with the mean of fan-in and
    fan-out.) A ReLU between layers sets half of the values to zero, so that half of the mean square is left: He's rule
    makes up for it, $\sigma_w = \sqrt{2/d}$. As a function, of the last layer's values before any ReLU:
    """)
    return


@app.function
def deviation_after(layers: int, width: int, sigma: float, *, relu: bool = False) -> float:
    """The root mean square after so many layers, of an input with deviation 1."""
    return (sigma * sqrt(width)) ** layers * (sqrt(0.5) ** (layers - 1) if relu else 1)


@app.function
def measured_after(layers: int, width: int, sigma: float, *, relu: bool = False) -> list[float]:
    """The same, of random matrices, after each layer."""
    draw = torch.Generator().manual_seed(layers)
    h, found = torch.randn(256, width, generator=draw), []
    for at in range(layers):
        weight = sigma * torch.randn(width, width, generator=draw)
        h = (h.relu() if relu and at else h) @ weight
        found.append(h.square().mean().sqrt().item())
    return found


@app.cell(hide_code=True)
def _():
    width = mo.ui.slider(steps=[64, 128, 256, 512], value=512, label="d", show_value=True)
    depth = mo.ui.slider(2, 40, value=10, label="layers", show_value=True)
    relu = mo.ui.checkbox(value=False, label="ReLU between layers")
    mo.hstack([width, depth, relu], justify="start")
    return depth, relu, width


@app.cell(hide_code=True)
def _(depth, relu, width):
    inits = {
        "N(0, 1)": 1.0,
        "root(2 / d), He": sqrt(2 / width.value),
        "1 / root d, fan-in": 1 / sqrt(width.value),
        "0.02 for all": 0.02,
    }
    layers = range(1, depth.value + 1)
    lines = []
    for (rule, sigma), colour in zip(inits.items(), COLOURS, strict=False):
        predicted = [deviation_after(at, width.value, sigma, relu=relu.value) for at in layers]
        lines.append(Line(layers, predicted, rule, colour))
        if lesson.HAS_TORCH:
            found = measured_after(depth.value, width.value, sigma, relu=relu.value)
            lines.append(Line(layers, found, "", colour, 0, symbol="circle", said=[f"{each:.3g}" for each in found]))
    Chart(
        "Deviation through depth: lines by the formula, points from random matrices",
        tuple(lines),
        Axis("layer"),
        Axis("deviation", log=True),
    )
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    The straight lines are the whole story: on a logarithmic axis each layer adds the same step, and only one step is
    zero. "0.02 for all", which GPT-2 made popular, is the fan-in rule for d = 2,500; a net of width 512 vanishes by it
    where nothing else repairs the scale.

    ## Residual streams forgive more, and still add up

    A Transformer does not multiply layer on layer. Each block normalizes what it reads and *adds* to a stream, two
    branches a block. A branch that follows the fan-in rule gives deviation 1 for any input, since the norm before it
    has made its input unit. Independent terms add their variances. After L blocks, as they are and with each branch
    divided by $\sqrt{2L}$:

    $$\operatorname{Var} = 1 + 2L, \qquad \operatorname{Var} = 1 + 2L \cdot \tfrac{1}{2L} = 2.$$

    That is what GPT-2 and this project's engine do with the two matrices that write into the stream. `tl.explain` has
    the rule of every matrix of a model, and how the stream grows:
    """)
    return


@app.cell
def _():
    tl.explain("init", "llama-3-8b")
    return


@app.cell(hide_code=True)
def _():
    stream = tl.explain("init", "llama-3-8b").document().data()["stream_variances"]
    mo.md(rf"""
    It ends at {stream[-1]:.2f}, below our 2: attention averages over tokens, and a gated MLP gives less than it
    gets, so real branches add less than 1.
    """)
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## The first loss

    The last check needs no training step. If the logits are independent of the right answer, with deviation s, then the
    loss is $\ln \sum_v e^{z_v} - z_{\text{right}}$. For normal $z$ the mean of $e^z$ is $e^{s^2/2}$, so

    $$\text{loss} \approx \ln V + \tfrac{s^2}{2}.$$

    A model that knows nothing should say so: $\ln V$ is 7.6 for V = 2,048 and 10.8 for 50,257. If your first loss is
    30, the head starts too large. If it is below ln V before the first step, the answer leaks into the input. The head
    multiplies a unit vector of width d, so $s = \sigma_{\text{head}} \sqrt d$. Here is a Transformer of a million
    parameters on random tokens, from three starts:
    """)
    return


@app.function
def first_loss(sigma: float | None) -> tuple[float, float]:
    """Loss of teach-1m on random tokens before any step, and ln V + s^2 / 2; one sigma for all, or the engine's."""
    spec = tl.model("teach-1m")
    draw = torch.Generator().manual_seed(3)
    model = transformer.Transformer(spec)
    init.initialize(model, seed=0)
    if sigma is not None:
        for each in model.parameters():
            if each.ndim > 1:
                nn.init.normal_(each, std=sigma, generator=draw)
    head = model.get_parameter("embed_tokens.weight")  # tied: it is the head, too
    tokens = torch.randint(spec.vocab_size, (4 if lesson.QUICK else 16, 128), generator=draw)
    targets = torch.randint(spec.vocab_size, tuple(tokens.shape), generator=draw)
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        s = head.std().item() * sqrt(spec.d_model)
    return loss.item(), log(spec.vocab_size) + s * s / 2


@app.cell
def _():
    if lesson.HAS_TORCH:
        starts = {"0.02 for all": 0.02, "the engine's, by fan-in": None, "N(0, 1)": 1.0}
        print(f"{'start':24}   loss   ln V + s^2 / 2")
        for start, sigma_of_all in starts.items():
            print(f"{start:24} {'{:6.2f} {:12.2f}'.format(*first_loss(sigma_of_all))}")
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    The formula overshoots in the last row: with s = 11 one logit of 2,048 wins every sum, which cannot grow as fast as
    the mean of $e^z$. Both say the same thing, that the head is wrong. (An untied head may start smaller than its
    fan-in asks, since nothing reads the logits but the loss: the engine takes half, which leaves 1/8 above ln V.)

    ## Cut the tails, but where?

    A normal draw of a million values reaches 4.9 deviations. Many recipes cut at 3, and `trunc_normal_` does it. **Find
    the mistake** in this line, from the code of a well-known course, for d = 16,384:

    ```python
    nn.init.trunc_normal_(weight, std=1 / sqrt(d), a=-3, b=3)
    ```

    `a` and `b` are values, not deviations. The deviation is 1/128, so the cut stands at 384 deviations, and nothing is
    ever cut. The default is no better: -2 and 2 are 100 deviations of 0.02. It has to be `a=-3 * std, b=3 * std`. And
    what is cut is missed: the deviation that is left is

    $$\sqrt{1 - \frac{2 c\, e^{-c^2/2}}{\sqrt{2\pi}\,\operatorname{erf}(c/\sqrt2)}} = 0.9866 \text{ at } c = 3,$$

    so divide `std` by it if you mean the deviation after the cut.
    """)
    return


@app.function
def left_by_cut(cut: float) -> float:
    """The deviation of a standard normal that is cut at so many deviations."""
    return sqrt(1 - 2 * cut * exp(-cut * cut / 2) / (sqrt(2 * pi) * erf(cut / sqrt(2))))


@app.function(hide_code=True)
def claims_variance() -> list[Claim]:
    if not lesson.HAS_TORCH:
        return []
    draw = torch.Generator().manual_seed(0)
    wide = [torch.randn(64, d, generator=draw) @ torch.randn(d, 512, generator=draw) for d in (256, 1024, 4096)]
    he, fan_in = sqrt(2 / 512), 1 / sqrt(512)
    stream = {scale: torch.randn(64, 256, generator=draw) for scale in (1.0, 1 / sqrt(48))}
    for scale, h in stream.items():
        for _ in range(48):  # branches of 24 blocks
            branch = nn.functional.rms_norm(h, (256,)) @ torch.randn(256, 256, generator=draw) / sqrt(256)
            h += scale * branch
    return [
        Claim("x @ randn: deviation for d = 256", wide[0].std().item(), 16, 0.03),
        Claim("for d = 4,096", wide[2].std().item(), 64, 0.03),
        Claim("ten layers of 512, N(0, 1): 512^5", measured_after(10, 512, 1.0)[-1], float(512**5), 0.1),
        Claim("by fan-in", measured_after(10, 512, fan_in)[-1], 1.0, 0.1),
        Claim("0.02 for all", measured_after(10, 512, 0.02)[-1], (0.02**2 * 512) ** 5, 0.1),
        Claim("ten layers with ReLU, He: root 2", measured_after(10, 512, he, relu=True)[-1], sqrt(2), 0.15),
        Claim("24 blocks that add to a stream", stream[1.0].std().item(), sqrt(1 + 48), 0.05),
        Claim("each branch divided by root 48", stream[1 / sqrt(48)].std().item(), sqrt(2), 0.05),
    ]


@app.function(hide_code=True)
def claims_start() -> list[Claim]:
    rows = [Claim("deviation left by a cut at 3", left_by_cut(3), 0.9866, 1e-4)]
    if not lesson.HAS_TORCH:
        return rows
    std, draw = 1 / 128, torch.Generator().manual_seed(0)
    loose, cut = torch.empty(2, 1024, 1024)
    nn.init.trunc_normal_(loose, std=std, a=-3, b=3, generator=draw)
    nn.init.trunc_normal_(cut, std=std, a=-3 * std, b=3 * std, generator=draw)
    ours = init.normal((1024, 1024), std, draw)
    return [
        Claim("a=-3, b=3, std=1/128: values go beyond 4.5 deviations", bool(loose.abs().max() > 4.5 * std), True),
        Claim("a=-3 std, b=3 std: the largest, in deviations", cut.abs().max().item() / std, 3.0, 1e-3),
        *rows,
        Claim("the same, of a million cut values", cut.std().item() / std, left_by_cut(3), 3e-3),
        Claim("the engine's draw, cut and made up for", ours.std().item(), std, 3e-3),
        Claim("first loss of teach-1m, 0.02 for all: ln V + s^2 / 2", *first_loss(0.02), 0.005),
        Claim("by fan-in, tied: ln V + 1/2", first_loss(None)[0], log(2048) + 0.5, 0.02),
    ]


@app.cell
def _():
    lesson.claims([*claims_variance(), *claims_start()])
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Exercises

    A new seed gives new numbers. After a first miss there is a hint, after a second the derivation.
    """)
    return


@app.function(hide_code=True)
def exercise_depth(seed: int) -> Exercise:
    draw = Random(seed)
    layers, width, sigma = draw.choice([4, 6, 8, 12]), draw.choice([256, 1024, 4096]), draw.choice([0.02, 0.05, 0.1])
    gain = sigma * sqrt(width)
    return Exercise(
        f"{layers} linear layers of width {width:,}, weights of deviation {sigma}, inputs of deviation 1. The "
        "deviation of the output?",
        deviation_after(layers, width, sigma),
        f"Each layer multiplies by {sigma} x root {width:,} = {gain:.3g}; {gain:.3g}^{layers}.",
        hint="Variance is multiplied by d sigma^2 in each layer.",
        mistakes={gain: "That is one layer.", gain ** (2 * layers): "That is the variance."},
    )


@app.function(hide_code=True)
def exercise_relu(seed: int) -> Exercise:
    width = Random(seed).choice([128, 200, 512, 800, 1024, 3000, 4096])
    return Exercise(
        f"Layers of width {width:,} with a ReLU between them. Which deviation of the weights keeps the mean square?",
        sqrt(2 / width),
        f"d sigma^2 / 2 = 1, so sigma = root(2 / {width:,}).",
        hint="ReLU leaves half of the mean square.",
        mistakes={1 / sqrt(width): "That is without ReLU.", 2 / width: "That is the variance of the weights."},
    )


@app.function(hide_code=True)
def drawn_module(draw: Random) -> tuple[str, int]:
    """The lines of a module's __init__, and how many parameters it registers, by the rules of the chapter."""
    a, b = draw.choice([8, 16, 32]), draw.choice([4, 10, 20])
    parts = [
        (f"self.up = nn.Linear({a}, {b})", a * b + b),
        (f"self.down = nn.Linear({b}, {a}, bias=False)", a * b),
        (f"self.layers = [nn.Linear({a}, {a}), nn.Linear({a}, {b})]", 0),
        (f"self.blocks = nn.ModuleList([nn.Linear({a}, {a}), nn.Linear({a}, {a})])", 2 * (a * a + a)),
        (f"self.scale = torch.ones({a})", 0),
        (f"self.gain = nn.Parameter(torch.ones({a}))", a),
        (f'self.register_buffer("mask", torch.ones({a}, {a}))', 0),
        (f"self.embed, self.head = nn.Embedding({b}, {a}), nn.Linear({a}, {b}, bias=False)", 2 * a * b),
    ]
    chosen = draw.sample(parts[:-1], 3)
    lines, count = [line for line, _ in chosen], sum(own for _, own in chosen)
    lines.append(parts[-1][0])
    count += parts[-1][1]
    if draw.random() < 0.5:
        lines.append("self.head.weight = self.embed.weight")
        count -= a * b
    return "\n        ".join(lines), count


@app.function(hide_code=True)
def count_of_parameters(seed: int) -> int:
    """How many parameters torch counts in a drawn module."""
    space = {"torch": torch, "nn": nn}
    body, _ = drawn_module(Random(seed))
    exec(f"class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        {body}", space)
    return sum(each.numel() for each in space["Net"]().parameters())


@app.function(hide_code=True)
def exercise_count(seed: int) -> Exercise:
    body, count = drawn_module(Random(seed))
    return Exercise(
        f"How many parameters does the optimizer get?\n\n```python\nclass Net(nn.Module):\n    def __init__(self):\n"
        f"        super().__init__()\n        {body}\n```\n",
        count,
        "Linear(a, b) has a b weights and b biases; a ModuleList registers, a list does not; plain tensors and buffers "
        "are not trained; a tied matrix counts once.",
        hint="Which lines register a parameter, and which of them twice the same?",
    )


@app.function(hide_code=True)
def exercise_first_loss(seed: int) -> Exercise:
    draw = Random(seed)
    vocabulary, width, sigma = (
        draw.choice([32_000, 50_257, 128_256]),
        draw.choice([768, 1024]),
        draw.choice([0.05, 0.06]),
    )
    s = sigma * sqrt(width)
    return Exercise(
        f"A head of {vocabulary:,} rows of width {width:,}, deviation {sigma}, after a norm that gives unit vectors' "
        "elements deviation 1. The first loss?",
        log(vocabulary) + s * s / 2,
        f"s = {sigma} x root {width:,} = {s:.3g}; ln V + s^2 / 2 = {log(vocabulary):.2f} + {s * s / 2:.2f}.",
        hint="First the deviation of a logit, then ln V + s^2 / 2.",
        mistakes={log(vocabulary): "That is for logits of zero."},
    )


@app.function(hide_code=True)
def exercise_stream(seed: int) -> Exercise:
    blocks = Random(seed).choice([6, 12, 24, 36, 40, 48, 60, 96])
    return Exercise(
        f"{blocks} blocks, each adding two unit branches to a stream that begins with deviation 1, none divided. The "
        "deviation at the end?",
        sqrt(1 + 2 * blocks),
        f"Variances add: 1 + 2 x {blocks} = {1 + 2 * blocks}; the deviation is its root.",
        hint="Independent terms add their variances, not their deviations.",
        mistakes={
            1 + 2 * blocks: "That is the variance.",
            sqrt(1 + blocks): "Two branches a block: attention and the MLP.",
            sqrt(2): "That is with each branch divided by root 2 L.",
        },
    )


@app.function(hide_code=True)
def fault_of_cut(text: str) -> str:
    """What is wrong with a function that fills a matrix of deviation 1 / root d, cut at three deviations."""
    if not lesson.HAS_TORCH:
        return "This exercise needs torch."
    try:
        space = {"torch": torch, "nn": nn, "sqrt": sqrt}
        exec(text, space)
        for d in (256, 16_384):
            weight = torch.empty(262_144 // d, d)
            space["fill"](weight, d)
            most, spread = weight.abs().max().item() * sqrt(d), weight.std().item() * sqrt(d)
            if not 2.9 < most < 3.1:
                return f"For d = {d:,} the largest value is at {most:.2f} deviations."
            if abs(spread - 1) > 0.03:
                return f"For d = {d:,} the deviation is {spread:.2f} / root d."
    except Exception as error:
        return f"{type(error).__name__}: {error}."
    return ""


@app.function(hide_code=True)
def exercise_cut(seed: int) -> Exercise:
    std = Random(seed).choice(["1 / sqrt(d)", "d**-0.5", "sqrt(1 / d)"])
    head = f"def fill(weight, d):\n    std = {std}\n    nn.init.trunc_normal_(weight, std=std"
    return Exercise(
        "Repair this, so that the values of a matrix of fan-in d are cut at three deviations for every d.",
        f"{head}, a=-3 * std, b=3 * std)\n",
        "The bounds of trunc_normal_ are values: three deviations are 3 * std.",
        hint="Print the largest value, divided by std.",
        start=f"{head}, a=-3, b=3)\n",
        check=fault_of_cut,
    )


@app.cell(hide_code=True)
def _():
    EXERCISES = [exercise_depth, exercise_relu, exercise_count, exercise_first_loss, exercise_stream, exercise_cut]
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

    A layer multiplies the deviation by $\sigma \sqrt d$: begin at $1/\sqrt{d}$, with ReLU at $\sqrt{2/d}$, and divide
    what writes into a stream by $\sqrt{2L}$. The first loss is $\ln V + s^2/2$; bounds of `trunc_normal_` are values.

    On the command line: `trainledger explain init gpt2` has the start of every tensor, and
    `trainledger explain parameters gpt2` its size. On the page:
    [Model](../?calculator=model). Next: [count a Transformer](09_transformer.html).
    """)
    return


if __name__ == "__main__":
    app.run()
