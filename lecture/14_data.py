import marimo

__generated_with = "0.25.2"
app = marimo.App(app_title="14. Data, seeds, determinism")

with app.setup:
    import tempfile
    from hashlib import sha256
    from itertools import islice
    from math import exp
    from pathlib import Path
    from random import Random

    import marimo as mo

    import trainledger as tl
    from trainledger.report import lesson
    from trainledger.report.chart import COLOURS, Axis, Chart, Line
    from trainledger.report.lesson import Claim, Exercise
    from trainledger.spec.dtypes import TOKEN_NBYTES, token_dtype

    REPEATED = 15.387756  # R*_D of Muennighoff et al. 2023 (arXiv 2305.16264), appendix A
    SEQ_LEN, BATCH = 128, 8
    EIGHT = {"layout.replicate": 8, "recipe.micro_batch": 64, "recipe.global_batch": 4096, "recipe.seq_len": 1024}

    if lesson.HAS_TORCH:
        import email

        import numpy as np
        import torch

        from trainledger.engine.data.loader import Loader, halves
        from trainledger.engine.data.mixture import alone, sequences_at, train_batch
        from trainledger.engine.data.prepare import prepare
        from trainledger.engine.nn.init import initialize
        from trainledger.engine.nn.transformer import build
        from trainledger.observe.measure.loader import measure_loader
        from trainledger.spec.run import DataSpec


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # 14. Data, seeds, determinism

    A colleague has started a run on the corpus that your team spent a month cleaning. His loader is the famous one: put
    all tokens into one file, and for each sequence draw a random place in it. After exactly as many tokens as the file
    has he stops and reports "one epoch".

    How much of your month's work did the model never see? Guess a percentage before you read on.
    """)
    return


@app.cell(hide_code=True)
def _():
    guess = mo.ui.text(label="per cent never read:")
    guess
    return (guess,)


@app.cell(hide_code=True)
def _(guess):
    mo.md(lesson.against(guess.value, 100 * exp(-1), "per cent") if guess.value else "")
    return


@app.cell(hide_code=True)
def _():
    corpus = tl.loop("gpt2", EIGHT, corpus=9_035_582_198, device="a100-sxm-80gb", count=8)
    mo.md(rf"""
    We shall come to the reason. First the file.

    ## Tokens on disk

    A token is a number below the size of the vocabulary. GPT-2 has 50,257 tokens, which is below $2^{{16}}$, so two
    bytes hold one. There is nothing else in the file: no header, no lengths, no strings. The 9.04 billion tokens of
    OpenWebText are {corpus.corpus_nbytes["uint16"] / 1e9:.2f} GB. Llama 3 has 128,256 tokens and pays four bytes for
    each: one more bit costs sixteen.

    Reading them is cheap. Eight A100 that train GPT-2 take {corpus.loader_tokens_per_second / 1e6:.2f} million tokens a
    second, which are {corpus.loader_nbytes_per_second / 1e6:.1f} MB/s for all of them together: a disk of ten years ago
    does it. Text is a small thing beside what is done with it. (A vision run at the same speed of devices may need a
    thousand times as much: see [devices](06_devices.html).)
    """)
    return


@app.cell(hide_code=True)
def _():
    tokens = mo.ui.slider(steps=[1e9, 9e9, 1e11, 3e11, 1.4e12, 15e12], value=3e11, label="tokens", show_value=True)
    vocabulary = mo.ui.slider(steps=[257, 32000, 50257, 65536, 65537, 128256, 256000], value=50257, label="vocabulary")
    mo.hstack([tokens, vocabulary], justify="start")
    return tokens, vocabulary


@app.cell(hide_code=True)
def _(tokens, vocabulary):
    chosen = token_dtype(vocabulary.value)
    mo.md(
        f"A vocabulary of {vocabulary.value:,} needs {chosen}: "
        f"**{tokens.value * TOKEN_NBYTES[chosen] / 1e9:,.0f} GB** for {tokens.value:.3g} tokens."
    )
    return


@app.function
def worth(epochs: float) -> float:
    """Epochs over fresh text that so many epochs over the same text are worth (Muennighoff et al. 2023, equation 5)."""
    return 1 + REPEATED * (1 - exp(-(epochs - 1) / REPEATED))


@app.function(hide_code=True)
def claims_disk() -> list[Claim]:
    web = tl.loop("gpt2", corpus=9_035_582_198)
    nbytes = web.corpus_nbytes[web.token_dtype]
    llama = tl.loop("llama-7b", {"recipe.tokens": "1.4T"})
    llama3 = tl.loop("llama-3-8b", {"recipe.tokens": "15T"})
    four, five = (tl.loop("gpt2", {"recipe.tokens": "10B"}, corpus=10**10 // each) for each in (4, 5))
    summed = 1 + sum(exp(-(at + 0.5) / 1000 / REPEATED) / 1000 for at in range(3000))  # a thousandth of an epoch each
    return [
        Claim("OpenWebText, whose file nanoGPT gives as about 17 GB: GiB", nbytes / 2**30, 17, 0.015, "GiB"),
        Claim("the same by hand: two bytes a token", nbytes, 2 * 9_035_582_198, unit="bytes"),
        Claim("LLaMA's 1.4T tokens, printed as 2.8 TB", llama.corpus_nbytes[llama.token_dtype], 2.8e12, 1e-6, "bytes"),
        Claim("Llama 3: 15T tokens, 128,256 in the vocabulary", llama3.corpus_nbytes["uint32"], 60e12, 1e-6, "bytes"),
        Claim(
            "a vocabulary of 65,536, and of one more",
            f"{token_dtype(2**16)}, {token_dtype(2**16 + 1)}",
            "uint16, uint32",
        ),
        Claim("four epochs are worth so many; the sum of small steps that decay", worth(4), summed, 1e-6, "epochs"),
        Claim(
            "the loop warns of repeated tokens: at four epochs", any("worth less" in each for each in four.notes), False
        ),
        Claim("at five", any("worth less" in each for each in five.notes), True),
    ]


@app.cell
def _():
    lesson.claims(claims_disk())
    return


@app.cell(hide_code=True)
def _():
    mo.md(rf"""
    The last rows are about reading a text again. The first repetitions are nearly as good as fresh text, and each one
    is worth less than the one before: with $U$ tokens and $E$ epochs the model has learned as if from

    $$D' = U + U R^* \left(1 - e^{{-(E-1)/R^*}}\right), \qquad R^* = {REPEATED:.2f}.$$

    Four epochs are worth {worth(4):.2f}, sixteen {worth(16):.1f}, and a hundred {worth(100):.1f}: more than
    {1 + REPEATED:.1f} cannot be had.

    ## The loader, in five lines

    `np.memmap` makes a file look like an array. Nothing is read when it is opened; a slice reads its pages, and the
    system keeps what was read lately. So 18 GB need no 18 GB of memory, and a loader is this:
    """)
    return


@app.function
def batch(path, starts, seq_len):
    tokens = np.memmap(path, dtype="<u2", mode="r")
    rows = np.stack([tokens[start : start + seq_len + 1] for start in starts])
    rows = rows.astype(np.int64)
    x, y = rows[:, :-1], rows[:, 1:]
    return x, y


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    Each row has one token more than the model sees. `x` is the row without its last token, `y` the row without its
    first: at each place the target is the token that comes next. Line 3 is there because torch looks up embeddings by
    int64, and has hardly an operation for uint16.

    Which rows? That is all of the difference between loaders. Here are three answers, for a file of $n$ sequences of
    $T$ tokens:
    """)
    return


@app.function
def random_starts(n_tokens, seq_len, *, seed, count):
    """The first starts that a loader with random places draws."""
    return np.random.default_rng(seed).integers(0, n_tokens - seq_len, count)


@app.function
def shuffled_starts(n_tokens, seq_len, *, seed, epoch):
    """All starts of an epoch: every sequence once, in an order that is drawn and stored."""
    n = (n_tokens - 1) // seq_len
    return np.random.default_rng([seed, epoch]).permutation(n) * seq_len


@app.function
def engine_starts(n_tokens, seq_len, *, seed, begin, count):
    """The starts at some places of the engine's order: every sequence once, computed when asked for."""
    n = (n_tokens - 1) // seq_len
    return sequences_at(n, seed=seed, begin=begin, count=count).astype(np.int64) * seq_len


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    The engine's order is a *keyed permutation*: a function that maps place $k$ of the order to a sequence, and no two
    places to the same one. It stores nothing and has no state. The batch of step $k$ is a function of the data, the
    seed and $k$, so a run that resumes at step 700,000 asks for step 700,000 and has its batch, whatever the number of
    devices. The stored shuffle is as good for learning. It costs eight bytes for each sequence and has to be drawn to
    the end before the first batch.

    Are the five lines the engine's loader? With the same starts they must give the same bits. This is checked on the
    sources of Python's `email` package, as bytes:
    """)
    return


@app.function(hide_code=True)
def claims_batch() -> list[Claim]:
    if not lesson.HAS_TORCH:
        return []
    with tempfile.TemporaryDirectory() as folder:
        text = DataSpec(path=(str(Path(email.__file__).parent),), cache=folder)
        store = prepare(text, vocab_size=None, progress=False)
        (path,) = store.directory.glob("*.train.u16")
        n_tokens = path.stat().st_size // 2
        n = (n_tokens - 1) // SEQ_LEN
        last = n // BATCH

        def digest(x, y) -> str:
            return sha256(np.asarray(x).tobytes() + np.asarray(y).tobytes()).hexdigest()[:12]

        def ours(step: int) -> str:
            starts = engine_starts(n_tokens, SEQ_LEN, seed=0, begin=step * BATCH, count=BATCH)
            return digest(*batch(path, starts, SEQ_LEN))

        def engines(step: int, **ranks: int):
            return train_batch(store, seed=0, step=step, global_batch=BATCH, seq_len=SEQ_LEN, **ranks)

        sizes = {"seed": 0, "seq_len": SEQ_LEN, "global_batch": BATCH, "micro_batch": BATCH}
        with Loader(alone(store), **sizes) as loader:
            ((sixth,),) = islice(loader.batches(0), 5, 6)
            ((resumed,),) = islice(loader.batches(5), 1)
        two = np.concatenate([engines(3, rank=rank, ranks=2) for rank in (0, 1)])
        everything = engine_starts(n_tokens, SEQ_LEN, seed=0, begin=0, count=n)
        shuffled = shuffled_starts(n_tokens, SEQ_LEN, seed=0, epoch=0)
        same = sorted(everything.tolist()) == sorted(shuffled.tolist())
        drawn = random_starts(n_tokens, SEQ_LEN, seed=0, count=n)
        read = np.zeros(n_tokens, dtype=bool)
        for start in drawn:
            read[start : start + SEQ_LEN] = True
        np.save(Path(folder) / "tokens.npy", np.arange(10, dtype=np.int32))
        mapped = np.memmap(Path(folder) / "tokens.npy", dtype=np.int32, mode="r")
        loaded = np.load(Path(folder) / "tokens.npy", mmap_mode="r")
        return [
            Claim("five lines and the engine, first batch: SHA-256", ours(0), digest(*halves(engines(0)))),
            Claim("the step in which the second epoch begins", ours(last), digest(*halves(engines(last)))),
            Claim("the engine's loader, started at step 5, and its sixth batch", digest(*resumed), digest(*sixth)),
            Claim("the rows of two ranks together, and of one", digest(*halves(two)), digest(*halves(engines(3)))),
            Claim("an epoch of the engine and of the stored shuffle: the same sequences", same, True),
            Claim("in the same order", bool((everything == shuffled).all()), False),
            Claim("an epoch of random starts: tokens never read", float(1 - read.mean()), exp(-1), 0.04),
            Claim("ten int32 in a .npy file, mapped with np.memmap: numbers", len(mapped), (128 + 10 * 4) // 4),
            Claim("the same by np.load(mmap_mode)", len(loaded), 10),
        ]


@app.cell(hide_code=True)
def _():
    mo.md("This table needs torch.") if not lesson.HAS_TORCH else lesson.claims(claims_batch())
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    So the loaders agree bit for bit where they are given the same starts, and they differ in the order of the starts
    alone: one is computed from a key, the other is drawn from a generator.

    ## Why a third is never read

    Random starts are another matter. A token is read when one of the $T$ starts before it is drawn. With as many draws
    as the file has sequences, $N/T$, each token is met once *on average*: some twice, some three times, some never. The
    number of meetings has a Poisson distribution of mean 1, and

    $$P(\text{never}) = \left(1 - \frac{T}{N}\right)^{N/T} \approx e^{-1} = 36.8\,\%.$$

    After $E$ epochs it is $e^{-E}$. Over a hundred epochs of a small file nobody sees a difference. In the one epoch
    that large runs have, more than a third of the text is paid for and never used.
    """)
    return


@app.cell
def _():
    epochs = [each / 10 for each in range(31)]
    drawn = [100 * (1 - exp(-each)) for each in epochs]
    once = [100 * min(each, 1) for each in epochs]
    marks = (Line(epochs, once, "each once"), Line(epochs, drawn, "random starts", COLOURS[5]))
    Chart(
        "How much of the file was read", marks, Axis("tokens taken / tokens of the file"), Axis("per cent", zero=True)
    )
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Does the loader keep up?

    Never ask whether a loader is fast; ask whether it is faster than the steps. Here is this machine:
    """)
    return


@app.cell
def _():
    workers = (0,) if lesson.QUICK else (0, 1, 2)
    measure_loader(text_nbytes=2**20, workers=workers, ranks=()) if lesson.HAS_TORCH else mo.md("This needs torch.")
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    "read ahead by a thread" is what a training loop gets: while step $k$ computes, the batch of step $k + 1$ is read.
    Text is made tokens once, before. Here a token is a byte; a trained vocabulary takes longer, and then processes pay,
    which for this one MiB cost more to start than they save.

    ## Seeds: one for each source of chance

    A run draws weights, an order of the data, and dropout masks. If all come from one generator, a layer more
    shifts the stream, and the data comes in another order: you wanted to compare two models and have changed the data.
    So each use has its own generator, seeded by a hash of the run's seed and the name of the use. Break one at a time:
    """)
    return


@app.function
def losses(*, init=0, data=0, dropout=0, micro=BATCH, steps=6) -> list[float]:
    """The losses of a plain loop, by the seed of each of its sources of chance."""
    with tempfile.TemporaryDirectory() as folder:
        fields = {"preset": "teach-1m", "vocab_size": 257, "n_layers": 2, "max_seq_len": SEQ_LEN}
        run = tl.load(
            {"model": fields, "recipe": {"seq_len": SEQ_LEN, "global_batch": BATCH, "steps": steps, "dropout": 0.1}}
        )
        store = prepare(
            DataSpec(path=(str(Path(email.__file__).parent),), cache=folder), vocab_size=None, progress=False
        )
        model = build(run.model, run.recipe)
        initialize(model, seed=init)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        torch.manual_seed(dropout)
        said = []
        for step in range(steps):
            rows = train_batch(store, seed=data, step=step, global_batch=BATCH, seq_len=SEQ_LEN)
            whole = 0.0
            for part in np.split(rows, BATCH // micro):
                x, y = halves(part)
                loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()) * micro / BATCH
                loss.backward()
                whole += loss.item()
            optimizer.step()
            optimizer.zero_grad()
            said.append(whole)
        return said


@app.cell(hide_code=True)
def _():
    def broken() -> str:
        changes = {
            "nothing": {},
            "the initial weights": {"init": 1},
            "the order of the data": {"data": 1},
            "the dropout masks": {"dropout": 1},
            "two micro-batches, not one": {"micro": BATCH // 2},
        }
        first, rows = (
            losses(),
            ["| another seed for | loss of step 1 | of step 6 | the same bits |", "|---|--:|--:|---|"],
        )
        for name, change in changes.items():
            again = losses(**change)
            rows.append(f"| {name} | {again[0]:.6f} | {again[-1]:.6f} | {'yes' if again == first else 'no'} |")
        return "\n".join(rows)

    mo.md(broken() if lesson.HAS_TORCH else "This needs torch.")
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    The last row has all seeds as they were, and yet other dropout masks, as two calls draw them: how a batch is split
    is a source of chance, too. The engine has a seed for each micro-batch, so that masks do not depend on which device
    computes it; but who resumes a run with another split is told that its bits will be others.

    **Find the mistakes.** Both are printed in public notes of this lecture.

    1. *`np.memmap("tokens.npy", dtype=np.int32)`.* A file that `np.save` wrote begins with a header of 128 bytes. The
       map takes it for tokens: ten numbers became 42 in the table above, and the first 32 are rubbish. Nothing fails;
       the model learns a little about headers. Use `np.load(path, mmap_mode="r")`, or a file without a header.
    2. *"`torch.use_deterministic_algorithms(True)` forces sequential execution."* It selects deterministic kernels
       where there are some, and raises where there is none. The threads stay.
    """)
    return


@app.function(hide_code=True)
def claims_seeds() -> list[Claim]:
    if not lesson.HAS_TORCH:
        return []
    threads = torch.get_num_threads()
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
        raised = "nothing"
    except RuntimeError as error:
        raised = str(error).split(", but")[0]
    finally:
        torch.use_deterministic_algorithms(before)
    first = losses(steps=3)
    return [
        Claim("all seeds the same: losses of three steps, bit for bit", str(losses(steps=3)), str(first)),
        Claim("another seed for the data: another first loss", losses(data=1, steps=1)[0] == first[0], False),
        Claim("`put_` at a place named twice", raised, "put_ does not have a deterministic implementation"),
        Claim("threads while only deterministic kernels are allowed", torch.get_num_threads(), threads),
    ]


@app.cell(hide_code=True)
def _():
    mo.md("This table needs torch.") if not lesson.HAS_TORCH else lesson.claims(claims_seeds())
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Exercises

    A new seed gives new numbers. After a first miss there is a hint, after a second the derivation.
    """)
    return


@app.function(hide_code=True)
def exercise_disk(seed: int) -> Exercise:
    draw = Random(seed)
    billions, vocabulary = draw.choice([5, 40, 300, 1400]), draw.choice([32_000, 50_257, 100_277, 151_936])
    size = TOKEN_NBYTES[token_dtype(vocabulary)]
    return Exercise(
        f"{billions}B tokens of a vocabulary of {vocabulary:,}: gigabytes on disk?",
        billions * size,
        f"{vocabulary:,} is {'at most' if size == 2 else 'above'} 65,536: {size} bytes each, {billions} x {size} GB.",
        hint="Which of uint16 and uint32 holds the largest token?",
        unit="GB",
        mistakes={
            billions * (6 - size): "Compare the vocabulary with 65,536.",
            billions * 8: "int64 is for the model.",
        },
    )


@app.function(hide_code=True)
def exercise_unread(seed: int) -> Exercise:
    epochs = Random(seed).choice([0.25, 0.5, 1.5, 2, 3])
    left = 100 * exp(-epochs)
    return Exercise(
        f"Random starts, {epochs} times as many tokens taken as the file has: per cent of the file never read?",
        left,
        f"Meetings of a token are Poisson with mean {epochs}: e^-{epochs} = {left:.1f} %.",
        hint="How often is a token met on average, and what is the chance of no meeting?",
        unit="per cent",
        mistakes={
            100 - left: "That is what was read.",
            max(0.0, 100 * (1 - epochs)): "That is with each sequence once.",
        },
    )


@app.function(hide_code=True)
def exercise_worth(seed: int) -> Exercise:
    draw = Random(seed)
    billions, epochs = draw.choice([2, 10, 50]), draw.choice([8, 12, 20, 40])
    answer = billions * worth(epochs)
    return Exercise(
        f"{billions}B tokens read {epochs} times: as good as how many billion fresh ones ($R^* = {REPEATED:.2f}$)?",
        answer,
        f"{billions} (1 + {REPEATED:.2f} (1 - e^(-{epochs - 1} / {REPEATED:.2f}))) = {answer:.1f}.",
        hint="The first reading counts in full; the repetitions are one fewer than the epochs.",
        unit="B",
        mistakes={
            billions * epochs: "Repetitions are worth less.",
            answer - billions: "The first reading counts, too.",
        },
    )


@app.function(hide_code=True)
def check_pair(text: str) -> str:
    """What is wrong with a function that makes a row into inputs and targets; empty where it is right."""
    names: dict = {}
    row = [31, 7, 7, 90, 12, 55]
    try:
        exec(text, names)
        x, y = map(list, names["pair"](list(row)))
    except Exception as error:
        return f"It does not run: {type(error).__name__}: {error}"
    if x == y:
        return "The model sees what it has to say: its loss goes to 0, and it has learned to copy."
    return "" if (x, y) == (row[:-1], row[1:]) else f"For the row {row} it gives x = {x} and y = {y}."


@app.function(hide_code=True)
def exercise_shift(seed: int) -> Exercise:
    wrong = ["row, row", "row[1:], row[1:]", "row[:-1], row[:-1]", "row[1:], row[:-1]", "row[:-2], row[1:]"]
    program = "def pair(row):\n    x, y = {}\n    return x, y\n"
    return Exercise(
        "This function makes a row of tokens into inputs and targets. Repair it.",
        program.format("row[:-1], row[1:]"),
        "x is the row without its last token, y the row without its first.",
        hint="At each place y must have the token that follows the one in x.",
        start=program.format(Random(seed).choice(wrong)),
        check=check_pair,
    )


@app.function(hide_code=True)
def exercise_generator(seed: int) -> Exercise:
    draw = Random(seed)
    uses = draw.sample(["weights", "order of the data", "dropout masks", "sampled text"], 3)
    at = draw.randrange(3)

    def drawn(extra: int | None) -> dict[str, float]:
        generator, found = Random(0), {}
        for place, use in enumerate(uses):
            if place == extra:
                generator.random()
            found[use] = generator.random()
        return found

    before, after = drawn(None), drawn(at)
    options = ["nothing", uses[2], f"{uses[1]}, {uses[2]}", ", ".join(uses)]
    return Exercise(
        f'One generator draws, in this order: {", ".join(uses)}. Somebody adds one more draw just before "{uses[at]}". '
        "What becomes different?",
        ", ".join(use for use in uses if before[use] != after[use]),
        "A generator is a stream: all that is drawn after the new draw is shifted, and nothing before it.",
        hint="Write the stream down as numbered values, and see who gets which.",
        choices=tuple(options),
        mistakes={"nothing": "It would be nothing if each use had a generator of its own."},
    )


@app.cell(hide_code=True)
def _():
    EXERCISES = [exercise_disk, exercise_unread, exercise_worth, exercise_shift, exercise_generator]
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

    A corpus is a file of two-byte numbers, and a batch is a function of the file, the seed and the step. Random starts
    leave $e^{-E}$ of the text unread after $E$ epochs.

    On the command line: `trainledger loop gpt2 --corpus 9B --device a100-sxm-80gb --count 8`, `trainledger data
    run.toml --show`, `trainledger measure loader`. On the page: [Data and loop](../?calculator=data). Next:
    [a loop that survives](15_loop.html).
    """)
    return


if __name__ == "__main__":
    app.run()
