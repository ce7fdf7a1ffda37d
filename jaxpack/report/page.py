"""The page of a sweep: one HTML file that needs nothing else, and a card of it."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpack.progress import format_number
from jaxpack.report.curves import curves_figure
from jaxpack.report.hparams import hparams_figure, parallel_figure, varied
from jaxpack.report.ranking import best_row, ranked
from jaxpack.report.rungs import rungs_figure
from jaxpack.report.style import DARK, to_svg
from jaxpack.report.summary import Summary
from jaxpack.report.work import work_figure
from jaxpack.types import TrialResult

# Slow to import, and only needed by who looks at results.
if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CAPTIONS = {
    "rungs": ("Scores by rung", "A line a trial; it ends where the trial was stopped."),
    "curves": ("Learning curves", "Every reading of every trial; the best in orange."),
    "hparams": ("Score against each hparam", "Each trial's best score."),
    "parallel": ("Parallel coordinates", "Each trial from its hparams to its score."),
    "work": ("Where the time went", "Summed over the workers, and as time went on."),
}


def pictures(summary: Summary) -> dict[str, Figure]:
    """The pictures of a sweep by name; those with nothing to show are left out."""
    ranks = summary.trials, summary.metric, summary.mode
    figures = {
        "rungs": rungs_figure(*ranks, summary.unit),
        "curves": curves_figure(*ranks, summary.unit),
    }
    if varied(summary.trials, summary.dims) and ranked(*ranks):
        figures["hparams"] = hparams_figure(*ranks, summary.dims)
        figures["parallel"] = parallel_figure(*ranks, summary.dims)
    if summary.stats.wall_seconds:
        figures["work"] = work_figure(summary.stats)
    return figures


def write(summary: Summary, folder: str | os.PathLike) -> Path:
    """Writes the pictures of a sweep, `index.html` that shows them, and its path.

    Args:
      summary: The sweep.
      folder: Where to, made if need be; files of these names are replaced.

    Returns:
      The path of the page.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {}
    for name, figure in pictures(summary).items():
        figure.savefig(folder / f"{name}.png", dpi=150)
        figure.set_layout_engine("none")  # It stays as it is now.
        drawn[name] = to_svg(figure)
    page = folder / "index.html"
    temporary = page.with_suffix(".tmp")
    temporary.write_text(_page(summary, drawn), encoding="utf-8")
    os.replace(temporary, page)
    return page


def card(summary: Summary, k: int = 10) -> str:
    """A sweep as an HTML fragment: the best, the `k` best trials, scores by rung."""
    ranks = summary.trials, summary.metric, summary.mode
    svg = to_svg(rungs_figure(*ranks, summary.unit))
    best = ranked(*ranks)[:k]
    head, rows = _trial_rows(summary, best)
    return (
        f"<div><p>{_headline(summary)}</p>"
        f"{_table('', head, rows)}"
        f'<div style="max-width: 60em">{svg}</div></div>'
    )


def _page(summary: Summary, drawn: Mapping[str, str]) -> str:
    figures = "".join(
        f'<section id="{name}"><h2>{_CAPTIONS[name][0]}</h2>'
        f"<figure>{svg}<figcaption>{_CAPTIONS[name][1]}</figcaption></figure></section>"
        for name, svg in drawn.items()
    )
    best = ranked(summary.trials, summary.metric, summary.mode)
    places = {trial.trial_id: place for place, trial in enumerate(best)}
    order = sorted(
        summary.trials, key=lambda t: (places.get(t.trial_id, len(places)), t.trial_id)
    )
    head, rows = _trial_rows(summary, order)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(summary.name)}</title>
<style>{_css()}</style>
</head>
<body>
<main>
<h1>{escape(summary.name)}</h1>
<p>{_headline(summary)}</p>
<dl>{_facts(summary)}</dl>
{figures}
<section id="trials"><h2>Trials</h2>
<p>The best first; a click on a column's name sorts by it.
<label>Show those with <input id="filter" type="search"></label></p>
<div class="scroll">{_table(_SORTABLE, head, rows)}</div></section>
{_packs(summary.stats.packs)}
</main>
<script>{_SCRIPT}</script>
</body>
</html>
"""


def _headline(summary: Summary) -> str:
    """How many trials ended how, and the best of them."""
    counts = Counter(trial.status for trial in summary.trials)
    words = ", ".join(f"{count} {status}" for status, count in counts.items())
    state = "" if summary.ended else " The sweep had not ended yet."
    if summary.stopped:
        state = f" Ended early by {escape(summary.stopped)}."
    best = ranked(summary.trials, summary.metric, summary.mode)[:1]
    if not best:
        return f"{len(summary.trials)} trials ({words}), none with a score.{state}"
    row = best_row(best[0], summary.metric, summary.mode) or {}
    return (
        f"{len(summary.trials)} trials ({words}). Best {escape(summary.metric)}: "
        f"<b>{format_number(row[summary.metric])}</b>, trial {best[0].trial_id} "
        f"after {format_number(row[summary.unit])} {summary.unit}.{state}"
    )


def _facts(summary: Summary) -> str:
    stats = summary.stats
    best = ranked(summary.trials, summary.metric, summary.mode)[:1]
    facts = {f"best {k}": _text(v) for t in best for k, v in t.hparams.items()}
    for name, value in (summary.test_metrics or {}).items():
        facts[f"its test {name}"] = format_number(value)
    facts["lane-epochs"] = format_number(round(stats.lane_epochs, 2))
    if stats.wall_seconds:
        facts["seconds"] = format_number(stats.wall_seconds)
        facts["programs compiled"] = str(stats.compiles)
        facts["lanes busy"] = f"{100 * stats.occupancy:.0f} %"
        facts["workers"] = str(stats.workers)
    return "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in facts.items()
    )


def _trial_rows(
    summary: Summary, trials: Sequence[TrialResult]
) -> tuple[list[str], list[list[Any]]]:
    """The names of the columns, and a row of values a trial."""
    names = list(dict.fromkeys(name for t in summary.trials for name in t.hparams))
    bracket = any(trial.bracket is not None for trial in trials)
    reason = any(trial.reason for trial in trials)
    head = ["trial", f"best {summary.metric}", "status", summary.unit]
    head += [*(["bracket", "rung"] if bracket else ()), *names, "seconds"]
    rows = []
    for trial in trials:
        row = best_row(trial, summary.metric, summary.mode) or {}
        last = trial.history[-1] if trial.history else {}
        values = [trial.trial_id, row.get(summary.metric), trial.status]
        values += [last.get(summary.unit, 0)]
        values += [trial.bracket, trial.rung] if bracket else []
        values += [trial.hparams.get(name) for name in names]
        values += [round(trial.seconds, 3), *([trial.reason] if reason else ())]
        rows.append(values)
    return [*head, *(["reason"] if reason else ())], rows


def _table(kind: str, names: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table; the names of columns of numbers stand over them."""
    numbers = {i for row in rows for i, value in enumerate(row) if _is_number(value)}
    return f"<table{kind}>{_head(names, numbers)}\n<tbody>{_body(rows)}</tbody></table>"


def _head(names: Iterable[str], numbers: set[int]) -> str:
    cells = "".join(
        f'<th scope="col"{_NUMBER if i in numbers else ""}>{escape(name)}</th>'
        for i, name in enumerate(names)
    )
    return f"<thead><tr>{cells}</tr></thead>"


_SORTABLE = ' class="sortable"'
_NUMBER = ' class="number"'


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _body(rows: Iterable[Iterable[Any]]) -> str:
    return "".join(f"<tr>{''.join(map(_cell, row))}</tr>\n" for row in rows)


def _cell(value: Any) -> str:
    kind = f'{_NUMBER} data-value="{value!r}"' if _is_number(value) else ""
    return f"<td{kind}>{escape(_text(value))}</td>"


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return format_number(value) if math.isfinite(value) else "not finite"
    return str(value)


def _packs(packs: Iterable[Mapping[str, Any]]) -> str:
    rows = [
        [
            ", ".join(f"{k}={_text(v)}" for k, v in pack.get("static", {}).items())
            or "all",
            *(pack.get(name) for name in ("engine", "lanes", "trials", "params")),
            pack.get("reason"),
        ]
        for pack in packs
    ]
    if not rows:
        return ""
    head = ("static hparams", "engine", "lanes", "trials", "weights", "why")
    return (
        '<section id="packs"><h2>Packs</h2><div class="scroll">'
        f"{_table(_SORTABLE, head, rows)}</div></section>"
    )


def _css() -> str:
    light = "".join(f"--c-{color[1:]}:{color};" for color in DARK)
    dark = "".join(f"--c-{color[1:]}:{other};" for color, other in DARK.items())
    return f""":root{{color-scheme:light dark;--ink:#1c1f23;--paper:#fff;--line:#d9dce0;
--soft:#f4f5f7;{light}}}
@media (prefers-color-scheme:dark){{:root{{--ink:#e4e6ea;--paper:#15171b;--line:#353a42;
--soft:#1e2127;{dark}}}}}
{_RULES}"""


_RULES = """body{margin:0;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,sans-serif}
main{max-width:75rem;margin:0 auto;padding:1.5rem}
h1{font-size:1.6rem;margin:0}h2{font-size:1.15rem;margin:2.5rem 0 .5rem}
dl{display:flex;flex-wrap:wrap;gap:.5rem;margin:1rem 0}
dl div{background:var(--soft);border-radius:.4rem;padding:.35rem .75rem}
dt{font-size:.75rem;opacity:.75}dd{margin:0;font-variant-numeric:tabular-nums}
figure{margin:0;overflow-x:auto}
figure svg{display:block;max-width:100%;height:auto;margin:auto}
svg text{font-family:system-ui,sans-serif!important}
figcaption{font-size:.85rem;opacity:.75;text-align:center}
.scroll{overflow:auto;max-height:40rem;border:1px solid var(--line);border-radius:.4rem}
table{border-collapse:collapse;font-size:.85rem;width:100%}
th,td{padding:.3rem .6rem;text-align:left;border-bottom:1px solid var(--line);
max-width:24rem}
td{white-space:nowrap;overflow:hidden;text-overflow:ellipsis}
#packs td{white-space:normal}
th{position:sticky;top:0;background:var(--soft);cursor:pointer;white-space:nowrap}
td.number,th.number{text-align:right;font-variant-numeric:tabular-nums}
[aria-sort=ascending]::after{content:" \\2191"}
[aria-sort=descending]::after{content:" \\2193"}
input{font:inherit;max-width:12rem}"""

_SCRIPT = """
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.querySelectorAll("th")], body = table.tBodies[0];
  heads.forEach((head, i) => head.addEventListener("click", () => {
    const up = head.getAttribute("aria-sort") !== "ascending";
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const key = row => {
      const cell = row.cells[i], number = cell.dataset.value;
      return number === undefined ? cell.textContent : Number(number);
    };
    const compare = (a, b) => {
      const x = key(a), y = key(b);
      const empty = v => v === "" || Number.isNaN(v);
      if (empty(x) || empty(y)) return empty(x) - empty(y);
      const order = typeof x === "number" && typeof y === "number"
        ? x - y : String(x).localeCompare(String(y));
      return up ? order : -order;
    };
    body.append(...[...body.rows].sort(compare));
  }));
}
document.getElementById("filter").addEventListener("input", event => {
  const words = event.target.value.toLowerCase().split(/\\s+/);
  for (const row of document.querySelector("#trials tbody").rows) {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every(word => text.includes(word));
  }
});
"""
