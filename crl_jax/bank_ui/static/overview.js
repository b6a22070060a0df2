// Growth: how the bank came to be, and what it was good for.

import { get } from "./api.js";
import { chart, diverging, legend, lines, niceTicks, pooled, stacked } from "./charts.js";
import { empty, families, h, number, panel, percent, signed } from "./dom.js";

const WAYS = { add: "added", update: "updated", merge: "merged", dedup: "duplicates joined", import: "imported", seed: "seeded" };
const ENDS = { evict: "evicted", update: "replaced", merge: "merged away", dedup: "duplicates", downvote: "voted out", retire: "retired", other: "other" };
const COLOURS = { add: "c0", update: "c5", merge: "c3", dedup: "c4", import: "c7", seed: "c7", evict: "c6", downvote: "c1", retire: "c1", other: "c4" };

export function overview(main, { summary, route }) {
  const tiles = h("section", { class: "tiles", "aria-label": "The bank in numbers" });
  if (summary) tiles.append(...numbers(summary));
  const charts = h("div", { class: "charts" });
  const lists = h("div", { class: "pair" }, top("Most used", "used", route), top("Most useful", "useful", route));
  main.append(tiles, charts, lists);
  panel(charts, () => get("growth"), drawn, { lines: 8 })();
}

function numbers(m) {
  const rate = (side) => (m.success[side].episodes ? m.success[side].succeeded / m.success[side].episodes : NaN);
  const [guided, free] = [rate("with"), rate("without")];
  const lift = Number.isNaN(guided - free) ? null : guided - free;
  const tile = (name, value, more) => h("div", { class: "tile" }, h("p", { class: "tile-name" }, name), h("p", { class: "tile-value" }, value), h("p", { class: "tile-more" }, more));
  return [
    tile("Experiences", number(m.entries), `${number(m.entries_ever)} ever written, ${Object.keys(m.namespaces).length} ${Object.keys(m.namespaces).length === 1 ? "family" : "families"}`),
    tile("Training step", number(m.step), `${number(m.generations)} generations, ${(m.file_bytes / 2 ** 20).toFixed(1)} MiB`),
    tile("Success with", percent(guided, 1), `${number(m.success.with.episodes)} episodes read an experience`),
    tile("Success without", percent(free, 1), `${number(m.success.without.episodes)} episodes played alone`),
    tile("Difference", lift === null ? "–" : `${signed(100 * lift, 1)} pts`, "with less without, over all steps"),
  ];
}

function drawn({ steps, namespaces }) {
  if (!steps.length) return empty("No experience yet", "The bank is empty at this revision. It grows when finished episodes are distilled.");
  const xs = steps.map((r) => r.step);
  return [sizes(steps, namespaces, xs), flow(steps, xs), success(steps, xs)];
}

function card(title, text, marks, body) {
  return h("section", { class: "card" }, h("div", { class: "card-head" }, h("h2", {}, title), h("p", {}, text)), legend(marks), body);
}

function sizes(steps, namespaces, xs) {
  const colour = families(namespaces);
  const series = namespaces.map((name) => [`c${colour.get(name)}`, steps.map((r) => r.entries[name] ?? 0), name]);
  const total = steps.map((r) => Object.values(r.entries).reduce((a, b) => a + b, 0));
  const body = chart({
    title: "Entries in the bank by family and training step",
    xs,
    ticks: niceTicks(Math.max(...total)),
    draw: stacked(series, xs),
    read: (n) => [`Step ${number(xs[n])}`, [...series.map(([mark, values, name]) => [mark, name, number(values[n])]), ["none", "all", number(total[n])]].slice(-9)],
    table: { head: ["step", ...namespaces, "all"], rows: steps.map((r, n) => [r.step, ...namespaces.map((name) => r.entries[name] ?? 0), total[n]]) },
  });
  return card("Entries", "in the bank after each step, by family", series.map(([mark, , name]) => [mark, name]), body);
}

function flow(steps, xs) {
  const ways = Object.keys(WAYS).filter((way) => steps.some((r) => r.written[way]));
  const ends = Object.keys(ENDS).filter((end) => steps.some((r) => r.left[end]));
  const up = ways.map((way) => [COLOURS[way], steps.map((r) => r.written[way] ?? 0)]);
  const down = ends.map((end) => [`${COLOURS[end]} soft`, steps.map((r) => r.left[end] ?? 0)]);
  const sum = (row) => Object.values(row).reduce((a, b) => a + b, 0);
  const [most, gone] = ["written", "left"].map((side) => Math.max(0, ...steps.map((r) => sum(r[side]))));
  const step = niceTicks(Math.max(1, most, gone), 3)[1];
  const ticks = Array.from({ length: Math.ceil(gone / step) + Math.max(1, Math.ceil(most / step)) + 1 }, (_, n) => step * (n - Math.ceil(gone / step)));
  const body = chart({
    title: "Entries written and removed by training step",
    inset: 12,
    xs,
    ticks,
    format: (t) => number(Math.abs(t)),
    draw: diverging(up, down, xs),
    read: (n) => [
      `Step ${number(xs[n])}`,
      [...ways.map((way) => [COLOURS[way], WAYS[way], number(steps[n].written[way] ?? 0)]), ...ends.map((end) => [`${COLOURS[end]} soft`, ENDS[end], number(steps[n].left[end] ?? 0)])],
    ],
    table: { head: ["step", ...ways.map((way) => WAYS[way]), ...ends.map((end) => ENDS[end])], rows: steps.map((r) => [r.step, ...ways.map((way) => r.written[way] ?? 0), ...ends.map((end) => r.left[end] ?? 0)]) },
  });
  const marks = [...ways.map((way) => [COLOURS[way], WAYS[way]]), ...ends.map((end) => [`${COLOURS[end]} soft`, ENDS[end]])];
  return card("Changes", "written above the line, gone below it", marks, body);
}

function success(steps, xs) {
  const pairs = (side) => steps.map((r) => r[side]);
  const own = (side) => pairs(side).map(([episodes, won]) => (episodes ? won / episodes : null));
  const window = Math.max(1, Math.round(xs.length / 12));
  const [guided, free] = [pooled(pairs("with"), window), pooled(pairs("without"), window)];
  if (![...guided, ...free].some((value) => value !== null)) {
    return h("section", { class: "card" }, h("h2", {}, "Success"), empty("No finished episode", "Success is drawn once episodes were counted in this bank."));
  }
  const text = ([episodes, won]) => (episodes ? `${percent(won / episodes)} of ${episodes}` : "no episode");
  const body = chart({
    title: "Success of episodes with and without experience by training step",
    xs,
    ticks: [0, 0.25, 0.5, 0.75, 1],
    format: (t) => percent(t),
    draw: lines([["c1", free, own("without")], ["c0", guided, own("with")]], xs),
    read: (n) => [`Step ${number(xs[n])}`, [["c0", "with", text(steps[n].with)], ["c1", "without", text(steps[n].without)]]],
    table: { head: ["step", "with: episodes", "succeeded", "without: episodes", "succeeded"], rows: steps.map((r) => [r.step, ...r.with, ...r.without]) },
  });
  const about = window > 1 ? `dots are steps, lines the last ${window} steps together` : "of the episodes that ended in each step";
  return card("Success", about, [["c0", "with experience"], ["c1", "without"]], body);
}

function top(title, by, route) {
  const list = h("div", {});
  panel(list, () => get("entries", { by, limit: 5, retired: 1 }), ({ entries }) => {
    const read = entries.filter((e) => e.usage.shown > 0);
    if (!read.length) return empty("Nothing read yet", "An experience counts as used when an episode that read it has ended.");
    return h("ol", { class: "top-list" }, read.map((e) => h("li", {}, h("a", { href: route("entry", e.id) }, e.text), h("p", { class: "meta" }, meter(e), `${e.usage.succeeded} of ${e.usage.shown} reads succeeded`, e.live ? null : h("span", {}, "has left the bank")))));
  })();
  const more = h("a", { href: route("entries", "", { by, retired: 1 }), class: "more" }, "all");
  return h("section", { class: "card" }, h("div", { class: "card-head" }, h("h2", {}, title), more), list);
}

export function meter(e) {
  const share = e.utility;
  return h("span", { class: "meter", role: "img", "aria-label": `utility ${share.toFixed(2)}` }, h("span", { style: { width: `${100 * share}%` } }));
}
