import marimo

__generated_with = "0.25.2"
app = marimo.App(app_title="4. Name the dimensions")

with app.setup:
    from itertools import permutations
    from random import Random
    from string import ascii_lowercase

    import marimo as mo

    from trainledger.report import lesson
    from trainledger.report.chart import COLOURS, Chart, bar_chart, stacked
    from trainledger.report.lesson import Claim, Exercise, Gives
    from trainledger.spec.problem import InvalidInput
    from trainledger.tensors.chain import start_of
    from trainledger.tensors.einops import Rearranged, rearranged
    from trainledger.tensors.einsum import Einsum, Tensor, einsum

    if lesson.HAS_TORCH:
        import torch


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # 4. Name the dimensions

    You read a pull request. `x = (q @ k.transpose(-2, -1)).softmax(-1)`, and later `x.mean(-2)`. Is -2 the head, the
    token that asks, or the token that is asked? The author knew, on Tuesday. The shapes happen to be (8, 16, 16, 64),
    so that a wrong answer runs as well as a right one.

    And there is a chain of three matrices in it, `a @ b @ c`, of sizes 1,024 x 16, 16 x 1,024 and 1,024 x 16. Python
    multiplies from the left. Guess before you read on: how many times cheaper is it from the right?
    """)
    return


@app.cell(hide_code=True)
def _():
    guess = mo.ui.text(label="times:")
    guess
    return (guess,)


@app.cell(hide_code=True)
def _(guess):
    mo.md(lesson.against(guess.value, from_the(left=True) / from_the(left=False), "times") if guess.value else "")
    return


@app.function
def from_the(*, left: bool) -> int:
    """FLOPs of the three matrices, two at a time."""
    a, b, c = (1024, 16), (16, 1024), (1024, 16)
    if left:
        return einsum("ij,jk->ik", [a, b]).flops + einsum("ik,kl->il", [(1024, 1024), c]).flops
    return einsum("jk,kl->jl", [b, c]).flops + einsum("ij,jl->il", [a, (16, 16)]).flops


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## One rule

    An einsum names each dim. Names that stand in the result are kept; names that do not are summed over. That is all of
    it. The scores of attention, where every token of `q` meets every token of `k`:

    $$\text{batch seq1 hidden, batch seq2 hidden} \to \text{batch seq1 seq2}$$

    No transpose to remember, no -2, and a reader sees that `hidden` is summed. The cost can be read off too. Each
    combination of *all* names is one multiplication, and where something is summed one addition. With batch 2, three
    tokens and hidden 4 there are $2 \times 3 \times 3 \times 4 = 72$ combinations, so 144 FLOPs. A matmul is the case
    of three names, $2 m n k$; a *batched* matmul is one more name, and a factor of its size.

    trainledger's `einsum` reads an equation with shapes, in letters or in words, and counts. Put your own in:
    """)
    return


@app.cell(hide_code=True)
def _():
    equation = mo.ui.text(
        value="batch seq1 hidden, batch seq2 hidden -> batch seq1 seq2", label="einsum:", full_width=True
    )
    shapes = mo.ui.text(value="2,3,4 2,3,4", label="shapes:")
    mo.hstack([equation, shapes], justify="start", widths=[3, 1])
    return equation, shapes


@app.cell(hide_code=True)
def _(equation, shapes):
    try:
        asked = einsum(equation.value, [tuple(map(int, each.split(","))) for each in shapes.value.split()])
        told = {
            "sizes": ", ".join(f"{name} {size}" for name, size in asked.sizes.items()),
            "shape": str(asked.shape),
            "FLOPs": asked.flops,
            "bytes in fp32": asked.nbytes,
        }
    except (InvalidInput, ValueError) as error:
        told = str(error)
    told
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    In PyTorch the same equation runs. `torch.einsum` takes letters, `einops.einsum` takes the words. What does not
    matter can be left unnamed: `...` stands for any dims in front, at the same price.
    """)
    return


@app.cell
def _():
    if lesson.HAS_TORCH:
        q, k = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
        scores = torch.einsum("bqh,bkh->bqk", q, k)
        print(torch.allclose(scores, q @ k.transpose(-2, -1)), tuple(scores.shape))
        print(torch.allclose(scores, torch.einsum("...qh,...kh->...qk", q, k)))
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Attention in four lines

    Named, attention is short enough to be remembered with its costs. `B` sequences of `T` tokens, `H` heads of `K`:
    """)
    return


@app.function
def attention(B: int, T: int, H: int, K: int) -> dict[str, Einsum]:
    """The einsums of one attention layer with D = H K, by what each makes."""
    D = H * K
    project = einsum("btd,dhk->bthk", [(B, T, D), (D, H, K)])
    return {
        "queries": project,
        "keys": project,
        "values": project,
        "scores": einsum("bthk,bshk->bhts", [(B, T, H, K), (B, T, H, K)]),
        "mixed values": einsum("bhts,bshk->bthk", [(B, H, T, T), (B, T, H, K)]),
        "output": einsum("bthk,hkd->btd", [(B, T, H, K), (H, K, D)]),
    }


@app.cell(hide_code=True)
def _():
    tokens = mo.ui.slider(steps=[256, 512, 1024, 2048, 4096, 8192, 16384], value=1024, label="T", show_value=True)
    n_heads = mo.ui.slider(steps=[1, 4, 8, 12, 16, 32], value=12, label="H", show_value=True)
    mo.hstack([tokens, n_heads], justify="start")
    return n_heads, tokens


@app.cell
def _(n_heads, tokens):
    {name: f"{each.flops:,} FLOPs" for name, each in attention(1, tokens.value, n_heads.value, 64).items()}
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    The projections grow with $T$, the two products of tokens with tokens by its square. They meet where
    $8 B T D^2 = 4 B T^2 D$, at $T = 2D$. Move the slider past it.
    """)
    return


@app.function(hide_code=True)
def claims_einsum() -> list[Claim]:
    words = einsum("batch seq1 hidden, batch seq2 hidden -> batch seq1 seq2", [(2, 3, 4), (2, 3, 4)])
    dots = einsum("... seq1 hidden, ... seq2 hidden -> ... seq1 seq2", [(2, 3, 4), (2, 3, 4)])
    linear = einsum("abmk,kn->abmn", [(4, 8, 16, 32), (32, 64)])
    batched = einsum("abmk,abkn->abmn", [(4, 8, 16, 32), (4, 8, 32, 64)])
    even = attention(1, 2 * 768, 12, 64)
    project = sum(even[name].flops for name in ("queries", "keys", "values", "output"))
    rows = [
        Claim("scores of (2, 3, 4): FLOPs", words.flops, 2 * (2 * 3 * 3 * 4)),
        Claim("with ... for the batch", dots.flops, 144),
        Claim("4 x 8 matmuls of 16 x 32 with one weight of 32 x 64", linear.flops, 4 * 8 * 65_536),
        Claim("and with 32 weights", batched.flops, linear.flops),
        Claim("at T = 2 D tokens meet tokens for the FLOPs of the projections", project, 8 * 2 * 768 * 768**2),
        Claim("and scores with mixed values are", even["scores"].flops + even["mixed values"].flops, project),
    ]
    if not lesson.HAS_TORCH:
        return rows
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        torch.einsum("bthk,bshk->bhts", torch.randn(2, 64, 4, 16), torch.randn(2, 64, 4, 16))
    ours = einsum("bthk,bshk->bhts", [(2, 64, 4, 16), (2, 64, 4, 16)]).flops
    return [*rows, Claim("scores by equation, and counted by torch's FlopCounterMode", ours, counter.get_total_flops())]


@app.cell
def _():
    lesson.claims(claims_einsum())
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Rearrange, reduce, repeat

    einops does for shapes what einsum does for sums. Brackets make several dims one. `b t (h k) -> b h t k` takes the
    heads apart and says so; the `view` and `transpose` of the last chapter are inside. Names that vanish are reduced,
    and one says how; names that come are repeated.

    A pattern is free where it is a view. Taking heads apart is; putting them together again is not, for the reason of
    the last chapter:
    """)
    return


@app.function(hide_code=True)
def pattern(shape: tuple[int, ...], text: str, reduction: str = "", **sizes: int) -> Rearranged:
    """A pattern of einops on a new fp32 tensor."""
    return rearranged(start_of(Tensor("fp32", shape)), text, sizes, reduction=reduction)


@app.cell
def _():
    {
        text: f"{each.result.shape}, {each.flops} FLOPs, {'a view' if each.view else f'{each.moved_nbytes} B moved'}"
        for text, each in (
            ("b t (h k) -> b h t k", pattern((2, 3, 8), "b t (h k) -> b h t k", h=2)),
            ("b h t k -> b t (h k)", pattern((2, 2, 3, 4), "b h t k -> b t (h k)")),
            ("b t c -> b t, mean", pattern((2, 3, 4), "b t c -> b t", "mean")),
        )
    }
    return


@app.cell
def _():
    if lesson.HAS_TORCH:
        from einops import rearrange, reduce

        hidden = torch.arange(48.0).reshape(2, 3, 8)
        apart = rearrange(hidden, "... (heads k) -> ... heads k", heads=2)
        print(tuple(apart.shape), apart.data_ptr() == hidden.data_ptr())
        print(torch.equal(reduce(hidden, "b t c -> b t", "mean"), hidden.mean(dim=-1)))
        print(torch.equal(reduce(hidden, "b t c -> b t", "sum"), hidden.mean(dim=-1)))
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    **Find the mistake.** In the executable notes of a well-known course two lines stand side by side as the old way and
    the new: `x.mean(dim=-1)` and `reduce(x, "... hidden -> ...", "sum")`. Names do not protect from the wrong verb. The
    third line above prints what happens: they differ, by a factor of the hidden size.

    ## The experiment: does the rule of views hold?

    Random patterns with random sizes, each run by einops in PyTorch and by the rule of strides. Counted is how often
    both agree: on the shape, on whether memory is shared, and on the strides:
    """)
    return


@app.function(hide_code=True)
def random_pattern(seed: int) -> tuple[tuple[int, ...], str, dict[str, int]]:
    """A shape, a rearrangement of three dims of which one may be parted and two put together, and its sizes."""
    draw = Random(seed)
    sizes = {name: draw.choice([2, 3, 4, 5]) for name in "abcd"}
    order = draw.choice(list(permutations("abcd")))
    joined = draw.randrange(4)
    if joined < 3:
        order = (*order[:joined], f"({order[joined]} {order[joined + 1]})", *order[joined + 2 :])
    shape = (sizes["a"], sizes["b"] * sizes["c"], sizes["d"])
    return shape, f"a (b c) d -> {' '.join(order)}", {"b": sizes["b"]}


@app.function(hide_code=True)
def agreeing_patterns(count: int) -> int:
    """Random patterns of which einops on torch and the rule give the same shape and strides, and share memory alike."""
    from einops import rearrange as by_einops

    agree = 0
    for seed in range(count):
        shape, text, sizes = random_pattern(seed)
        given = torch.zeros(shape)
        found, ours = by_einops(given, text, **sizes), pattern(shape, text, **sizes)
        shared = found.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
        same = tuple(found.shape), found.stride(), shared
        agree += same == (ours.result.shape, ours.result.stride, ours.view)
    return agree


@app.cell
def _():
    tried = 100 if lesson.QUICK else 1000
    f"{agreeing_patterns(tried)} of {tried}" if lesson.HAS_TORCH else mo.md("needs torch")
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## The order of a chain

    Back to the three matrices. Summing over all names at once costs $3 \times$ the product of all sizes: nobody does
    that. From the left, the intermediate is 1,024 x 1,024; from the right it is 16 x 16. The result is the same, and
    the cost differs by the ratio of their sides, 64:
    """)
    return


@app.function(hide_code=True)
def order_chart(width: int, rank: int) -> Chart:
    """FLOPs of a chain width x rank, rank x width, width x rank: in each order, product by product."""
    a, b, c = (width, rank), (rank, width), (width, rank)
    first = [einsum("ij,jk->ik", [a, b]).flops, einsum("jk,kl->jl", [b, c]).flops]
    second = [einsum("ik,kl->il", [(width, width), c]).flops, einsum("ij,jl->il", [a, (rank, rank)]).flops]
    parts = {"first product": [each / 1e6 for each in first], "second product": [each / 1e6 for each in second]}
    colours = dict(zip(parts, COLOURS, strict=False))
    bars = stacked(parts, colours, lambda name, row: f"{name}: {parts[name][row]:,.2f} MFLOP")
    title = f"({width} x {rank}) ({rank} x {width}) ({width} x {rank})"
    return bar_chart(title, "MFLOP", ["from the left", "from the right"], bars)


@app.cell(hide_code=True)
def _():
    width = mo.ui.slider(steps=[64, 128, 256, 512, 1024, 4096], value=1024, label="width", show_value=True)
    rank = mo.ui.slider(steps=[4, 8, 16, 64, 256, 1024], value=16, label="rank", show_value=True)
    mo.hstack([width, rank], justify="start")
    return rank, width


@app.cell(hide_code=True)
def _(rank, width):
    order_chart(width.value, rank.value)
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    `einsum` above tries every order and reports the cheapest. Does PyTorch? A public account says that `torch.compile`
    finds the order "once". Ask PyTorch itself: count the FLOPs that `torch.einsum` really runs for all three at once.
    """)
    return


@app.function
def flops_of_torch(*, compiled: bool = False) -> int:
    """FLOPs that torch.einsum runs for the three matrices in one equation, counted as they are dispatched."""
    from torch.utils.flop_counter import FlopCounterMode

    matrices = torch.randn(1024, 16), torch.randn(16, 1024), torch.randn(1024, 16)

    def chain(a, b, c):
        return torch.einsum("ij,jk,kl->il", a, b, c)

    call = torch.compile(chain, backend="aot_eager") if compiled else chain
    call(*matrices)  # compiles
    with FlopCounterMode(display=False) as counter:
        call(*matrices)
    return counter.get_total_flops()


@app.cell
def _():
    orders = {}
    if lesson.HAS_TORCH:
        orders = {
            "opt_einsum is installed": torch.backends.opt_einsum.is_available(),
            "torch.einsum": f"{flops_of_torch():,}",
            "what torch.compile makes of it": f"{flops_of_torch(compiled=True):,}",
        }
    orders or mo.md("needs torch")
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    The compiler runs what it is given. The order comes from elsewhere: `torch.einsum` asks the package opt_einsum, if
    it is installed. Where it is missing, products are taken from left to right, as they are written, and nothing warns
    you. So write a chain in the order you want it, or install the package.
    """)
    return


@app.function(hide_code=True)
def claims_shapes() -> list[Claim]:
    best = einsum("ij,jk,kl->il", [(1024, 16), (16, 1024), (1024, 16)])
    heads, together = pattern((2, 3, 8), "b t (h k) -> b h t k", h=2), pattern((2, 2, 3, 4), "b h t k -> b t (h k)")
    mean = pattern((2, 3, 4), "b t c -> b t", "mean")
    rows = [
        Claim("three matrices in the cheapest order: FLOPs", best.flops, 2 * (2 * 16 * 1024 * 16)),
        Claim("from the left", from_the(left=True), 2 * (2 * 1024 * 16 * 1024)),
        Claim("all names at once", best.at_once_flops, 3 * 1024 * 16 * 1024 * 16),
        Claim("heads apart: a view, and contiguous", f"{heads.view}, {heads.result.contiguous}", "True, False"),
        Claim("heads together: bytes written", together.chain.written_nbytes, 2 * 3 * 8 * 4, unit="bytes"),
        Claim("mean over 4 of (2, 3, 4): FLOPs", mean.flops, 24),
        Claim("and bytes: 24 elements read, 6 written", mean.moved_nbytes, (24 + 6) * 4, unit="bytes"),
    ]
    if not lesson.HAS_TORCH:
        return rows
    ordered = from_the(left=not torch.backends.opt_einsum.is_available())
    return [
        *rows,
        Claim("patterns on which einops and the rule of views agree", agreeing_patterns(100), 100),
        Claim("torch.einsum: with opt_einsum the cheapest order, else from the left", flops_of_torch(), ordered),
        Claim("torch.compile of it runs the same", flops_of_torch(compiled=True), ordered),
    ]


@app.cell
def _():
    lesson.claims(claims_shapes())
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Exercises

    A new seed gives new numbers. After a first miss there is a hint, after a second the derivation.
    """)
    return


@app.function(hide_code=True)
def exercise_flops(seed: int) -> Exercise:
    draw = Random(seed)
    B, T, H, K = draw.choice([4, 8]), draw.choice([128, 256, 512]), draw.choice([8, 12, 16]), draw.choice([64, 128])
    what, equation, shapes = draw.choice(
        [
            ("scores", "b t h k, b s h k -> b h t s", [(B, T, H, K), (B, T, H, K)]),
            ("mixed values", "b h t s, b s h k -> b t h k", [(B, H, T, T), (B, T, H, K)]),
            ("queries", "b t d, d h k -> b t h k", [(B, T, H * K), (H * K, H, K)]),
        ]
    )
    one = einsum(equation, shapes)
    return Exercise(
        f"The {what} of attention, `{equation}`, for shapes {shapes[0]} and {shapes[1]}: FLOPs?",
        one.flops,
        f"2 x {' x '.join(f'{size:,}' for size in one.sizes.values())} ({', '.join(one.sizes)}) = {one.flops:,}.",
        hint="Every name once, and a multiplication and an addition for each combination.",
        mistakes={one.flops / 2: "An addition for each multiplication, too.", one.flops / B: "The batch counts."},
    )


@app.function(hide_code=True)
def exercise_view(seed: int) -> Exercise:
    draw = Random(seed)
    patterns = [
        ("b t (h k) -> b t h k", (2, 6, 12), {"h": 3}),
        ("b t (h k) -> b h t k", (2, 6, 12), {"h": 4}),
        ("b t (h k) -> (b h) t k", (2, 6, 12), {"h": 3}),
        ("b h t k -> b t (h k)", (2, 3, 5, 4), {}),
        ("b h t k -> b h (t k)", (2, 3, 5, 4), {}),
        ("b h t k -> (b h) t k", (2, 3, 5, 4), {}),
        ("b c (y p) (x q) -> b (y x) (p q c)", (2, 3, 8, 8), {"p": 4, "q": 4}),
        ("b t c -> t b c", (4, 6, 8), {}),
        ("b t c -> (t b) c", (4, 6, 8), {}),
    ]
    chosen = draw.sample(patterns, 4)
    while sum(pattern(shape, text, **sizes).view for text, shape, sizes in chosen) != 3:
        chosen = draw.sample(patterns, 4)
    copies = next(text for text, shape, sizes in chosen if not pattern(shape, text, **sizes).view)
    return Exercise(
        "Which of these rearrangements of a new tensor copies?",
        copies,
        f"In `{copies}` the dims that one bracket on the right makes one are not next to each other in memory.",
        hint="Parting and reordering are always views. A bracket on the right asks for neighbours, outer before inner.",
        choices=tuple(text for text, _, _ in chosen),
    )


@app.function(hide_code=True)
def exercise_chain(seed: int) -> Exercise:
    draw = Random(seed)
    i, j, k, n = (draw.choice([8, 16, 64, 512, 1024]) for _ in range(4))
    best = einsum("ij,jk,kl->il", [(i, j), (j, k), (k, n)])
    left, right = 2 * i * j * k + 2 * i * k * n, 2 * j * k * n + 2 * i * j * n
    return Exercise(
        f"A chain of {i} x {j}, {j} x {k} and {k} x {n}: FLOPs in the cheaper order?",
        best.flops,
        f"From the left 2 x {i} x {j} x {k} + 2 x {i} x {k} x {n} = {left:,}; from the right "
        f"2 x {j} x {k} x {n} + 2 x {i} x {j} x {n} = {right:,}.",
        hint="Work out both: two products of 2 m n k each.",
        mistakes={max(left, right): "That is the other order."} if left != right else {best.flops / 2: "2 m n k each."},
    )


@app.function(hide_code=True)
def exercise_grouped(seed: int) -> Exercise:
    draw = Random(seed)
    D, H, K, G = draw.choice([(4096, 32, 128, 8), (8192, 64, 128, 8), (2048, 16, 128, 4), (3584, 28, 128, 4)])
    grouped = 2 * einsum("td,dgk->tgk", [(1, D), (D, G, K)]).flops
    return Exercise(
        f"Grouped-query attention: hidden size {D:,}, {H} query heads of {K}, but {G} heads of keys and values. "
        "FLOPs of keys and values together, per token?",
        grouped,
        f"Two einsums d, d g k -> g k: 2 x 2 x {D:,} x {G} x {K} = {grouped:,}; with all heads {grouped * H // G:,}.",
        hint="Two projections from the hidden size to groups times head size.",
        mistakes={
            grouped * H // G: f"That is with all {H} heads.",
            grouped / 2: "Keys and values are two projections.",
        },
    )


@app.function(hide_code=True)
def exercise_write_flops(seed: int) -> Exercise:
    draw = Random(seed)
    counted = draw.choice(["flops", "multiplications"])
    per_term, said = (2, "FLOPs") if counted == "flops" else (1, counted)
    solution = (
        f"def {counted}(left, right, out, sizes):\n    total = {per_term}\n    for name in set(left + right):\n"
        "        total *= sizes[name]\n    return total"
    )
    cases = []
    for _ in range(8):
        names = draw.sample(ascii_lowercase, 4)
        sizes = {name: draw.choice([2, 3, 5, 8]) for name in names}
        batch, m, n, k = names
        left, right, out = batch + m + k, batch + k + n, batch + m + n
        shapes = [tuple(sizes[name] for name in each) for each in (left, right)]
        cases.append(((left, right, out, sizes), einsum(f"{left},{right}->{out}", shapes).flops * per_term // 2))
    return Exercise(
        f"Write `{counted}(left, right, out, sizes)`: how many {said} the einsum `left,right->out` takes, whose "
        'names are letters, such as "bmk", "bkn", "bmn"; `sizes` is a dict. Something is summed over.',
        solution,
        f"A multiplication{' and an addition' * (per_term == 2)} for all combinations.\n\n```\n{solution}\n```",
        hint="Each name counts once, whether it is kept or summed.",
        start=f"def {counted}(left, right, out, sizes):\n    return 0",
        check=Gives(counted, tuple(cases)),
    )


@app.cell(hide_code=True)
def _():
    EXERCISES = [exercise_flops, exercise_view, exercise_chain, exercise_grouped, exercise_write_flops]
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

    Names that vanish are summed, and FLOPs are 2 x the product of all names. Rearranging is free until a bracket on the
    right wants neighbours that are none; a chain of products costs by its order, and nobody orders it for you unless
    opt_einsum is there.

    On the command line: `trainledger einsum "ij,jk,kl->il" 1024,16 16,1024 1024,16`. On the page:
    [Matmul and roofline](../?calculator=matmul). Next: [FLOPs, bytes, seconds](05_matmul.html).
    """)
    return


if __name__ == "__main__":
    app.run()
