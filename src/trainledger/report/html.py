"""One HTML file of a run that opens offline: the reconciliation, the figures, and everything they need inside."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path

from trainledger.report.figures import figures
from trainledger.report.reconciliation import COLUMNS, cells_of, spread_sentence
from trainledger.report.record import RunRecord
from trainledger.report.style import Figure, key_of, untitled
from trainledger.report.table import sentence
from trainledger.spec.plain import finite, replace_file

NO_PLOTLY = "Figures need the web extra: pip install 'trainledger[web]'"
# Nothing may be fetched, whatever stands in the data: the browser itself is told so.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; }
body { max-width: 980px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h1, h2, p { overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.where { color: #555; margin-top: 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; border-bottom: 2px solid #222; font-weight: 600; }
th, td { padding: .25rem .6rem; } td { border-bottom: 1px solid #e4e4e4; white-space: nowrap; }
tr.part td { color: #555; border-bottom-color: #f1f1f1; } tr.part td:first-child { padding-left: 1.8rem; }
.number { text-align: right; }
figure { margin: 0; } figcaption { color: #555; font-size: .85rem; } .note { color: #555; margin: .4rem 0; }
"""
# Nothing is sent either: Plotly's own tool bar has a button that uploads a chart to its maker's server.
CONFIG = {
    "responsive": True, "displaylogo": False, "plotlyServerURL": "", "showSendToCloud": False,
    "modeBarButtonsToRemove": [
        "sendDataToCloud", "sendChartToCloud", "select2d", "lasso2d", "zoomIn2d", "zoomOut2d", "autoScale2d",
    ],
}  # fmt: skip
# A legend takes as many lines as the width of the page needs, and the figure grows by them: its plot stays as high as
# it was. On a telephone there is no tool bar to stand on it, and a finger that drags moves the page.
_SCRIPT = """
const read = (name) => JSON.parse(document.getElementById(name).textContent);
read("figures").forEach(({data, layout}, at) => {
  const box = document.getElementById("figure-" + at), narrow = box.clientWidth < 600;
  if (narrow) {
    layout.margin.r = 14;
    layout.font.size = 11;
    layout.dragmode = false;
  }
  Plotly.newPlot(box, data, layout, {...read("config"), displayModeBar: narrow ? false : "hover"}).then(() => {
    const legend = box.querySelector(".legend .bg");
    if (legend) Plotly.relayout(box, {height: layout.height + legend.getBBox().height});
  });
});
"""


def write_html(record: RunRecord, path: str | os.PathLike[str]) -> None:
    """Store the report of a run as one file."""
    replace_file(path, html(record).encode())


def html(record: RunRecord) -> str:
    """The report of a run; without plotly it has the table and a sentence instead of the figures."""
    title = f"{record.path.name}: forecast and measurement"
    return document(title, [_head(record), _table(record), *_notes(record)], figures(record))


def document(title: str, parts: Sequence[str], drawn: Mapping[str, Figure]) -> str:
    """A page that opens offline: parts of HTML, then figures under their titles (or a sentence without plotly)."""
    plotly = plotly_js() if drawn else None
    page = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
        *parts,
    ]
    if drawn and plotly is None:
        page.append(f'<p class="note">{escape(NO_PLOTLY)}</p>')
    elif plotly is not None:
        for at, (name, figure) in enumerate(drawn.items()):
            own = figure["layout"].get("title", {}).get("text") or name
            heading = "" if own == title else f"<h2>{escape(own)}</h2>"
            named = "".join(f"<li>{escape(each)}</li>" for each in key_of(figure["layout"]))
            key = f"<figcaption><ol>{named}</ol></figcaption>" if named else ""
            page.append(f'{heading}<figure><div id="figure-{at}"></div>{key}</figure>')
        page.append(f"<script>{plotly}</script>")
        without_titles = [each | {"layout": untitled(each["layout"])} for each in drawn.values()]
        for name, held in (("figures", without_titles), ("config", CONFIG)):
            page.append(f'<script type="application/json" id="{name}">{_embedded(held)}</script>')
        page.append(f"<script>{_SCRIPT}</script>")
    return "\n".join([*page, "</body></html>\n"])


def plotly_js() -> str | None:
    """The text of plotly.js from the plotly package, or None where it is not installed."""
    found = find_spec("plotly")
    if found is None or found.origin is None:
        return None
    path = Path(found.origin).parent / "package_data" / "plotly.min.js"
    return path.read_text(encoding="utf-8") if path.exists() else None


def _embedded(held: object) -> str:
    """JSON that cannot end the script element it stands in, and that every browser reads."""
    return json.dumps(finite(held), allow_nan=False).replace("<", "\\u003c")


def _head(record: RunRecord) -> str:
    rows = record.reconciliation
    facts = [rows.device, record.measured.date, str(record.state.get("state", "")), str(record.path)]
    if record.measured.torch_version:
        facts.insert(1, f"torch {record.measured.torch_version}")
    return (
        f"<h1>{escape(record.path.name)}: forecast and measurement</h1>"
        f'<p class="where">{escape(" · ".join(each for each in facts if each))}</p>'
    )


def _table(record: RunRecord) -> str:
    numbers = (1, 2, 3)

    def cells(row: list[str], tag: str) -> str:
        side = [' class="number"' if at in numbers else "" for at in range(len(row))]
        return "".join(f"<{tag}{each}>{escape(cell)}</{tag}>" for each, cell in zip(side, row, strict=True))

    body = "".join(
        f"<tr{' class=part' if is_part else ''}>{cells(row, 'td')}</tr>"
        for is_part, row in cells_of(record.reconciliation)
    )
    return (
        f'<div class="wide"><table><thead><tr>{cells(list(COLUMNS), "th")}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _notes(record: RunRecord) -> list[str]:
    rows = record.reconciliation
    notes = ["The ratio is measured / predicted. Parts and the unexplained rest sum to the difference."]
    if rows["step_seconds"].spread is not None:
        notes.append(spread_sentence(rows["step_seconds"].spread))
    notes += [sentence(each) for each in rows.notes]
    notes += [f"Not in this report: {each}." for each in record.missing]
    return paragraphs(notes)


def paragraphs(sentences: Sequence[str]) -> list[str]:
    """Sentences as parts of a page."""
    return [f'<p class="note">{escape(each)}</p>' for each in sentences]
