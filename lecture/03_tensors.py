import marimo

__generated_with = "0.25.2"
app = marimo.App(app_title="3. A tensor is a rule for finding elements")

with app.setup:
    from math import prod
    from random import Random
    from time import perf_counter

    import marimo as mo

    import trainledger as tl
    from trainledger.answers.pages.storage import elements_chart, storage_chart
    from trainledger.report import lesson
    from trainledger.report.lesson import Claim, Exercise, Gives
    from trainledger.spec.problem import InvalidInput
    from trainledger.spec.units import GIB, MIB
    from trainledger.tensors.chain import chain
    from trainledger.tensors.einsum import Tensor, read_tensor

    if lesson.HAS_TORCH:
        import torch


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # 3. A tensor is a rule for finding elements

    You write attention for the first time. The heads come apart without trouble, and at the end you put them together
    again: `out.transpose(1, 2).view(8, 128, 1024)`. PyTorch answers: *view size is not compatible with input tensor's
    size and stride (at least one dimension spans across two contiguous subspaces). Use .reshape(...) instead.* You do
    as you are told, it works, and that night the largest batch no longer fits.

    Guess before you read on. Eight sequences of 128 tokens, 16 heads of 64, in bf16: how many bytes did the word
    `reshape` write?
    """)
    return


@app.cell(hide_code=True)
def _():
    guess = mo.ui.text(label="bytes:")
    guess
    return (guess,)


@app.cell(hide_code=True)
def _(guess):
    heads = chain(read_tensor("bf16[8,16,128,64]"), "transpose(1,2) reshape(8,128,1024)")
    mo.md(lesson.against(guess.value, heads.written_nbytes, "bytes") if guess.value else "")
    return (heads,)


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## One row of memory

    Memory has one dimension. A tensor of four is an agreement on how to find its elements in a row of them, the
    *storage*: a start (*offset*), and for each dim a *stride*, how many elements to go on for the next index.

    $$\text{place}(i_0, i_1, \ldots) = \text{offset} + i_0 s_0 + i_1 s_1 + \ldots$$

    A new tensor is *row-major*: the last index runs quickest. In a 4 x 4 tensor one row down is four elements on, one
    column right is one, so the strides are (4, 1) and element [1, 2] lies at $1 \times 4 + 2 \times 1 = 6$. In fp32
    that is byte 24. The number of bytes is elements times bytes an element, and nothing else of a tensor takes memory
    worth counting.
    """)
    return


@app.cell
def _():
    four = chain(read_tensor("float32[4,4]"), "").start
    {"strides": str(four.stride), "place": four.place((1, 2)), "byte": four.byte((1, 2)), "bytes in all": four.nbytes}
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Operations that only change the rule

    Now the point of it. Transpose, and no element moves: two strides change places. Take a column, and the offset
    changes. Expand one row to eight, and a stride becomes 0. Each of these is a *view*: a new rule over the same
    storage, free whatever the size. Write a chain of your own, and choose the step that is drawn:
    """)
    return


@app.cell(hide_code=True)
def _():
    shape = mo.ui.text(value="float32[4,6]", label="tensor:")
    operations = mo.ui.text(value="transpose(0,1) [1:4] reshape(12)", label="operations:", full_width=True)
    mo.hstack([shape, operations], justify="start", widths=[1, 3])
    return operations, shape


@app.cell(hide_code=True)
def _(operations, shape):
    try:
        chained = chain(read_tensor(shape.value), operations.value)
    except InvalidInput as error:
        chained = chain(read_tensor("float32[4,6]"), "transpose(0,1)")
        print(error)
    chained
    return (chained,)


@app.cell(hide_code=True)
def _(chained):
    step = mo.ui.slider(0, max(1, len(chained.steps)), value=1, label="step", show_value=True)
    step
    return (step,)


@app.cell(hide_code=True)
def _(chained, step):
    drawn = [chained.start, *(each.result for each in chained.steps)][min(step.value, len(chained.steps))]
    mo.vstack(
        [
            storage_chart(drawn, "The storage; in each cell the number of the tensor's element"),
            elements_chart(drawn, "The tensor; in each cell its place in the storage"),
        ]
    )
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    Follow one colour. After the transpose a row of the tensor lies scattered over the storage, and the storage itself
    is what it was. After the reshape there is another storage: somebody has copied.

    In PyTorch, all of it can be asked. Two tensors over one storage are one memory with two names, and what you write
    through one is read through the other:
    """)
    return


@app.cell
def _():
    if lesson.HAS_TORCH:
        x = torch.zeros(4, 8)
        column, turned = x[:, 1], x.t()
        turned[1, 2] = 7.0  # x[2, 1]
        print(x.stride(), turned.stride(), column.stride(), column.storage_offset())
        print(x.data_ptr() == turned.data_ptr(), x.is_contiguous(), turned.is_contiguous(), x[2, 1].item())
    tl.inspect(x, turned, turned.contiguous()) if lesson.HAS_TORCH else mo.md("needs torch")
    return


@app.function(hide_code=True)
def claims_places() -> list[Claim]:
    gpt3 = Tensor("fp32", (49152, 12288))
    square = chain(read_tensor("fp32[4,4]"), "").start
    column = chain(read_tensor("fp32[4,4]"), "[:,1]").result
    million = Tensor("fp32", (1024, 1024)).nbytes
    return [
        Claim("4 x 8 in bf16", Tensor("bf16", (4, 8)).nbytes, 4 * 8 * 2, unit="bytes"),
        Claim("one MLP matrix of GPT-3 in fp32", gpt3.nbytes, 2_415_919_104, unit="bytes"),
        Claim('which is printed as "2.3 GB": in GiB', gpt3.nbytes / GIB, 2.25, unit="GiB"),
        Claim("and in GB", gpt3.nbytes / 1e9, 2.416, 1e-3, "GB"),
        Claim('1024 x 1024 in fp32 are 4 MiB; the "4 MB" that is printed are', million / 1e6, 4.194, 1e-3, "MB"),
        Claim("element [1, 2] of 4 x 4", square.place((1, 2)), 1 * 4 + 2 * 1),
        Claim("a column: stride and offset", f"{column.stride[0]}, {column.offset}", "4, 1"),
    ]


@app.cell
def _():
    lesson.claims(claims_places())
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    **Find the mistake.** A GPT-3 matrix of 49,152 x 12,288 in fp32 "is 2.3 GB", says a public account. Its bytes
    divided by $10^9$ are 2.4, divided by $2^{30}$ they are 2.25. 2.3 is 2,304 MiB, read as if a thousand of them made a
    GB. Seven percent sound like nothing, until a plan for 80 GB is made in one unit and the device sold in the other.

    ## When there is no rule

    `view` asks for another shape over the same elements. Splitting a dim always works. Merging two dims needs one
    stride for both. Walk through the inner dim of size $n_1$ and stride $s_1$ to its end: the next element has to
    be where the outer dim's next step is. So they merge if

    $$s_0 = n_1 s_1.$$

    A new [2, 3] tensor has strides (3, 1), and $3 = 3 \times 1$. Its transpose is [3, 2] with strides (1, 3), and
    $1 \neq 2 \times 3$. No start and no stride walks through memory in that order; `view` cannot, and says so.
    """)
    return


@app.cell
def _():
    chain(read_tensor("fp32[2,3]"), "transpose(0,1) view(2,3)")
    return


@app.cell(hide_code=True)
def _(heads):
    mo.md(rf"""
    Three words, then. `view` changes the rule or fails. `contiguous` copies to row-major order unless it is so already.
    `reshape` is `view` where that works, and silently `contiguous().view()` where it does not. With the heads of the
    beginning it does not: dim 2, the heads, has stride {heads.steps[0].result.stride[2]:,}, and 64 is wanted. So
    `reshape` wrote {heads.written_nbytes:,} bytes, in every layer; and since the projection behind it keeps its input
    for backward, the copy lives on beside the original.

    Is that rule really all? Draw random chains, run each in PyTorch, and ask whether the result shares the storage. So
    many agree, of so many:
    """)
    return


@app.function(hide_code=True)
def random_chain(seed: int) -> tuple[tuple[int, ...], str]:
    """A shape and a chain of two or three operations that ends in reshape, as Python text."""
    draw = Random(seed)
    shape = tuple(draw.sample([2, 3, 4, 6, 8], 3))
    sizes, words = list(shape), []
    for _ in range(draw.choice([1, 1, 2])):
        if draw.random() < 0.5:
            one, other = sorted(draw.sample(range(3), 2))
            sizes[one], sizes[other] = sizes[other], sizes[one]
            words.append(f".transpose({one}, {other})")
        else:
            dim = draw.randrange(3)
            if sizes[dim] < 2:
                continue
            sizes[dim] -= 1
            words.append(f"[{':, ' * dim}1:]")
    merged = draw.choice([(sizes[0] * sizes[1], sizes[2]), (sizes[0], sizes[1] * sizes[2])])
    return shape, "".join(words) + f".reshape({merged[0]}, {merged[1]})"


@app.function
def agreeing_chains(count: int) -> int:
    """Random chains after which torch shares the first storage exactly where the rule of strides says so."""
    agree = 0
    for seed in range(count):
        shape, words = random_chain(seed)
        first = torch.zeros(shape)
        last = eval(f"first{words}", {"first": first})
        shared = first.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
        agree += shared == chain(Tensor("fp32", shape), words).shares
    return agree


@app.cell
def _():
    chains = 100 if lesson.QUICK else 400
    f"{agreeing_chains(chains)} of {chains}" if lesson.HAS_TORCH else mo.md("needs torch")
    return


@app.function(hide_code=True)
def claims_copies() -> list[Claim]:
    turned = chain(read_tensor("fp32[2,3]"), "transpose(0,1) view(2,3)")
    copied = chain(read_tensor("fp32[2,3]"), "transpose(0,1) contiguous view(2,3)")
    heads = chain(read_tensor("bf16[8,16,128,64]"), "transpose(1,2) reshape(8,128,1024)")
    swapped = chain(read_tensor("bf16[8,128,16,64]"), "reshape(8,128,1024)")
    wanted = str(turned.failure).partition("would need stride ")[2].partition(",")[0]
    rows = [
        Claim("view of a transposed [2, 3] fails: it wants a stride of", int(wanted), 2 * 3),
        Claim("contiguous before it writes", copied.written_nbytes, 2 * 3 * 4, unit="bytes"),
        Claim("reshape of the heads writes", heads.written_nbytes, 8 * 128 * 16 * 64 * 2, unit="bytes"),
        Claim("with heads next to their elements it writes", swapped.written_nbytes, 0, unit="bytes"),
    ]
    if not lesson.HAS_TORCH:
        return rows
    wide = torch.ones(4, 1).expand(4, 8)
    return [
        *rows,
        Claim("expand: bytes of the storage behind 4 x 8 in fp32", wide.untyped_storage().nbytes(), 4 * 4),
        Claim("and its stride", tl.inspect(wide).stride[1], 0),
        Claim("random chains on which PyTorch and the rule of strides agree", agreeing_chains(100), 100),
    ]


@app.cell
def _():
    lesson.claims(claims_copies())
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## What a copy costs here

    A copy moves its bytes twice, once in and once out. How quickly depends on the order. Reading along rows, memory
    hands over whole cache lines of 64 bytes and each is used up; reading down columns, each line brings 4 bytes that
    are wanted and 60 that are not. The same elements, copied in both orders:
    """)
    return


@app.function
def seconds_of(call, times: int) -> float:
    """Seconds of the quickest of several calls, after one that is not counted."""
    call()
    found = []
    for _ in range(times):
        start = perf_counter()
        call()
        found.append(perf_counter() - start)
    return min(found)


@app.cell
def _():
    rates = {}
    if lesson.HAS_TORCH:
        size, times = (1024, 5) if lesson.QUICK else (2048, 20)
        rows = torch.randn(size, size)
        for name, call in {
            "view: x.t()": rows.t,
            "copy along rows: x.clone()": rows.clone,
            "copy across rows: x.t().contiguous()": lambda: rows.t().contiguous(),
        }.items():
            taken = seconds_of(call, times)
            moved = 0 if name.startswith("view") else 2 * rows.nbytes
            rates[name] = f"{taken * 1e6:,.1f} us" + (f", {moved / taken / 1e9:,.1f} GB/s" if moved else "")
    rates or mo.md("needs torch")
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    The view takes a microsecond at any size: that is Python. (`torch.empty` is as cheap, because it writes nothing; you
    find there what the last owner left. `torch.zeros` and `torch.randn` write every byte.)

    So is `contiguous` bad? No. A matmul or a kernel that reads a tensor many times is often worth one copy in good
    order. Bad is the copy that nobody knows of, in a layer that runs 48 times.

    ## Exercises

    A new seed gives new numbers. After a first miss there is a hint, after a second the derivation.
    """)
    return


@app.function(hide_code=True)
def exercise_place(seed: int) -> Exercise:
    draw = Random(seed)
    shape = tuple(draw.sample([3, 4, 5, 6], 3))
    one, other = draw.choice([(0, 1), (0, 2), (1, 2)])
    result = chain(Tensor("fp32", shape), f"transpose({one},{other})").result
    index = tuple(draw.randrange(1, size) for size in result.shape)
    place = result.place(index)
    as_if_new = chain(Tensor("fp32", result.shape), "").start.place(index)
    return Exercise(
        f"`y = torch.zeros{shape}.transpose({one}, {other})`. At which place of the storage, in elements, is "
        f"`y[{', '.join(map(str, index))}]`?",
        place,
        f"The strides of y are {result.stride}: "
        f"{' + '.join(f'{at} x {stride}' for at, stride in zip(index, result.stride, strict=True))} = {place}.",
        hint="Write down the strides of the tensor before the transpose, then exchange two of them.",
        tolerance=1e-6,
        mistakes={as_if_new: "That would be its place if y were contiguous."} if as_if_new != place else {},
    )


@app.function(hide_code=True)
def exercise_copies(seed: int) -> Exercise:
    draw = Random(seed)
    # Chains of both kinds equally often.
    wanted = draw.random() < 0.5
    shape, words = next(
        (shape, words)
        for at in range(200)
        for shape, words in [random_chain(1000 * seed + at)]
        if chain(Tensor("bf16", shape), words).shares == wanted
    )
    written = chain(Tensor("bf16", shape), words).written_nbytes
    moved = prod(chain(Tensor("bf16", shape), words).result.shape) * 2
    copy = f"a copy of {moved:,} bytes"
    return Exercise(
        f"`x` is a new bf16 tensor of shape {shape}. What is `x{words}`?",
        copy if written else "a view, free",
        f"{chain(Tensor('bf16', shape), words).steps[-1].why}.",
        hint="Write the strides after each step. Two dims merge if the outer stride is the inner size x its stride.",
        choices=("a view, free", copy, "an error"),
        mistakes={"an error": "view would fail where strides do not fit; reshape copies instead."},
    )


@app.function(hide_code=True)
def exercise_cache(seed: int) -> Exercise:
    draw = Random(seed)
    layers, kv_heads, head_dim = draw.choice([(32, 8, 128), (80, 8, 128), (32, 32, 128), (28, 4, 128)])
    tokens, batch = draw.choice([2048, 8192, 32768]), draw.choice([4, 8, 64])
    nbytes = Tensor("bf16", (2, layers, batch, kv_heads, tokens, head_dim)).nbytes
    return Exercise(
        f"A model of {layers} layers keeps keys and values of {kv_heads} heads of {head_dim} in bf16, for {tokens:,} "
        f"tokens of each of {batch} sequences. How many bytes does this KV cache take?",
        nbytes,
        f"2 x {layers} x {batch} x {kv_heads} x {tokens:,} x {head_dim} elements of 2 bytes = {nbytes:,} bytes, "
        f"{nbytes / GIB:.4g} GiB.",
        hint="It is one tensor for keys and one for values in each layer; elements times bytes an element.",
        unit="bytes",
        mistakes={nbytes / 2: "Keys and values both, and 2 bytes each.", nbytes / layers: "That is one layer."},
    )


@app.function(hide_code=True)
def exercise_units(seed: int) -> Exercise:
    draw = Random(seed)
    dtype, itemsize = draw.choice([("fp32", 4), ("bf16", 2)])
    shape = draw.choice([(50257, 1600), (32000, 4096), (128256, 8192), (12288, 12288), (4096, 14336)])
    mebibytes = Tensor(dtype, shape).nbytes / MIB
    return Exercise(
        f"A {dtype} matrix of {shape[0]:,} x {shape[1]:,}: how many MiB?",
        mebibytes,
        f"{shape[0]:,} x {shape[1]:,} x {itemsize} bytes = {Tensor(dtype, shape).nbytes:,}, over 2^20 = 1,048,576.",
        hint="A MiB is 2^20 bytes, a MB is 10^6.",
        tolerance=0.005,
        mistakes={
            Tensor(dtype, shape).nbytes / 1e6: "Those are MB.",
            mebibytes / itemsize: "Those are elements; each has several bytes.",
        },
    )


@app.function(hide_code=True)
def exercise_write_strides(seed: int) -> Exercise:
    draw = Random(seed)
    last_first = draw.random() < 0.5
    order = "row-major (the last dim runs quickest)" if last_first else "column-major (the first dim runs quickest)"
    head = "def strides(shape):\n"
    body = (
        "    found, step = [], 1\n"
        f"    for size in {'reversed(shape)' if last_first else 'shape'}:\n"
        "        found.append(step)\n"
        "        step *= size\n"
        f"    return {'found[::-1]' if last_first else 'found'}"
    )
    cases = []
    for _ in range(8):
        shape = tuple(draw.choice([2, 3, 4, 5, 7]) for _ in range(draw.choice([1, 2, 3, 4])))
        stride = chain(Tensor("fp32", shape if last_first else shape[::-1]), "").start.stride
        cases.append(((shape,), list(stride if last_first else stride[::-1])))
    return Exercise(
        f"Write `strides(shape)`: the list of strides, in elements, of a new tensor that is {order}.",
        head + body,
        f"Walk from the quickest dim on; each stride is the product of the sizes passed.\n\n```\n{head}{body}\n```",
        hint="The quickest dim has stride 1. What has to be stepped over for the next one?",
        start=f"{head}    # {order}\n    return [1 for size in shape]",
        check=Gives("strides", tuple(cases)),
    )


@app.cell(hide_code=True)
def _():
    EXERCISES = [exercise_place, exercise_copies, exercise_cache, exercise_units, exercise_write_strides]
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

    A tensor is a storage with offset, shape and strides; transposing, slicing and expanding change the rule and cost
    nothing. Two dims merge where the outer stride is the inner size times the inner stride; where not, `view` fails and
    `reshape` copies.

    On the command line: `trainledger tensor "fp32[2,3]" transpose:0,1 view:2,3`; in Python `tl.inspect(x, y)`. On the
    page: [Tensor](../?calculator=tensor&shape=4,6). Next: [name the dimensions](04_einsum.html).
    """)
    return


if __name__ == "__main__":
    app.run()
