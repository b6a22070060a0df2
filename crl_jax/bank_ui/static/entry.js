// One entry: its text, its lineage as a picture, and everything behind the picture.

import { get } from "./api.js";
import { h, number, panel, percent, signed } from "./dom.js";
import { picture } from "./lineage.js";

export function entry(main, { arg, route, go }) {
  const back = h("a", { class: "back", href: route("entries"), on: { click: (event) => history.length > 1 && (event.preventDefault(), history.back()) } }, "← back");
  const host = h("div", {});
  let clean = null;
  main.append(back, host);
  panel(host, () => get(`entry/${encodeURIComponent(arg)}`), (found) => {
    document.title = `${found.entry.text.slice(0, 60)} – lineage`;
    const drawn = picture(found, route, go);
    clean = drawn.clean;
    return [head(found), h("section", { class: "card" }, h("div", { class: "card-head" }, h("h2", {}, "Lineage"), h("p", {}, "from the episodes it was distilled from to the episodes it guided")), drawn.node), ...facts(found, route)];
  }, { lines: 8 })();
  return () => clean?.();
}

function head(f) {
  const e = f.entry;
  const bits = [
    h("code", {}, e.id),
    h("span", {}, e.namespace),
    h("span", {}, `${f.written_as}, step ${number(e.step)}, revision ${number(f.created_revision)}`),
    e.outcome !== null && h("span", { class: `source ${e.outcome ? "good" : "bad"}` }, e.outcome ? "from a success" : "from a failure"),
    f.usage.votes ? h("span", {}, `${f.usage.votes} votes`) : null,
  ];
  const left = f.left && h("p", { class: "left-note" }, `No longer in the bank: ${f.left[2]}, at revision ${number(f.left[0])}${f.left[1] === null ? "" : `, step ${number(f.left[1])}`}.`);
  return h("div", { class: "entry-head" }, h("h2", { class: "lesson" }, e.text), h("p", { class: "meta" }, bits), left);
}

function facts(f, route) {
  const w = f.writing;
  return [h("div", { class: "pair" }, generation(f, w), guided(f)), h("div", { class: "pair" }, relatives("Replaced", f.parents, f.parents_total, "Nothing: it was a new lesson.", route), relatives("Replaced by", f.children, f.children_total, f.left ? "Nothing took its place." : "Nothing: it is in the bank.", route))];
}

function row(name, value) {
  return h("div", {}, h("dt", {}, name), h("dd", {}, value));
}

function generation(f, w) {
  const box = h("section", { class: "card" }, h("h2", {}, "Generation"));
  if (!w) {
    box.append(h("p", { class: "note" }, f.entry.generation_id ? `Generation ${f.entry.generation_id} is not stored.` : "No generation: a person or a file brought it in."));
    return box;
  }
  const c = w.credit;
  const credit = c.mean === null ? "no evidence yet" : `${signed(c.mean)} ± ${c.error.toFixed(2)} over ${number(c.episodes)} episodes`;
  box.append(
    h("dl", { class: "facts" }, row("Id", h("code", {}, w.id)), row("Kind", w.kind), row("Step", number(w.step)), row("Weight version", w.versions.length ? String(w.versions.at(-1)) : "–"), row("Read", w.parse_error ? `not: ${w.parse_error}` : "without fault"), row("Length", `${number(w.prompt_tokens)} + ${number(w.response_tokens)} tokens`), row("Credit", credit), row("Trained on", c.trained === 1 ? "once" : `${c.trained} times`)),
  );
  for (const [name, text] of [["Prompt", w.prompt], ["Response", w.response]]) {
    if (text !== null) box.append(h("details", { open: name === "Response" }, h("summary", {}, name), h("pre", { tabindex: 0 }, text)));
  }
  return box;
}

function guided(f) {
  const box = h("section", { class: "card" }, h("div", { class: "card-head" }, h("h2", {}, "Episodes it guided"), h("p", {}, `${number(f.guided_total)} in all`)));
  if (!f.guided.length) {
    box.append(h("p", { class: "note" }, "No finished episode has read it yet."));
    return box;
  }
  const lines = [...f.guided].reverse().map(([episode, reader, step, won, reward]) => h("tr", {}, h("td", { class: "num" }, number(step)), h("td", {}, h("code", {}, episode || "–")), h("td", {}, reader), h("td", {}, h("span", { class: `source ${won ? "good" : "bad"}` }, won ? "success" : "failure")), h("td", { class: "num" }, reward.toFixed(2))));
  box.append(h("p", { class: "meta" }, `${percent(f.guided.filter((g) => g[3]).length / f.guided.length)} succeeded`), h("div", { class: "scroll tall", tabindex: 0, role: "region", "aria-label": "Episodes" }, h("table", { class: "plain" }, h("thead", {}, h("tr", {}, ["step", "episode", "family", "outcome", "reward"].map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, lines))));
  return box;
}

function relatives(title, list, total, none, route) {
  const box = h("section", { class: "card" }, h("div", { class: "card-head" }, h("h2", {}, title), total ? h("p", {}, `${number(total)} in all`) : null));
  if (!list.length) {
    box.append(h("p", { class: "note" }, none));
    return box;
  }
  box.append(h("ul", { class: "relatives" }, list.map((r) => h("li", { style: { "--deep": String(Math.min(r.distance - 1, 6)) } }, h("a", { href: route("entry", r.id) }, r.text), h("p", { class: "meta" }, h("code", {}, r.id), h("span", {}, r.how), r.live ? h("span", { class: "source good" }, "in the bank") : null)))));
  return box;
}
