// The picture of a lineage: boxes in the flow of the page, curves drawn between them.

import { h, number, percent, s, signed } from "./dom.js";

const SHOWN = 5; // boxes of one kind

export function picture(f, route, go) {
  const w = f.writing;
  const edges = [];
  const me = box("me", "Entry", f.entry.text, [f.left ? "has left the bank" : "in the bank", `utility ${f.utility.toFixed(2)}`]);
  const made = w
    ? box("generation", "Generation", w.id, [`${w.kind}, step ${number(w.step)}`, `weights ${w.versions.at(-1) ?? "–"}`])
    : box("generation", "Brought in", f.written_as, ["by a person or a file"]);
  const sources = capped(f.entry.episode_ids, "more episodes", (id) => box(f.entry.outcome === null ? "episode" : f.entry.outcome ? "episode good" : "episode bad", "Episode", id, [f.entry.outcome === null ? "" : f.entry.outcome ? "success" : "failure"]));
  if (!sources.length) sources.push(box("episode none", "Episodes", "none on record", []));
  const parents = capped(f.parents.filter((r) => r.distance === 1), "more replaced", (r) => relative(r, "Replaced", route));
  const children = capped(f.children.filter((r) => r.distance === 1), "more", (r) => relative(r, "Replaced by", route));
  const steps = f.steps.slice(-SHOWN).map((step) => box("guided", `Step ${number(step.step)}`, dots(step), [`${step.succeeded} of ${step.episodes} succeeded`]));
  if (f.steps.length > SHOWN) steps.unshift(box("guided none", "Earlier", `${number(f.steps.length - SHOWN)} more steps`, []));
  if (!steps.length) steps.push(box("guided none", "Guided", "no finished episode", []));
  const n = f.guided_total;
  const won = f.usage.succeeded;
  const mean = f.steps.length ? f.steps.reduce((sum, step) => sum + step.reward, 0) / n : null;
  const credit = w && w.credit.mean !== null ? `credit ${signed(w.credit.mean)}` : null;
  const reward = box("reward", "Reward", mean === null ? "–" : mean.toFixed(2), n ? [`mean over ${number(n)} episodes`, `${percent(won / Math.max(1, f.usage.shown))} success`] : ["no evidence yet"]);
  if (credit) reward.append(h("span", { class: "node-more stacked-only" }, `${credit} for the generation`));

  for (const node of sources) edges.push([node, made, ""]);
  edges.push([made, me, ""]);
  for (const node of parents) edges.push([node, me, "soft"]);
  for (const node of steps) edges.push([me, node, ""], [node, reward, ""]);
  for (const node of children) edges.push([me, node, "soft"]);

  const column = (name, ...nodes) => h("div", { class: "stage", role: "group", "aria-label": name }, nodes.flat());
  const wires = s("svg", { class: "wires", "aria-hidden": "true" });
  const stage = h("div", { class: "lineage" }, wires, column("Source episodes", sources), column("Generation and replaced entries", made, parents), column("Entry", me), column("Guided episodes and successors", steps, children), column("Reward", reward));
  if (credit) edges.push([reward, made, "credit", credit]);
  const redraw = () => wire(stage, wires, edges);
  const watch = new ResizeObserver(redraw);
  watch.observe(stage);
  stage.addEventListener("keydown", (event) => arrows(event, stage));
  return { node: stage, clean: () => watch.disconnect() };
}

function box(kind, title, main, more, link = null) {
  const tag = link ? "a" : "div";
  return h(tag, { class: `node ${kind}`, href: link }, h("span", { class: "node-kind" }, title), h("span", { class: "node-main" }, main), more.filter(Boolean).map((text) => h("span", { class: "node-more" }, text)));
}

const relative = (r, title, route) => box(r.live ? "relative" : "relative gone", title, r.text, [r.how, r.live ? "" : "has left"], route("entry", r.id));

function capped(items, more, make) {
  const made = items.slice(0, SHOWN - 1).map(make);
  if (items.length === SHOWN) made.push(make(items[SHOWN - 1]));
  else if (items.length > SHOWN) made.push(box("none", "And", `${number(items.length - SHOWN + 1)} ${more}`, []));
  return made;
}

function dots(step) {
  const drawn = Math.min(step.episodes, 24);
  const good = Math.round((drawn * step.succeeded) / step.episodes);
  return h("span", { class: "dots", "aria-hidden": "true" }, Array.from({ length: drawn }, (_, n) => h("i", { class: n < good ? "good" : "bad" })));
}

function wire(stage, wires, edges) {
  const frame = stage.getBoundingClientRect();
  const at = (node) => {
    const r = node.getBoundingClientRect();
    return { left: r.left - frame.left, right: r.right - frame.left, top: r.top - frame.top, bottom: r.bottom - frame.top, x: (r.left + r.right) / 2 - frame.left, y: (r.top + r.bottom) / 2 - frame.top };
  };
  wires.setAttribute("width", frame.width);
  wires.setAttribute("height", frame.height);
  wires.replaceChildren(
    ...edges.flatMap(([from, to, kind, text]) => {
      const [a, b] = [at(from), at(to)];
      if (kind === "credit") return loop(a, b, frame, text);
      const flat = b.left >= a.right - 1;
      const d = flat ? curve(a.right, a.y, b.left - 5, b.y, true) : curve(a.x, a.bottom, b.x, b.top - 5, false);
      return [s("path", { class: `wire ${kind}`, d }), head(flat ? [b.left, b.y] : [b.x, b.top], flat, kind)];
    }),
  );
}

function curve(x1, y1, x2, y2, flat) {
  const middle = flat ? (x1 + x2) / 2 : (y1 + y2) / 2;
  return flat ? `M${x1},${y1} C${middle},${y1} ${middle},${y2} ${x2},${y2}` : `M${x1},${y1} C${x1},${middle} ${x2},${middle} ${x2},${y2}`;
}

function head([x, y], flat, kind) {
  const points = flat ? `${x - 7},${y - 4} ${x},${y} ${x - 7},${y + 4}` : `${x - 4},${y - 7} ${x},${y} ${x + 4},${y - 7}`;
  return s("polygon", { class: `tip-head ${kind}`, points });
}

// The way of the reward back to the generation that wrote the entry: below the boxes, or beside them on a narrow page.
function loop(a, b, frame, text) {
  if (b.right < a.left) {
    const low = frame.height - 14;
    const [side, end] = [b.left - 18, b.bottom - 14];
    const d = `M${a.x},${a.bottom} C${a.x},${low} ${a.x - 20},${low} ${a.x - 50},${low} L${side + 24},${low} C${side},${low} ${side},${low - 6} ${side},${low - 24} L${side},${end + 14} C${side},${end} ${side},${end} ${b.left - 6},${end}`;
    const middle = (a.x + b.x) / 2;
    const wide = text.length * 6.6 + 16;
    return [s("path", { class: "wire credit", d }), s("polygon", { class: "tip-head credit", points: `${b.left - 7},${end - 4} ${b.left},${end} ${b.left - 7},${end + 4}` }), s("rect", { class: "wire-label-back", x: middle - wide / 2, y: low - 10, width: wide, height: 20, rx: 10 }), s("text", { class: "wire-label", x: middle, y: low + 4, "text-anchor": "middle" }, text)];
  }
  return [];
}

function arrows(event, stage) {
  const links = [...stage.querySelectorAll("a.node")];
  const at = links.indexOf(document.activeElement);
  const move = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 }[event.key];
  if (at < 0 || move === undefined) return;
  event.preventDefault();
  links[(at + move + links.length) % links.length].focus();
}
