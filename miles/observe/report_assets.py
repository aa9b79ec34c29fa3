"""Style and script of the report: everything inline, so that the page is one file that asks no network for anything."""

from __future__ import annotations

_LIGHT = """
  color-scheme: light;
  --page: #f6f7f9; --card: #ffffff; --ink: #1a1f29; --soft: #5b6576; --line: #e2e6ec; --grid: #edf0f4;
  --good: #12805c; --good-bg: #e2f5ee; --bad: #b3432b; --bad-bg: #fbeae5; --warn: #8a5a00; --warn-bg: #fff4da;
  --t0: #8a94a6; --t1: #2f6bde; --t2: #d9702b; --t3: #139275; --t4: #8656d6; --t5: #c23d7c; --t6: #a5850f; --t7: #3a93b8;
  --shadow: 0 1px 2px rgba(20, 30, 50, .05), 0 4px 14px rgba(20, 30, 50, .04);
"""
_DARK = """
  color-scheme: dark;
  --page: #0f1319; --card: #171c24; --ink: #e6eaf1; --soft: #98a3b5; --line: #29313d; --grid: #222933;
  --good: #55d3a6; --good-bg: #12332a; --bad: #f29478; --bad-bg: #3b2019; --warn: #f2c566; --warn-bg: #352a12;
  --t0: #8791a3; --t1: #6b9dff; --t2: #f29a5c; --t3: #43c7a3; --t4: #b08cf5; --t5: #ee7fb0; --t6: #d8b949; --t7: #6fc3e4;
  --shadow: none;
"""

STYLE = (
    f":root {{{_LIGHT}}}\n"
    f"@media (prefers-color-scheme: dark) {{ :root:not([data-theme=light]) {{{_DARK}}} }}\n"
    f":root[data-theme=dark] {{{_DARK}}}\n"
    """
* { box-sizing: border-box; }
html { scroll-behavior: smooth; scroll-padding-top: 64px; -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI",
  Roboto, "Liberation Sans", "DejaVu Sans", sans-serif; font-variant-numeric: tabular-nums; }
main { max-width: 1180px; margin: 0 auto; padding: 0 20px 80px; }
h1 { font-size: 30px; line-height: 1.2; margin: 0; letter-spacing: -.02em; overflow-wrap: anywhere; }
h2 { font-size: 20px; margin: 52px 0 6px; letter-spacing: -.01em; }
h3 { font-size: 15px; margin: 0; }
h3.part { margin: 24px 0 2px; }
p { margin: 0; }
a { color: inherit; }
.hint, .lead { color: var(--soft); }
.hint { font-size: 13px; line-height: 1.4; }
nav { position: sticky; top: 0; z-index: 5; background: color-mix(in srgb, var(--page) 88%, transparent);
  backdrop-filter: blur(8px); border-bottom: 1px solid var(--line); }
nav div { max-width: 1180px; margin: 0 auto; padding: 0 20px; display: flex; gap: 18px; align-items: center; overflow-x: auto;
  scrollbar-width: none; height: 48px; }
nav b { letter-spacing: .02em; margin-right: 6px; }
nav a { color: var(--soft); text-decoration: none; font-size: 14px; white-space: nowrap; }
nav a:hover { color: var(--ink); }
nav button { margin-left: auto; flex: none; border: 1px solid var(--line); background: var(--card); color: var(--soft);
  border-radius: 8px; font: inherit; font-size: 13px; padding: 3px 10px; cursor: pointer; }
header { padding: 40px 0 4px; }
header .lead { margin-top: 8px; overflow-wrap: anywhere; }
.status { display: inline-flex; gap: 7px; align-items: center; font-size: 13px; font-weight: 600; padding: 3px 11px;
  border-radius: 99px; margin-bottom: 12px; background: var(--warn-bg); color: var(--warn); }
.status::before { content: ""; width: 7px; height: 7px; border-radius: 9px; background: currentColor; }
.status.done { background: var(--good-bg); color: var(--good); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 12px; margin: 26px 0 12px; }
.tile, .chart, .card, .box, .notice { background: var(--card); border: 1px solid var(--line); border-radius: 14px;
  box-shadow: var(--shadow); }
.tile { padding: 13px 16px 14px; }
.tile .name { color: var(--soft); font-size: 13px; }
.tile .value { font-size: 24px; font-weight: 650; letter-spacing: -.02em; line-height: 1.25; white-space: nowrap; }
.tile .value small { color: var(--soft); font-weight: 500; font-size: .72em; }
.tile .note { color: var(--soft); font-size: 13px; }
.tile.main { border-color: color-mix(in srgb, var(--t1) 45%, var(--line)); }
.box { padding: 13px 18px; overflow-wrap: anywhere; }
.box code { font-size: 13.5px; }
.notice { padding: 13px 18px 13px 16px; margin-top: 10px; border-left: 4px solid var(--warn); }
.notice b { color: var(--warn); }
.notice .where { color: var(--soft); font-size: 13px; margin-left: 6px; }
.calm { color: var(--good); }
.empty { color: var(--soft); padding: 22px; text-align: center; border: 1px dashed var(--line); border-radius: 14px; }
code, pre, .answers bdi, .prompt pre { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono",
  "DejaVu Sans Mono", monospace; }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(340px, 100%), 1fr)); gap: 12px; margin-top: 14px; }
.wide { margin-top: 14px; }
.chart { margin: 0; padding: 15px 18px 12px; min-width: 0; display: flex; flex-direction: column; }
.chart .hint { margin-top: 1px; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 3px 15px; margin: 5px 0 0; padding: 0; font-size: 13px; color: var(--soft); }
.key { display: inline-block; width: 15px; height: 0; border-top: 3px solid; margin-right: 6px; vertical-align: 4px; border-radius: 2px; }
.key.dashed { border-top-style: dotted; }
.unit { color: var(--soft); font-size: 12px; margin: auto 0 9px; padding-top: 8px; }
.frame { display: grid; grid-template-columns: 46px minmax(0, 1fr); grid-template-rows: 130px 24px; }
.large .frame { grid-template-rows: 310px 24px; }
.lane { display: grid; grid-template-columns: minmax(90px, 190px) minmax(0, 1fr); gap: 10px; align-items: center; margin-top: 5px;
  font-size: 12.5px; color: var(--soft); }
.lane > span { overflow-wrap: anywhere; line-height: 1.25; }
.lane svg { width: 100%; height: 30px; background: var(--grid); border-radius: 4px; display: block; }
.lane .xaxis { grid-column: 2; height: 22px; }
.lanes figcaption { margin-bottom: 8px; }
.yaxis, .xaxis, .plot { position: relative; }
.yaxis span { position: absolute; right: 8px; transform: translateY(-50%); }
.xaxis { grid-column: 2; }
.xaxis span { position: absolute; top: 6px; transform: translateX(-50%); }
.xname { text-align: right; padding: 6px 8px 0 0; }
.yaxis, .xaxis, .xname { font-size: 11.5px; color: var(--soft); line-height: 1.2; white-space: nowrap; }
.plot { cursor: crosshair; touch-action: pan-y; }
.plot svg { position: absolute; inset: 0; width: 100%; height: 100%; overflow: visible; }
svg path { vector-effect: non-scaling-stroke; fill: none; }
path.rule { stroke: var(--grid); stroke-width: 1; }
path.line { stroke: var(--tone); stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.large path.line { stroke-width: 2.4; }
.large path.line.light { stroke-width: 1.5; opacity: .6; }
path.dashed { stroke-dasharray: 2 5; }
path.faint { opacity: .32; }
path.line.faint { stroke-width: 1.2; }
path.mark { stroke: var(--tone); stroke-width: 7; }
.large path.mark { stroke-width: 8; }
path.round { stroke-linecap: round; }
path.square { stroke-linecap: square; }
path.error { stroke: var(--tone); stroke-width: 1.5; opacity: .6; }
path.area { fill: var(--tone); shape-rendering: crispEdges; }
path.limit { stroke: var(--bad); stroke-width: 1.2; stroke-dasharray: 5 4; opacity: .75; }
.t0 { --tone: var(--t0); } .t1 { --tone: var(--t1); } .t2 { --tone: var(--t2); } .t3 { --tone: var(--t3); }
.t4 { --tone: var(--t4); } .t5 { --tone: var(--t5); } .t6 { --tone: var(--t6); } .t7 { --tone: var(--t7); }
.key { border-color: var(--tone); }
.cursor { position: absolute; top: 0; bottom: 0; width: 1px; background: var(--soft); opacity: .6; pointer-events: none; }
.tip { position: absolute; top: 6px; z-index: 4; background: var(--card); border: 1px solid var(--line); border-radius: 9px;
  box-shadow: 0 6px 24px rgba(0, 0, 0, .18); padding: 7px 11px; font-size: 12.5px; line-height: 1.5; pointer-events: none;
  white-space: nowrap; }
.tip div { display: flex; gap: 8px; align-items: center; }
.tip div b { margin-left: auto; padding-left: 14px; }
.tip i { width: 9px; height: 9px; border-radius: 9px; background: var(--tone); }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(380px, 100%), 1fr)); gap: 12px; margin-top: 10px;
  align-items: start; }
.card { padding: 13px 16px; min-width: 0; }
.prompt summary { cursor: pointer; font-weight: 600; overflow-wrap: anywhere; }
.prompt pre { color: var(--soft); background: var(--page); }
pre { font-size: 13px; line-height: 1.45; padding: 12px 14px; margin: 8px 0 2px; border-radius: 10px; overflow-x: auto;
  white-space: pre-wrap; overflow-wrap: anywhere; max-height: 460px; overflow-y: auto; }
.timeline { list-style: none; margin: 8px 0 0; padding: 0; max-height: 620px; overflow-y: auto; }
.timeline > li { border-top: 1px solid var(--line); padding: 8px 0; }
.timeline > li:last-child { padding-bottom: 0; }
.place { color: var(--soft); font-size: 13px; display: flex; gap: 10px; align-items: center; margin: 2px 0 3px; }
.place .mean { margin-left: auto; }
.answers { list-style: none; margin: 0; padding: 0; }
.answers li { display: flex; gap: 8px; align-items: baseline; padding: 2px 0; }
.answers bdi { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 13.5px; min-width: 0; max-height: 300px; overflow-y: auto; }
.answers .more, .blank { color: var(--soft); font-size: 13px; }
.times { flex: none; width: 27px; text-align: right; color: var(--soft); font-size: 13px; }
.pill { flex: none; min-width: 36px; text-align: center; font-size: 12.5px; font-weight: 600; border-radius: 7px; padding: 0 7px;
  line-height: 20px; }
.pill.good { color: var(--good); background: var(--good-bg); }
.pill.bad { color: var(--bad); background: var(--bad-bg); }
.pill.none { color: var(--soft); background: var(--grid); }
.tag { flex: none; font-size: 11.5px; color: var(--soft); border: 1px solid var(--line); border-radius: 6px; padding: 0 6px; }
.tag.warn { color: var(--warn); background: var(--warn-bg); border-color: transparent; }
details.more { margin-top: 12px; }
details.more > summary { cursor: pointer; color: var(--soft); padding: 4px 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th { text-align: left; font-weight: 600; color: var(--soft); }
th, td { padding: 5px 12px 5px 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
td.n, th.n { text-align: right; }
.spark { width: 110px; height: 22px; display: block; overflow: visible; }
.spark path.line { stroke-width: 1.5; }
footer { color: var(--soft); font-size: 13px; margin-top: 60px; }
@media (max-width: 620px) {
  main, nav div { padding-left: 14px; padding-right: 14px; }
  header { padding-top: 26px; }
  h1 { font-size: 24px; }
  .tiles { grid-template-columns: 1fr 1fr; gap: 9px; }
  .tile { padding: 11px 13px; }
  .tile.main { grid-column: 1 / -1; }
  .tile .value { font-size: 21px; white-space: normal; }
  .chart { padding: 13px 13px 10px; }
  .frame { grid-template-columns: 40px minmax(0, 1fr); }
  .large .frame { grid-template-rows: 230px 24px; }
  .xaxis span:nth-child(even) { display: none; }
}
@media print {
  nav { display: none; }
  .chart, .card, .tile { break-inside: avoid; box-shadow: none; }
  .timeline, pre, .answers bdi { max-height: none; overflow: visible; }
}
"""
)

SCRIPT = """
'use strict';
const short = v => {
  const a = Math.abs(v);
  if (a !== 0 && (a < 1e-3 || a >= 1e6)) return v.toExponential(2);
  return v.toLocaleString('en', {maximumSignificantDigits: 5});
};
const make = (tag, name, text) => {
  const node = document.createElement(tag);
  if (name) node.className = name;
  if (text !== undefined) node.textContent = text;
  return node;
};
for (const plot of document.querySelectorAll('.plot')) {
  const data = JSON.parse(plot.dataset.chart), [left, right] = data.span;
  let cursor, tip, shown;
  const leave = () => { if (cursor) { cursor.remove(); tip.remove(); cursor = shown = undefined; } };
  const move = event => {
    const box = plot.getBoundingClientRect();
    const x = left + (event.clientX - box.left) / box.width * (right - left);
    let best = 0;
    data.x.forEach((place, i) => { if (Math.abs(place - x) < Math.abs(data.x[best] - x)) best = i; });
    if (!cursor) { cursor = make('div', 'cursor'); tip = make('div', 'tip'); plot.append(cursor, tip); }
    if (best === shown) return;
    shown = best;
    const share = (data.x[best] - left) / (right - left);
    cursor.style.left = share * 100 + '%';
    tip.replaceChildren(make('strong', '', data.name + ' ' + data.x[best]));
    for (const line of data.lines) {
      if (line.y[best] === null) continue;
      const row = make('div');
      row.append(make('i', 't' + line.tone), make('span', '', line.label), make('b', '', short(line.y[best])));
      tip.append(row);
    }
    tip.style.left = share < .5 ? 'calc(' + share * 100 + '% + 12px)' : 'auto';
    tip.style.right = share < .5 ? 'auto' : 'calc(' + (1 - share) * 100 + '% + 12px)';
  };
  plot.addEventListener('pointermove', move);
  plot.addEventListener('pointerdown', move);
  plot.addEventListener('pointerleave', leave);
}
document.querySelector('nav button').addEventListener('click', () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches;
  root.dataset.theme = dark ? 'light' : 'dark';
});
"""
