"""Model: parameters and forward FLOPs by component, and how their shares change as size and context grow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import trainledger as tl
from trainledger.answers.explain import account_terms
from trainledger.answers.load import resolve
from trainledger.answers.pages.model import (
    components_chart,
    components_table,
    forward_totals,
    ordered,
    shares_chart,
    shares_table,
    title_of,
)
from trainledger.answers.pages.plain_data import plain, run_data
from trainledger.forecast.explain import account as explained
from trainledger.forecast.plan.family import scaled
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.model.parameters import SCORES, ParameterCount, forward_flops, parameters
from trainledger.report.document import Document, section
from trainledger.spec.layout import AXES
from trainledger.spec.model import ModelSpec
from trainledger.spec.run import Run
from trainledger.spec.units import format_count, format_flops, format_percent
from trainledger.web.calculator import PLAIN, Calculator, Drawing, Headline, Progress, Reply
from trainledger.web.field import FILE, YES_OR_NO, Field, Query, of_run, powers, steps
from trainledger.web.run import (
    MODEL,
    PASTED,
    more_positions,
    of_pasted,
    run_file_of,
    sequence_of,
    settings_of,
    source_of,
    texts_of,
    words_of,
)

_SEQUENCES = tuple(2**index for index in range(9, 21))
_FACTORS = tuple(2.0**index for index in range(-4, 5))
# A model has no layout and no batch: one sequence on one device, whatever a pasted run file says.
_ALONE = {"layout.auto": "false", "cluster.count": "1", "recipe.global_batch": "1", "recipe.micro_batch": "1"} | {
    f"layout.{axis}": "1" for axis in (*AXES, "expert")
}
_LARGEST = 10**14  # parameters
_KAPLAN = "Kaplan et al. 2020 (arXiv 2001.08361), section 2.1: backward has two matmuls for each one of forward"


def _reply(query: Query, progress: Progress) -> Reply:
    asked = completed(query)
    run = resolve(source_of(asked), settings_of(asked), search=False)
    run = replace(run, layout=replace(run.layout, auto=False))  # for a step of one device no layout is searched for
    count, ledger = parameters(run.model), tl.account(run)
    tokens, kernel = run.recipe.seq_len, run.recipe.attention
    flops = forward_flops(run.model, tokens, attention=kernel)
    return Reply(
        document=_document(run, count, flops, ledger),
        headlines=tuple(_headlines(run, count, flops, ledger)),
        verdict=(
            f"{format_count(count.total)} parameters; the forward of {tokens:,} tokens takes "
            f"{format_flops(sum(flops.values()))}, of which attention scores are "
            f"{format_percent(flops[SCORES] / sum(flops.values()))}."
        ),
        tone=PLAIN,
        drawings=tuple(_drawings(run, count, flops)),
        values=_values(run, query),
        unused=_unused(run, query),
        words=words_of("explain flops", asked),
        python=_python(asked),
        run_file=run_file_of(run),
        notes=more_positions(asked, query),
    )


def completed(query: Query) -> Query:
    """The query with one sequence on one device; a longer one than the model takes makes it take as many."""
    if query[FILE]:
        return replace(query, given=_ALONE | dict(query.given))
    given = sequence_of(query) | {"cluster.device": "h100-sxm"} | dict(query.given)
    return replace(query, given=given)


def _unused(run: Run, query: Query) -> dict[str, str]:
    """The fields that do not count, with the reason."""
    found, spec = of_pasted(query), run.model
    if spec.experts is None:
        names = ("per_token", "expert_d_ff", "n_shared", "n_dense_layers")
        found |= {f"model.feed_forward.{name}": "there are no experts" for name in names}
    if spec.latent is None:
        found["model.attention.q_rank"] = "keys and values have no latent"
    else:
        found |= {f"model.attention.{each}": "latent attention has its own" for each in ("n_kv_heads", "head_dim")}
    if spec.attention.window is None:
        found["model.attention.global_every"] = "there is no window"
    return found


def _values(run: Run, query: Query) -> dict[str, str]:
    """The sizes of the model, those that follow from others too."""
    spec = run.model
    own = {"model.attention.n_kv_heads": str(spec.kv_heads), "model.attention.head_dim": str(spec.head_size)}
    if spec.latent is not None:
        own = {}
    if spec.experts is not None:
        own["model.feed_forward.expert_d_ff"] = str(spec.experts.width)
    return texts_of(run, query) | own


def _headlines(run: Run, count: ParameterCount, flops: dict[str, int], ledger: Ledger) -> list[Headline]:
    spec, tokens, forward = run.model, run.recipe.seq_len, sum(flops.values())
    scores, parts = flops[SCORES], ordered(count.by_component)
    totals = forward_totals(spec, flops, tokens)
    headlines = [
        Headline(
            name="total", title="parameters", value=count.total, unit="count", basis="exact",
            formula=" + ".join(f"{format_count(count.by_component[part])} {title_of(part)}" for part in parts),
            source="shapes of all modules",
        ),
    ]  # fmt: skip
    if spec.experts is not None:
        mixture = spec.experts
        headlines.append(
            Headline(
                name="active", title="active parameters", value=count.active, unit="count", basis="exact",
                formula=f"all but {mixture.n_experts - mixture.per_token} of {mixture.n_experts} experts of each layer",
                source="those that one token passes through",
            )
        )  # fmt: skip
    headlines += [
        Headline(
            name="forward", title=f"forward FLOPs of {tokens:,} tokens", value=forward, unit="flops", basis="exact",
            formula=" + ".join(f"{format_flops(flops[each])} {title_of(each)}" for each in ordered(flops)),
            source="2 m n k for each matmul, attention counted dense",
        ),
        Headline(
            name="per_token", title="forward FLOPs of a token", value=totals["per_token"], unit="flops", basis="exact",
            formula=f"{format_flops(forward)} / {tokens:,}; 2 N = {format_flops(2 * count.active)}",
            source="2 N for each token is the rule of thumb (Kaplan et al. 2020)",
        ),
        _backward(ledger),
        Headline(
            name="scores_share", title="share of attention scores", value=totals["scores_share"], unit="share",
            formula=f"scores / all = {format_flops(scores)} / {format_flops(forward)}", basis="exact",
            source="queries times keys and probabilities times values grow with the square of the tokens",
        ),
    ]  # fmt: skip
    if totals["half_at"] is not None:
        headlines.append(
            Headline(
                name="half_at",
                title="tokens at which scores are half",
                value=totals["half_at"],
                unit="integer",
                formula=f"T x rest / scores = {tokens:,} x {format_flops(forward - scores)} / {format_flops(scores)}",
                basis="exact",
                source="scores grow with T^2, all other matmuls with T",
            )
        )
    return headlines


def _backward(ledger: Ledger) -> Headline:
    """The model FLOPs of backward over those of forward, and what kernels run."""
    model, run = ledger.by("phase", "model_flops"), _matmuls(ledger)
    ratio = f"{format_flops(model['backward'])} / {format_flops(model['forward'])}"
    return Headline(
        name="backward_to_forward", title="backward to forward", value=model["backward"] / model["forward"],
        unit="factor", formula=f"model FLOPs: {ratio}; kernels run {run['backward'] / run['forward']:.4g} times the "
        "forward, as fused attention computes its scores again", basis="exact", source=_KAPLAN,
    )  # fmt: skip


def _matmuls(ledger: Ledger) -> dict[str, int]:
    """FLOPs of matmuls and attention by phase."""
    return ledger.filter(lambda entry: entry.kind in ("matmul", "attention")).by("phase")


def _document(run: Run, count: ParameterCount, flops: dict[str, int], ledger: Ledger) -> Document:
    account = explained.of_numbers(run, ledger)
    return Document(
        title=f"The model {run.model.name}",
        sections=(
            section("By component", components_table(count.by_component, flops)),
            section("Parameters line by line", *account_terms("parameters", explained.parameters(account))),
            section("FLOPs of a step, line by line", *account_terms("flops", explained.flops(account))),
        ),
        data=lambda: {
            "run": run_data(run),
            "parameters": plain(count),
            "tokens": run.recipe.seq_len,
            "forward_flops": flops,
            "totals": forward_totals(run.model, flops, run.recipe.seq_len),
            "matmul_flops": _matmuls(ledger),
            "model_flops": ledger.by("phase", "model_flops"),
        },
    )


def _drawings(run: Run, count: ParameterCount, flops: dict[str, int]) -> list[Drawing]:
    spec, tokens, kernel = run.model, run.recipe.seq_len, run.recipe.attention
    over_tokens = [forward_flops(spec, sequence, attention=kernel) for sequence in _SEQUENCES]
    models, sizes = zip(*_scaled(spec, count), strict=True)
    totals, by_component = [size.total for size in sizes], [size.by_component for size in sizes]
    over_size = [forward_flops(model, tokens, attention=kernel) for model in models]
    what = "forward FLOPs"
    own, lengths, grown = count.by_component, "Forward FLOPs as the context grows", "Forward FLOPs as the model grows"
    return [
        Drawing(
            chart=components_chart(own, flops, "Parameters and forward FLOPs by component"),
            table=components_table(own, flops),
        ),
        Drawing(
            chart=shares_chart(_SEQUENCES, over_tokens, "tokens of a sequence", what, tokens, lengths),
            table=shares_table("context", _SEQUENCES, over_tokens, "tokens"),
        ),
        Drawing(
            chart=shares_chart(totals, over_size, "parameters", what, count.total, grown),
            table=shares_table("model flops", totals, over_size, "parameters"),
        ),
        Drawing(
            chart=shares_chart(
                totals, by_component, "parameters", "parameters", count.total, "Parameters as the model grows"
            ),
            table=shares_table("model parameters", totals, by_component, "parameters"),
        ),
    ]


def _scaled(spec: ModelSpec, own: ParameterCount) -> Iterator[tuple[ModelSpec, ParameterCount]]:
    """The model with heads, width and depth from a sixteenth to 16 times its own, up to 100 trillion parameters."""
    for model_spec in filter(None, (scaled(spec, factor) for factor in _FACTORS)):
        count = own if model_spec is spec else parameters(model_spec)
        if model_spec is spec or count.total <= _LARGEST:
            yield model_spec, count


def _python(query: Query) -> str:
    command = words_of("plan", query)[1]
    return (
        f"import trainledger as tl\n\nrun = tl.load({command!r}, {list(settings_of(query))})\n"
        'print(tl.parameters(run.model))\nprint(tl.account(run).by("path"))'
    )


def _size(name: str, title: str, stops: tuple[str, ...], group: str = "Sizes") -> Field:
    return of_run(f"model.{name}", title, group=group, stops=stops)


_LAYERS = steps(1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 28, 32, 36, 40, 48, 56, 64, 72, 80, 96, 112, 126, 128, 160, 200)
_WIDTHS = steps(64, 128, 256, 384, 512, 768, 1024, 1280, 1536, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192,
                10240, 12288, 14336, 16384, 18432, 20480, 24576, 28672, 32768)  # fmt: skip
_HEADS = steps(1, 2, 4, 6, 8, 10, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 256)
_INNER = steps(*(int(width) for width in _WIDTHS[2:]), 36864, 40960, 49152, 53248, 65536, 81920)
_VOCABULARY = steps(
    256, 1000, 4096, 8192, 16384, 32000, 32768, 50257, 50304, 65536, 100352, 128256, 151936, 200064, 256000, 262144
)

MODEL_CALCULATOR = Calculator(
    name="model",
    title="Model",
    question="Where are the parameters and the FLOPs of a model, and where do they go as it grows?",
    fields=(
        MODEL,
        *PASTED,
        of_run("recipe.seq_len", "sequence length", default="8192", group="Sizes", stops=powers(128, 1048576)),
        _size("n_layers", "layers", _LAYERS),
        _size("d_model", "hidden size", _WIDTHS),
        _size("attention.n_heads", "query heads", _HEADS),
        _size("attention.n_kv_heads", "key-value heads", _HEADS),
        _size("attention.head_dim", "head size", steps(16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256, 512)),
        _size("feed_forward.d_ff", "inner size of the MLP", _INNER),
        _size("vocab_size", "vocabulary", _VOCABULARY),
        of_run("model.tie_embeddings", "tied embeddings", group="Sizes", choices=YES_OR_NO, strict=True),
        _size("feed_forward.n_experts", "experts", steps(2, 4, 8, 16, 32, 60, 64, 96, 128, 160, 256, 384, 512),
              "Experts"),
        _size("feed_forward.per_token", "experts of a token", steps(1, 2, 3, 4, 6, 8, 10, 12, 16), "Experts"),
        _size("feed_forward.expert_d_ff", "inner size of an expert", _INNER, "Experts"),
        _size("feed_forward.n_shared", "shared experts", steps(0, 1, 2, 3, 4), "Experts"),
        _size("feed_forward.n_dense_layers", "leading dense layers", steps(0, 1, 2, 3, 4, 6, 8), "Experts"),
        _size("attention.kv_rank", "latent of keys and values", steps(64, 128, 256, 512, 768, 1024, 1536),
              "Latent attention"),
        _size("attention.q_rank", "latent of queries", steps(256, 512, 768, 1024, 1536, 2048, 3072),
              "Latent attention"),
        _size("attention.window", "window of local layers", powers(128, 65536), "Local attention"),
        _size("attention.global_every", "every n-th layer is global", steps(2, 3, 4, 5, 6, 8), "Local attention"),
    ),
    reply=_reply,
    presets={
        "Llama 3 8B": {},
        "GPT-2 small: a third is the embedding": {"run": "gpt2", "recipe.seq_len": "1024"},
        "Llama 3.1 405B": {"run": "llama-3.1-405b"},
        "Llama 3.1 8B at 131,072 tokens": {"run": "llama-3.1-8b", "recipe.seq_len": "131072"},
        "DeepSeek-V3: experts and a latent": {"run": "deepseek-v3", "recipe.seq_len": "4096"},
    },
    any_of_run=True,
)  # fmt: skip
