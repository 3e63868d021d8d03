import marimo

__generated_with = "0.25.2"
app = marimo.App(app_title="17. What to train")

with app.setup:
    from functools import cache
    from math import sqrt
    from random import Random

    import marimo as mo

    import trainledger as tl
    from trainledger.report import lesson
    from trainledger.report.chart import COLOURS, Axis, Chart, Line
    from trainledger.report.lesson import Claim, Exercise

    if lesson.HAS_TORCH:
        import torch

    CLUSTER = {"device": "h100-sxm", "count": 32, "days": "2w"}
    EIGHT_B = {"layout.shard": 64, "recipe.precision": "bf16-sharded", "recipe.global_batch": 64}


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # 17. What should the budget train, and what does it serve?

    The cluster is yours for two weeks: 32 H100, no extension. You can train a large model on few tokens or a small one
    on many, and both cost the same. Your colleague wants the largest that fits: 32 devices hold the states of a 70B
    model with room to spare. Whoever will pay for serving wants the smallest. Who is right?

    Guess before you read on. How many billion parameters give the lowest loss after those two weeks, at half of the
    peak?
    """)
    return


@app.cell(hide_code=True)
def _():
    guess = mo.ui.text(label="billion parameters:")
    guess
    return (guess,)


@app.cell(hide_code=True)
def _(guess):
    best = tl.optimal(**CLUSTER, family=None)
    mo.md(lesson.against(guess.value, best.parameters / 1e9, "billion parameters") if guess.value else "")
    return (best,)


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## One budget, two ways to be wrong

    The budget fixes the product: $C = 6 N D$. A model that is too small runs out of capacity; one that is too large
    sees too few tokens. Hoffmann et al. (2022) trained more than 400 models and found that the loss falls as a sum,

    $$L(N, D) = E + \frac{A}{N^\alpha} + \frac{B}{D^\beta}.$$

    E is the entropy of text itself, which no model beats; the second term is what a finite model cannot express, the
    third what finite data cannot teach. Put $D = C / 6N$ into it and set the derivative by N to zero:

    $$\frac{\alpha A}{N^\alpha} = \frac{\beta B}{D^\beta}.$$

    Both exponents are close to 0.36, so N and D grow alike, each with about the square root of C. The ratio that
    comes out is near 20 tokens per parameter (Besiroglu et al. 2024, who fitted the published points again). With
    D = 20 N the rest is one line: $C = 6 N \cdot 20 N$, and so $N = \sqrt{C / 120}$.
    """)
    return


@app.cell
def _(best):
    best
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    Your colleague's 70B is what Kaplan's law of 2020 would say, the last row: five times too large for its tokens.
    Move the budget. The valley is flat at its floor and steep far from it:
    """)
    return


@app.cell(hide_code=True)
def _():
    devices = mo.ui.slider(steps=[1, 8, 32, 128, 512, 2048, 16384], value=32, label="H100", show_value=True)
    weeks = mo.ui.slider(1, 12, 1, value=2, label="weeks", show_value=True)
    mo.hstack([devices, weeks], justify="start")
    return devices, weeks


@app.cell(hide_code=True)
def _(devices, weeks):
    own = tl.optimal(device="h100-sxm", count=devices.value, days=7 * weeks.value, family=None)

    def valley(flops: float, name: str, colour: str) -> Line:
        sizes = [10 ** (8 + at / 20) for at in range(76)]
        pairs = [(n, own.loss_law.loss(n, flops / (6 * n))) for n in sizes]
        kept = [(n, loss) for n, loss in pairs if loss < 2.8]
        return Line([n for n, _ in kept], [loss for _, loss in kept], name, colour)

    budget = own.budget.flops
    kaplan = next(choice for choice in own.choices if choice.law.name == "kaplan")
    Chart(
        "Loss of models that cost the same",
        (
            valley(budget / 10, "a tenth of it", COLOURS[4]),
            valley(budget, f"{budget:.3g} FLOP", COLOURS[0]),
            valley(10 * budget, "ten times as much", COLOURS[2]),
            Line([own.parameters], [own.chosen.loss.value], "20 tokens a parameter", COLOURS[5], 0, symbol="circle"),
            Line([kaplan.parameters.value], [kaplan.loss.value], "Kaplan 2020", COLOURS[3], 0, symbol="diamond"),
        ),
        Axis("parameters", log=True),
        Axis("loss, nats per token"),
    )
    return


@app.function(hide_code=True)
def fitted_loss(parameters: float, tokens: float) -> float:
    """Table 1 of Besiroglu et al. 2024, typed from the paper."""
    return 1.8172 + 482.01 / parameters**0.3478 + 2085.43 / tokens**0.3658


@app.function(hide_code=True)
def claims_budget() -> list[Claim]:
    answer = tl.optimal(**CLUSTER, family=None)
    by_hand = sqrt(32 * 1979e12 / 2 * 0.5 * 14 * 86400 / 120)
    off = next(row for row in answer.off if round(row.tokens / row.parameters) == 100)
    # Above E the least loss falls as C^-(alpha beta / (alpha + beta)).
    power = 0.3478 * 0.3658 / (0.3478 + 0.3658)
    best_above = fitted_loss(by_hand, 20 * by_hand) - 1.8172
    off_above = fitted_loss(by_hand / sqrt(5), 20 * by_hand * sqrt(5)) - 1.8172
    llama = tl.napkin(device="h100-sxm", params=405e9, tokens=15.6e12, count=16384, mfu=0.4)
    swapped = tl.optimal(**CLUSTER, family=None, params=answer.tokens).asked
    assert swapped is not None
    return [
        Claim("32 H100, two weeks: the square root of C / 120", answer.parameters, by_hand, 1e-6, "parameters"),
        Claim("its loss", answer.chosen.loss.value, fitted_loss(by_hand, 20 * by_hand), 1e-4, "nats"),
        Claim(
            "100 tokens a parameter cost this much more than the cheapest run of that loss",
            off.overhead,
            (off_above / best_above) ** (1 / power) - 1,
            1e-2,
        ),
        Claim("a model of 253B parameters on 12.6B tokens", swapped.loss, fitted_loss(20 * by_hand, by_hand), 1e-4),
        Claim("Llama 3.1 405B: the 3.8e25 FLOP of its paper", llama.flops, 3.8e25, 0.01),
        Claim("of the 1e26 FLOP that a US order of 2023 made reportable", llama.flops / 1e26, 0.38, 0.01),
    ]


@app.cell
def _():
    lesson.claims(claims_budget())
    return


@app.cell(hide_code=True)
def _(best):
    exchanged = tl.optimal(**CLUSTER, family=None, params=252.7e9).asked
    same_loss = tl.optimal(flops=exchanged.same_loss_flops, family=None)
    mo.md(rf"""
    **Find the mistake.** A published summary of this lecture explains $6 N D$ with "N is tokens, D is parameters". In
    the product nobody notices: exchange them and C is the same. Then the rule of 20 is applied, and it becomes 20
    parameters per token. The fourth row is what comes out: the same bill for a loss of {exchanged.loss:.2f}, which
    {same_loss.parameters / 1e9:.1f}B parameters on {same_loss.tokens / 1e9:.0f}B tokens reach for
    {exchanged.same_loss_flops / best.budget.flops:.1%} of it.

    The 1e26 is a threshold of the US order of October 2023 (revoked in January 2025), above which a run had to be
    reported. The 2e25 that is often said of GPT-4 is somebody's estimate: nobody outside has its N or D, so no row.

    ## See the valley yourself

    A laptop's seconds are enough. The text below is drawn from a source whose next symbol depends on the two before
    it. Networks of five widths get the same FLOPs: the narrow ones see many symbols, the wide ones few. Then all
    get more. Where is the floor of the valley, and where does it go?
    """)
    return


@app.function
def source_of(symbols: int) -> "torch.Tensor":
    """Probabilities of the next symbol after each pair of symbols."""
    draw = torch.Generator().manual_seed(1)
    first, second = torch.randn(2, symbols, symbols, generator=draw).mul(1.5)
    both = torch.randn(symbols, symbols, symbols, generator=draw)
    return torch.softmax(first[:, None] + second[None, :] + both, -1).flatten(0, 1)


@app.function(hide_code=True)
def text_of(source: "torch.Tensor", tokens: int, seed: int) -> tuple["torch.Tensor", "torch.Tensor"]:
    """Pairs of symbols and what follows each, from 1,024 texts that are drawn side by side."""
    draw = torch.Generator().manual_seed(seed)
    limits = source.cumsum(-1)
    symbols, texts = source.shape[1], 1024
    drawn = [torch.randint(symbols, (texts,), generator=draw) for _ in range(2)]
    for _ in range(-(-tokens // texts)):
        at = torch.rand(texts, 1, generator=draw)
        after = torch.searchsorted(limits[drawn[-2] * symbols + drawn[-1]], at).squeeze(1)
        drawn.append(after.clamp(max=symbols - 1))
    pairs = torch.stack([torch.cat(drawn[:-2]), torch.cat(drawn[1:-1])], -1)
    return pairs[:tokens], torch.cat(drawn[2:])[:tokens]


@app.function
def train_one(width: int, budget: float, source: "torch.Tensor") -> tuple["torch.nn.Module", int, int, float]:
    """A network of one hidden layer after C FLOPs, its N and D, and its loss on text that it has not seen."""
    torch.manual_seed(0)
    symbols = source.shape[1]
    model = torch.nn.Sequential(
        torch.nn.Embedding(symbols, width),
        torch.nn.Flatten(),
        torch.nn.Linear(2 * width, 2 * width),
        torch.nn.ReLU(),
        torch.nn.Linear(2 * width, symbols),
    )
    parameters = sum(each.numel() for each in model[1:].parameters())  # looking a row up takes no FLOP
    tokens, batch = int(budget / (6 * parameters)), 256
    pairs, after = text_of(source, tokens, seed=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    steps = max(tokens // batch, 1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=steps)
    for step in range(steps):
        rows = slice(step * batch, (step + 1) * batch)
        loss = torch.nn.functional.cross_entropy(model(pairs[rows]), after[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model, parameters, tokens, loss_of(model, source)


@app.function(hide_code=True)
def loss_of(model: "torch.nn.Module", source: "torch.Tensor") -> float:
    pairs, after = text_of(source, 50_000, seed=3)
    with torch.no_grad():
        return torch.nn.functional.cross_entropy(model(pairs), after).item()


@app.function
@cache
def valleys(budgets: tuple[float, ...]) -> dict:
    """By budget, what `train_one` gives for each width; nothing without torch."""
    if not lesson.HAS_TORCH:
        return {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the matrices are smaller than the cost of waking a second core
    try:
        source = source_of(32)
        return {budget: [train_one(width, budget, source) for width in (4, 8, 16, 32, 64)] for budget in budgets}
    finally:
        torch.set_num_threads(threads)


@app.cell
def _():
    trained = valleys((3e8, 1e9) if lesson.QUICK else (3e8, 1e9, 3e9))
    return (trained,)


@app.cell(hide_code=True)
def _(trained):
    mo.stop(not trained, mo.md("This experiment needs torch."))
    Chart(
        "Loss of networks that cost the same, on this CPU",
        tuple(
            Line(
                [parameters for _, parameters, _, _ in rows],
                [loss for _, _, _, loss in rows],
                f"{budget:.0e} FLOP",
                COLOURS[at],
                symbol="circle",
                said=[
                    f"{parameters:,} parameters, {tokens:,} symbols: {loss:.3f}" for _, parameters, tokens, loss in rows
                ],
            )
            for at, (budget, rows) in enumerate(trained.items())
        ),
        Axis("parameters", log=True),
        Axis("loss, nats per symbol"),
    )
    return


@app.function(hide_code=True)
def claims_valley(trained: dict | None = None) -> list[Claim]:
    found = trained if trained is not None else valleys((3e8, 1e9))
    if not found:
        return []
    losses = [[loss for _, _, _, loss in rows] for rows in found.values()]
    best = [each.index(min(each)) for each in losses]
    return [
        Claim("the widest network is not the best for any budget", max(best) < 4, True),
        Claim("nor is the narrowest", min(best) > 0, True),
        Claim("the floor does not move to smaller networks as the budget grows", best == sorted(best), True),
    ]


@app.cell
def _(trained):
    lesson.claims(claims_valley(trained))
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## What breaks first when you grow the run

    You have the size. Somebody will now ask for twice the context, the batch or the devices. `tl.breaks` grows one
    size at a time and says which limit comes first: a rule, the memory of a device, or the batch beyond which more
    sequences hardly lower the loss.
    """)
    return


@app.cell
def _():
    tl.breaks("llama-3-8b", EIGHT_B, device="h100-sxm", count=64)
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    The first row is no question of money: the model has positions for 8,192 tokens and not for one more. Memory would
    come next, and the devices stop at 64 because a batch of 64 sequences cannot be cut into 128 parts.

    ## The bill that comes after training

    A compute-optimal model is the cheapest way to a *loss*. It is not the cheapest to *use*: each token served costs
    $2 N$ FLOPs, for years. So the sum to minimize is $6 N D + 2 N D_\text{served}$, at the same loss. If two trillion
    tokens will be served:
    """)
    return


@app.cell(hide_code=True)
def _():
    served = tl.optimal(**CLUSTER, family=None, inference=2e12).served
    llama_ratio = 15e12 / tl.parameters(tl.model("llama-3-8b")).total
    mo.md(rf"""
    | | |
    |---|--:|
    | parameters | {served.parameters / 1e9:.2f}B |
    | tokens to train on | {served.tokens / 1e9:.0f}B, {served.tokens / served.parameters:.0f} a parameter |
    | training | {served.training_flops:.3g} FLOP |
    | serving | {served.inference_flops:.3g} FLOP |
    | saved, of both together | {served.saved:.0%} |

    That is why Llama 3 8B was trained on 15T tokens, {llama_ratio:,.0f} for each parameter. It is no mistake of its
    makers and no refutation of Chinchilla: they minimized another sum.

    ### One token at a time

    Decoding reads every weight once for each new token, and for each earlier token of the sequence its keys and values:
    the *KV cache*. Of one token that is 2 x layers x key-value heads x head size x bytes of an element.
    """)
    return


@app.cell
def _():
    alone = tl.inference("llama-3-8b", phase="decode", batch=1, context=8192, device="h100-sxm")
    alone
    return


@app.function(hide_code=True)
def claims_serving() -> list[Claim]:
    where = {"phase": "decode", "device": "h100-sxm"}
    eight = tl.inference("llama-3-8b", batch=1, context=8192, **where)
    moved = sum(eight.moved_nbytes.values())
    multiplied = 8_030_261_248 - 128_256 * 4096 - 65 * 4096  # without the input embedding and the norms
    flops = 2 * multiplied + 4 * 32 * 32 * 128 * 8192
    assert eight.memory is not None
    around = {line.name: line.nbytes for line in eight.memory.lines}
    lost = 1 + around["fragmentation"] / around["tensors"]
    usable = ((eight.memory.usable_nbytes or 0) - around["CUDA context"] - around["cuBLAS workspaces"]) / lost
    small = tl.inference("gpt2", batch=1, context=1024, weights="int4", **where)
    matrices = 12 * 12 * 768**2  # 12 d^2 of each of 12 layers
    grown = tl.breaks("llama-3-8b", EIGHT_B, device="h100-sxm", count=64, along=["sequence", "devices"]).along
    first = {each.axis: each.breaks[0] for each in grown}
    return [
        Claim("KV cache of a token: 2 x 32 x 8 x 128 x 2", eight.token_nbytes, 2 * 32 * 8 * 128 * 2, unit="bytes"),
        Claim(
            "llama-2-7b, with a key-value head for each of its 32 heads: four times as much",
            tl.inference("llama-2-7b", batch=1, context=4096, **where).token_nbytes,
            4 * eight.token_nbytes,
        ),
        Claim("one sequence of 8,192: FLOPs per byte", eight.intensity, flops / moved, 1e-3),
        Claim("sequences of 8,192 that fit", eight.largest_batch, int((usable - 2 * 8_030_261_248) / (2**30 + 4.5e6))),
        Claim("gpt2 in int4: its matrices", small.weights.codes, matrices // 2, unit="bytes"),
        Claim("the sequence stops at the model's positions", first["sequence"].holds, 8192, unit="tokens"),
        Claim("twice the devices do not divide the batch", 64 % first["devices"].breaks != 0, True),
    ]


@app.cell
def _():
    lesson.claims(claims_serving())
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    1.2 FLOPs for each byte, on a device that does 295 in the time of one. Sequences that are decoded together share the
    read of the weights, and none shares its cache. So batches help until the caches fill the memory, and fewer
    key-value heads or fewer bits help at once. Move both:
    """)
    return


@app.cell(hide_code=True)
def _():
    context = mo.ui.slider(steps=[1024, 2048, 4096, 8192], value=8192, label="context", show_value=True)
    weights = mo.ui.dropdown(["bf16", "fp8", "int8", "int4"], value="bf16", label="weights")
    of_cache = mo.ui.dropdown(["bf16", "fp8", "int4"], value="bf16", label="cache")
    mo.hstack([context, weights, of_cache], justify="start")
    return context, of_cache, weights


@app.cell(hide_code=True)
def _(context, of_cache, weights):
    full = tl.inference(
        "llama-3-8b",
        phase="decode",
        batch=1,
        context=context.value,
        weights=weights.value,
        cache=of_cache.value,
        device="h100-sxm",
    )
    mo.ui.table(
        [
            {
                "sequences": row.batch,
                "fits": "yes" if row.fits else "no",
                "GB": round(row.device_nbytes / 1e9, 1),
                "tokens/s, at most": round(row.bound_tokens_per_second or 0),
            }
            for row in full.batches
        ],
        selection=None,
    )
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ### Fewer bits after training

    *Post-training quantization* stores each row of a weight matrix as small integers and one scale. Nothing is trained
    again. Here it is, for the network at the floor of your valley:
    """)
    return


@app.function
def quantized(weight: "torch.Tensor", bits: int) -> "torch.Tensor":
    """A matrix after its rows were rounded to integers of so many bits and multiplied by their scales again."""
    most = 2 ** (bits - 1) - 1
    scale = weight.abs().amax(1, keepdim=True) / most
    return (weight / scale).round().clamp(-most, most) * scale


@app.function
def loss_by_bits(model: "torch.nn.Module") -> dict[int, float]:
    from copy import deepcopy

    losses = {32: loss_of(model, source_of(32))}
    for bits in (8, 4, 3, 2):
        small = deepcopy(model)
        for layer in (small[2], small[4]):
            layer.weight.data = quantized(layer.weight.data, bits)
        losses[bits] = loss_of(small, source_of(32))
    return losses


@app.cell
def _(trained):
    mo.stop(not trained, mo.md("This experiment needs torch."))
    floor = min(list(trained.values())[-1], key=lambda row: row[3])
    by_bits = loss_by_bits(floor[0])
    by_bits
    return (by_bits,)


@app.cell
def _(by_bits):
    lesson.claims(
        [
            Claim("8 bits change the loss by less than 1 %", by_bits[8], by_bits[32], 0.01),
            Claim("2 bits cost more than 3, and 3 more than 4", by_bits[2] > by_bits[3] > by_bits[4], True),
        ]
    )
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    `trainledger quantize` does this to a model that you trained, and prints the change in perplexity; `trainledger
    inference gpt2 --weights int4` has the bytes of a model that you have not.

    ## Exercises

    A new seed gives new numbers. After a first miss there is a hint, after a second the derivation.
    """)
    return


@app.function(hide_code=True)
def exercise_best_size(seed: int) -> Exercise:
    draw = Random(seed)
    count, days = draw.choice([8, 16, 64, 128, 512]), draw.choice([7, 10, 14, 30])
    best = tl.optimal(device="h100-sxm", count=count, days=days, family=None)
    return Exercise(
        f"{count} H100 (989.5 TFLOP/s), {days} days, MFU 0.5, 20 tokens a parameter: the best N?",
        float(best.parameters),
        f"C = {count} x 989.5e12 x 0.5 x {days} x 86,400 = {best.budget.flops:.3g} FLOP; N = sqrt(C / 120).",
        hint="C = 6 N D, with D = 20 N.",
        mistakes={
            float(best.tokens): "Those are its tokens.",
            sqrt(best.budget.flops / 20): "6 FLOPs for each parameter and token: C = 120 N^2.",
            best.parameters * sqrt(2): "Half of the peak is reached, not all.",
        },
    )


@app.function(hide_code=True)
def exercise_overtrained(seed: int) -> Exercise:
    draw = Random(seed)
    flops, ratio = draw.choice([1e21, 1e22, 1e23]), draw.choice([100, 200, 500, 1000])
    asked = tl.optimal(flops=flops, family=None, ratio=ratio).asked
    assert asked is not None
    law = tl.optimal(flops=flops, family=None).loss_law
    return Exercise(
        f"You train {asked.parameters / 1e9:.3g}B parameters on {ratio} tokens each. The best run with the same loss "
        f"takes {asked.same_loss_flops:.3g} FLOP, yours {flops:.0e}. How much more is that, in percent?",
        100 * asked.overhead,
        f"{flops:.0e} / {asked.same_loss_flops:.3g} - 1. Each token served is cheaper for it: the model is smaller.",
        hint="More than the cheapest, not less than yours.",
        unit="%",
        tolerance=0.03,
        mistakes={
            100 * (1 - asked.same_loss_flops / flops): "That is the share of your FLOPs that could be saved.",
            100 * (asked.loss / law.E - 1): "That is how far the loss is above the entropy of text.",
        },
    )


@app.function(hide_code=True)
def exercise_cache(seed: int) -> Exercise:
    draw = Random(seed)
    name = draw.choice(["llama-3-8b", "llama-2-7b", "llama-3-70b", "mistral-7b", "gpt2-xl", "qwen3-8b"])
    context = draw.choice([1024, 512, 256])
    served = tl.inference(name, phase="decode", batch=1, context=context, device="h100-sxm")
    heads = served.run.model.attention
    layers = served.run.model.n_layers
    size = served.token_nbytes // (4 * layers * heads.n_kv_heads) if heads.n_kv_heads else 0
    return Exercise(
        f"{name}: {layers} layers, {heads.n_heads} heads, {heads.n_kv_heads} key-value heads of {size}, bf16. "
        f"The bytes of the KV cache of one sequence of {context:,} tokens, in MB?",
        context * served.token_nbytes / 1e6,
        f"2 x {layers} x {heads.n_kv_heads} x {size} x 2 bytes = {served.token_nbytes:,} bytes a token, "
        f"times {context:,}.",
        hint="Keys and values, two bytes each, in every layer.",
        unit="MB",
        mistakes={context * served.token_nbytes / 2e6: "Keys and values: two of each."},
    )


@app.function(hide_code=True)
def exercise_ridge(seed: int) -> Exercise:
    draw = Random(seed)
    name = draw.choice(["h100-sxm", "a100-sxm-80gb", "l4", "h200", "b200"])
    nbytes = draw.choice([2, 1])
    sheet = tl.device(name)
    ridge = sheet.peak_flops_per_second["bf16"] / sheet.memory_bytes_per_second
    return Exercise(
        f"Decode on {sheet.title}: bf16 peak {sheet.peak_flops_per_second['bf16'] / 1e12:.4g} TFLOP/s, "
        f"{sheet.memory_bytes_per_second / 1e12:.3g} TB/s, weights of {nbytes} byte(s), short contexts. "
        "From how many sequences is it no longer memory-bound?",
        ridge * nbytes / 2,
        f"A batch of b does 2 b FLOPs with each weight of {nbytes} byte(s): b = ridge {ridge:.1f} x {nbytes} / 2.",
        hint="FLOPs per byte of a batch of b against peak over bandwidth.",
        mistakes={ridge * nbytes: "Each weight takes two FLOPs, a multiplication and an addition."},
    )


@app.function(hide_code=True)
def exercise_write_the_rule(seed: int) -> Exercise:
    ratio = Random(seed).choice([10, 20, 40, 100])
    asked = [(flops, tl.optimal(flops=flops, family=None, ratio=ratio).asked) for flops in (1e18, 3e21, 5e24)]
    return Exercise(
        f"Write best(flops): the parameters of a model that spends a budget on {ratio} tokens for each.",
        f"def best(flops):\n    return (flops / (6 * {ratio})) ** 0.5\n",
        f"C = 6 N D and D = {ratio} N give N = sqrt(C / {6 * ratio}).",
        hint="Put D into C and solve for N.",
        start="def best(flops):\n    return flops\n",
        check=lesson.Gives("best", tuple(((flops,), float(model.parameters)) for flops, model in asked if model)),
    )


@app.cell(hide_code=True)
def _():
    EXERCISES = [exercise_best_size, exercise_overtrained, exercise_cache, exercise_ridge, exercise_write_the_rule]
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

    For the least loss N = sqrt(C / 120), and the valley is flat; for the least bill in use the model is smaller and
    sees more. Decoding is memory-bound: the weights are read for every token, so share the read, and shrink it.

    On the command line: `trainledger optimal --device h100-sxm --count 32 --days 14`. On the page:
    [Compute-optimal](../?calculator=optimal). Next: [closing the books](18_closing_the_books.html).
    """)
    return


if __name__ == "__main__":
    app.run()
