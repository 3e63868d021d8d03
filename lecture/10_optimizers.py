import marimo

__generated_with = "0.25.2"
app = marimo.App(app_title="10. Optimizers, written out")

with app.setup:
    from collections.abc import Callable
    from math import sqrt
    from random import Random
    from typing import Any

    import marimo as mo

    import trainledger as tl
    from trainledger.ledger.optimizers.update_rules import UPDATE_FLOPS_PER_PARAMETER
    from trainledger.ledger.rules_of_thumb import averaging_steps
    from trainledger.report import lesson
    from trainledger.report.chart import COLOURS, PALE, Axis, Chart, Line
    from trainledger.report.lesson import Claim, Exercise, Gives

    if lesson.HAS_TORCH:
        import torch
        from torch import nn

        from trainledger.engine.nn import transformer

    Number = Any


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # 10. Optimizers, written out

    A model of 1.5 billion parameters trains on your 24 GB device by plain SGD, badly. You change one word to `AdamW`,
    and it runs out of memory before the first step has ended. The batch is the same, the model is the same.

    Guess before you read on. How many GB does AdamW remember that SGD does not, in fp32?
    """)
    return


@app.cell(hide_code=True)
def _():
    guess = mo.ui.text(label="GB:")
    guess
    return (guess,)


@app.cell(hide_code=True)
def _(guess):
    remembered = tl.napkin(device="h100-sxm", params=1.5e9, tokens=1e9, count=1, mfu=0.4).static_nbytes
    more = (remembered["fp32-adamw"] - remembered["fp32-sgd"]) / 1e9
    mo.md(lesson.against(guess.value, more, "GB") if guess.value else "")
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    What is worth so much memory? Each rule below answers a complaint about the one before it. All of them get a weight
    w, its gradient g, the step t from 1 on, and a dict s that is all they remember. They work on floats and on tensors.

    **SGD** goes downhill: $w \leftarrow w - r g$. It remembers nothing. Its trouble is one rate r for all: a weight
    whose gradient changes quickly (large curvature) allows only a small r, and the others crawl.

    **Momentum** sums old gradients, each step 0.9 of the one before. Directions that agree add up to ten times the
    gradient, directions that alternate cancel.
    """)
    return


@app.function
def sgd(w: Number, g: Number, s: dict[str, Number], t: int, lr: float) -> Number:
    return w - lr * g


@app.function
def momentum(w: Number, g: Number, s: dict[str, Number], t: int, lr: float, b: float = 0.9) -> Number:
    s["m"] = b * s.get("m", 0.0) + g
    return w - lr * s["m"]


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    **AdaGrad** gives each weight its own rate: it divides by the root of the sum of its squared gradients. A rare word
    has had few gradients, so it takes larger steps when it comes. But a sum only grows: after t equal gradients the
    step is $r / \sqrt t$, and training stalls.

    **RMSProp** replaces the sum by an average that forgets, 0.99 of it from step to step. The step stays near r.
    """)
    return


@app.function
def adagrad(w: Number, g: Number, s: dict[str, Number], t: int, lr: float, e: float = 1e-10) -> Number:
    s["v"] = s.get("v", 0.0) + g * g
    return w - lr * g / (s["v"] ** 0.5 + e)


@app.function
def rmsprop(w: Number, g: Number, s: dict[str, Number], t: int, lr: float, b: float = 0.99, e: float = 1e-8) -> Number:
    s["v"] = b * s.get("v", 0.0) + (1 - b) * (g * g)
    return w - lr * g / (s["v"] ** 0.5 + e)


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    **Adam** does both: an average m of gradients over that of their squares v. Both begin at 0 and are too small at
    first, by exactly $1 - b^t$, so it divides that out (*bias correction*). Then the first step is r for any gradient:
    $m / \sqrt v = g / |g|$. Without it the first step would be $(1 - b_1) / \sqrt{1 - b_2} = 3.2$ times as long.

    **AdamW** adds weight decay, and where it adds it is the point. Put into the gradient as $g + \lambda w$, decay is
    divided by $\sqrt v$ like everything else: weights with large gradients hardly decay, and a weight without any
    gradient shrinks by r a step whatever $\lambda$ is. AdamW scales the weight itself, by $1 - r \lambda$.
    """)
    return


@app.function
def adam(
    w: Number, g: Number, s: dict[str, Number], t: int, lr: float, b: float = 0.9, c: float = 0.999, e: float = 1e-8
) -> Number:
    s["m"] = b * s.get("m", 0.0) + (1 - b) * g
    s["v"] = c * s.get("v", 0.0) + (1 - c) * (g * g)
    return w - lr / (1 - b**t) * s["m"] / ((s["v"] / (1 - c**t)) ** 0.5 + e)


@app.function
def adamw(w: Number, g: Number, s: dict[str, Number], t: int, lr: float, decay: float = 0.01) -> Number:
    return adam((1 - lr * decay) * w, g, s, t, lr)


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    **Adafactor** asks whether v must be as large as w. For a matrix of n x m it keeps an average for each row and one
    for each column, n + m numbers, and takes $v_{ij} \approx r_i c_j / \bar r$: exact where v has rank 1. It keeps no
    m, forgets less and less ($t^{-0.8}$ of v is new), and bounds the size of an update by that of the weights.
    """)
    return


@app.function
def adafactor(w: Number, g: Number, s: dict[str, Number], t: int, lr: float, least: float = 1e-3) -> Number:
    new, tiny = t**-0.8, torch.finfo(w.dtype).eps
    if w.ndim > 1:
        s["r"] = (1 - new) * s.get("r", 0.0) + new * (g * g).mean(dim=-1, keepdim=True)
        s["c"] = (1 - new) * s.get("c", 0.0) + new * (g * g).mean(dim=-2, keepdim=True)
        v = s["r"] * s["c"] / s["r"].mean(dim=-2, keepdim=True).clamp(min=tiny)
    else:
        v = s["v"] = (1 - new) * s.get("v", 0.0) + new * (g * g)
    update = g / v.clamp(min=tiny * tiny) ** 0.5
    size = min(lr, t**-0.5) * rms(w).clamp(min=least)  # relative to the weights
    return w - size * update / rms(update).clamp(min=1.0)


@app.function
def rms(x: Number) -> Number:
    return (x * x).mean() ** 0.5


@app.function
def rules() -> dict[str, Callable[..., Number]]:
    written = [sgd, momentum, adagrad, rmsprop, adam, adamw, adafactor]
    return dict(zip(["SGD", "momentum", "AdaGrad", "RMSProp", "Adam", "AdamW", "Adafactor"], written, strict=True))


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Are these the rules that PyTorch runs?

    A small net, a matrix and a bias, 50 steps by each rule above and by the class of `torch.optim`. The claim: no
    weight differs by more than 5e-7, a few roundings of fp32.
    """)
    return


@app.function(hide_code=True)
def difference_from_torch(name: str, steps: int = 50, lr: float = 0.003) -> float:
    """The largest difference of any weight from torch.optim's."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(64, 32, generator=draw), torch.randn(64, 16, generator=draw)
    start = [0.1 * torch.randn(32, 16, generator=draw), torch.zeros(16)]
    theirs = [nn.Parameter(each.clone()) for each in start]
    classes = {"momentum": torch.optim.SGD, "AdaGrad": torch.optim.Adagrad, "RMSProp": torch.optim.RMSprop}
    options = {"momentum": 0.9} if name == "momentum" else {}
    optimizer = (classes.get(name) or getattr(torch.optim, name))(theirs, lr=lr, **options)
    ours, states = start, [{}, {}]

    def loss(w: list[Number]) -> Number:
        return ((x @ w[0] + w[1] - y) ** 2).mean()

    for t in range(1, steps + 1):
        optimizer.zero_grad()
        loss(theirs).backward()
        optimizer.step()
        leaves = [each.requires_grad_() for each in ours]
        gradients = torch.autograd.grad(loss(leaves), leaves)
        ours = [rules()[name](w.detach(), g, s, t, lr) for w, g, s in zip(ours, gradients, states, strict=True)]
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))


@app.function(hide_code=True)
def claims_rules() -> list[Claim]:
    if not lesson.HAS_TORCH:
        return []
    apart = {name: difference_from_torch(name) for name in rules()}
    return [Claim(f"{name}: at most {each:.0e} from torch.optim", each < 5e-7, True) for name, each in apart.items()]


@app.cell
def _():
    lesson.claims(claims_rules()) if lesson.HAS_TORCH else mo.md("needs torch")
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    `tl.explain` writes the rule that the account counts, with its own constants, as lines of Python that run:
    """)
    return


@app.cell
def _():
    tl.explain("optimizer", "adamw")
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## The valley, which is a rare word

    Why would one rate for all be bad? Take two weights of a model that is linear in its inputs. The loss's curvature
    along a weight is the mean square of its input. A feature that is there in every example has curvature 1; one in a
    hundred examples, 0.01. Together they are a valley, steep across and flat along:

    $$\ell = \tfrac12 \left( a^2 + p\, b^2 \right), \qquad \nabla \ell = (a,\; p\, b).$$

    SGD with a rate above 2 diverges along a, and with a rate below 2 needs some $1/p$ steps along b. Each rule runs
    with the best of thirteen rates. Choose how rare b is; then turn the valley by 45 degrees, so that no weight has a
    curvature of its own:
    """)
    return


@app.cell(hide_code=True)
def _():
    rare = mo.ui.slider(steps=[1, 10, 30, 100, 300, 1000], value=100, label="b is there in one of", show_value=True)
    turned = mo.ui.checkbox(value=False, label="turned by 45 degrees")
    mo.hstack([rare, turned], justify="start")
    return rare, turned


@app.function
def walk(rule: Callable[..., Number], lr: float, p: float, steps: int, *, turned: bool) -> list[tuple[float, float]]:
    """The path of (a, b) from (0.5, 1); turned, the rule sees their sum and difference instead, over root 2."""
    root, states, path = sqrt(0.5), ({}, {}), [(0.5, 1.0)]
    u, v = (1.5 * root, -0.5 * root) if turned else path[0]
    for t in range(1, steps + 1):
        a, b = (root * (u + v), root * (u - v)) if turned else (u, v)
        ga, gb = a, p * b
        gu, gv = (root * (ga + gb), root * (ga - gb)) if turned else (ga, gb)
        u, v = rule(u, gu, states[0], t, lr), rule(v, gv, states[1], t, lr)
        path.append((root * (u + v), root * (u - v)) if turned else (u, v))
        if not abs(u) + abs(v) < 1e3:
            break
    return path


@app.function
def best_walk(name: str, p: float, *, turned: bool, steps: int = 500) -> tuple[int, float, list[tuple[float, float]]]:
    """Steps until the loss stays below a thousandth, the rate, and the path, by the best of the rates."""
    found = []
    for at in range(13):
        lr = 2 * 10 ** (-at / 3)
        path = walk(rules()[name], lr, p, steps, turned=turned)
        losses = [(a * a + p * b * b) / (0.25 + p) for a, b in path]
        above = max((t for t, each in enumerate(losses) if not each < 1e-3), default=0) + 1
        found.append((above if len(path) > steps else steps + 1, losses[-1], lr, path))
    until, _, lr, path = min(found)
    return until, lr, path


@app.cell(hide_code=True)
def _(rare, turned):
    walks = {
        name: best_walk(name, 1 / rare.value, turned=turned.value, steps=250 if lesson.QUICK else 500)
        for name in list(rules())[:5]
    }
    remember = {"SGD": 0, "momentum": 4, "AdaGrad": 4, "RMSProp": 4, "Adam": 8}
    paths = [
        Line(
            [b for _, b in path],
            [a for a, _ in path],
            f"{name}, {remember[name]} bytes: {until if until < len(path) else 'too many'} steps",
            COLOURS[at],
            1.5,
            symbol="circle",
            size=4,
            said=[],
        )
        for at, (name, (until, _, path)) in enumerate(walks.items())
    ]
    ground = [Line([0], [0], "", PALE, 0, symbol="cross", size=16, said=["the lowest point"])]
    Chart(
        "Paths in the valley, with the steps until the loss stays below a thousandth",
        (*ground, *paths),
        Axis("b, along the valley", ends=(-0.6, 1.2)),
        Axis("a, across", ends=(-0.7, 0.7)),
    )
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    Straight, SGD spends its steps along the bottom, while AdaGrad and RMSProp, with a rate for each weight, walk to the
    goal as if both were alike. Turned, their advantage is gone, since each weight now has both curvatures. Momentum
    does not care how the valley lies, and Adam has a bit of either. Words in a vocabulary lie straight: each row of an
    embedding is one word's own, and that is where a rate for each weight earns its memory.

    ## What they remember, and what they compute

    Memory follows from the dict s. Each entry is as large as the weight, but for Adafactor's rows and columns. With 4
    bytes for the weight and 4 for the gradient, AdamW has 16 in all and SGD 8. PyTorch keeps this dict for each
    parameter, makes it in the first step (which is why you ran out of memory at *its end*), and stores it in every
    checkpoint. The moments stay in fp32 where the rest is bf16: 0.999 v + 0.001 g g is an update of a thousandth, and
    bf16 rounds what is below half of 0.0078 away. Adam in 8 bits scales each block of 256 numbers by its largest, and
    needs 2 bytes in place of 8.

    FLOPs can be counted as well, since the rules take any number: give them one that counts what is done to it.
    """)
    return


@app.function
def counted_flops(rule: Callable[..., Number]) -> int:
    """Operations of a rule on one weight, by a number that counts them."""
    done = []

    class Counting(float):
        def operation(self, *_: object) -> "Counting":
            done.append(1)
            return Counting(1.0)

    for name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow"):
        setattr(Counting, f"__{name}__", Counting.operation)
    states: dict[str, Number] = {}
    for t in (1, 2):  # the first step has no state yet
        done.clear()
        rule(Counting(1.0), Counting(1.0), states, t, 0.1)
    return len(done)


@app.function(hide_code=True)
def remembered_nbytes(rule: Callable[..., Number]) -> int:
    """Bytes of the states of a rule for gpt2's parameters, on tensors without memory."""
    with torch.device("meta"):
        parameters = [each.detach() for each in transformer.Transformer(tl.model("gpt2")).parameters()]
    total = 0
    for each in parameters:
        states: dict[str, Number] = {}
        rule(each, torch.empty_like(each), states, 1, 0.1)
        total += sum(4 * state.numel() for state in states.values())
    return total


@app.function(hide_code=True)
def ledger_nbytes(kind: str) -> int:
    """Bytes of optimizer state in the account of gpt2, with the 4 of each parameter's step counter."""
    return dict(tl.account("gpt2", {"recipe.optimizer": kind}).resident).get("optimizer state", 0)


@app.function(hide_code=True)
def claims_costs() -> list[Claim]:
    names = ["sgd", "momentum", "adagrad", "rmsprop", "adam"]
    counted = [counted_flops(each) for each in (sgd, momentum, adagrad, rmsprop, adam)]
    ledger = tl.account("gpt2-xl")
    update, parameters = ledger.by("kind")["update"], tl.parameters(tl.model("gpt2-xl")).total
    rows = [
        Claim(
            "FLOPs per parameter of the first five, counted and as the ledger has them",
            str(counted),
            str([UPDATE_FLOPS_PER_PARAMETER[name] for name in names]),
        ),
        Claim("AdamW's update of gpt2-xl in FLOPs", update, 13 * parameters),
        Claim("less than 0.3 % of a step of one sequence", update / ledger.flops < 0.003, True),
    ]
    if lesson.HAS_TORCH:
        kinds = {"momentum": momentum, "adamw": adamw, "adafactor": adafactor}
        rows += [
            Claim(f"gpt2, {kind}: bytes remembered", remembered_nbytes(rule), ledger_nbytes(kind), 1e-3)
            for kind, rule in kinds.items()
        ]
    return rows


@app.function(hide_code=True)
def claims_steps() -> list[Claim]:
    w, states = 0.0, {}
    for t in range(1, 10_001):
        before, w = w, adagrad(w, 1.0, states, t, 0.01)
    w_of_zero, zeros = 1.0, {}
    for t in range(1, 101):
        w_of_zero = adamw(w_of_zero, 0.0, zeros, t, 0.01, decay=0.1)
    coupled, of_coupled = 1.0, {}
    for t in range(1, 101):
        coupled = adam(coupled, 0.1 * coupled, of_coupled, t, 0.001)
    told = tl.explain("optimizer", "adamw").document().data()
    space = {"sqrt": sqrt, "lr": 0.01, "w": 1.0, "m": 0.0, "v": 0.0, **told["constants"]}
    own, own_states = 1.0, {}
    for t in range(1, 21):
        space |= {"t": t, "g": (-1) ** t * t}
        exec("\n".join(told["formulas"]), space)
        own = adam(own * (1 - 0.01 * space["weight_decay"]), space["g"], own_states, t, 0.01, c=space["beta2"])
    first = {gradient: -adam(0.0, gradient, {}, 1, 3e-4) for gradient in (1e-3, 1e3)}
    uncorrected = 0.1 / sqrt(0.001)  # m / root v after one gradient of 1
    return [
        Claim("AdamW as it is explained, its lines run for 20 steps", space["w"], own, 1e-12),
        Claim("AdaGrad's step after 10,000 equal gradients: r / root t", before - w, 0.01 / 100, 1e-3),
        Claim("Adam's first step for a gradient of 0.001: r", first[1e-3], 3e-4, 1e-4),
        Claim("for one of 1,000: r", first[1e3], 3e-4, 1e-4),
        Claim("without bias correction, times r", uncorrected, 3.162, 1e-3),
        Claim(
            "an average with 0.999 is over this many steps",
            averaging_steps(0.999),
            sum(0.999**i for i in range(20_000)),
            1e-6,
        ),
        Claim("Adam with decay in the gradient, nothing else: 100 steps of about r", 1 - coupled, 100 * 0.001, 0.03),
        Claim("AdamW without gradients: (1 - r decay)^100", w_of_zero, (1 - 0.01 * 0.1) ** 100, 1e-9),
    ]


@app.cell
def _():
    lesson.claims([*claims_costs(), *claims_steps()])
    return


@app.cell(hide_code=True)
def _():
    per_step = 2**22
    mo.md(rf"""
    **Find the mistake.** AdaGrad stalls, says a public account of this lecture, "after trillions of tokens (billions of
    steps)". A step of a large run has some 4 million tokens, {per_step:,} in many, so 15 trillion are
    {15e12 / per_step / 1e6:.1f} million steps, not billions. AdaGrad stalls all the same: after a million equal
    gradients its step is a thousandth of r. And Adam's averages over 10 and 1,000 steps are short beside either.

    ## Exercises

    A new seed gives new numbers. After a first miss there is a hint, after a second the derivation.
    """)
    return


@app.function(hide_code=True)
def exercise_adam(seed: int) -> Exercise:
    draw = Random(seed)
    solution = (
        "def adam(w, g, m, v, t, lr=0.01, b=0.9, c=0.999, e=1e-8):\n"
        "    m = b * m + (1 - b) * g\n"
        "    v = c * v + (1 - c) * g * g\n"
        "    m_hat = m / (1 - b**t)\n"
        "    v_hat = v / (1 - c**t)\n"
        "    return w - lr * m_hat / (v_hat**0.5 + e)\n"
    )
    line = draw.choice(solution.splitlines()[1:])
    blank = line[: line.index("=") + 2] + "..." if "=" in line else "    return ..."
    cases = []
    for step in (1, 2, 50):
        w, g, m, v = (round(draw.uniform(0.1, 2), 2) for _ in range(4))
        cases.append(((w, g, m, v, step), adam(w, g, {"m": m, "v": v}, step, 0.01)))
    return Exercise(
        "Fill in the missing line of Adam. It is compared with the chapter's, for three steps.",
        solution,
        f"`{line.strip()}`",
        hint="Two averages, each divided by 1 - (its decay)^t, then a step of m_hat over the root of v_hat.",
        start=solution.replace(line, blank),
        check=Gives("adam", tuple(cases)),
    )


@app.function(hide_code=True)
def exercise_largest(seed: int) -> Exercise:
    draw = Random(seed)
    gigabytes, (name, states) = draw.choice([24, 48, 80, 141]), draw.choice([("SGD", 0), ("momentum", 4), ("AdamW", 8)])
    largest = gigabytes * 1e9 / (8 + states)
    return Exercise(
        f"The largest model whose fp32 weights, gradients and {name} states fit into {gigabytes} GB?",
        largest,
        f"{gigabytes}e9 / (4 + 4 + {states}) = {largest:.3g}, before any activation.",
        hint="Bytes per parameter: weight, gradient, and what the rule remembers.",
        mistakes={gigabytes * 1e9 / 4: "That is the weights alone.", gigabytes * 1e9 / (4 + states): "Gradients, too."},
    )


@app.function(hide_code=True)
def exercise_first_step(seed: int) -> Exercise:
    draw = Random(seed)
    b, c, gradient = draw.choice([0.8, 0.9, 0.95]), draw.choice([0.98, 0.99, 0.999]), draw.choice([0.01, 5, 300])
    return Exercise(
        f"Adam with {b} and {c} *without* bias correction, first gradient {gradient}, rate r. The first step, in r?",
        (1 - b) / sqrt(1 - c),
        f"m = {1 - b:.3g} g, v = {1 - c:.3g} g^2: m / root v = {1 - b:.3g} / root {1 - c:.3g}; the gradient cancels.",
        hint="Write m and v after one gradient, beginning at 0.",
        mistakes={1 - b: "Divide by the root of v.", (1 - b) * gradient / sqrt(1 - c): "The gradient cancels."},
    )


@app.function(hide_code=True)
def exercise_stall(seed: int) -> Exercise:
    draw = Random(seed)
    lr, steps = draw.choice([0.01, 0.1, 0.5]), draw.choice([400, 2500, 40_000, 1_000_000])
    return Exercise(
        f"AdaGrad, rate {lr}, {steps:,} gradients of the same size. The length of the last step?",
        lr / sqrt(steps),
        f"v is the sum of {steps:,} g^2, so g / root v = 1 / root {steps:,}.",
        hint="The sum of t equal squares is t g^2.",
        mistakes={lr: "That is the first step.", lr / steps: "It divides by the root of the sum."},
    )


@app.function(hide_code=True)
def exercise_decay(seed: int) -> Exercise:
    draw = Random(seed)
    lr, decay, steps = draw.choice([1e-3, 3e-3]), draw.choice([0.05, 0.1, 0.2]), draw.choice([5_000, 10_000, 20_000])
    left = (1 - lr * decay) ** steps
    return Exercise(
        f"An embedding row of a token that never occurs, AdamW with rate {lr} and decay {decay}, {steps:,} steps. "
        "Which share of it is left?",
        left,
        f"Its gradient is 0, so each step only scales it: (1 - {lr} x {decay})^{steps:,} = {left:.3g}.",
        hint="Decoupled decay does not look at the gradient.",
        mistakes={1 - left: "That is the share that is gone.", 1.0: "Decay acts without a gradient."},
    )


@app.function(hide_code=True)
def exercise_eight_bits(seed: int) -> Exercise:
    draw = Random(seed)

    def setup(billions: float, trained: float, activations: int, ranks: int) -> tuple[float, str]:
        """The share of a device's memory that 8-bit moments save, of fp32 weights, and the run in words."""
        states = billions * trained / ranks
        whole = 4 * billions + 4 * billions * trained + 8 * states + activations
        part = "all trained" if trained == 1 else f"LoRA trains {trained:.1%}"
        zero = f", moments sharded over {ranks}" if ranks > 1 else ""
        return 6 * states / whole, f"{billions}B parameters, {part}, {activations} GB of activations{zero}"

    runs = [
        setup(draw.choice([1.5, 3, 4]), 1, draw.randint(2, 8), 1),
        setup(draw.choice([0.1, 0.2, 0.3]), 1, draw.randint(40, 60), 1),
        setup(draw.choice([7, 8]), 1, draw.randint(5, 20), draw.choice([32, 64, 128])),
        setup(draw.choice([7, 13]), draw.choice([0.002, 0.005]), draw.randint(5, 20), 1),
    ]
    best = max(runs)
    draw.shuffle(runs)
    return Exercise(
        "Adam's two moments take 1 byte each in place of 4. In which run does that save the largest share of memory?",
        best[1],
        f"6 bytes for each trained parameter on the device, over all it holds: {best[0]:.0%} there.",
        hint="How many moments does one device hold, beside weights, gradients and activations?",
        choices=tuple(text for _, text in runs),
    )


@app.cell(hide_code=True)
def _():
    EXERCISES = [
        exercise_adam,
        exercise_largest,
        exercise_first_step,
        exercise_stall,
        exercise_decay,
        exercise_eight_bits,
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

    A rule costs what it remembers: 0, 4 or 8 bytes a parameter, and next to no FLOPs. A rate for each weight pays where
    curvatures lie along the weights, as for rare words; momentum pays in any valley; decay belongs on the weight.

    On the command line: `trainledger explain optimizer adafactor`, and
    `trainledger compare gpt2-xl --device a100-sxm-80gb --set-b recipe.optimizer=adafactor`. On the
    page: [Memory](../?calculator=memory). Next: [memory of a step is a story in time](11_memory.html).
    """)
    return


if __name__ == "__main__":
    app.run()
