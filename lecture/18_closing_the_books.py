import marimo

__generated_with = "0.25.2"
app = marimo.App(app_title="18. Closing the books")

with app.setup:
    import csv
    import re
    from collections import Counter
    from pathlib import Path
    from random import Random
    from textwrap import dedent

    import marimo as mo

    import trainledger as tl
    from trainledger.observe.reconcile import Part, Row
    from trainledger.report import lesson
    from trainledger.report.chart import Axis, bar_chart, beside
    from trainledger.report.lesson import Claim, Exercise

    if lesson.HAS_TORCH:
        from tempfile import TemporaryDirectory
        from time import perf_counter

        import torch

    REPOSITORY = Path(globals().get("__file__", "lecture/x.py")).resolve().parents[1]


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # 18. Closing the books

    You forecast a run, it was trained, and the invoice is a fifth above what you said. The meeting wants one sentence.
    "The estimate was rough" is no sentence that anybody can use. A bookkeeper would ask: which line is off? What is in
    the account and not in the bank, what in the bank and not in the account, and what remains when both are explained?

    That remainder has a name here, *unexplained*, and this chapter is about making it small for the right reason. We
    forecast a run, train it, measure it and set the two side by side, line by line. Then we do the same to texts.

    Guess before you read on. A model of 771,328 parameters takes one step on 1,024 tokens: by how many percent will
    the FLOPs that PyTorch really runs differ from the forecast? And the peak of memory?
    """)
    return


@app.cell(hide_code=True)
def _():
    guess = mo.ui.text(label="percent:")
    guess
    return (guess,)


@app.cell(hide_code=True)
def _(books, guess):
    said = mo.md("")
    if guess.value and books is not None:
        flops = books.reconciliation["flops"]
        said = mo.md(lesson.against(guess.value, 100 * abs(flops.ratio - 1), "%"))
    said
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Three witnesses

    Whoever adds up the same list twice finds no mistake in the list. So the three accounts of this course come from
    three places that know nothing of each other: closed forms, which read the run file and nothing else; a tracer,
    which watches the operations that PyTorch dispatches; and the meter of a real step. Where all three give the same
    integer, an error would have to be made three times in the same way.

    A reconciliation is a subtraction that is finished:

    $$\text{measured} - \text{predicted} = \sum_{\text{parts}} (\text{measured} - \text{predicted})_{\text{part}}
      + \text{unexplained}.$$

    By hand first. The model below has V = 257 bytes and tokens for the end, D = 128, four layers with four heads and
    two key-value heads of 32, an inner size of 352, and shares the embedding with its head:

    $$N = V D + L \, (D^2 + 2 D \cdot 64 + D^2 + 3 D \cdot 352 + 2 D) + D.$$

    The FLOPs of its matmuls are 6 for each parameter and token, but for the norms, and $12 L D T$ for each token for
    the scores.
    """)
    return


@app.function(hide_code=True)
def settings(layers: int = 4, seq_len: int = 128, steps: int = 30, precision: str = "fp32") -> dict:
    """A run file as a dict: a small Llama on the bytes of Python's own json package."""
    import json

    return {
        "model": {"preset": "teach-1m", "vocab_size": 257, "n_layers": layers},
        "recipe": {
            "seq_len": seq_len,
            "global_batch": 8,
            "steps": steps,
            "learning_rate": 2e-3,
            "precision": precision,
            "evaluation": {"every": steps, "sequences": 8},
            "checkpoints": {"every": steps},
        },
        "cluster": {"device": "this-machine", "backend": "cpu"},
        "data": {"path": [str(Path(json.__file__).parent)], "tokenizer": "bytes"},
    }


@app.function
def closed(run_settings: dict) -> "RunRecord":  # noqa: F821
    """Forecast a run, train it in a folder of its own, meter it, and read both sides."""
    from trainledger.answers.closed_loop import run_closed_loop
    from trainledger.answers.pages.record import read_run

    with TemporaryDirectory() as folder:
        run = tl.load(run_settings, {"data.cache": f"{folder}/cache"})
        run_closed_loop(run, Path(folder) / "run")
        return read_run(Path(folder) / "run")


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    Change the run. It is trained again each time; the whole loop takes seconds:
    """)
    return


@app.cell(hide_code=True)
def _():
    layers = mo.ui.slider(1, 6, 1, value=4, label="layers", show_value=True)
    seq_len = mo.ui.slider(steps=[64, 128, 256], value=128, label="tokens of a sequence", show_value=True)
    precision = mo.ui.dropdown(["fp32", "bf16-mixed"], value="fp32", label="precision")
    mo.hstack([layers, seq_len, precision], justify="start")
    return layers, precision, seq_len


@app.cell
def _(layers, precision, seq_len):
    steps = 20 if lesson.QUICK else 30
    run_settings = settings(layers.value, seq_len.value, steps, precision.value)
    books = closed(run_settings) if lesson.HAS_TORCH else None
    books.reconciliation if books else mo.md("This experiment needs torch.")
    return (books,)


@app.function(hide_code=True)
def claims_books(books: "RunRecord | None" = None) -> list[Claim]:  # noqa: F821
    """Forecast against measurement; of the default run where none is given."""
    if not lesson.HAS_TORCH:
        return []
    plain = books is None
    books = books or closed(settings(steps=4))
    rows = books.reconciliation
    claims = [
        Claim("parameters", rows["parameters"].measured, rows["parameters"].predicted),
        Claim("FLOPs of a step", rows["flops"].measured, rows["flops"].predicted, unit="FLOP"),
        Claim("bytes kept for backward", rows["kept_nbytes"].measured, rows["kept_nbytes"].predicted, unit="bytes"),
        Claim("peak of the step", rows["peak_nbytes"].measured, rows["peak_nbytes"].predicted, unit="bytes"),
        Claim("of that peak unexplained", float(rows["peak_nbytes"].unexplained or 0), 0.0, unit="bytes"),
    ]
    if plain:
        attention, inner, norms = 2 * 128**2 + 2 * 128 * 64, 3 * 128 * 352, 2 * 128
        by_hand = 257 * 128 + 4 * (attention + inner + norms) + 128
        matmuls = 6 * (by_hand - 4 * norms - 128) + 12 * 4 * 128 * 128
        claims += [
            Claim("parameters, by hand", rows["parameters"].measured, by_hand),
            Claim("model FLOPs, by hand", books.measured.model_flops, 1024 * matmuls, unit="FLOP"),
        ]
    return claims


@app.cell
def _(books):
    lesson.claims(claims_books(books) if books else [])
    return


@app.cell(hide_code=True)
def _(books):
    mo.stop(books is None)
    parts = books.reconciliation["peak_nbytes"].parts
    sides = {"predicted": [part.predicted / 1e6 for part in parts], "measured": [part.measured / 1e6 for part in parts]}
    bar_chart(
        "Forecast and measurement of the peak, bar by bar",
        Axis("MB"),
        [part.name for part in parts],
        beside(sides, lambda side, at: f"{parts[at].name}, {side}: {sides[side][at]:.3f} MB"),
    )
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Counts are exact, seconds are not

    Bytes and FLOPs follow from the program. Seconds follow from a machine, its heat and its other guests, and no
    closed form knows these. So the forecast of a time has a basis, *measured here* or *assumed*, and an interval.
    The smallest such forecast is yours: time one matmul, divide.

    Memory stands between the two. What the tensors need was exact above. A GPU also spends on its context, on the
    workspaces of its libraries and on fragments between tensors, and `trainledger plan` has a line for each, with its
    source. So compare `torch.cuda.max_memory_allocated()` after the first step with the peak, and only what is left
    beyond those lines is headroom. The usual advice to leave 10 to 20 % free is what one says without the lines.
    """)
    return


@app.cell
def _(books):
    mo.stop(books is None, mo.md("This experiment needs torch."))

    def best_rate(size: int = 512, times: int = 10) -> float:
        """FLOP/s of the fastest of some matmuls of this size; the first is not timed."""
        a = torch.randn(size, size)
        a @ a
        seconds = []
        for _ in range(times):
            begun = perf_counter()
            a @ a
            seconds.append(perf_counter() - begun)
        return 2 * size**3 / min(seconds)

    rate = best_rate()
    by_napkin = books.measured.model_flops / rate
    return by_napkin, rate


@app.cell(hide_code=True)
def _(books, by_napkin, rate):
    took = books.reconciliation["step_seconds"].measured or float("nan")
    mo.md(rf"""
    This machine reached {rate / 1e9:.0f} GFLOP/s in a matmul of 512, so the step needs at least
    {1000 * by_napkin:.1f} ms for its matmuls. It took {1000 * took:.1f} ms: {by_napkin / took:.0%} of that rate.
    The rest is no mystery but a list: small kernels, norms and softmax that are bound by memory, the optimizer,
    Python between them. `trainledger measure machine` times each of these kinds once, and then the reconciliation has
    a row for the seconds too, with the parts that differ.
    """)
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Read a script like an account

    What is measured can still be the wrong program. Below are twelve lines that somebody sent you: "the loss goes up,
    is the learning rate too high?" Two lines are at fault, and neither is the learning rate. Find them before you open
    the answer.
    """)
    return


@app.cell
def _():
    SCRIPT = dedent("""\
    import torch
    from torch import nn

    model = nn.Linear(64, 64)
    data = [torch.zeros(8, 64) for _ in range(4)]
    total = 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in data:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        total += loss.item()
    """)
    mo.md(f"```python\n{SCRIPT}```")
    return (SCRIPT,)


@app.cell
def _(SCRIPT):
    mo.stop(not lesson.HAS_TORCH, mo.md("This experiment needs torch."))
    with TemporaryDirectory() as _folder:
        _script = Path(_folder) / "loop.py"
        _script.write_text(SCRIPT)
        findings = tl.annotate(_script).findings
    mo.accordion({"Answer": mo.md("\n\n".join(f"Line {f.line.split(':')[-1]}: {f.what}. {f.why}." for f in findings))})
    return (findings,)


@app.cell
def _(findings):
    lesson.claims([Claim("faults found in the script, by line", ", ".join(f.line[-2:] for f in findings), "10, 12")])
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    No tool finds the rest for you. Four faults of a well-known script of this lecture, which runs to its end without a
    complaint: a budget of "two weeks" is multiplied out for one; the FLOPs of a backward count the gradient of an input
    that needs none; a truncated normal is cut at an absolute 3, which is hundreds of its deviations; and a
    function takes `lr` and never uses it, so that the "tuning" after it repeats one run. The last has a test that takes
    a minute: change the argument and see whether anything changes. It finds the other silent one, too, a model that
    stays in `.eval()` after its first evaluation and trains on without its dropout: print `model.training` in the loop.

    ## Find the mistake

    Numbers in notes, lectures and papers are claims, and each can be put to a function. The project keeps a list of
    them, the printed number beside its own, and a test works all of it out again. Draw three; say of each whether it
    holds before you look.
    """)
    return


@app.function(hide_code=True)
def printed() -> list[dict[str, str]]:
    """The rows of docs/claims.md: topic, claim, printed, ours, verdict, and why where it is said."""
    page, table = REPOSITORY / "docs" / "claims.md", REPOSITORY / "docs" / "tables" / "claims.csv"
    if not page.exists():
        return []
    with table.open(newline="", encoding="utf-8") as file:
        whys = {row["claim"]: row["why"] for row in csv.DictReader(file) if row["why"]}
    rows = []
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
        if len(cells) == 5 and cells[4].strip("*") in ("holds", "wrong", "answered"):
            names = ("topic", "claim", "printed", "ours", "verdict")
            row = dict(zip(names, (*cells[:4], cells[4].strip("*")), strict=True))
            rows.append({**row, "why": whys.get(row["claim"], "")})
    return rows


@app.function(hide_code=True)
def numbers_in(text: str) -> list[float]:
    """The numbers of a cell; a range is its middle."""
    found = [float(each) for each in re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?", text.replace(",", ""))]
    return [sum(found) / 2] if " to " in text and len(found) == 2 else found


@app.function(hide_code=True)
def disagree(row: dict[str, str]) -> bool:
    """Whether a printed number is further than 3.8 % from ours."""
    pairs = zip(numbers_in(row["printed"]), numbers_in(row["ours"]), strict=True)
    return any(abs(theirs - ours) > 0.038 * abs(theirs) for theirs, ours in pairs)


@app.cell(hide_code=True)
def _():
    three = mo.ui.number(1, 999, value=1, label="draw")
    three
    return (three,)


@app.cell(hide_code=True)
def _(three):
    _rows = printed()
    mo.stop(not _rows, mo.md("The list is docs/claims.md of the repository, which is not beside this page."))
    _drawn = Random(three.value).sample(_rows, 3)
    mo.accordion(
        {
            f"{row['topic']}: {row['claim']}. Printed: {row['printed'] or 'as said'}": mo.md(
                f"**{row['verdict']}**: {row['ours']}. {row['why']}"
            )
            for row in _drawn
        }
    )
    return


@app.function(hide_code=True)
def claims_texts() -> list[Claim]:
    rows = printed()
    if not rows:
        return []
    verdicts = Counter(row["verdict"] for row in rows)
    head = (REPOSITORY / "docs" / "claims.md").read_text(encoding="utf-8")
    said = re.search(r"Of (\d+) claims (\d+) hold, (\d+) do not", head)
    assert said is not None
    numeric = [row for row in rows if row["verdict"] != "answered" and numbers_in(row["printed"])]
    numeric = [row for row in numeric if len(numbers_in(row["printed"])) == len(numbers_in(row["ours"]))]
    ours = {row["claim"]: numbers_in(row["ours"]) for row in numeric}
    return [
        Claim("statements in the list", len(rows), int(said[1])),
        Claim("of them wrong", verdicts["wrong"], int(said[3])),
        Claim(
            "rows with two numbers whose verdict does not follow from these numbers",
            sum(disagree(row) != (row["verdict"] == "wrong") for row in numeric),
            0,
        ),
        Claim("(4,8,16,32) @ (32,2): FLOPs", ours["(4,8,16,32) @ (32,2)"][0], 2.0 * 4 * 8 * 16 * 32 * 2),
        Claim(
            "8 H100 for two weeks: FLOPs",
            ours["8 H100 for two weeks computed as 8*60*60*24*7*peak"][0],
            8 * 1979e12 / 2 * 14 * 86400,
            1e-3,
        ),
    ]


@app.cell
def _():
    lesson.claims(claims_texts())
    return


@app.cell(hide_code=True)
def _():
    _wrong = [row for row in printed() if row["verdict"] == "wrong" and row["why"]]
    mo.stop(not _wrong)
    mo.md("What is wrong, and why:\n\n" + "\n".join(f"- {row['claim']}: {row['why']}" for row in _wrong))
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    Look at how these came about. A peak with sparsity in place of the dense one; one week for two; a unit, GB or GiB;
    one tensor counted where a layer keeps a dozen; a ratio of parameters given for a ratio of FLOPs. None is a slip of
    arithmetic. In each, somebody multiplied the right way with a number that meant something else. So ask of
    every number what it counts, of which device, in which unit, before you ask whether it is right.

    ## Exercises

    A new seed gives new numbers. After a first miss there is a hint, after a second the derivation.
    """)
    return


@app.function(hide_code=True)
def exercise_which_is_wrong(seed: int) -> Exercise:
    draw = Random(seed)
    rows = [row for row in printed() if numbers_in(row["printed"])]
    if not rows:
        return Exercise("This one needs the repository beside the page. Type 1.", 1, "1", hint="1")
    wrong = draw.choice([row for row in rows if row["verdict"] == "wrong"])
    options = [wrong, *draw.sample([row for row in rows if row["verdict"] == "holds"], 3)]
    draw.shuffle(options)
    return Exercise(
        "One of these is wrong. Which?",
        f"{wrong['claim']}: {wrong['printed']}",
        f"It is {wrong['ours']}. {wrong['why']}",
        hint="Work each out; the wrong one is off by more than 3.8 %.",
        choices=tuple(f"{row['claim']}: {row['printed']}" for row in options),
    )


@app.function(hide_code=True)
def exercise_unexplained(seed: int) -> Exercise:
    draw = Random(seed)
    names = ("forward", "backward", "optimizer")
    parts = tuple(Part(name, draw.randint(20, 90), draw.randint(20, 120)) for name in names)
    predicted = sum(part.predicted for part in parts)
    measured = sum(part.measured for part in parts) + draw.choice([7, 12, 19, 31])
    row = Row("step_seconds", "step time", "seconds", predicted, measured, parts=parts)
    assert row.unexplained is not None
    table = "; ".join(f"{part.name} {part.predicted} predicted, {part.measured} measured" for part in parts)
    return Exercise(
        f"A step in ms: {table}. In all {predicted} predicted and {measured} measured. How many ms are unexplained?",
        float(row.unexplained),
        f"({measured} - {predicted}) less the differences of the parts.",
        hint="Take the parts' differences off the whole difference.",
        unit="ms",
        tolerance=1e-3,
        mistakes={measured - predicted: "That is the whole difference; the parts explain some of it."},
    )


@app.function(hide_code=True)
def exercise_where(seed: int) -> Exercise:
    draw = Random(seed)
    names = ("forward", "backward", "optimizer", "data")
    parts = tuple(Part(name, draw.randint(20, 90), draw.randint(20, 120)) for name in names)
    row = Row("step_seconds", "step time", "seconds", sum(p.predicted for p in parts), sum(p.measured for p in parts),
              parts=parts)  # fmt: skip
    assert row.where is not None
    return Exercise(
        "Which part would you look at first? In ms, predicted and measured: "
        + "; ".join(f"{part.name} {part.predicted} and {part.measured}" for part in parts),
        row.where[0],
        f"It differs by {float(row.where[1]):+.0f} ms; a part that is faster than predicted is off as well.",
        hint="The largest difference, in either direction.",
        choices=names,
    )


@app.function(hide_code=True)
def exercise_parameters(seed: int) -> Exercise:
    draw = Random(seed)
    layers, vocabulary = draw.choice([2, 3, 6, 8, 12]), draw.choice([257, 512, 2048, 8192])
    run = tl.load({**settings(layers), "model": {"preset": "teach-1m", "vocab_size": vocabulary, "n_layers": layers}})
    right = tl.parameters(run.model).total
    return Exercise(
        f"The model of this chapter with {layers} layers and {vocabulary:,} rows of the vocabulary: its parameters?",
        right,
        f"{vocabulary:,} x 128 + {layers} x (2 x 128^2 + 2 x 128 x 64 + 3 x 128 x 352 + 2 x 128) + 128.",
        hint="The formula is above; the embedding is shared with the head.",
        tolerance=1e-5,
        mistakes={
            right + vocabulary * 128: "The head shares the embedding.",
            right - 128: "There is a norm behind the last layer.",
        },
    )


@app.function(hide_code=True)
def exercise_write_a_verdict(seed: int) -> Exercise:
    draw = Random(seed)
    tolerance = draw.choice([0.01, 0.02, 0.05])
    pairs = [
        (ours, ours * factor) for ours in (48.0, 6.3e24) for factor in (1, 1 + tolerance / 2, 1 - 2 * tolerance, 2)
    ]
    pairs += [(0.0, 0.0), (0.0, 1.0)]
    cases = [((ours, other), Claim("", ours, other, tolerance).holds) for ours, other in pairs]
    return Exercise(
        f"Write holds(ours, printed): whether both agree within {tolerance:.0%} of the larger. Zero agrees with zero.",
        f"def holds(ours, printed):\n    return abs(ours - printed) <= {tolerance} * max(abs(ours), abs(printed))\n",
        "A relative tolerance, so that 48 and 6.3e24 are judged alike; <= and not <, for zero.",
        hint="Divide nothing: multiply the tolerance by the larger of the two.",
        start="def holds(ours, printed):\n    return ours == printed\n",
        check=lesson.Gives("holds", tuple(cases)),
    )


@app.cell(hide_code=True)
def _():
    EXERCISES = [
        exercise_which_is_wrong,
        exercise_unexplained,
        exercise_where,
        exercise_parameters,
        exercise_write_a_verdict,
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

    Count three times from three places, and print the remainder. A number without what it counts, on which device and
    in which unit is not yet a claim.

    On the command line: `trainledger demo` does this chapter's loop on a larger model, and `trainledger reconcile
    RUN_DIR` for a run of yours; `trainledger trace module:Net --input "fp32[8,64]" --loss mean` is the account of a
    module that you wrote. On the page: [Runs](../?calculator=runs). That was the last chapter; the first is
    [what can this budget buy?](01_budget.html), and you can now check every line of it.
    """)
    return


if __name__ == "__main__":
    app.run()
