import marimo

__generated_with = "0.25.2"
app = marimo.App(app_title="13. Mixed precision as a recipe")

with app.setup:
    from collections.abc import Callable
    from math import erf, sqrt
    from random import Random

    import marimo as mo

    import trainledger as tl
    from trainledger.ledger.memory.timeline import highest_by_category
    from trainledger.report import lesson
    from trainledger.report.chart import COLOURS, Axis, Chart, Line
    from trainledger.report.lesson import Claim, Exercise
    from trainledger.spec.dtypes import FORMATS
    from trainledger.tensors.number import zero_up_to

    if lesson.HAS_TORCH:
        import torch
        from torch import Tensor


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # 13. Mixed precision as a recipe

    It is Saturday, and your run in fp32 takes 3.4 seconds a step. You write one line, `model.to(torch.bfloat16)`, and a
    step takes a twelfth of that, in half of the memory. The loss falls as it did. On Sunday evening you look again:
    since Saturday night it has hardly moved.

    Your colleague used bf16 too, and her run is fine. She did not switch the model; she followed a *recipe*, which says
    for every tensor in which format it is computed, kept and updated. Guess: how many bytes of states (parameter,
    gradient, two moments) does a parameter have in her run?
    """)
    return


@app.cell(hide_code=True)
def _():
    guess = mo.ui.text(label="bytes per parameter:")
    guess
    return (guess,)


@app.cell(hide_code=True)
def _(guess):
    mo.md(lesson.against(guess.value, state_nbytes("bf16-mixed"), "bytes") if guess.value else "")
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Three questions for each tensor

    In which format is it *computed*, in which is it *kept*, in which is it *updated*? The answers of `torch.autocast`
    with bf16, which is what most people mean by mixed precision:

    | tensor | format | why |
    |---|---|---|
    | parameters | fp32 | they are updated by small steps |
    | their copies in matmuls | bf16 | tensor cores multiply bf16; made once per forward |
    | sums inside a matmul | fp32 | thousands of terms; the hardware adds in fp32 |
    | outputs of matmuls | bf16 | half of the bytes to write and to keep |
    | norms, softmax, loss | fp32 | sums and exponentials over a row |
    | residual stream | fp32 | it is the sum of all layers |
    | gradients of parameters | fp32 | they have the format of their parameter |
    | moments of AdamW | fp32 | averages that change by a thousandth a step |

    So matmuls are mixed and the states are not: $4 + 4 + 8 = 16$ bytes, as in fp32. Autocast saves time and
    activations, and no byte of state.

    ## Why an update gets lost

    bf16 has 7 bits behind the point. Above 1 its numbers are $2^{-7}$ apart, below 1 half of that. A weight of 1 that
    is to become 0.999 is nearest to 1 again: the update is smaller than half of a step of $2^{-8}$. It is not rounded
    a little. It is *gone*, and it will be gone in the next step as well, and in every step after that.

    Rounding in fp32 does the same, at a step of $2^{-24}$. So do not compute less exactly than before where it is
    cheap: keep a *master copy* of each weight in fp32, update that, and round it to bf16 for the next forward. A
    thousand updates of 0.001, three ways:
    """)
    return


@app.function
def thousand_updates() -> dict[str, float]:
    bf16, fp32, master = torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(1.0), torch.tensor(1.0)
    weight = master.to(torch.bfloat16)
    for _ in range(1000):
        bf16 -= 0.001
        fp32 -= 0.001
        master -= 0.001
        weight = master.to(torch.bfloat16)  # what the next forward would use
    return {"bf16": bf16.item(), "fp32": fp32.item(), "bf16 with a master copy": weight.item()}


@app.cell
def _():
    thousand_updates() if lesson.HAS_TORCH else mo.md("needs torch")
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Four runs of one problem

    The same in a loss curve. Least squares with 16 unknowns, AdamW: in fp32; all in bf16; weights in bf16 with fp32
    masters; and autocast. This is the whole training loop, and what differs is two lines:
    """)
    return


@app.function
def losses(recipe: str, steps: int) -> list[float]:
    torch.manual_seed(0)
    x, wanted = torch.randn(256, 16), torch.randn(16)
    y = x @ wanted
    kept = torch.bfloat16 if recipe == "bf16" else torch.float32
    w = torch.zeros(16, dtype=kept, requires_grad=True)
    optimizer = torch.optim.AdamW([w], lr=0.01, weight_decay=0)  # its moments have the format of w
    seen = []
    for _ in range(steps):
        computed = w.to(torch.bfloat16) if recipe == "masters" else w
        with torch.autocast("cpu", torch.bfloat16, enabled=recipe == "autocast"):
            predicted = x.to(computed.dtype) @ computed
        (predicted - y.to(predicted.dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            seen.append((x @ w.float() - y).square().mean().item())  # judged in fp32
    return seen


@app.cell
def _():
    n_steps = 300 if lesson.QUICK else 1500
    recipes = {"fp32": "", "bf16": "", "masters": "", "autocast": "dash"}
    curves = {recipe: losses(recipe, n_steps) for recipe in recipes} if lesson.HAS_TORCH else {}
    picked = range(0, n_steps, 10)
    Chart(
        "Mean squared error of the weights that are kept",
        tuple(
            Line(list(picked), [max(curve[at], 1e-12) for at in picked], recipe, COLOURS[number], dash=recipes[recipe])
            for number, (recipe, curve) in enumerate(curves.items())
        ),
        Axis("step"),
        Axis("mean squared error", log=True),
        height=260,
    ) if curves else mo.md("needs torch")
    return (curves,)


@app.cell(hide_code=True)
def _(curves):
    said = (
        "It ends at "
        + ", ".join(f"{curve[-1]:.1e} ({recipe})" for recipe, curve in curves.items())
        + ". The bf16 run stops where its updates are smaller than half a step of its weights. Adam's step is about "
        "the learning rate whatever the gradient, so that happens early. With masters it goes on until the rounding of "
        "the *forward* is what is left."
        if curves
        else ""
    )
    mo.md(said)
    return


@app.function
def state_nbytes(precision: str, **more: object) -> float:
    """Bytes of parameters, gradients and optimizer state of GPT-2 XL for each parameter."""
    fields = {"kind": precision} | more
    recipe = {f"recipe.precision.{name}": value for name, value in fields.items()}
    recipe |= {"recipe.micro_batch": 1, "recipe.global_batch": 1, "recipe.seq_len": 64}
    step = tl.account("gpt2-xl", recipe, device="a100-sxm-80gb")
    most = highest_by_category(step)
    return sum(most[kind] for kind in ("parameters", "gradients", "optimizer state")) / step.parameters


@app.function
def activations(precision: str, sequences: int = 4) -> int:
    """Bytes of activations of GPT-2 XL at 1,024 tokens, with flash attention."""
    recipe = {"recipe.precision": precision, "recipe.micro_batch": sequences, "recipe.global_batch": sequences}
    return tl.account("gpt2-xl", recipe, device="a100-sxm-80gb").peak().by_category["activations"]


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## What each recipe costs

    The run of the story under every precision that trainledger knows, on an A100:
    """)
    return


@app.cell
def _():
    run = {"recipe.micro_batch": 4, "recipe.global_batch": 4}
    sweep = tl.compare("gpt2-xl", None, run, over="recipe.precision", device="a100-sxm-80gb")
    sweep
    return (sweep,)


@app.cell(hide_code=True)
def _(sweep):
    row = {each.value.split()[0]: each for each in sweep.rows}
    fp32, mixed = row["fp32"], row["bf16-mixed"]
    mo.md(rf"""
    fp32 to autocast: {fp32.step_seconds:.2f} s to {mixed.step_seconds:.3f} s, a factor of
    {fp32.step_seconds / mixed.step_seconds:.1f} of the 16 that tensor cores promise, for the rest of the step moves
    bytes and multiplies nothing. But the activations fall only from {fp32.activation_nbytes / 1e9:.1f} to
    {mixed.activation_nbytes / 1e9:.1f} GB. Where is the other half?

    Count as in chapter 11, now in bytes for one token and layer. In fp32 a layer keeps 64 D, all in bf16 32 D. Autocast
    keeps

    | | bytes |
    |---|--:|
    | the residual stream before both norms, in fp32 | 2 x 4 D |
    | the first norm's output, cast to bf16 three times, for q, k and v each | 3 x 2 D |
    | q, k, v and the attention's output | 4 x 2 D |
    | the second norm's output, cast | 2 D |
    | before and after the GELU | 2 x 8 D |

    which is 40 D: a cast of an activation is not remembered, so three matrices make three copies. (One matrix for q, k
    and v would save 4 D.) Casts of *weights* are remembered until the end of forward: 2 bytes more for each weight that
    is multiplied with. Both together are why autocast is not half.
    """)
    return


@app.function
def claims_account() -> list[Claim]:
    tokens, layers, d, heads, matrices = 1024, 48, 1600, 25, 48 * 12 * 1600**2 + 50257 * 1600
    small = 4 * heads + 16  # a sum of each head's row, and mean and deviation of two norms, always fp32
    per_sequence = (activations("bf16-mixed", 8) - activations("bf16-mixed", 4)) // 4
    a100, h100 = (tl.device(name).peak_flops_per_second for name in ("a100-sxm-80gb", "h100-sxm"))
    return [
        Claim("bytes a parameter: autocast, 4 + 4 + 8", state_nbytes("bf16-mixed"), 16.0, 1e-5),
        Claim("all in bf16, 2 + 2 + 4: no mixture", state_nbytes("bf16"), 8.0, 1e-5),
        Claim("with fp32 masters, 2 + 2 + 4 + 8", state_nbytes("bf16", master_weights=True), 16.0, 1e-5),
        Claim(
            "and fp32 gradients (Megatron-LM)",
            state_nbytes("bf16", master_weights=True, gradient_dtype="fp32"),
            18.0,
            1e-5,
        ),
        Claim("bf16 with fp32 moments, no masters", state_nbytes("bf16", moment_dtype="fp32"), 12.0, 1e-5),
        Claim(
            "activations, fp32: 64 D a layer",
            activations("fp32"),
            4 * tokens * (layers * (64 * d + small) + 8 * d + 8),
            1e-6,
            "bytes",
        ),
        Claim("bf16: 32 D", activations("bf16"), 4 * tokens * (layers * (32 * d + small) + 4 * d + 8), 1e-6, "bytes"),
        Claim("autocast, a sequence: 40 D", per_sequence, tokens * (layers * (40 * d + small) + 6 * d + 8)),
        Claim(
            "and once: 2 bytes for each weight of a matmul",
            activations("bf16-mixed") - 4 * per_sequence,
            2 * matrices,
            1e-6,
            "bytes",
        ),
        Claim(
            "tensor cores against fp32, A100 and H100",
            f"{a100['bf16'] / a100['fp32']:.1f} and {h100['bf16'] / h100['fp32']:.1f}",
            "16.0 and 14.8",
        ),
    ]


@app.cell
def _():
    lesson.claims(claims_account())
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## fp16 needs one part more

    fp16 has bits to spare where bf16 has not, ten behind the point, and lacks them in the exponent. Weights and
    activations stay in its range. Gradients do not: below $2^{-25}$ they are zero. *Loss scaling* multiplies the loss
    by a large number $s$ before backward, so that every gradient is $s$ times as large, and divides by $s$ before the
    update. If something overflows, the step is skipped and $s$ is halved; after many good steps it is doubled. That is
    `GradScaler`, and it belongs to fp16 alone: bf16 has the range of fp32 and needs none.
    """)
    return


@app.function
def share_that_is_zero(deviation: float, scale: float = 1.0) -> float:
    """Of normally distributed gradients, the share that fp16 rounds to zero, by the error function."""
    return erf(zero_up_to(FORMATS["fp16"]) / (deviation * scale) / sqrt(2))


@app.function
def claims_run() -> list[Claim]:
    if not lesson.HAS_TORCH:
        return []
    torch.manual_seed(0)
    gradients = 1e-8 * torch.randn(100_000)

    def zeros(dtype: torch.dtype, scale: float = 1.0) -> float:
        return ((gradients * scale).to(dtype) == 0).float().mean().item()

    def refused(**fields: str) -> str:
        try:
            torch.cuda.amp.autocast(**fields)
        except TypeError as error:
            return type(error).__name__
        return ""

    after = thousand_updates()
    ends = {recipe: losses(recipe, 600)[-1] for recipe in ("fp32", "bf16", "masters")}
    return [
        Claim("1 less 0.001, a thousand times, in bf16", after["bf16"], 1.0),
        Claim(
            "with a master copy it is where fp32 is", abs(after["bf16 with a master copy"] - after["fp32"]) < 1e-4, True
        ),
        Claim(
            "least squares: masters end at a tenth of bf16's error or less", ends["masters"] < ends["bf16"] / 10, True
        ),
        Claim("gradients of 1e-8 in fp16: zero", zeros(torch.float16), share_that_is_zero(1e-8), 1e-3),
        Claim("after a scale of 2^16, fewer than one in ten thousand", zeros(torch.float16, 2.0**16) < 1e-4, True),
        Claim("in bf16", zeros(torch.bfloat16), 0.0),
        Claim("torch.cuda.amp.autocast(device_type='cuda')", refused(device_type="cuda"), "TypeError"),
    ]


@app.cell
def _():
    lesson.claims(claims_run())
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Find the mistake

    A public account of this lecture shows mixed precision as
    `from torch.cuda.amp import autocast` and `with autocast(device_type="cuda"):`. The last claim ran it: it is a
    TypeError. The function of that module knows its device from its name; the one that takes a `device_type` is
    `torch.autocast`. Nobody had run the code.

    The same text lists as the gain of mixed precision: "weights in bf16, 8 bytes per parameter". Eight bytes are bf16
    *throughout*, your run of Saturday. The recipe that works has 16, with autocast and with masters alike: what is won
    is time and activations. Ask a text that promises half of the memory which of the two it means.

    ## Exercises
    """)
    return


@app.function(hide_code=True)
def exercise_bytes(seed: int) -> Exercise:
    words, kind, more = Random(seed).choice(
        [
            ("fp32 parameters under bf16 autocast", "bf16-mixed", {}),
            ("everything in bf16, moments too", "bf16", {}),
            ("bf16 parameters and gradients, fp32 masters and moments", "bf16", {"master_weights": True}),
            ("bf16 parameters, fp32 gradients, masters and moments", "bf16",
             {"master_weights": True, "gradient_dtype": "fp32"}),
            ("bf16 parameters and gradients, fp32 moments, no masters", "bf16", {"moment_dtype": "fp32"}),
        ]
    )  # fmt: skip
    answer = round(state_nbytes(kind, **more))
    return Exercise(
        f"AdamW, {words}: bytes of states for each parameter?",
        answer,
        "Parameter, gradient, master copy (if there is one), two moments: 2 bytes each in bf16, 4 in fp32.",
        "Four or five numbers; masters are a number of their own.",
        "bytes",
        mistakes={answer - 4: "Something in fp32 is missing: the masters, or one moment."},
    )


@app.function(hide_code=True)
def exercise_format(seed: int) -> Exercise:
    tensor, answer, why = Random(seed).choice(
        [
            ("a parameter, as the optimizer updates it", "fp32", "Small updates would be lost in bf16."),
            ("the input of a matmul in forward", "bf16", "Tensor cores multiply bf16; it is cast before."),
            ("the running sum inside a matmul", "fp32", "Tensor cores add in fp32."),
            ("the output of a linear layer", "bf16", "A matmul writes the format of its inputs."),
            ("the gradient of a weight, as AdamW reads it", "fp32", "It has the format of its parameter."),
            ("the second moment of AdamW", "fp32", "It has the format of its parameter, and changes by 1/1000 a step."),
            ("the log-probabilities of the loss", "fp32", "Losses and softmax are on autocast's fp32 list."),
            ("the query vectors that attention keeps for backward", "bf16", "They are the output of a linear layer."),
            ("the residual stream of a GPT-2", "fp32", "fp32 embeddings plus bf16 outputs are fp32."),
        ]
    )
    return Exercise(
        f"Under bf16 autocast, in which format is {tensor}?",
        answer,
        why,
        "Matmuls read and write bf16. Whatever sums, averages or is updated does not.",
        choices=("fp32", "bf16", "fp16", "fp8"),
    )


@app.function(hide_code=True)
def exercise_smallest_update(seed: int) -> Exercise:
    draw = Random(seed)
    weight, name = draw.choice([0.25, 0.5, 1.0, 2.0, 4.0]), draw.choice(["bf16", "fp16", "fp32"])
    bits = FORMATS[name].mantissa_bits
    answer = weight * FORMATS[name].epsilon / 2
    return Exercise(
        f"A weight of {weight} in {name} ({bits} bits behind the point) grows by an update and is rounded. Above "
        "which size does the update change it at all?",
        answer,
        f"The next number is {weight} x 2^-{bits} above; what is less than half of it rounds back.",
        f"The spacing above a power of two w is w x 2^-{bits}.",
        tolerance=1e-3,
        mistakes={2 * answer: "That is the spacing; half of it rounds up.", answer / 2: "Below the weight, not above."},
    )


@app.function(hide_code=True)
def exercise_device(seed: int) -> Exercise:
    name = Random(seed).choice(["t4", "v100-sxm-32gb", "a100-sxm-80gb", "h100-sxm", "rtx-4090", "l4"])
    device = tl.device(name)
    peaks = ", ".join(f"{kind} {peak / 1e12:.0f}" for kind, peak in device.peak_flops_per_second.items())
    return Exercise(
        f"{device.title} (TFLOP/s: {peaks}). You want 16 bits and as few parts as possible. Which recipe?",
        "bf16-mixed" if "bf16" in device.peak_flops_per_second else "fp16-mixed with a scaler",
        "bf16 where its matmuls are fast: no scaler. Older tensor cores know fp16 only, and then the scaler is a part.",
        "Which 16-bit formats have a peak? Which one needs loss scaling?",
        choices=("bf16-mixed", "fp16-mixed with a scaler", "fp16-mixed without one", "bf16 throughout"),
    )


@app.function(hide_code=True)
def exercise_scale(seed: int) -> Exercise:
    draw = Random(seed)
    exponent, power = draw.choice([-8.25, -8, -7.75, -7.5]), draw.choice([0, 1])
    answer = 100 * share_that_is_zero(10**exponent, 2.0**power)
    return Exercise(
        f"Gradients are normal with deviation {10**exponent:.3g}; the loss is scaled by {2**power}. Which percentage "
        "is zero in fp16? (`math.erf(limit / deviation / sqrt(2))` is the share below a limit.)",
        answer,
        f"The limit is 2^-25; scaled gradients have deviation {2**power} x {10**exponent:.3g}.",
        "fp16's smallest number is 2^-24, and half of it rounds to zero.",
        mistakes={100 - answer: "That is the share that survives."} if abs(answer - 50) > 2 else {},
    )


@app.function(hide_code=True)
def exercise_mend(seed: int) -> Exercise:
    solution = (
        "def update(master, gradient, lr):\n"
        "    master = master - lr * gradient.float()\n"
        "    weight = master.to(torch.bfloat16)\n"
        "    return master, weight\n"
    )
    faults = [
        ("master = master - lr * gradient.float()", "master = master.to(torch.bfloat16) - lr * gradient"),
        ("    return master, weight", "    return weight.float(), weight"),
        ("weight = master.to(torch.bfloat16)", "weight = master"),
        ("master - lr", "master + lr"),
    ]
    right, wrong = Random(seed).choice(faults)
    return Exercise(
        "`update` gets an fp32 master, a bf16 gradient and a learning rate. It shall return the new master in fp32 and "
        "the bf16 weight of the next forward. Mend it.",
        solution,
        f"`{wrong.strip()}` should be `{right.strip()}`.",
        "Update in fp32, round for the forward, and never let the rounded value become the master.",
        start=solution.replace(right, wrong),
        check=fault_of_update,
    )


@app.function(hide_code=True)
def fault_of_update(text: str) -> str:
    """What is wrong with a function ``update(master, gradient, lr)``; empty where masters stay exact."""
    if not lesson.HAS_TORCH:
        return "This one needs torch."
    written: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {}
    try:
        exec(text, {"torch": torch}, written)
        master, gradient = torch.tensor([1.0, -2.0]), torch.tensor([1.0, -0.5], dtype=torch.bfloat16)
        for _ in range(100):
            master, weight = written["update"](master, gradient, 1e-3)
        if (master.dtype, weight.dtype) != (torch.float32, torch.bfloat16):
            return f"The master is {master.dtype} and the weight {weight.dtype}."
        if not torch.allclose(master, torch.tensor([0.9, -1.95]), atol=1e-4):
            return f"100 updates of 0.001 and -0.0005 take 1 and -2 to {master.tolist()}."
        if not torch.equal(weight, master.to(torch.bfloat16)):
            return "The weight is not the rounded master."
    except Exception as error:
        return f"It should define update(master, gradient, lr); it ends with {type(error).__name__}: {error}."
    return ""


@app.cell(hide_code=True)
def _():
    EXERCISES = [
        exercise_format,
        exercise_bytes,
        exercise_smallest_update,
        exercise_device,
        exercise_scale,
        exercise_mend,
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

    Multiply in 16 bits, add and update in 32. The states stay at 16 bytes a parameter; what you win is the time of
    matmuls and some of the activations. fp16 needs a scaler, bf16 needs masters, and "all in bf16" is neither.

    On the command line: `trainledger compare gpt2-xl --over recipe.precision --device a100-sxm-80gb`. On the page:
    [Number formats](../?calculator=formats&value=0.999). Next: [data, seeds, determinism](14_data.html).
    """)
    return


if __name__ == "__main__":
    app.run()
