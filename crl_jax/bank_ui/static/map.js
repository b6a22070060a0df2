// Duplicates: entries as points, near ones joined. Drawn on a canvas; read with a pointer, the arrow keys or the list beside it.

import { get } from "./api.js";
import { legend } from "./charts.js";
import { empty, families, h, number, panel, percent, say } from "./dom.js";

export function map(main, { summary, params, route, go }) {
  const names = Object.keys(summary?.namespaces ?? {});
  const colour = families(names);
  const start = Number(params.near) >= 0.5 && Number(params.near) <= 1 ? params.near : "0.9";
  const near = h("input", { type: "range", id: "near", min: 0.7, max: 0.99, step: 0.01, value: start });
  const near_text = h("output", { for: "near" }, Number(start).toFixed(2));
  const host = h("div", {});
  let clean = null;
  const load = panel(host, () => get("map", { near: near.value }), (found) => {
    clean?.();
    const made = drawn(found, colour, route, go);
    clean = made.clean;
    return made.nodes;
  }, { lines: 8 });
  main.append(
    h("p", { class: "lead" }, "Each point is an entry, placed by the two directions in which their embeddings differ most. A line joins two entries of one family that say nearly the same: candidates for a merge."),
    h("div", { class: "toolbar" }, h("label", { for: "near" }, "Near means a cosine of at least"), near, near_text),
    legend(names.map((name) => [`c${colour.get(name)}`, name])),
    host,
  );
  let wait = 0;
  near.addEventListener("input", () => {
    near_text.textContent = Number(near.value).toFixed(2);
    clearTimeout(wait);
    wait = setTimeout(() => {
      history.replaceState(null, "", route("map", "", { near: near.value }));
      load();
    }, 200);
  });
  load();
  return () => clean?.();
}

function drawn(found, colour, route, go) {
  if (!found.points.length) return { nodes: [empty("No points", "The bank holds no entry with an embedding at this revision.")], clean: null };
  const view = { zoom: 1, x: 0, y: 0 };
  let at = null;
  let size = { w: 600, h: 480 };
  const canvas = h("canvas", { tabindex: 0, role: "application", "aria-label": `Map of ${found.points.length} entries, ${found.pairs.length} near pairs. Arrow keys move to the next point, Enter opens it, plus and minus zoom.` });
  const tip = h("div", { class: "tip map-tip", hidden: true });
  const frame = h("div", { class: "map" }, canvas, tip);
  const g = canvas.getContext("2d");
  const partners = new Map();
  for (const [a, b, cosine] of found.pairs) {
    for (const [from, to] of [[a, b], [b, a]]) partners.set(from, [...(partners.get(from) ?? []), [to, cosine]]);
  }
  const spot = ([, x, y]) => `${x.toFixed(2)},${y.toFixed(2)}`;
  const crowd = new Map(); // entries in one place are drawn as one larger point
  for (const point of found.points) crowd.set(spot(point), (crowd.get(spot(point)) ?? 0) + 1);
  const place = ([, x, y]) => [size.w / 2 + (x * 0.92 * view.zoom + view.x) * (size.w / 2), size.h / 2 - (y * 0.92 * view.zoom + view.y) * (size.h / 2)];

  function paint() {
    const css = getComputedStyle(document.documentElement);
    const read = (name) => css.getPropertyValue(name).trim();
    const ratio = devicePixelRatio || 1;
    canvas.width = size.w * ratio;
    canvas.height = size.h * ratio;
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.clearRect(0, 0, size.w, size.h);
    const spots = found.points.map(place);
    g.strokeStyle = read("--wire");
    g.lineWidth = 1;
    g.globalAlpha = 0.7;
    g.beginPath();
    for (const [a, b] of found.pairs) {
      g.moveTo(...spots[a]);
      g.lineTo(...spots[b]);
    }
    g.stroke();
    g.globalAlpha = 0.82;
    for (const [n, point] of found.points.entries()) {
      g.fillStyle = read(`--c${colour.get(point[3]) ?? 4}`);
      g.beginPath();
      g.arc(...spots[n], Math.min(16, 3 + 1.3 * Math.sqrt(crowd.get(spot(point)))), 0, 7);
      g.fill();
    }
    g.globalAlpha = 1;
    if (at !== null) {
      g.strokeStyle = read("--ink");
      g.lineWidth = 2;
      g.beginPath();
      for (const [to] of partners.get(at) ?? []) {
        g.moveTo(...spots[at]);
        g.lineTo(...spots[to]);
      }
      g.stroke();
      g.beginPath();
      g.arc(...spots[at], 11, 0, 7);
      g.stroke();
    }
  }

  function pick(n, loud = false) {
    at = n;
    if (n === null) tip.hidden = true;
    else {
      const [id, , , family, text, shown, won] = found.points[n];
      const twins = partners.get(n) ?? [];
      tip.replaceChildren(h("strong", {}, text), h("span", { class: "meta" }, `${family}, ${won} of ${shown} reads succeeded${twins.length ? `, ${twins.length} near` : ""}${crowd.get(spot(found.points[n])) > 1 ? `, ${crowd.get(spot(found.points[n]))} entries in this place` : ""}`), h("code", {}, id));
      tip.hidden = false;
      const [x, y] = place(found.points[n]);
      tip.style.setProperty("left", `${Math.max(4, Math.min(size.w - tip.offsetWidth - 4, x > size.w / 2 ? x - tip.offsetWidth - 14 : x + 14))}px`);
      tip.style.setProperty("top", `${Math.max(4, Math.min(size.h - tip.offsetHeight - 4, y - tip.offsetHeight / 2))}px`);
      if (loud) say(`${text}. ${family}. ${twins.length} near entries.`);
    }
    paint();
  }

  function nearest(x, y, reach) {
    let best = null;
    let least = reach;
    for (const [n, point] of found.points.entries()) {
      const [px, py] = place(point);
      const d = Math.hypot(px - x, py - y);
      if (d < least) [best, least] = [n, d];
    }
    return best;
  }

  function beyond(key) {
    if (at === null) return nearest(size.w / 2, size.h / 2, Infinity);
    const [x, y] = place(found.points[at]);
    const [dx, dy] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[key];
    let best = at;
    let least = Infinity;
    for (const [n, point] of found.points.entries()) {
      const [px, py] = place(point);
      const ahead = (px - x) * dx + (py - y) * dy;
      const aside = Math.abs((px - x) * dy) + Math.abs((py - y) * dx);
      if (n !== at && ahead > 0.5 && aside <= ahead * 1.5 && ahead + 2 * aside < least) [best, least] = [n, ahead + 2 * aside];
    }
    return best;
  }

  function zoom(factor, x = size.w / 2, y = size.h / 2) {
    const next = Math.max(1, Math.min(40, view.zoom * factor));
    const [cx, cy] = [(x - size.w / 2) / (size.w / 2), -(y - size.h / 2) / (size.h / 2)];
    view.x = cx - ((cx - view.x) * next) / view.zoom;
    view.y = cy - ((cy - view.y) * next) / view.zoom;
    view.zoom = next;
    if (next === 1) view.x = view.y = 0;
    pick(at);
  }

  let held = null;
  canvas.addEventListener("pointerdown", (event) => {
    held = { x: event.clientX, y: event.clientY, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (held && (held.moved || Math.hypot(event.clientX - held.x, event.clientY - held.y) > 4)) {
      view.x += (event.clientX - held.x) / (size.w / 2);
      view.y -= (event.clientY - held.y) / (size.h / 2);
      held = { x: event.clientX, y: event.clientY, moved: true };
      pick(null);
      return;
    }
    const n = nearest(event.offsetX, event.offsetY, 14);
    canvas.classList.toggle("over", n !== null);
    if (n !== at) pick(n);
  });
  canvas.addEventListener("pointerup", (event) => {
    const clicked = held && !held.moved;
    held = null;
    const n = nearest(event.offsetX, event.offsetY, 14);
    if (clicked && n !== null) go("entry", found.points[n][0]);
  });
  canvas.addEventListener("pointerleave", () => document.activeElement !== canvas && pick(null));
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && document.activeElement !== canvas) return; // the page scrolls
    event.preventDefault();
    zoom(event.deltaY < 0 ? 1.2 : 1 / 1.2, event.offsetX, event.offsetY);
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    if (event.key.startsWith("Arrow")) pick(beyond(event.key), true);
    else if (event.key === "Enter" && at !== null) go("entry", found.points[at][0]);
    else if (event.key === "+" || event.key === "=") zoom(1.4);
    else if (event.key === "-") zoom(1 / 1.4);
    else if (event.key === "0") zoom(0);
    else if (event.key === "Escape" && at !== null) {
      pick(null);
      event.stopPropagation();
    } else return;
    event.preventDefault();
  });
  canvas.addEventListener("blur", () => pick(null));
  const resize = new ResizeObserver(() => {
    size = { w: Math.max(260, frame.clientWidth), h: Math.max(300, Math.min(620, frame.clientWidth * 0.72)) };
    canvas.style.setProperty("height", `${size.h}px`);
    paint();
  });
  resize.observe(frame);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", paint);

  const left = found.missing ? ` ${number(found.missing)} entries have no vector.` : "";
  const sample = found.points.length < found.total ? `A sample of ${number(found.points.length)} of ${number(found.total)} entries. ` : "";
  const note = h("p", { class: "note" }, `${sample}${number(found.pairs.length)} near pairs touch ${percent(found.in_pairs / found.points.length)} of the points; the picture keeps ${percent(found.explained[0] + found.explained[1])} of the variance.${left}`);
  const list = h("section", { class: "card" }, h("h2", {}, "Nearest pairs"), found.pairs.length ? h("ol", { class: "twins", tabindex: 0, role: "list", "aria-label": "Nearest pairs" }, told(found).map((pair) => twin(pair, route))) : h("p", { class: "note" }, "No two entries are that near. Lower the limit to see more."));
  const clean = () => {
    resize.disconnect();
    dark.removeEventListener("change", paint);
  };
  return { nodes: [note, h("div", { class: "map-row" }, h("div", { class: "card flush" }, frame), list)], clean };
}

// The nearest pairs, those with the same two texts together.
function told(found) {
  const seen = new Map();
  for (const [a, b, cosine] of found.pairs) {
    const [one, two] = [found.points[a], found.points[b]];
    const key = JSON.stringify([one[4], two[4]].sort());
    const known = seen.get(key);
    if (known) known.times++;
    else if (seen.size < 60) seen.set(key, { one, two, cosine, times: 1 });
  }
  return [...seen.values()];
}

function twin({ one, two, cosine, times }, route) {
  const link = (p) => h("a", { href: route("entry", p[0]) }, p[4]);
  const same = one[4] === two[4];
  return h("li", {}, h("b", { class: "num" }, cosine.toFixed(3)), h("div", {}, link(one), link(two), (same || times > 1) && h("span", { class: "meta" }, same && h("span", {}, "the same words"), times > 1 && h("span", {}, `${number(times)} pairs`))));
}
