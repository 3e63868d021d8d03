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
from trainledger.web.calculator import PLAIN, Drawing, Headline, Progress, Reply, calculator, headline
from trainledger.web.field import FILE, Query
from trainledger.web.run import (
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


def _headlines(run: Run, count: ParameterCount, flops: dict[str, int], ledger: Ledger) -> Iterator[Headline]:
    spec, tokens, forward = run.model, run.recipe.seq_len, sum(flops.values())
    scores, parts = flops[SCORES], ordered(count.by_component)
    totals = forward_totals(spec, flops, tokens)
    formula = " + ".join(f"{format_count(count.by_component[part])} {title_of(part)}" for part in parts)
    yield headline("model.total", count.total, formula)
    if (mixture := spec.experts) is not None:
        formula = f"all but {mixture.n_experts - mixture.per_token} of {mixture.n_experts} experts of each layer"
        yield headline("model.active", count.active, formula)
    formula = " + ".join(f"{format_flops(flops[part])} {title_of(part)}" for part in ordered(flops))
    yield headline("model.forward", forward, formula, tokens=f"{tokens:,}")
    formula = f"{format_flops(forward)} / {tokens:,}; 2 N = {format_flops(2 * count.active)}"
    yield headline("model.per_token", totals["per_token"], formula)
    yield _backward(ledger)
    formula = f"scores / all = {format_flops(scores)} / {format_flops(forward)}"
    yield headline("model.scores_share", totals["scores_share"], formula)
    if totals["half_at"] is not None:
        formula = f"T x rest / scores = {tokens:,} x {format_flops(forward - scores)} / {format_flops(scores)}"
        yield headline("model.half_at", totals["half_at"], formula)


def _backward(ledger: Ledger) -> Headline:
    """The model FLOPs of backward over those of forward, and what kernels run."""
    model, run = ledger.by("phase", "model_flops"), _matmuls(ledger)
    ratio = f"{format_flops(model['backward'])} / {format_flops(model['forward'])}"
    times = f"kernels run {run['backward'] / run['forward']:.4g} times the forward"
    formula = f"model FLOPs: {ratio}; {times}, as fused attention computes its scores again"
    return headline("model.backward_to_forward", model["backward"] / model["forward"], formula)


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


MODEL_CALCULATOR = calculator("model", _reply)
