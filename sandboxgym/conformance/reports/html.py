"""A report as one self-contained HTML page: verdicts, evidence, counterexamples, and what was not tested."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from sandboxgym.conformance.check import Level
from sandboxgym.conformance.reports import comparison
from sandboxgym.conformance.reports.causes import Cause, causes
from sandboxgym.conformance.reports.caveats import caveats
from sandboxgym.conformance.reports.verdicts import headline, weight
from sandboxgym.conformance.runner import Report
from sandboxgym.system.atomic import write_atomic

_STYLE = """
:root { --fg: #1d2433; --dim: #5f6b82; --bg: #fff; --panel: #f5f7fa; --line: #d5dbe6;
  --pass: #14804a; --fail: #b3261e; --skip: #68738a; --inconclusive: #96670a; }
@media (prefers-color-scheme: dark) { :root { --fg: #e4e8f0; --dim: #9aa5ba; --bg: #161a22; --panel: #1f2530;
  --line: #39435a; --pass: #56cf94; --fail: #ff8d82; --skip: #95a0b5; --inconclusive: #e6b64c; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem; font: 15px/1.5 system-ui, sans-serif; color: var(--fg);
  background: var(--bg); }
h1, h2, p, dd, summary { overflow-wrap: anywhere; }
h1 { margin: 0; font-size: 1.5rem; } h2 { margin: 2rem 0 .6rem; font-size: 1.15rem; }
p { margin: .4rem 0; } .dim { color: var(--dim); }
.banner { font-size: 1.05rem; font-weight: 600; padding: .6rem .9rem; border-radius: .4rem; margin: 1rem 0;
  border: 2px solid currentColor; }
.pass { color: var(--pass); } .fail { color: var(--fail); } .skip { color: var(--skip); }
.inconclusive { color: var(--inconclusive); }
.matrix { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .8rem 1.2rem; align-items: start; }
.tiles { display: flex; flex-wrap: wrap; gap: .35rem; }
@media (max-width: 46rem) { body { padding: 1rem; } .matrix { grid-template-columns: minmax(0, 1fr); gap: .4rem; }
  .tiles { margin-bottom: .6rem; } }
.tile { border: 1px solid currentColor; border-radius: .3rem; padding: .05rem .5rem; font-size: .85rem;
  text-decoration: none; }
.tile b { font-weight: 700; }
.tile:hover, .tile:focus-visible { background: var(--panel); }
:target { outline: 2px solid var(--skip); outline-offset: 2px; }
a { color: inherit; }
.wide { overflow-x: auto; margin: .6rem 0; }
.differs td { background: color-mix(in srgb, var(--fail) 14%, transparent); }
.differs td:first-child { color: var(--fail); font-weight: 700; }
.differs td:first-child::before { content: "≠ "; }
td code { overflow-wrap: anywhere; }
.facts { display: flex; flex-wrap: wrap; gap: .3rem 1.4rem; margin: .4rem 0 1rem; }
.copied { position: relative; }
.copied button { position: absolute; top: .4rem; right: .4rem; font: inherit; font-size: .8rem; padding: .1rem .6rem;
  color: var(--fg); background: var(--panel); border: 1px solid var(--line); border-radius: .3rem; cursor: pointer; }
.cause { border-left: 3px solid var(--fail); padding-left: .8rem; margin: 1rem 0; }
@media print { .copied button { display: none; } }
table { border-collapse: collapse; max-width: 100%; font-size: .9rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem .6rem; border-bottom: 1px solid var(--line);
  overflow-wrap: anywhere; }
th:first-child, td:first-child { min-width: 9rem; overflow-wrap: break-word; }
th { white-space: nowrap; }
details { border: 1px solid var(--line); border-radius: .4rem; margin: .4rem 0; background: var(--panel); }
summary { cursor: pointer; padding: .4rem .8rem; } details > div { padding: 0 .8rem .7rem; }
code { font: .92em ui-monospace, monospace; }
pre { overflow-x: auto; background: var(--bg); border: 1px solid var(--line); border-radius: .3rem; padding: .6rem;
  font: 12.5px/1.45 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
dt { font-weight: 600; margin-top: .5rem; } dd { margin: 0; }
"""

_MARKS = {"PASS": "✓", "FAIL": "✗", "SKIP": "–", "INCONCLUSIVE": "?"}
_COLOURS = {
    **{verdict: verdict.lower() for verdict in _MARKS},
    **dict.fromkeys(("kept", "declared", "refused"), "pass"),
    **dict.fromkeys(("leaked", "disturbed", "silent", "harmed", "crashed"), "fail"),
    **dict.fromkeys(("n/a", "skipped"), "skip"),
    "lost": "inconclusive",
    **dict.fromkeys(("caught", "explained"), "pass"),
    "unseen": "fail",
    **dict.fromkeys(("never varied", "not tried"), "inconclusive"),
    "without effect": "skip",
}
_LEVELS = {
    Level.API: "API",
    Level.EXACT: "Exact restore",
    Level.ISOLATION: "Isolation",
    Level.DISTRIBUTION: "Distribution",
    Level.PROBES: "Hidden state",
    Level.DURABLE: "Durability",
    Level.COST: "Cost",
}


def write(report: Report, path: str | os.PathLike[str]) -> None:
    """Write the page, atomically."""
    write_atomic(path, page(report.to_json()).encode())


def page(report: Mapping[str, Any]) -> str:
    """The page of a report in its JSON form."""
    results: Sequence[Mapping[str, Any]] = report["results"]
    failed = [result for result in results if result["verdict"] == "FAIL"]
    beside = report.get("beside", ())
    labels = comparison.labels(report)
    sections = [
        f"<h1>Snapshot conformance: {escape(report['name'])}</h1>",
        f'<p class="dim">{escape(report["started"])} · budget {escape(report["budget"])} · seed {report["seed"]} · '
        f"{report['seconds']:.1f} s · {escape(report['platform'])} · "
        f"{escape(', '.join(f'{name} {version}' for name, version in report['versions'].items()))}</p>",
        *([f"<p><b>{escape(labels[0])}</b></p>"] if beside else []),
        _banner(report),
        _facts(report),
        _matrix(results),
    ]
    for label, other in zip(labels[1:], beside):
        theirs = [result for result in other["results"] if result["verdict"] == "FAIL"]
        sections += [f"<p><b>{escape(label)}</b></p>", _banner(other)]
        sections += [_details(result, open=True, place=f"{label}: ") for result in theirs]
    if failed:
        sections += ["<h2>Failures</h2>", *_grouped(failed)]
    if beside:
        sections += _side_by_side(report)
    for label, each in zip(labels, (report, *beside)):
        sections += [_probes(result, f" ({label})" if beside else "") for result in each["results"]]
    sections += [
        *_strength(report.get("strength")),
        *_weights(results),
        "<h2>Declared</h2>",
        _table(("claim", "value"), ((name, comparison.plain(v)) for name, v in report["capabilities"].items())),
        "<h2>What was not tested</h2>",
        *_not_tested(report["not_tested"]),
        "<h2>All checks</h2>",
        *(_details(result) for result in results if result["verdict"] != "FAIL"),
    ]
    fails = failed or any(other["counts"].get("FAIL") for other in beside)
    title = escape(f"{report['name']}: {'FAIL' if fails else 'no failure'}")
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>'
        f"<style>{_STYLE}</style>\n" + "\n".join(sections) + "\n</html>\n"
    )


def _banner(report: Mapping[str, Any]) -> str:
    told = ", ".join(f"{count} {verdict.lower()}" for verdict, count in report["counts"].items() if count)
    text, kind = headline(report)
    left = "".join(f"<p>Not tested: {escape(caveat)}</p>" for caveat in caveats(report))
    return f'<p class="banner {kind}">{escape(text)} <span class="dim">({told})</span></p>{left}'


def _facts(report: Mapping[str, Any]) -> str:
    """Strength of the certificate, and facts about the machine."""
    facts = []
    if strength := report.get("strength"):
        facts.append(f'<a href="#strength">Strength</a>: {escape(strength["summary"])}')
    if machine := report.get("machine"):
        facts.append(f"A call takes {_time(machine['seconds per call'])}")
        if machine["load before"] is not None:
            busy = max(machine["load before"], machine["load after"]) > machine["cores"]
            load = f"Load {machine['load before']} to {machine['load after']} on {machine['cores']} cores"
            facts.append(f'<b class="inconclusive">{load}: a busy machine</b>' if busy else load)
    return f'<div class="facts">{"".join(f"<span>{fact}</span>" for fact in facts)}</div>' if facts else ""


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"


def _grouped(failed: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Failures by probable cause: the first of each unfolded."""
    known = {result["id"]: result for result in failed}
    for cause in causes(failed):
        first, others = _details(known[cause.root], open=True), cause.checks[1:]
        if not others:
            yield first
            continue
        yield f'<div class="cause"><p><b>{_headed(cause)}</b></p>{first}'
        yield "".join(_details(known[id]) for id in others) + "</div>"


def _headed(cause: Cause) -> str:
    where = f": <code>{escape(cause.what)}</code>" if cause.what else ""
    return f"Probably one cause{where}, in {len(cause.checks)} checks; look at the first"


def _not_tested(entries: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    unasked = [entry["id"] for entry in entries if "not asked for" in entry["reason"]]
    rows = [(entry["id"], entry["reason"]) for entry in entries if entry["id"] not in unasked]
    if rows:
        yield _table(("check", "why"), rows)
    if unasked:
        ids = escape(", ".join(unasked))
        yield f"<details><summary>{len(unasked)} checks were not asked for</summary><div><p>{ids}</p></div></details>"
    if not entries:
        yield "<p>Every check ran and could tell.</p>"


def _strength(strength: Mapping[str, Any] | None) -> Iterator[str]:
    if strength is None:
        return
    yield '<h2 id="strength">What this certificate would have seen</h2>'
    yield f"<p>{escape(strength['summary'])}.</p>"
    if strength["trials"]:
        yield (
            '<p class="dim">Each line is a fault that was put into this environment\'s own snapshots, and the check '
            "that failed with it. A field that is not exercised could be lost, and the verdicts would be the same.</p>"
        )
        trials = [[trial[key] for key in ("field", "fault", "outcome", "note")] for trial in strength["trials"]]
        yield _table(("field", "fault", "outcome", "by, or why not"), trials)


def _weights(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    rows = [(result["id"], *weight(result)) for result in results if result["verdict"] == "PASS"]
    rows = [row for row in rows if any(row[1:])]
    if rows:
        yield "<h2>How strong each PASS is</h2>"
        head = ("check", "tried", "would show (99.9 %) a fault of", "power")
        shown = 4 if any(row[3] for row in rows) else 3
        yield _table(head[:shown], (row[:shown] for row in rows))


def _matrix(results: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for level in Level:
        tiles = [
            f'<a class="tile {r["verdict"].lower()}" href="#{escape(r["id"])}" title="{escape(r["message"])}" '
            f'onclick="{_OPEN}">'
            f"<b>{_MARKS[r['verdict']]}</b> {escape(r['id'])}</a>"
            for r in results
            if r.get("level") == int(level)
        ]
        if tiles:
            rows.append(f'<div>{int(level)} · {_LEVELS[level]}</div><div class="tiles">{"".join(tiles)}</div>')
    return f'<div class="matrix">{"".join(rows)}</div>'


def _side_by_side(report: Mapping[str, Any]) -> Iterator[str]:
    labels = comparison.labels(report)
    for title, rows in {"checks": comparison.verdicts(report), **comparison.matrices(report)}.items():
        differing = [(row.name, *row.cells) for row in rows if row.differs]
        same: dict[str, list[str]] = {}
        for row in rows:
            if not row.differs:
                same.setdefault(row.cells[0], []).append(row.name)
        yield f"<h2>Side by side: {escape(title)}</h2>"
        yield _table(("differs", *labels), differing) if differing else "<p>Nothing differs.</p>"
        if same:
            yield _table(("the same in all", ""), ((cell, ", ".join(names)) for cell, names in same.items()))


def _details(result: Mapping[str, Any], *, open: bool = False, place: str = "") -> str:
    """A result as an element that unfolds; ``place`` names the report if it is one beside the main report."""
    verdict = result["verdict"]
    evidence = {name: value for name, value in result["evidence"].items() if name != "matrix"}
    parts = [f"<p>{escape(result['message'])}</p>"] if result["message"] else []
    parts += [
        "<dl>",
        *(
            f"<dt>{name}</dt><dd>{_prose(result[key])}</dd>"
            for name, key in (("Hazard", "hazard"), ("What it does", "does"), ("What it cannot see", "blind"))
            if result.get(key)
        ),
        "</dl>",
    ]
    if table := evidence.pop("difference", None):
        evidence = {name: value for name, value in evidence.items() if name not in ("expected", "found")}
        parts.append("<p><b>Expected and found</b></p>" + _difference(table))
    if evidence:
        parts.append(_evidence(evidence))
    if result.get("counterexample"):
        script = f'<div class="copied"><button onclick="{_COPY}">Copy</button>'
        parts.append(f"<p><b>Counterexample</b></p>{script}<pre>{escape(result['counterexample'])}</pre></div>")
    return (
        f'<details id="{escape(place + result["id"])}"{" open" if open else ""}><summary><b class="{verdict.lower()}">'
        f"{_MARKS[verdict]} {verdict}</b> {escape(place + result['id'])} "
        f'<span class="dim">{result["seconds"]:.2f} s</span></summary><div>{"".join(parts)}</div></details>'
    )


_OPEN = "document.getElementById(this.hash.slice(1)).open = true"
# Browsers give some pages no clipboard (those from a file or plain HTTP); the script is then selected instead.
_COPY = (
    "const script = this.nextElementSibling, select = () => { getSelection().selectAllChildren(script); "
    "this.textContent = 'Selected' }; navigator.clipboard ? navigator.clipboard.writeText(script.textContent)"
    ".then(() => { this.textContent = 'Copied' }, select) : select()"
)


def _difference(table: Sequence[Mapping[str, Any]]) -> str:
    """Expected and found values side by side, with the differences marked."""
    rows = "".join(
        f"<tr{' class=differs' if row['differs'] else ''}><td>{escape(row['field'])}</td>"
        f"<td><code>{escape(row['expected'])}</code></td><td><code>{escape(row['found'])}</code></td></tr>"
        for row in table
    )
    head = "<tr><th>field</th><th>expected</th><th>found</th></tr>"
    return f'<div class="wide"><table><thead>{head}</thead><tbody>{rows}</tbody></table></div>'


def _prose(text: str) -> str:
    """Text of a docstring, with double backticks rendered as code."""
    return re.sub("``(.+?)``", r"<code>\1</code>", escape(text))


def _evidence(evidence: Mapping[str, Any]) -> str:
    short = {k: v for k, v in evidence.items() if not (isinstance(v, str) and "\n" in v)}
    long = {k: v for k, v in evidence.items() if k not in short}
    text = _table(("measured", "value"), short.items()) if short else ""
    return text + "".join(f"<p><b>{escape(k)}</b></p><pre>{escape(v)}</pre>" for k, v in long.items())


def _probes(result: Mapping[str, Any], where: str) -> str:
    rows = result["evidence"].get("matrix")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, Mapping) for row in rows):
        return ""
    names = list(rows[0])
    title = "Kept, lost, leaked" if result["id"] == "probes.matrix" else result["id"]
    return f"<h2>{escape(title + where)}</h2>" + _table(names, ([row.get(name) for name in names] for row in rows))


def _table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{_cell(value)}</td>" for value in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, str) and value in _COLOURS:
        return f'<b class="{_COLOURS[value]}">{value}</b>'
    return escape(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
