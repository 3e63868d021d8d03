"""The layouts that a search found, for a terminal of 80 columns, for programs, and as a figure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from trainledger.document import Figure
from trainledger.plan import in_json
from trainledger.plan.difference import as_override
from trainledger.plan.layouts.result import AS_QUICK, Gap, Layouts, Rejected, ScoredLayout
from trainledger.predict.device_memory import TENSORS_ALONE
from trainledger.report.style import COLOURS, around, arranged, by_turns, mark
from trainledger.report.table import pasted, sentence, table, wrapped
from trainledger.spec.layout import Layout, overlaps
from trainledger.units import GIGA, counted, format_count, format_nbytes, format_percent, format_seconds

_SHOWN = 12  # reasons that are listed
_COLUMNS = ("step", "MFU", "holds", "TP", "CP", "PP", "EP", "DP", "Z", "B", "again")


def text(found: Layouts) -> str:
    """All of it."""
    return "\n\n".join(_parts(found))


def _parts(found: Layouts) -> Iterator[str]:
    yield _head(found)
    if found.best is None:
        yield wrapped(_none(found))
    else:
        legend = (
            "TP, CP, EP tensor, context and expert ranks (sp: with sequence parallelism); PP stages, V chunks each, "
            "and the schedule; DP replicate x shard; Z what of ZeRO, 3k keeps parameters gathered from forward to "
            "backward; B the micro-batch; again what is recomputed (part: selective)."
        )
        bounds = " by their bounds" if found.basis == "bound" else ""
        told = [f"The quickest that fit{bounds}\n{_table(found.ranked)}", wrapped(legend), *_of_experts(found)]
        yield "\n".join([*told, *_of_a_sheet(found)])
        simplest = found.simplest or found.best
        if simplest == found.best:
            yield f"The best{bounds}, to paste into a run file\n\n{pasted(found.best.toml)}"
        else:
            yield f"As quick within {format_percent(AS_QUICK - 1)}, and simpler\n{_table([simplest])}"
            yield f"That one, which layout=auto takes, to paste into a run file\n\n{pasted(simplest.toml)}"
        if len(found.pareto) > 1:
            yield f"Less memory for a longer step (Pareto front)\n{_table(found.pareto)}"
    if found.rejected:
        yield _rejected(found)
    yield "\n".join(wrapped(each) for each in _how(found))


def _head(found: Layouts) -> str:
    return "\n".join(wrapped(each) for each in about(found))


def about(found: Layouts) -> list[str]:
    """Whose layouts these are, and of how many: above the text, and on the page of the figure."""
    recipe = found.run.recipe
    batch = f"{counted(recipe.global_batch, 'sequence')} of {counted(recipe.seq_len, 'token')} a step"
    return [
        f"{found.run.model.name} on {found.devices:,} x {found.device}: {batch}, {recipe.precision}, "
        f"{recipe.optimizer}",
        f"{found.searched:,} layouts: the rules allow {found.allowed:,}, of which {found.fitting:,} may fit",
    ]


def _none(found: Layouts) -> str:
    """Why there is no layout, with what helps where one thing stands in the way of most."""
    if found.allowed:
        return f"None of them fits {found.devices:,} x {found.device}."
    helps = ""
    if found.run.model.n_mtp_layers:
        helps = " Without its multi-token prediction the model can be spread: --set model.n_mtp_layers=0."
    below = "; the reasons stand below" if found.rejected else ""
    return f"No layout over {found.devices:,} x {found.device} is allowed{below}.{helps}"


def _table(some: Sequence[ScoredLayout]) -> str:
    return table(_COLUMNS, [_row(each) for each in some], align="rrrllllllrl")


def _row(each: ScoredLayout) -> list[str]:
    layout, recipe = each.run.layout, each.run.recipe
    pipeline = str(layout.pipeline)
    if layout.pipeline > 1:
        schedule = {"interleaved": f"x{layout.virtual_stages}V", "zero-bubble": " zb"}
        pipeline += schedule.get(layout.schedule, f" {layout.schedule}")
    zero = "-"
    if layout.shard_ranks > 1:
        zero = f"{layout.zero}k" if layout.zero == 3 and not layout.reshards else str(layout.zero)
    context = str(layout.context) + (" a2a" if layout.context > 1 and layout.context_kind != "ring" else "")
    return [
        format_seconds(each.seconds), "" if each.mfu is None else format_percent(each.mfu),
        format_nbytes(each.device_nbytes), f"{layout.tensor}{' sp' if layout.sequence_parallel else ''}", context,
        pipeline, _experts(layout), f"{layout.replicate}x{layout.shard}", zero, str(recipe.micro_batch),
        {"selective": "part"}.get(recipe.activation_checkpointing, recipe.activation_checkpointing),
    ]  # fmt: skip


def _experts(layout: Layout) -> str:
    """Expert ranks, with n where tokens go once to each node and b where beside another micro-batch."""
    how = "n" * layout.sends_to_nodes + "b" * overlaps(layout, "experts")
    return f"{layout.expert} {how}".rstrip()


def _of_experts(found: Layouts) -> Iterator[str]:
    """What n and b say, as ``--set`` takes it, where a layout has them."""
    every = [each.run.layout for each in (*found.ranked, *found.pareto)]
    beside = next((each for each in every if overlaps(each, "experts")), None)
    said = []
    if any(each.sends_to_nodes for each in every):
        said.append("n: --set layout.expert_send=nodes, tokens once to each node (a program that does so: DeepEP)")
    if beside is not None:
        override = as_override("layout.overlap", beside.overlap)
        said.append(f"b: --set '{override}', beside another micro-batch (DualPipe, Megatron Core)")
    yield from (wrapped(each) for each in said)
    if said:
        yield wrapped(
            "Unless you say how, tokens go to their experts so, which is the quickest way in nearly every layout; "
            "--fix expert_send=copies and --fix overlap=gradients look at the others."
        )


def _of_a_sheet(found: Layouts) -> Iterator[str]:
    """What must be said of a device of which only the data sheet is known."""
    if found.basis == "bound":
        yield wrapped(
            f"Steps and MFU are bounds, by the peaks of {found.device}'s data sheet: no run is faster, most are "
            "slower, and not all layouts by as much."
        )
    if found.best is not None and found.best.device_nbytes == found.best.peak_nbytes:
        yield wrapped(sentence(TENSORS_ALONE))


def _rejected(found: Layouts) -> str:
    reasons = _alike(found.rejected)
    shown, rest = reasons[:_SHOWN], reasons[_SHOWN:]
    rows = [[f"{count:,}", reason] for reason, count in shown]
    if rest:
        rows.append([f"{sum(count for _, count in rest):,}", f"{counted(len(rest), 'other reason')} (--json has all)"])
    return table(["layouts", "why not"], rows, align="rl")


def _alike(rejected: Sequence[Rejected]) -> list[tuple[str, int]]:
    """Reasons and how many layouts each keeps out, most first; those that differ in one size are one, with its range.

    >>> _alike([Rejected("of the 8 ranks", 3), Rejected("does not fit", 4), Rejected("of the 32 ranks", 2)])
    [('of the 8 to 32 ranks', 5), ('does not fit', 4)]
    """
    kinds: dict[tuple[str, ...], list[Rejected]] = {}
    for each in rejected:
        before, size, after = _size_in(each.reason)
        kinds.setdefault((before, after) if size else (each.reason,), []).append(each)
    found = []
    for kind, same in kinds.items():
        reason = same[0].reason
        if len(same) > 1 and len(kind) == 2:
            sizes = sorted(int(_size_in(each.reason)[1]) for each in same)
            reason = f"{kind[0]}{sizes[0]} to {sizes[-1]}{kind[1]}"
        found.append((reason, sum(each.count for each in same)))
    return sorted(found, key=lambda each: -each[1])


def _size_in(reason: str) -> tuple[str, str, str]:
    """A reason as what stands before "the 8 ranks" or "the 8 heads"'s number, the number, and what follows."""
    found = re.search(r"(?<=\bthe )\d+(?= )", reason)
    return (reason[: found.start()], found[0], reason[found.end() :]) if found else (reason, "", "")


def _how(found: Layouts) -> Iterator[str]:
    rate = format_count(round(found.layouts_per_second))
    yield (
        f"{format_seconds(found.preparing_seconds)} for the grid and the pieces of layouts; bounded {found.allowed:,} "
        f"layouts in memory and time in {format_seconds(found.bounding_seconds)} of one core "
        f"({rate} a second); accounted for the best {found.accounted:,} in "
        f"{format_seconds(found.accounting_seconds)}."
    )
    for what, gap in (("seconds", found.seconds_gap), ("bytes", found.nbytes_gap)):
        if gap is not None:
            yield f"Their bounds in {what} were {_apart(gap)} below the account."
    if found.best is not None and found.certain:
        yield "No other layout can be among the ranked, if bounds hold as they did for these."
    for note in found.notes:
        yield sentence(note)


def _apart(gap: Gap) -> str:
    least, middle, most = (format_percent(each) for each in (gap.least, gap.median, gap.most))
    return f"{least} to {most} (median {middle})"


def to_json(found: Layouts) -> dict[str, Any]:
    """The result as JSON takes it."""
    from trainledger.spec.plain import to_plain

    def layout(each: ScoredLayout) -> dict[str, Any]:
        recipe = each.run.recipe
        return {
            "layout": to_plain(each.run.layout), "micro_batch": recipe.micro_batch,
            "activation_checkpointing": recipe.activation_checkpointing, "set": list(each.settings),
            "step_seconds": each.seconds, "mfu": each.mfu, "device_nbytes": each.device_nbytes,
            "peak_nbytes": each.peak_nbytes, "bound_seconds": each.bound_seconds, "bound_nbytes": each.bound_nbytes,
        }  # fmt: skip

    own = ("run", "device", "devices", "ranked", "simplest", "pareto", "rejected", "seconds_gap", "nbytes_gap")
    return {
        "run": in_json.run(found.run),
        "device_title": found.device,
        **{name: value for name, value in vars(found).items() if name not in own},
        "layouts_per_second": found.layouts_per_second,
        "seconds_gap": None if found.seconds_gap is None else vars(found.seconds_gap),
        "nbytes_gap": None if found.nbytes_gap is None else vars(found.nbytes_gap),
        "ranked": [layout(each) for each in found.ranked],
        "simplest": None if found.simplest is None else layout(found.simplest),
        "pareto": [layout(each) for each in found.pareto],
        "rejected": [vars(each) for each in found.rejected],
    }


def figures(found: Layouts) -> dict[str, Figure]:
    """Step time against memory: the ranked layouts, and the Pareto front, numbered, with what its layouts are."""
    if not found.ranked:
        return {}
    data = [
        _points("quickest", found.ranked, COLOURS[4], "markers"),
        _points("Pareto front", found.pareto, COLOURS[0], "lines+markers+text"),
    ]
    numbers = range(1, len(found.pareto) + 1)
    data[1] |= {"text": [f"{each}" for each in numbers], "textposition": by_turns(numbers)}
    layout = arranged(
        f"{found.run.model.name} on {found.devices:,} x {found.device}", "memory of the heaviest device (GB)",
        "step (seconds)", meta={"key": [each.title for each in found.pareto]},
    )  # fmt: skip
    held = [each.device_nbytes / GIGA for each in (*found.ranked, *found.pareto)]
    if found.usable_nbytes is not None:
        gives = found.usable_nbytes / GIGA
        layout["xaxis"] |= {"range": around([*held, gives])}
        mark(layout, "v", gives, f"{format_nbytes(found.usable_nbytes)} usable")
    return {"Step time against memory": {"data": data, "layout": layout}}


def _points(name: str, some: Sequence[ScoredLayout], colour: str, mode: str) -> dict[str, Any]:
    return {
        "type": "scatter", "mode": mode, "name": name, "x": [each.device_nbytes / GIGA for each in some],
        "y": [each.seconds for each in some], "customdata": [each.title for each in some], "cliponaxis": False,
        "marker": {"color": colour, "size": 8}, "line": {"color": colour},
        "hovertemplate": "%{customdata}<br>%{y:.4g} s, %{x:.4g} GB<extra></extra>",
    }  # fmt: skip
