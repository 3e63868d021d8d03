import marimo

__generated_with = "0.25.2"
app = marimo.App(app_title="7. Gradients and what they cost")

with app.setup:
    from collections.abc import Sequence
    from itertools import pairwise
    from random import Random
    from textwrap import dedent, indent

    import marimo as mo

    import trainledger as tl
    from trainledger.report import lesson
    from trainledger.report.chart import COLOURS, DARK, GREY, WHITE, Axis, Band, Chart, Line, Words
    from trainledger.report.lesson import Claim, Exercise
    from trainledger.tensors.einsum import einsum

    if lesson.HAS_TORCH:
        import torch
        from torch import nn

    LOOP = dedent("""\
        def train(model, optimizer, batches, k):
            losses = []
            for x, y in batches:
                optimizer.zero_grad()
                for x_part, y_part in zip(x.chunk(k), y.chunk(k)):
                    loss = ((model(x_part) - y_part) ** 2).mean()
                    (loss / k).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
                optimizer.step()
                losses.append(error(model))
            return losses
    """)
    ZERO = "        optimizer.zero_grad()\n"
    CLIP, STEP = "        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)\n", "        optimizer.step()\n"
    PLANTED = {
        "no 1/k": LOOP.replace("(loss / k)", "loss"),
        "no zero_grad": LOOP.replace(ZERO, ""),
        "zero_grad wipes": LOOP.replace(ZERO, "").replace("            (loss", "    " + ZERO + "            (loss"),
        "clip after step": LOOP.replace(CLIP + STEP, STEP + CLIP),
    }


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # 7. Gradients and what they cost

    You train a net of two matrices, $y = x W_1 W_2$, on batches of 1,024 rows: $W_1$ is 256 x 256, $W_2$ is 256 x 64.
    Forward takes 167.8 million FLOPs; you have counted them. Everybody says that backward takes twice as many, so you
    promise a step of three times the forward. Then a profiler runs, and its number for backward is not yours.

    Guess before you read on. How many million FLOPs do the matmuls of this backward take?
    """)
    return


@app.cell(hide_code=True)
def _():
    guess = mo.ui.text(label="million FLOPs:")
    guess
    return (guess,)


@app.cell(hide_code=True)
def _(guess):
    promised = sum(flops for *_, flops in backward_matmuls(1024, [256, 256, 64], [True, True], x_needs=False))
    mo.md(lesson.against(guess.value, promised / 1e6, "million FLOPs") if guess.value else "")
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    The answer depends on a question that looks like housekeeping: which tensors get a gradient, and why. Begin there.

    ## Who gets .grad

    PyTorch records each operation on tensors that *require a gradient*: the result remembers, in `grad_fn`, what made
    it and from what. The record is a graph, and `backward()` walks it from the loss to its ends by the chain rule. Of
    one number: $y = x^2 + 3x$ has $dy/dx = 2x + 3$, at $x = 2$ it is 7. Of three weights:

    $$h = \sum_i x_i w_i, \quad \ell = \tfrac12 (h - 5)^2, \qquad
    \frac{\partial \ell}{\partial h} = h - 5, \qquad
    \frac{\partial \ell}{\partial w_i} =
    \frac{\partial \ell}{\partial h}\,\frac{\partial h}{\partial w_i} = (h - 5)\, x_i.$$

    With $x = (1, 2, 3)$ and $w = (1, 1, 1)$, $h$ is 6, and the gradient of $w$ is $(1, 2, 3)$. In code:
    """)
    return


@app.cell
def _():
    if lesson.HAS_TORCH:
        x = torch.tensor([1.0, 2.0, 3.0])
        w = torch.tensor([1.0, 1.0, 1.0], requires_grad=True)
        h = (x * w).sum()
        h.retain_grad()
        loss = 0.5 * (h - 5) ** 2
        loss.backward()
        print("w:", w.grad, " h:", h.grad, " x:", x.grad)
    else:
        print("needs torch")
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    Two questions tell tensors apart. Is it a *leaf*, which no recorded operation made? Does it *require a gradient*?
    A result does where any of its inputs does.

    | tensor | leaf | requires a gradient | `.grad` after backward |
    |---|---|---|---|
    | `w`, a parameter | yes | yes, you said so | yes |
    | `x`, the data | yes | no | None: never computed |
    | `h`, a result | no, `grad_fn` made it | yes, because `w` does | None: computed, passed on and freed |
    | `h` after `h.retain_grad()` | no | yes | yes, a copy |

    Backward stores a gradient where both answers are yes, or where you asked for it. Four traps follow.

    - `w = torch.randn(3, requires_grad=True) * 0.02` is a *result* of the tensor you will never see again. It is no
      leaf and gets no `.grad`. Scale first; then `requires_grad_()`, or wrap it in `nn.Parameter`, which does so.
    - `a.detach()` is a new leaf over the same memory that requires nothing: the graph ends there. Under
      `torch.no_grad()` nothing is recorded at all.
    - A leaf that the loss does not depend on keeps `.grad = None`.
    - `backward()` of anything but one number raises RuntimeError: take a `.sum()` or `.mean()` first.

    `retain_grad` is not free. While `h` is alive, backward copies its gradient, which is as large as `h` itself.

    ## .grad is added to

    `backward()` never overwrites `.grad`; it adds. Call forward and backward twice without clearing, and `w.grad` is
    $(2, 4, 6)$. (Twice from *one* forward raises an error: the first backward frees what the graph saved, unless you
    pass `retain_graph=True`.) `optimizer.zero_grad()` clears it to None, which also frees its memory until the next
    backward; with `set_to_none=False` it becomes zeros, and memory stays. Call it anywhere after a step and before the
    first backward of the next: public notes argue about the place, and all of them are right.

    Adding is also useful. Your batch of B does not fit, so you split it into k *micro-batches* of B/k. The batch's loss
    is a mean, and a mean over B is the mean of k means:

    $$\frac1B \sum_{i=1}^{B} \ell_i = \frac1k \sum_{j=1}^{k} \Big( \frac{k}{B} \sum_{i \in j} \ell_i \Big)
    \quad\Rightarrow\quad \nabla L = \sum_{j=1}^{k} \nabla \frac{L_j}{k}.$$

    So call `(loss / k).backward()` for each micro-batch, and `.grad` adds up to the batch's gradient, to rounding.
    Without the 1/k it is k times as much. SGD then takes k times the step, and a learning rate that was good may
    diverge. Adam divides by the size of the gradient and hides the mistake, but a clip then acts at a k-th of its
    limit. (If micro-batches have different numbers of tokens, the weights are not 1/k but their shares of the tokens.)
    """)
    return


@app.function(hide_code=True)
def claims_who_gets_grad() -> list[Claim]:
    if not lesson.HAS_TORCH:
        return []
    data, target = [1.0, 2.0, 3.0], 5.0
    by_hand = [(sum(data) - target) * each for each in data]  # weights are one, so h is the sum
    x, w = torch.tensor(data), torch.ones(3, requires_grad=True)
    point = torch.tensor(2.0, requires_grad=True)
    (point**2 + 3 * point).backward()
    h = (x * w).sum()
    h.retain_grad()
    (0.5 * (h - target) ** 2).backward()
    once = w.grad.tolist()
    (0.5 * ((x * w).sum() - target) ** 2).backward()
    agree = sum(count_of_grads(seed) == exercise_leaves(seed).answer for seed in range(1, 21))
    return [
        Claim("x^2 + 3x at 2: the gradient, by the rule 2x + 3", point.grad.item(), 2 * 2.0 + 3),
        Claim("gradient of w, by hand (h - 5) x", str(once), str(by_hand)),
        Claim("gradient of h where it is retained, by hand h - 5", h.grad.item(), sum(data) - target),
        Claim("after a second backward without zero_grad", str(w.grad.tolist()), str([2 * each for each in by_hand])),
        Claim("of 20 programs as in exercise 1, torch and the rule agree on", agree, 20),
    ]


@app.function(hide_code=True)
def claims_accumulation() -> list[Claim]:
    if not lesson.HAS_TORCH:
        return []
    k = 4
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
    x, y = torch.randn(64, 32), torch.randn(64, 1)

    def gradient(parts: int, divide: bool) -> torch.Tensor:
        model.zero_grad()
        for part, target in zip(x.chunk(parts), y.chunk(parts), strict=True):
            loss = ((model(part) - target) ** 2).mean()
            (loss / parts if divide else loss).backward()
        return torch.cat([each.grad.flatten() for each in model.parameters()])

    whole = gradient(1, divide=True)
    off = (gradient(k, divide=True) - whole).norm() / whole.norm()
    more = (gradient(k, divide=False).norm() / whole.norm()).item()
    model.zero_grad(set_to_none=False)
    zeros = sum(each.grad.nbytes for each in model.parameters())
    model.zero_grad()
    try:
        model(x).backward()
    except RuntimeError as error:
        refused = str(error)
    return [
        Claim("4 micro-batches of loss / 4 against the whole batch: error below 2e-6", bool(off < 2e-6), True),
        Claim("without the 1/k, times the gradient", more, k, 1e-4),
        Claim("bytes of gradients after zero_grad(set_to_none=False): 4 N", zeros, 4 * (32 * 64 + 64 + 64 + 1)),
        Claim("after zero_grad()", str({each.grad for each in model.parameters()}), str({None})),
        Claim("backward of 64 numbers is refused", refused, "grad can be implicitly created only for scalar outputs"),
    ]


@app.function(hide_code=True)
def count_of_grads(seed: int) -> int:
    """How many named tensors of a drawn program have a .grad, by running it."""
    lines, names, _ = leaf_program(Random(seed))
    space = {"torch": torch, "nn": nn}
    exec("\n".join(lines), space)
    asked = [space[name] for name in names if space[name].is_leaf or space[name].retains_grad]
    return sum(each.grad is not None for each in asked)


@app.cell
def _():
    lesson.claims([*claims_who_gets_grad(), *claims_accumulation()]) if lesson.HAS_TORCH else mo.md("needs torch")
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Five loops, one of them right

    Here is a training loop with all of it: clear, accumulate, clip, step. Clipping scales all gradients together, so
    that their one joint norm is at most the limit; it can only do that after the last backward of the batch and before
    the step.
    """)
    return


@app.cell(hide_code=True)
def _():
    mo.md(f"""
    ```python
{indent(LOOP, "    ")}
    ```

    Four faults are planted into copies of it, one each. Each copy runs without an error message. They train the same
    16 weights on the same 60 batches, of which one, halfway, is bad: a sensor failed, and its targets are 200 times too
    large. Before you look at the figure: which of the four does the bad batch ruin, and which were ruined before?
    """)
    return


@app.function
def losses_of(text: str, seed: int = 1) -> list[float]:
    """Squared distance to the true weights after each step of a loop that is given as text."""
    draw = torch.Generator().manual_seed(seed)
    true = torch.randn(16, 1, generator=draw)
    xs = torch.randn(60, 32, 16, generator=draw)
    ys = xs @ true + 0.1 * torch.randn(60, 32, 1, generator=draw)
    ys[30] *= 200
    model = nn.Linear(16, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.15)
    space = {"torch": torch, "error": lambda trained: ((trained.weight.detach().T - true) ** 2).sum().item()}
    exec(text, space)
    losses: list[float] = space["train"](model, optimizer, list(zip(xs, ys, strict=True)), 4)
    return losses


@app.cell(hide_code=True)
def _():
    if lesson.HAS_TORCH:
        runs = {"right": losses_of(LOOP), **{fault: losses_of(text) for fault, text in PLANTED.items()}}
        curves = [
            Line(range(1, 61), losses, name, COLOURS[at], width=4 if at == 0 else 2, said=[])
            for at, (name, losses) in enumerate(runs.items())
        ]
        bad = Band("x", 31, text="the bad batch")
        distance = Axis("squared distance to the true weights", log=True)
        races = Chart("One loop is right", (*curves, bad), Axis("step"), distance)
        ends = {name: losses[-1] for name, losses in runs.items()}
        told = mo.md(rf"""
        The right loop ends at {ends["right"]:.1g}. Three are wrong all the time. Without the 1/k each step is four
        times as long, and the end is {ends["no 1/k"]:.1g}. Without `zero_grad` each step adds all gradients so far, and
        nothing is learned: the end is {ends["no zero_grad"]:.1g}. A `zero_grad` before each backward wipes the
        micro-batches before it, so that the step sees the last quarter of the data, and of that a quarter of the
        gradient: it is slow, and the end is {ends["zero_grad wipes"]:.1g}. A clip after the step is right until the bad
        batch, where it comes too late: the squared distance is {max(runs["clip after step"]):,.0f}. It returns to
        {ends["clip after step"]:.1g}, as this loss has one valley; a network need not.
        """)
    else:
        races, told = mo.md("needs torch"), mo.md("")
    mo.vstack([races, told])
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## The two matmuls of backward

    Now the cost. One layer multiplies B rows by a matrix: $Y_{bk} = \sum_d X_{bd} W_{dk}$. Three indices, so B D K
    multiplications and as many additions: 2 B D K FLOPs. Backward is given $\partial \ell / \partial Y$, written $G$.
    One element of W acts on the loss through each row, one element of X through each column:

    $$\frac{\partial \ell}{\partial W_{dk}} = \sum_b X_{bd}\, G_{bk} \;\;(X^\top G), \qquad
    \frac{\partial \ell}{\partial X_{bd}} = \sum_k G_{bk}\, W_{dk} \;\;(G W^\top).$$

    The same three indices, each time summed over another one: two matmuls of 2 B D K. For one weight and one row that
    is 2 FLOPs forward (multiply, add) and 4 backward, 2 for the weight's gradient and 2 for the input's. This is where
    the 6 in 6 N FLOPs per token comes from.

    The first of the two needs X, so forward *keeps* X until then. The second needs W, which is there anyway. And each
    is computed only if somebody wants it:

    - $X^\top G$ for W, where W requires a gradient. A frozen W costs nothing here, and X need not be kept.
    - $G W^\top$ for X, where X requires one: where *anything before this layer* is trained, or the data itself asks.

    As a function of the sizes, with the input of the net first:
    """)
    return


@app.function
def backward_matmuls(
    batch: int, widths: Sequence[int], trained: Sequence[bool], *, x_needs: bool
) -> list[tuple[int, str, int]]:
    """The matmuls that backward runs: layer, whose gradient it is, FLOPs."""
    runs = []
    for layer, trains in enumerate(trained):
        flops = 2 * batch * widths[layer] * widths[layer + 1]
        if trains:
            runs.append((layer, "weight", flops))
        if x_needs or any(trained[:layer]):  # something before this layer waits for a gradient
            runs.append((layer, "input", flops))
    return runs


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    So in your net of two matrices the first layer's $G W_1^\top$ never runs: the data requires no gradient. Change the
    sizes, freeze a matrix, let the data ask for a gradient (as an attack on the input does, or the layer before it):
    """)
    return


@app.cell(hide_code=True)
def _():
    batch = mo.ui.slider(steps=[64, 256, 1024, 4096], value=1024, label="B", show_value=True)
    width = mo.ui.slider(steps=[64, 256, 1024, 4096], value=256, label="D", show_value=True)
    out = mo.ui.slider(steps=[16, 64, 256, 1024], value=64, label="K", show_value=True)
    first, second = mo.ui.checkbox(value=True, label="train W1"), mo.ui.checkbox(value=True, label="train W2")
    asks = mo.ui.checkbox(value=False, label="x requires a gradient")
    mo.vstack([mo.hstack([batch, width, out], justify="start"), mo.hstack([first, second, asks], justify="start")])
    return asks, batch, first, out, second, width


@app.cell(hide_code=True)
def _(asks, batch, first, out, second, width):
    graph(batch.value, [width.value, width.value, out.value], [first.value, second.value], x_needs=asks.value)
    return


@app.function(hide_code=True)
def graph(batch: int, widths: Sequence[int], trained: Sequence[bool], *, x_needs: bool) -> Chart:
    """The net as a drawing: FLOPs of each matmul forward, and of those that backward runs."""
    runs = {(layer, whose): flops for layer, whose, flops in backward_matmuls(batch, widths, trained, x_needs=x_needs)}
    forward = [2 * batch * before * after for before, after in pairwise(widths)]
    marks: list[Line | Words] = []

    def edge(xs: list[float], ys: list[float], kind: str, text: str, at: tuple[float, float]) -> None:
        colour = {"forward": COLOURS[0], "backward": COLOURS[5]}.get(kind, GREY)
        marks.append(Line(xs, ys, kind, colour, 3, "" if colour != GREY else "dash", said=[]))
        marks.append(Words([at[0]], [at[1]], [text], colour))

    for layer, (left, right) in enumerate((("x", "h"), ("h", "y"))):
        x = 2.0 * layer
        edge([x, x + 2], [2.1, 2.1], "forward", f"{forward[layer] / 1e6:,.1f} M for {right}", (x + 1, 2.4))
        edge([x + 0.97, x + 0.97], [1.0, 2.1], "forward", "", (x, 0))
        for whose, xs, ys, to, place in (
            ("input", [x + 2, x], [1.9, 1.9], left, (x + 0.5, 1.6)),
            ("weight", [x + 1.03, x + 1.03], [1.9, 1.0], f"W{layer + 1}", (x + 1.4, 1.3)),
        ):
            flops = runs.get((layer, whose))
            said = f"not run for {to}" if flops is None else f"{flops / 1e6:,.1f} M for {to}"
            edge(xs, ys, "backward" if flops else "not run", said, place)
        kept = f"keeps {left}: {4 * batch * widths[layer] / 1e6:,.2f} MB" if trained[layer] else f"keeps no {left}"
        marks.append(Words([x + 1], [0.45], [kept], DARK))
    nodes, places = ["x", "h", "y", "W1", "W2"], ([0, 2, 4, 1, 3], [2, 2, 2, 0.9, 0.9])
    marks += [Line(*places, "", DARK, 0, symbol="square", size=30, said=nodes), Words(*places, nodes, WHITE)]
    total, back = sum(forward), sum(runs.values())
    title = f"forward {total / 1e6:,.1f} M, backward {back / 1e6:,.1f} M FLOPs: {back / total:.2f} times"
    return Chart(title, tuple(marks), Axis(ends=(-0.5, 4.5), ticks={}), Axis(ends=(0.2, 2.8), ticks={}))


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    With both matrices trained and plain data, backward is 1.2 times forward, not twice: the first layer is most of this
    net. In L equal layers one missing matmul of 2 L is next to nothing, and "twice" is right. Where else it is not:

    - **Frozen weights, LoRA.** The large matrices are frozen, small adapters beside them train. $X^\top G$ is gone for
      all of them; $G W^\top$ must run, or no gradient reaches the adapters below. Backward is once the forward: a step
      costs 2 + 2 = 4 FLOPs per weight and token, not 6 and not 2.
    - **Fused attention.** A score $q \cdot k$ has no weight, but two inputs, and both want a gradient: the usual two
      matmuls for each. A flash kernel has thrown the scores away and computes them again: 5 matmuls backward for 2
      forward.
    - **Embeddings** are looked up, not multiplied: 0 FLOPs forward, additions backward.
    - **Activation checkpointing** runs forward again: 2 + 2 + 4 = 8 ([chapter 12](12_checkpointing.html)).

    `tl.trace` runs a step of any module on fake tensors and records what PyTorch runs, so it can say whether the
    function above is right. In this trace of your net, bytes that are kept stand with the matmul that *wrote* them: the
    first writes h, which the second keeps. The first keeps x, which is there anyway and does not count.
    """)
    return


@app.function
def traced(batch: int, widths: Sequence[int], trained: Sequence[bool], *, x_needs: bool) -> "tl.Ledger":
    """The ledger of one forward and backward of a stack of matrices."""
    layers = [nn.Linear(before, after, bias=False) for before, after in pairwise(widths)]
    for layer, trains in zip(layers, trained, strict=True):
        layer.requires_grad_(trains)
    x = torch.empty(batch, widths[0], requires_grad=x_needs)
    return tl.trace(nn.Sequential(*layers), x, loss=lambda y: y.mean())


@app.cell
def _():
    if lesson.HAS_TORCH:
        ledger = traced(1024, [256, 256, 64], [True, True], x_needs=False)
        for entry in ledger.filter(lambda entry: entry.kind == "matmul"):
            print(f"{entry.phase:9} [B, m, n, k] = {entry.shape!s:22} {entry.flops:>12,} FLOPs, keeps {entry.kept:,} B")
    return


@app.function(hide_code=True)
def claims_flops() -> list[Claim]:
    b, d, k = 1024, 256, 64
    to_weight, to_input = einsum("bd,bk->dk", [(b, d), (b, k)]), einsum("bk,dk->bd", [(b, k), (d, k)])
    flash = tl.account("gpt2").filter(lambda entry: entry.kind in ("matmul", "attention"))
    plain = tl.account("gpt2", {"recipe.attention": "math"}).matmul_flops
    forward, backward = (flash.by("phase")[phase] for phase in ("forward", "backward"))
    scores = 4 * 1024**2 * 768 * 12  # 12 layers
    rows = [
        Claim("both matmuls of a layer's backward, as einsums", to_weight.flops + to_input.flops, 2 * (2 * b * d * k)),
        Claim("gpt2, attention written out: a step over its forward", plain / forward, 3.0),
        Claim("gpt2, flash attention: backward over forward", backward / forward, 2 + 0.5 * scores / forward, 1e-9),
    ]
    if not lesson.HAS_TORCH:
        return rows
    nets = {
        "your net, backward: 2BDD + 4BDK": ([True, True], False, 2 * b * d * d + 4 * b * d * k),
        "its data asks for a gradient: 4BDD + 4BDK": ([True, True], True, 4 * b * d * d + 4 * b * d * k),
        "W1 frozen: 2BDK": ([False, True], False, 2 * b * d * k),
    }
    for text, (trained, asks, expected) in nets.items():
        matmuls = traced(b, [d, d, k], trained, x_needs=asks).filter(lambda entry: entry.kind == "matmul")
        rows.append(Claim(text, matmuls.by("phase")["backward"], expected))
    kept = [traced(b, [d, d, k], trained, x_needs=False).kept_nbytes for trained in ([True, True], [True, False])]

    alive = []

    def retain(_module: nn.Module, _inputs: object, h: torch.Tensor) -> None:
        h.retain_grad()
        alive.append(h)

    two = nn.Sequential(nn.Linear(d, d, bias=False), nn.Linear(d, k, bias=False))
    two[0].register_forward_hook(retain)
    clones = tl.trace(two, torch.empty(b, d), loss=lambda y: y.mean()).filter(lambda entry: entry.name == "clone")
    return [
        *rows,
        Claim("bytes that forward no longer keeps, W2 frozen: h", kept[0] - kept[1], 4 * b * d),
        Claim("bytes that h.retain_grad() copies", clones.total("written"), 4 * b * d),
    ]


@app.cell
def _():
    lesson.claims(claims_flops())
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    **Find the mistake.** Public notes of this lecture derive for $x W_1 W_2$: "backward takes 4 B (D D + D K) FLOPs,
    twice the forward". Beside it stands code in which `x` is plain data: the notes count a matmul that never runs, and
    the number is 4 B D K + 2 B D D.

    ## Exercises

    A new seed gives new numbers. After a first miss there is a hint, after a second the derivation.
    """)
    return


@app.function(hide_code=True)
def leaf_program(draw: Random) -> tuple[list[str], list[str], list[bool]]:
    """A drawn program, the names in it, and which of them have a .grad by the two questions."""
    kinds = [
        ("torch.ones(3, requires_grad=True)", True),
        ("nn.Parameter(torch.ones(3) * 0.02)", True),
        ("torch.ones(3, requires_grad=True) * 0.02", False),
        ("nn.Parameter(torch.ones(3)).detach()", False),
        ("torch.ones(3)", False),
    ]
    names = list("abcdef")
    chosen = [kinds[draw.randrange(2)], *(draw.choice(kinds) for _ in range(4))]
    draw.shuffle(chosen)
    lines = [f"{name} = {text}" for name, (text, _) in zip(names, chosen, strict=False)]
    gets = [gets_grad for _, gets_grad in chosen]
    summed = f"{names[0]} * {names[1]} + {' + '.join(names[2:5])}"
    retained, unused = draw.random() < 0.5, draw.random() < 0.5
    lines.append(f"f = {summed}" + ("; f.retain_grad()" if retained else ""))
    gets.append(retained)
    if unused:
        lines.append("g = nn.Parameter(torch.ones(3))")
        names, gets = [*names, "g"], [*gets, False]
    return [*lines, "f.sum().backward()"], names, gets


@app.function(hide_code=True)
def exercise_leaves(seed: int) -> Exercise:
    lines, names, gets = leaf_program(Random(seed))
    require = sum("requires_grad" in line or "Parameter" in line for line in lines)
    has = ", ".join(name for name, gets_grad in zip(names, gets, strict=True) if gets_grad)
    wrong = {require: "That is every line that mentions a gradient.", len(names): "Data has none."}
    return Exercise(
        "How many of the named tensors have a `.grad` after this?\n\n```python\n" + "\n".join(lines) + "\n```\n",
        sum(gets),
        f"Leaves that require a gradient and that the loss depends on, and what retains its gradient: {has}.",
        hint="Of each: did you make it (leaf)? Does it require a gradient? And does the loss depend on it?",
        mistakes={count: remark for count, remark in wrong.items() if count != sum(gets)},
    )


@app.function(hide_code=True)
def exercise_frozen_layer(seed: int) -> Exercise:
    draw = Random(seed)
    batch, widths = draw.choice([32, 64, 128]), [draw.choice([128, 256, 512]) for _ in range(4)]
    frozen = draw.randrange(3)
    trained = [at != frozen for at in range(3)]
    runs = backward_matmuls(batch, widths, trained, x_needs=False)
    flops = sum(each for *_, each in runs)
    shown = " + ".join(f"{each / 1e6:.3g} (W{at + 1}'s {whose})" for at, whose, each in runs)
    forward = 2 * batch * sum(a * b for a, b in pairwise(widths))
    every = sum(each for *_, each in backward_matmuls(batch, widths, [True] * 3, x_needs=False))
    return Exercise(
        f"{batch} rows of plain data through three matrices, {' x '.join(map(str, widths))} (W1 is {widths[0]} x "
        f"{widths[1]}); W{frozen + 1} is frozen. FLOPs of backward's matmuls?",
        flops,
        f"In millions: {shown}, which is {flops:,} FLOPs.",
        hint="For each layer two questions: is its matrix trained? Is anything before it trained?",
        mistakes={2 * forward: "That is twice the forward: nothing frozen, and data that asks.", every: "W is frozen."},
    )


@app.function(hide_code=True)
def exercise_adapters(seed: int) -> Exercise:
    draw = Random(seed)
    billions, tokens = draw.choice([3, 7, 8, 13, 70]), draw.choice([10, 20, 50, 200])
    weights, seen = billions * 1e9, tokens * 1e6
    return Exercise(
        f"LoRA on a frozen model of {billions}B weights in many layers, tiny adapters in each, {tokens} million "
        "tokens. FLOPs of the run?",
        (2 + 2) * weights * seen,
        f"Forward 2, the input's gradient 2, the weight's none: 4 x {weights:.3g} x {seen:.3g}.",
        hint="Which of backward's two matmuls runs for a frozen matrix with something trained before it?",
        unit="FLOPs",
        mistakes={
            6 * weights * seen: "Frozen weights need no gradient.",
            2 * weights * seen: "A gradient still has to pass through the frozen matrices to the adapters below.",
        },
    )


@app.function(hide_code=True)
def fault_of_loop(text: str) -> str:
    """What is wrong with a training loop that is given as text."""
    if not lesson.HAS_TORCH:
        return "This exercise needs torch."
    right = losses_of(LOOP)
    try:
        losses = losses_of(text)
        if len(losses) != len(right):
            return f"It returns {len(losses)} losses for {len(right)} batches."
        worst = max(abs(a - b) / b for a, b in zip(losses, right, strict=True))
    except Exception as error:
        return f"{type(error).__name__}: {error}."
    return "" if worst < 1e-3 else f"It runs, and ends at {losses[-1]:.2g}; a right loop ends at {right[-1]:.2g}."


@app.function(hide_code=True)
def exercise_repair(seed: int) -> Exercise:
    fault = Random(seed).choice(sorted(PLANTED))
    reasons = {
        "no 1/k": "The mean over the batch is the mean of k means: each loss is divided by k.",
        "no zero_grad": "Nothing clears .grad between steps.",
        "zero_grad wipes": "zero_grad inside the inner loop wipes the micro-batches before the last.",
        "clip after step": "The clip has to come between the last backward and the step.",
    }
    return Exercise(
        "One line of this loop is wrong, missing or in the wrong place. Repair it; its losses are compared with those "
        "of a right loop.",
        LOOP,
        reasons[fault],
        hint="Read it in order: clear once per step, add k gradients of loss / k, clip, step.",
        start=PLANTED[fault],
        check=fault_of_loop,
    )


@app.function(hide_code=True)
def fault_of_backward(text: str) -> str:
    """What is wrong with a backward that stands below its forward, against autograd."""
    if not lesson.HAS_TORCH:
        return "This exercise needs torch."
    space = {"torch": torch}
    x, w = (
        torch.randn(5, 3, requires_grad=True),
        torch.randn((4, 3) if "w.T" in text.partition("def backward")[0] else (3, 4)),
    )
    w.requires_grad_()
    try:
        exec(text, space)
        y = space["forward"](x, w)
        g = torch.randn_like(y)
        y.backward(g)
        found = space["backward"](x.detach(), w.detach(), g)
        for name, ours, right in zip(("x", "w"), found, (x.grad, w.grad), strict=True):
            if ours.shape != right.shape:
                return f"The gradient of {name} has shape {list(ours.shape)}, and {name} has {list(right.shape)}."
            if not torch.allclose(ours, right, atol=1e-5):
                return f"The gradient of {name} has the right shape and wrong values."
    except Exception as error:
        return f"{type(error).__name__}: {error}."
    return ""


@app.function(hide_code=True)
def exercise_backward(seed: int) -> Exercise:
    layers = {
        "x @ w": "g @ w.T, x.T @ g",
        "x @ w.T": "g @ w, g.T @ x",
        "2 * x @ w": "2 * g @ w.T, 2 * x.T @ g",
        "x @ w.T / 3": "g @ w / 3, g.T @ x / 3",
    }
    forward, backward = Random(seed).choice(list(layers.items()))
    head = f"def forward(x, w):\n    return {forward}\n\ndef backward(x, w, g):  # g is the gradient of the result\n"
    return Exercise(
        "Write backward of this layer: the gradients of x and of w, two matmuls. Autograd checks them.",
        f"{head}    return {backward}\n",
        f"`{backward}`: in each, the index that is summed is the one that the result does not have.",
        hint="The gradient of x has the shape of x. There is one way to multiply g and w that gives it.",
        start=f"{head}    return x, w\n",
        check=fault_of_backward,
    )


@app.cell(hide_code=True)
def _():
    EXERCISES = [exercise_leaves, exercise_frozen_layer, exercise_adapters, exercise_repair, exercise_backward]
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

    A gradient is stored for leaves that require one, and it is added: divide by k, clear once per step, clip before it.
    Backward is up to two matmuls a layer, one for the weight if it is trained, one for the input if anything before it
    is: 2 + 4 = 6, and 4 for frozen weights.

    On the command line: `trainledger annotate train.py` shows the FLOPs of forward and backward beside each line of
    your script, and `trainledger explain flops gpt2` those of a model. Next:
    [parameters and where they start](08_parameters.html).
    """)
    return


if __name__ == "__main__":
    app.run()
