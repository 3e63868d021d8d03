import marimo

__generated_with = "0.25.2"
app = marimo.App(app_title="11. Memory of a step is a story in time")

with app.setup:
    from collections.abc import Callable, Iterable
    from random import Random

    import marimo as mo

    import trainledger as tl
    from trainledger.answers.pages.memory import memory_chart
    from trainledger.ledger.memory.timeline import highest_by_category, timeline
    from trainledger.report import lesson
    from trainledger.report.lesson import Claim, Exercise

    if lesson.HAS_TORCH:
        import torch
        from torch import Tensor, nn
        from torch.nn import functional as F


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # 11. Memory of a step is a story in time

    It is Thursday, and you have a GPU of 80 GB and a model of 1.56B parameters, GPT-2 XL. You did the arithmetic:
    16 bytes a parameter for AdamW in fp32, so 24.9 GB. More than half of the device is free. You start with six
    sequences of 1,024 tokens, and the first step dies: out of memory.

    The 24.9 GB were right as far as they go: parameters, gradients and moments. A step needs more than that, and not
    all of it at once. Guess: how many GB are alive in the worst moment of that step?
    """)
    return


@app.cell(hide_code=True)
def _():
    guess = mo.ui.text(label="GB:")
    guess
    return (guess,)


@app.cell(hide_code=True)
def _(guess):
    mo.md(lesson.against(guess.value, step_of(6).peak().nbytes / 1e9, "GB") if guess.value else "")
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Five kinds of bytes

    Everything that a training step keeps alive is one of five things, and each has its own lifetime:

    | | how many | alive |
    |---|---|---|
    | parameters | 4 N bytes in fp32 | always |
    | moments of AdamW | 8 N bytes | always |
    | gradients | 4 N bytes | from backward until the optimizer has used them |
    | activations | grow with the batch | from forward until backward has used them |
    | logits and loss | grow with batch x vocabulary | a moment between forward and backward |

    The first three depend on the model alone, the last two on what you feed it. The third column is what this chapter
    is about, and what a sum over the second cannot say.

    ## What is an activation, exactly?

    Not every tensor of forward. An *activation* in this account is what backward will need and forward therefore leaves
    alive. A linear layer $Y = X W$ has $\partial W = X^T \, \partial Y$ and $\partial X = \partial Y \, W^T$: it keeps
    its input $X$, and not its output. A ReLU keeps its output, to know where it was positive. Addition keeps nothing.

    These lines listen to every tensor that autograd saves and count each storage once; parameters and the batch are
    alive anyway and do not count:
    """)
    return


@app.function
def saved_nbytes(forward: "Callable[[], Tensor]", alive_anyway: "Iterable[Tensor]") -> int:
    sizes: dict[int, int] = {}

    def note(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        loss = forward()
    assert loss.requires_grad  # the graph, and with it what it saved, is alive up to here
    own = {tensor.untyped_storage().data_ptr() for tensor in alive_anyway}
    return sum(nbytes for pointer, nbytes in sizes.items() if pointer not in own)


@app.cell
def _():
    def small_mlp() -> int:
        mlp = nn.Sequential(nn.Linear(64, 256, bias=False), nn.ReLU(), nn.Linear(256, 8, bias=False))
        x = torch.randn(32, 64)
        return saved_nbytes(lambda: mlp(x).square().mean(), [x, *mlp.parameters()])

    small_mlp() if lesson.HAS_TORCH else mo.md("needs torch")
    return


@app.cell(hide_code=True)
def _():
    mo.md(rf"""
    By hand: 32 rows of 256 after the ReLU, which serve the ReLU and the second layer alike, and 32 rows of 8 for the
    square: 4 x 32 x (256 + 8) = {4 * 32 * (256 + 8):,} bytes. What the ReLU reads is not kept.

    ## A Transformer layer, tensor by tensor

    The same for one layer of GPT-2 and one token, in numbers; $D$ is the hidden size, $H$ the heads, $L$ the layers.
    The attention is written out: scores, softmax, mixture, each a tensor of its own.

    | operation | keeps | |
    |---|---|--:|
    | first norm | its input, which is the residual stream; mean and deviation | D + 2 |
    | projections to q, k, v | their input, the norm's output, once for all three | D |
    | scores | q and k | 2 D |
    | softmax | its output: one probability for each head and each token seen | H T |
    | mixture | v (the probabilities are there already) | D |
    | output projection | its input | D |
    | second norm | its input; mean and deviation | D + 2 |
    | first matrix of the MLP | its input | D |
    | GELU | its input | 4 D |
    | second matrix | its input, the GELU's output | 4 D |

    Together $16 D + H T + 4$ numbers per token and layer. After the last layer stands one more norm, whose output is
    the input of the head: $2 D + 2$. With 4 bytes each, $B$ sequences of $T$ tokens keep

    $$A = 4 \, B T \, \bigl[ L \, (16 D + H T + 4) + 2 D + 2 \bigr] \text{{ bytes.}}$$

    For GPT-2 XL ($L = 48$, $D = 1600$, $H = 25$, $T = 1024$) this is {activations_by_hand(1) / 1e9:.2f} GB *for each
    sequence*, of which the term $H T$, the square of the sequence length, is
    {4 * 1024 * 48 * 25 * 1024 / activations_by_hand(1):.0%}. Six of them are {activations_by_hand(6) / 1e9:.1f} GB.
    """)
    return


@app.function
def activations_by_hand(
    sequences: int, tokens: int = 1024, layers: int = 48, width: int = 1600, heads: int = 25
) -> int:
    of_a_layer = 16 * width + heads * tokens + 4
    return 4 * sequences * tokens * (layers * of_a_layer + 2 * width + 2)


@app.function
def step_of(sequences: int, micro_batches: int = 1, model: str = "gpt2-xl", **recipe: object) -> tl.Ledger:
    """The account of one step of GPT-2 XL in fp32, with the attention written out, on an A100."""
    fields: dict[str, object] = {"precision": "fp32", "attention": "math", "seq_len": 1024}
    fields |= {"micro_batch": sequences, "global_batch": sequences * micro_batches} | recipe
    return tl.account(model, {f"recipe.{name}": value for name, value in fields.items()}, device="a100-sxm-80gb")


@app.function
def at_the_loss(ledger: tl.Ledger) -> dict[str, int]:
    """Bytes by category when backward begins."""
    return next(moment.live for moment in timeline(ledger) if moment.entry.phase == "backward")


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    `tl.account` does this for any model: the ledger of one step, operation by operation, each with what it allocates,
    keeps and frees. A kept tensor is booked on the operation that *wrote* it, by PyTorch's name: the residual stream,
    which the norms need, on `add`; copies of q, k, v and of the mixture in another order on `clone`.
    """)
    return


@app.cell
def _():
    kept = step_of(6).by("name", "kept")
    {name: f"{nbytes / 1e9:.2f} GB" for name, nbytes in kept.items() if nbytes > 1e9}
    return


@app.function(hide_code=True)
def claims_kept() -> list[Claim]:
    d, tensors = 1600, 48 * 16 + 4
    # a layer: q, k, v, out (4 d^2 + 4 d), the MLP (8 d^2 + 5 d), two norms (4 d); then two embeddings and the last norm
    n = 48 * (12 * d**2 + 13 * d) + (50257 + 1024) * d + 2 * d
    states, at_loss = dict(step_of(1).resident), at_the_loss(step_of(1))
    scores = step_of(32, model="llama-7b", seq_len=2048).by("name", "kept")["_softmax"] / 32
    return [
        Claim("GPT-2 XL: 4 N bytes of parameters", states["parameters"], 4 * n),
        Claim(
            "moments: 8 N, and 4 for the step counter of each tensor", states["optimizer state"], 8 * n + 4 * tensors
        ),
        Claim("activations of a sequence, by the table above", at_loss["activations"], activations_by_hand(1)),
        Claim("scores of a layer: B 32, H 32, T 2,048, printed", scores, 17.2e9, 2e-3),
    ]


@app.function(hide_code=True)
def assignment_xl(sequences: int) -> tl.Ledger:
    """The XL model of Stanford's CS336, assignment 1: 2.127B parameters, in fp32."""
    layer = {"attention.bias": False, "feed_forward.bias": False, "feed_forward.gated": True}
    model = {"norm": "rmsnorm", "tie_embeddings": False, "positions": "rope", "feed_forward.activation": "silu"} | layer
    recipe = {"recipe.precision": "fp32", "recipe.attention": "math", "recipe.seq_len": 1024}
    recipe |= {"recipe.micro_batch": sequences, "recipe.global_batch": sequences}
    return tl.account("gpt2-xl", {f"model.{name}": value for name, value in model.items()} | recipe, backend="cuda")


@app.cell
def _():
    lesson.claims(claims_kept())
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    All but the last, a number printed with three digits, are equal to the byte.

    ## The peak is a moment

    Below is every operation of a step from left to right, and what is alive while it runs. Move the batch and watch
    *where* the highest point is.
    """)
    return


@app.cell(hide_code=True)
def _():
    model = mo.ui.dropdown(["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"], value="gpt2-xl", label="model")
    sequences = mo.ui.slider(1, 16, value=5, label="sequences", show_value=True)
    tokens = mo.ui.slider(steps=[64, 128, 256, 512, 1024], value=1024, label="tokens", show_value=True)
    micro_batches = mo.ui.slider(steps=[1, 2, 4], value=1, label="micro-batches", show_value=True)
    attention = mo.ui.dropdown({"written out": "math", "flash": "sdpa"}, value="written out", label="attention")
    mo.hstack([model, sequences, tokens, micro_batches, attention], justify="start", wrap=True)
    return attention, micro_batches, model, sequences, tokens


@app.cell
def _(attention, micro_batches, model, sequences, tokens):
    chosen = step_of(sequences.value, micro_batches.value, model.value, seq_len=tokens.value, attention=attention.value)
    memory_chart(chosen, f"Memory over one step of {model.value}", usable_nbytes=80 * 10**9)
    return (chosen,)


@app.cell(hide_code=True)
def _(chosen):
    peak = chosen.peak()
    most = highest_by_category(chosen)
    table = "\n    ".join(
        f"| {category} | {most[category] / 1e9:.2f} | {peak.by_category.get(category, 0) / 1e9:.2f} |"
        for category in most
        if most[category] > 10**7
    )
    mo.md(rf"""
    | | most that is ever alive, GB | alive at the peak, GB |
    |---|--:|--:|
    {table}
    | together | {sum(most.values()) / 1e9:.2f} | **{peak.nbytes / 1e9:.2f}** |

    The peak is in {peak.entry.phase}, at `{peak.entry.name}` of {peak.entry.path or "the model"}. The first column adds
    up things that never meet. *Scratch* is what an operation writes for the next one, and nobody keeps.
    """)
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    Read the figure from the left. Parameters and moments are a floor. Forward climbs: each layer lays its activations
    on the heap and takes nothing away. At the top stand the logits, with a column for each of $V$ words. Three tensors
    of that size are alive together for one instant: the log-probabilities, their gradient, and the gradient of the
    logits that is just being written. All are in fp32, the dtype in which the loss is computed whatever that of the
    weights: $12 \, B T V$ bytes. That instant is the peak:

    $$\text{peak} = \underbrace{4 N}_{\text{parameters}} + \underbrace{8 N}_{\text{moments}} + A + 3 \cdot 4 \, B T V.$$

    No gradient of a parameter is in it: the first is written an operation later. From there on each layer of backward
    adds its gradients and frees its activations, and as long as its activations are more bytes, the heap shrinks.

    With a small batch the opposite holds: 64 tokens have hardly any activations, backward only climbs, and the peak
    moves to its very end, where all gradients are there and no activation is left: $16 N$ and a little. Only then are
    16 bytes a parameter all that you need. Try it with the sliders.

    There is a third place. With the attention written out, backward of a layer makes two more tensors of scores, the
    gradient of the probabilities and that of the scores, $4 B H T^2$ bytes each. Where sequences are long and the
    vocabulary is small, the peak is there, in the last layer, which is the first that backward comes to.

    ## Accumulation moves the gradients under the peak

    Five sequences fit. You want a batch of ten, so you run two *micro-batches* of five, and let their gradients add up
    before the optimizer steps. Activations are those of one micro-batch. But the second forward begins while the
    gradients of the first are still there, so now they stand below the peak, whole: $+ 4 N$.
    """)
    return


@app.cell(hide_code=True)
def _():
    five, six, ten = (f"{step_of(size).peak().nbytes / 1e9:.1f} GB" for size in (5, 6, 10))
    usable = tl.device("a100-sxm-80gb").usable_nbytes
    mo.md(rf"""
    Five sequences in one go: {five}. Twice five: {step_of(5, 2).peak().nbytes / 1e9:.1f} GB. Ten at once would be
    {ten}. So the sum of $16 N$, $A$ and the logits, wrong for a single micro-batch, is right as soon as you accumulate.

    And six, {six}? The chapter counts tensors, and 80 GB as 80 x 10⁹ bytes. An A100 of that name leaves a program about
    {usable / 1e9:.0f} x 10⁹, of which fragments of the allocator and workspaces of kernels take a share: six are a
    matter of luck.

    What does a smaller micro-batch cost? Take 32 sequences of GPT-2 XL in bf16 with flash attention on an A100, four
    micro-batches of 8 or sixteen of 2:
    """)
    return


@app.cell
def _():
    def accumulated(micro_batch: int) -> str:
        recipe = {"recipe.global_batch": 32, "recipe.micro_batch": micro_batch}
        step = tl.predict("gpt2-xl", recipe, device="a100-sxm-80gb")
        live = (step.peak_by_category[kind] / 1e9 for kind in ("activations", "logits and loss", "gradients"))
        return f"{micro_batch} | " + " | ".join(f"{size:.2f}" for size in (*live, step.step_seconds))

    heads = "micro-batch | activations, GB | logits, GB | gradients, GB | step, predicted, s\n--:|--:|--:|--:|--:\n"
    mo.md(heads + "\n".join(accumulated(micro_batch) for micro_batch in (8, 4, 2, 1)))
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    A quarter of the micro-batch is not a quarter of the activations. Autocast casts each matrix to bf16 once per
    forward, and backward needs the copy: 2 bytes for each weight that is multiplied with, whatever the batch. And the
    time grows, because small kernels fill a device badly and all gradients are read and written once more for every
    micro-batch.
    """)
    return


@app.function(hide_code=True)
def claims_peak() -> list[Claim]:
    n, batch, tokens, vocabulary = 1_557_611_200, 5, 1024, 50257
    counters, ids, loss = 4 * 772, 16 * tokens, 8  # ids: input and target, 8 bytes each; loss: its value, its weight
    one = step_of(batch)
    by_hand = 12 * n + counters + activations_by_hand(batch) + 12 * batch * tokens * vocabulary + batch * ids + loss
    eight, two = (
        tl.account("gpt2-xl", {"recipe.global_batch": 32, "recipe.micro_batch": size}, device="a100-sxm-80gb").peak()
        for size in (8, 2)
    )
    # two sizes give the slope, and what is left at no sequence at all
    of_autocast = two.by_category["activations"] * 8 / 6 - eight.by_category["activations"] * 2 / 6
    of_matmuls = 48 * 12 * 1600**2 + 50257 * 1600
    grown = step_of(batch, 4).peak().nbytes - one.peak().nbytes
    fits = next(size for size in range(1, 20) if assignment_xl(size + 1).peak().nbytes > 80e9)
    of_a_sequence = 4 * tokens * (48 * (8 * 1600 + 2 * 25 * tokens + 2 * 6400) + 1600 + 2 * vocabulary)
    summed = (80 * 10**9 - 16 * 2_127_057_600) // of_a_sequence
    tiny = step_of(1, seq_len=64).peak().by_category["gradients"]
    return [
        Claim("the peak with 5 sequences: 12 N + A + 12 B T V, ids and loss", one.peak().nbytes, by_hand, unit="bytes"),
        Claim("it is at the loss", one.peak().entry.path, "loss"),
        Claim("4 micro-batches add 4 N, their ids, the sum of losses", grown, 4 * n + 3 * batch * ids + 4, 0, "bytes"),
        Claim(
            "what autocast keeps anyway: 2 bytes for each weight of a matmul",
            of_autocast,
            2 * of_matmuls,
            1e-6,
            "bytes",
        ),
        Claim("one sequence of 64 tokens: gradients at the peak, all 4 N", tiny, 4 * n, 0, "bytes"),
        Claim(f"the assignment's XL on 80 GB: sequences at the peak, where its sum allows {summed}", fits, 4),
    ]


@app.cell
def _():
    lesson.claims(claims_peak())
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    The last row is an exercise of a well-known course. Its handout asks for "parameters, activations, gradients and
    optimizer state" of a model of 2.127B parameters. They add up to $15{,}517{,}753{,}344 \, B + 34{,}032{,}921{,}600$
    bytes for $B$ sequences: two on 80 GB. That is a sum and not the peak. It has 4 N of gradients too many for this
    moment, and the scores before the softmax, which no backward needs. And it has too little where it counts two
    tensors of the inner size: SwiGLU keeps four. Say which of the two questions you answer.

    ## Try it here

    A Transformer of your own, in plain PyTorch. `tl.trace` runs a step on tensors without values and writes its ledger;
    `tl.meter` records a step that really runs. Both are compared byte by byte.
    """)
    return


@app.function
def language_model(vocabulary: int, tokens: int, width: int, heads: int, layers: int) -> "nn.Module":
    class LanguageModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kind = {"dropout": 0.0, "activation": F.gelu, "batch_first": True, "norm_first": True}
            self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
            blocks = (nn.TransformerEncoderLayer(width, heads, 4 * width, **kind) for _ in range(layers))
            self.blocks = nn.ModuleList(blocks)
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

        def forward(self, ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
            x_BTD = self.token(ids_BT) + self.place(torch.arange(ids_BT.shape[1]))
            causal = nn.Transformer.generate_square_subsequent_mask(ids_BT.shape[1])
            for block in self.blocks:
                x_BTD = block(x_BTD, src_mask=causal, is_causal=True)
            return F.cross_entropy(self.head(self.norm(x_BTD)).flatten(0, 1), targets_BT.flatten())

    return LanguageModel()


@app.function
def traced_and_metered() -> tuple[tl.Ledger, tl.Ledger, int]:
    """The ledgers of one step, traced and really run, and the bytes that autograd itself says it saved."""
    torch.manual_seed(0)
    width, layers = (64, 2) if lesson.QUICK else (256, 6)
    model = language_model(8192, 128, width, 4, layers)
    batch = torch.randint(8192, (2, 4, 128))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # the first one makes the moments
    saved = saved_nbytes(lambda: model(*batch), [batch, *model.parameters()])
    traced = tl.trace(model, tuple(batch), optimizer=optimizer)
    with tl.meter(model, optimizer) as metered:
        step()
    return traced, metered.ledger, saved


@app.cell
def _():
    measured = traced_and_metered()[1] if lesson.HAS_TORCH else None
    memory_chart(measured, "Memory over one step, as it ran") if measured is not None else mo.md("needs torch")
    return


@app.function(hide_code=True)
def claims_measured() -> list[Claim]:
    if not lesson.HAS_TORCH:
        return []
    traced, metered, saved = traced_and_metered()
    return [
        Claim("kept: the trace, and autograd's own list with the loss's 4 bytes", traced.kept_nbytes, saved + 4),
        Claim("the peak: without values, and as it ran", traced.peak().nbytes, metered.peak().nbytes, unit="bytes"),
    ]


@app.cell
def _():
    lesson.claims(claims_measured())
    return


@app.cell(hide_code=True)
def _():
    mo.md(rf"""
    ## Find the mistake

    A public account of this lecture gives a rule for activations: "2 B T d L bytes in bf16", and for
    $d = 2048$, $L = 24$, $B = 8$, $T = 2048$ prints 3.2 GB. The rule gives {2 * 8 * 2048 * 2048 * 24 / 1e9:.2f} GB, so
    the number is not even the rule's. But the rule is the real mistake: it keeps $D$ numbers of a layer, and you have
    counted $16 D$ above. The account of that model, in bf16 and with flash attention, which has no $H T$:
    """)
    return


@app.function(hide_code=True)
def claims_mistake() -> list[Claim]:
    batch, tokens, layers, d, heads, vocabulary = 8, 2048, 24, 2048, 16, 32000
    fields = {"model.vocab_size": vocabulary, "model.tie_embeddings": True, "model.block": "serial"}
    fields |= {"model.attention.bias": False, "model.feed_forward.bias": False, "recipe.precision": "bf16"}
    fields |= {"recipe.micro_batch": batch, "recipe.global_batch": batch, "recipe.seq_len": tokens}
    # 2 bytes for 16 D; 4 for one sum of each head's row and for the four statistics of two norms; log-probabilities
    of_a_token = layers * (2 * 16 * d + 4 * heads + 4 * 4) + 2 * 2 * d + 8 + 4 * vocabulary
    return [
        Claim(
            "kept by forward, not 3.2 GB",
            tl.account("pythia-1.4b", fields, device="h100-sxm").kept_nbytes,
            batch * tokens * of_a_token,
            1e-4,
            "bytes",
        )
    ]


@app.cell
def _():
    lesson.claims(claims_mistake())
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Exercises

    A new seed gives new numbers. The formulas of this chapter suffice; a pocket calculator helps. GB are 10⁹ bytes.
    """)
    return


@app.function(hide_code=True)
def exercise_activations(seed: int) -> Exercise:
    draw = Random(seed)
    model, layers, d, heads = draw.choice([("gpt2", 12, 768, 12), ("gpt2-medium", 24, 1024, 16)])
    sequences, tokens = draw.choice([2, 4, 8]), draw.choice([256, 512, 1024])
    answer = at_the_loss(step_of(sequences, model=model, seq_len=tokens))["activations"] / 1e9
    of_scores = 4 * sequences * tokens * layers * heads * tokens / 1e9
    return Exercise(
        f"{model} (L = {layers}, D = {d}, H = {heads}), fp32, attention written out, {sequences} sequences of "
        f"{tokens:,} tokens: GB of activations?",
        answer,
        f"4 x {sequences} x {tokens} x ({layers} x (16 x {d} + {heads} x {tokens}) + 2 x {d}) bytes.",
        "16 D + H T numbers per token and layer, of 4 bytes each.",
        "GB",
        mistakes={
            answer / 2: "fp32 has 4 bytes.",
            answer - of_scores: "The scores are missing: H T numbers for each token and layer.",
            answer / layers: "That is one layer.",
        },
    )


@app.function(hide_code=True)
def exercise_when(seed: int) -> Exercise:
    model, sequences, tokens, attention = Random(seed).choice(
        [
            ("gpt2", 8, 1024, "flash attention"),
            ("gpt2-medium", 4, 1024, "attention written out"),
            ("pythia-1.4b", 1, 128, "flash attention"),
            ("llama-3-8b", 1, 256, "flash attention"),
            ("llama-7b", 1, 2048, "attention written out"),
        ]
    )
    kernel = "sdpa" if attention == "flash attention" else "math"
    run = step_of(sequences, model=model, seq_len=tokens, attention=kernel)
    places = {
        "forward": "in the middle of forward",
        "loss": "at the loss, between forward and backward",
        "layers": "in backward of the last layer, with its scores and their gradient",
        "embed": "at the end of backward, when all gradients are there",
    }
    at = run.peak().entry
    spec = tl.model(model)
    return Exercise(
        f"{model} in fp32 ({run.parameters / 1e9:.2f}B parameters, {spec.vocab_size:,} words, "
        f"{spec.attention.n_heads} heads), {sequences} x {tokens:,} tokens, {attention}. When is the peak?",
        places[next(name for name in places if name in at.path)],
        "Compare 12 B T V bytes of logits, two tensors of 4 B H T^2 in backward of one layer, and 4 N of "
        f"gradients less the activations that they replace. Here it is `{at.name}` of {at.path}.",
        "Forward only climbs. What is largest: the logits, the scores of a layer, or all gradients less "
        "the activations?",
        choices=tuple(places.values()),
    )


@app.function(hide_code=True)
def exercise_logits(seed: int) -> Exercise:
    draw = Random(seed)
    model, vocabulary = draw.choice([("gemma-2b", 256_000), ("llama-3-8b", 128_256), ("llama-7b", 32_000)])
    sequences, tokens = draw.choice([2, 4, 8]), draw.choice([1024, 2048])
    run = step_of(sequences, model=model, seq_len=tokens, precision="bf16", attention="sdpa")
    answer = highest_by_category(run)["logits and loss"] / 1e9
    return Exercise(
        f"{vocabulary:,} words, {sequences} sequences of {tokens:,} tokens, weights in bf16 and the loss in fp32, as "
        "is usual. How many GB are logits, log-probabilities and their gradients at most?",
        answer,
        f"Three tensors of fp32: 3 x 4 x {sequences} x {tokens} x {vocabulary} bytes, however large the model is.",
        "Three tensors are alive at once, and the loss reads fp32.",
        "GB",
        mistakes={answer / 3: "Three of them are alive at once.", answer / 2: "The loss is computed in fp32."},
    )


@app.function(hide_code=True)
def exercise_largest_batch(seed: int) -> Exercise:
    draw = Random(seed)
    model, gigabytes = draw.choice([("gpt2-large", 40), ("gpt2-xl", 80), ("gpt2-medium", 24)])
    tokens, times = draw.choice([512, 1024]), draw.choice([1, 4])
    runs = [step_of(size, times, model, seq_len=tokens) for size in (20, 21)]  # so many that the peak is at the loss
    slope = runs[1].peak().nbytes - runs[0].peak().nbytes
    states = runs[0].peak().nbytes - 20 * slope
    largest = int((gigabytes * 10**9 - states) // slope)
    around = [step_of(size, times, model, seq_len=tokens).peak().nbytes for size in (largest, largest + 1)]
    assert around[0] <= gigabytes * 10**9 < around[1]
    return Exercise(
        f"{model} ({runs[0].parameters / 1e9:.3f}B parameters), fp32, AdamW, micro-batches in a step: {times}. A "
        f"sequence of {tokens} tokens adds {slope / 1e9:.3f} GB of activations and logits to the peak. How many "
        f"sequences fit into {gigabytes} GB?",
        largest,
        f"{'16 N, for the gradients of earlier micro-batches are there' if times > 1 else '12 N, without gradients'}: "
        f"({gigabytes} - {states / 1e9:.2f}) / {slope / 1e9:.3f} = {(gigabytes * 1e9 - states) / slope:.2f}.",
        "Which of parameters, moments and gradients are there at the loss? With accumulation?",
        mistakes={int(gigabytes * 10**9 // slope): "The states take their part of the memory first."},
    )


@app.function(hide_code=True)
def exercise_mend(seed: int) -> Exercise:
    solution = (
        "def activations(B, T, D, H, L):\n"
        "    per_token_and_layer = 16 * D + H * T\n"
        "    return 4 * B * T * (L * per_token_and_layer + 2 * D)\n"
    )
    faults = [("16 * D", "12 * D"), ("H * T", "H"), ("4 * B", "2 * B"), ("L * per", "per"), ("B * T * (", "T * (")]
    right, wrong = Random(seed).choice(faults)
    return Exercise(
        "A colleague's function for the activations of a GPT-2 in fp32 with the attention written out, in bytes, is "
        "wrong in one place. Mend it; statistics of norms may be left out.",
        solution,
        f"`{wrong}` should be `{right}`.",
        "Go through the table of the layer; then bytes, sequences, tokens, layers.",
        start=solution.replace(right, wrong),
        check=fault_of_activations,
    )


@app.function(hide_code=True)
def fault_of_activations(text: str) -> str:
    """What is wrong with a function ``activations(B, T, D, H, L)``; empty where it agrees with the account."""
    written: dict[str, Callable[..., float]] = {}
    try:
        exec(text, {}, written)
        for model, heads, d, layers, tokens in (("gpt2", 12, 768, 12, 256), ("gpt2-medium", 16, 1024, 24, 512)):
            given = written["activations"](3, tokens, d, heads, layers)
            right = at_the_loss(step_of(3, model=model, seq_len=tokens))["activations"]
            if abs(given - right) > 0.01 * right:
                return f"{model}, 3 x {tokens} tokens: {given / 1e9:.3f} GB; the account says {right / 1e9:.3f} GB."
    except Exception as error:
        return f"It should define activations(B, T, D, H, L); it ends with {type(error).__name__}: {error}."
    return ""


@app.cell(hide_code=True)
def _():
    EXERCISES = [exercise_activations, exercise_when, exercise_logits, exercise_largest_batch, exercise_mend]
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

    Ask of every byte *from when until when*. At the loss of a single micro-batch there are 12 N, the activations and
    three tensors of the vocabulary's width; with accumulation the gradients come to it, and with a tiny batch nothing
    but 16 N is left.

    On the command line: `trainledger explain memory gpt2-xl --symbolic B --memory 80GB --set recipe.precision=fp32
    --set recipe.attention=math`. On the page:
    [Memory](../?calculator=memory&model=gpt2-xl&recipe.seq_len=1024&recipe.micro_batch=5). Next:
    [keep or recompute](12_checkpointing.html).
    """)
    return


if __name__ == "__main__":
    app.run()
