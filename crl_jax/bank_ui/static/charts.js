// Charts by hand: axes, areas, bars and lines in SVG, drawn anew for every width, read with a pointer or the arrow keys.

import { h, s, number } from "./dom.js";

const PAD = { left: 44, right: 12, top: 10, bottom: 26 };

export function niceTicks(top, wanted = 4) {
  if (!(top > 0)) return [0, 1];
  const raw = top / wanted;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = Math.max(1, [1, 2, 2.5, 5, 10].map((m) => m * power).find((m) => m >= raw)); // what is counted has no halves
  return Array.from({ length: Math.ceil(top / step - 1e-9) + 1 }, (_, n) => n * step);
}

// `draw(frame)` adds the marks; `read(n)` gives [title, [[class, name, text], ...]] of step n for the tooltip; `table` is the text form.
export function chart({ title, height = 220, inset = 0, xs, ticks, draw, read, format = number, table }) {
  const note = h("div", { class: "tip", hidden: true });
  const host = h("div", { class: "plot", tabindex: 0, role: "group", "aria-roledescription": "chart", "aria-label": `${title}. Arrow keys read the values.` });
  const spoken = h("p", { class: "hidden", "aria-live": "polite" });
  const box = h("figure", { class: "chart" }, host, spoken, note, table && details(table));
  let at = null;
  let frame = null;

  function render() {
    const width = Math.max(240, Math.floor(host.clientWidth || 600));
    const inner = { w: width - PAD.left - PAD.right, h: height - PAD.top - PAD.bottom };
    const low = Math.min(...ticks);
    const high = Math.max(...ticks);
    const span = Math.max(1, xs.at(-1) - xs[0]);
    frame = {
      ...inner,
      width,
      x: (value) => PAD.left + inset + (xs.length === 1 ? inner.w / 2 - inset : ((inner.w - 2 * inset) * (value - xs[0])) / span),
      y: (value) => PAD.top + inner.h * (1 - (value - low) / (high - low)),
    };
    const rules = ticks.map((t) => [
      s("line", { class: t === 0 ? "axis" : "rule", x1: PAD.left, x2: width - PAD.right, y1: frame.y(t), y2: frame.y(t) }),
      s("text", { class: "tick", x: PAD.left - 7, y: frame.y(t) + 3.5, "text-anchor": "end" }, format(t)),
    ]);
    const step = Math.max(1, niceTicks(span, Math.max(2, Math.floor(inner.w / 90)))[1]);
    const first = Math.ceil(xs[0] / step) * step;
    const marks = Array.from({ length: Math.floor((xs.at(-1) - first) / step) + 1 }, (_, n) => first + n * step);
    const below = (marks.length ? marks : [xs[0]]).map((x) => s("text", { class: "tick", x: frame.x(x), y: height - 8, "text-anchor": "middle" }, number(x)));
    const cross = s("line", { class: "cross", y1: PAD.top, y2: PAD.top + inner.h, visibility: "hidden" });
    host.replaceChildren(s("svg", { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" }, rules, draw(frame), below, cross));
    frame.cross = cross;
    if (at !== null) point(at);
  }

  function point(n, loud = false) {
    at = Math.max(0, Math.min(xs.length - 1, n));
    const x = frame.x(xs[at]);
    for (const [name, value] of [["x1", x], ["x2", x], ["visibility", "visible"]]) frame.cross.setAttribute(name, value);
    const [head, rows] = read(at);
    note.replaceChildren(
      h("strong", {}, head),
      ...rows.map(([mark, name, text]) => h("span", { class: "tip-row" }, h("i", { class: `swatch ${mark}` }), h("span", {}, name), h("b", {}, text))),
    );
    note.hidden = false;
    const left = x > frame.width / 2 ? x - note.offsetWidth - 12 : x + 12;
    note.style.setProperty("left", `${Math.max(0, left)}px`);
    if (loud) spoken.textContent = `${head}: ${rows.map(([, name, text]) => `${name} ${text}`).join(", ")}`;
  }

  function leave() {
    at = null;
    note.hidden = true;
    frame?.cross.setAttribute("visibility", "hidden");
  }

  host.addEventListener("pointermove", (event) => {
    const x = event.clientX - host.getBoundingClientRect().left;
    let best = 0;
    for (let n = 1; n < xs.length; n++) if (Math.abs(frame.x(xs[n]) - x) < Math.abs(frame.x(xs[best]) - x)) best = n;
    point(best);
  });
  host.addEventListener("pointerleave", () => document.activeElement !== host && leave());
  host.addEventListener("blur", leave);
  host.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const to = move !== undefined ? (at ?? (move > 0 ? -1 : xs.length)) + move : { Home: 0, End: xs.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    point(to, true);
  });
  new ResizeObserver(render).observe(host);
  return box;
}

function details({ head, rows }) {
  const make = (cells, tag) => h("tr", {}, cells.map((cell) => h(tag, tag === "th" ? { scope: "col" } : {}, String(cell))));
  const body = h("tbody", {});
  const whole = h("details", { class: "as-table" }, h("summary", {}, "As a table"), h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Values" }, h("table", {}, h("thead", {}, make(head, "th")), body)));
  whole.addEventListener("toggle", () => whole.open && !body.childElementCount && body.append(...rows.map((row) => make(row, "td"))));
  return whole;
}

export function legend(items) {
  return h("ul", { class: "legend" }, items.map(([mark, name]) => h("li", {}, h("i", { class: `swatch ${mark}` }), name)));
}

// Areas on top of each other. `series` is [[class, values], ...].
export function stacked(series, xs) {
  return (f) => {
    const sums = xs.map(() => 0);
    return series.map(([mark, values]) => {
      const low = [...sums];
      values.forEach((value, n) => (sums[n] += value));
      const up = xs.map((x, n) => `${f.x(x).toFixed(1)},${f.y(sums[n]).toFixed(1)}`);
      const down = xs.map((x, n) => `${f.x(x).toFixed(1)},${f.y(low[n]).toFixed(1)}`).reverse();
      return s("polygon", { class: `area ${mark}`, points: [...up, ...down].join(" ") });
    });
  };
}

// Bars on both sides of zero: what came above, what left below.
export function diverging(up, down, xs) {
  return (f) => {
    const wide = Math.max(1, Math.min(22, (f.w / Math.max(1, xs.length)) * 0.72));
    const pile = (groups, n, sign) => {
      let sum = 0;
      return groups.map(([mark, values]) => {
        const from = sum;
        sum += values[n];
        if (!values[n]) return null;
        const [a, b] = [f.y(sign * from), f.y(sign * sum)];
        return s("rect", { class: `fill ${mark}`, x: (f.x(xs[n]) - wide / 2).toFixed(1), width: wide.toFixed(1), y: Math.min(a, b).toFixed(1), height: Math.abs(a - b).toFixed(1) });
      });
    };
    return xs.map((_, n) => [pile(up, n, 1), pile(down, n, -1)]);
  };
}

// Lines through the values that are there, and a dot for each value of its own.
export function lines(series, xs) {
  return (f) =>
    series.map(([mark, smooth, dots]) => [
      dots.map((value, n) => value !== null && s("circle", { class: `dot ${mark}`, cx: f.x(xs[n]).toFixed(1), cy: f.y(value).toFixed(1), r: 2.2 })),
      s("polyline", {
        class: `line ${mark}`,
        points: smooth.map((value, n) => (value === null ? null : `${f.x(xs[n]).toFixed(1)},${f.y(value).toFixed(1)}`)).filter(Boolean).join(" "),
      }),
    ]);
}

// Successes over episodes of a window that ends at each step: sums are averaged, never rates.
export function pooled(pairs, window) {
  return pairs.map((_, n) => {
    const part = pairs.slice(Math.max(0, n - window + 1), n + 1);
    const [episodes, won] = [part.reduce((a, p) => a + p[0], 0), part.reduce((a, p) => a + p[1], 0)];
    return episodes ? won / episodes : null;
  });
}
