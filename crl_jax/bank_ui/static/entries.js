// Experiences: the table of all entries, sorted and filtered by the server.

import { get } from "./api.js";
import { empty, failed, families, h, number, roving, say, skeleton } from "./dom.js";
import { meter } from "./overview.js";

const COLUMNS = [
  ["text", "Experience", "text"],
  ["namespace", "Family", "wide"],
  ["newest", "Step", "num"],
  ["used", "Reads", "num"],
  ["success", "Success", "num"],
  ["useful", "Utility", "meter-cell"],
];
const PAGE = 100;

export function entries(main, { summary, params, go, route }) {
  const view = { by: COLUMNS.some(([key]) => key === params.by) ? params.by : "used", order: params.order === "asc" ? "asc" : "desc", text: params.text ?? "", namespace: params.namespace ?? "", retired: params.retired ?? "" };
  const colour = families(Object.keys(summary?.namespaces ?? {}));
  const count = h("p", { class: "count", role: "status" });
  const body = h("tbody", {});
  const more = h("button", { type: "button", hidden: true }, "Show more");
  const state = h("div", {});
  const heads = COLUMNS.map(([key, name, kind]) => h("th", { scope: "col", class: kind }, h("button", { type: "button", data: { key }, on: { click: () => sort(key) } }, name, h("span", { class: "arrow", "aria-hidden": "true" }))));
  const table = h("table", { class: "entries" }, h("caption", { class: "hidden" }, "Experiences. Arrow keys move, Enter opens."), h("thead", {}, h("tr", {}, heads)), body);
  const box = h("input", { type: "search", id: "filter", placeholder: "Filter by words or id", value: view.text, autocomplete: "off", spellcheck: "false" });
  const family = h("select", { id: "family" }, h("option", { value: "" }, "All families"), [...colour.keys()].map((name) => h("option", { value: name, selected: name === view.namespace }, name)));
  const retired = h("input", { type: "checkbox", id: "retired", checked: view.retired === "1" });
  main.append(
    h("div", { class: "toolbar" }, h("label", { class: "hidden", for: "filter" }, "Filter"), box, h("label", { class: "hidden", for: "family" }, "Family"), family, h("label", { class: "check", for: "retired" }, retired, "with those that have left"), count),
    h("div", { class: "card flush" }, h("div", { class: "scroll" }, table), state, more),
  );

  const rows = roving(body, "tr", { open: (row) => go("entry", row.dataset.id) });
  let stop = new AbortController();
  let total = 0;

  async function load(offset = 0) {
    stop.abort();
    stop = new AbortController();
    const mine = stop;
    if (!offset && !body.childElementCount) state.replaceChildren(skeleton(6));
    try {
      const found = await get("entries", { ...view, offset, limit: PAGE }, { signal: mine.signal });
      if (mine !== stop) return;
      total = found.total;
      state.replaceChildren();
      if (!offset) body.replaceChildren();
      body.append(...found.entries.map((e) => line(e, colour, route)));
      rows.settle();
      count.textContent = `${number(total)} ${total === 1 ? "entry" : "entries"}`;
      more.hidden = body.childElementCount >= total;
      if (!total) state.replaceChildren(view.text || view.namespace ? empty("Nothing fits", "No entry has these words in its text or id. Clear the filter to see all.") : empty("No experience yet", "The bank is empty at this revision."));
    } catch (error) {
      if (error.name === "AbortError") return;
      body.replaceChildren();
      more.hidden = true;
      state.replaceChildren(failed(error, () => load()));
    }
  }

  function sort(key) {
    view.order = view.by === key && view.order === "desc" ? "asc" : "desc";
    view.by = key;
    changed();
    say(`Sorted by ${COLUMNS.find(([k]) => k === key)[1]}, ${view.order === "desc" ? "largest first" : "smallest first"}`);
  }

  function changed() {
    history.replaceState(null, "", route("entries", "", view));
    for (const head of heads) {
      const mine = head.firstChild.dataset.key === view.by;
      head.setAttribute("aria-sort", mine ? (view.order === "desc" ? "descending" : "ascending") : "none");
    }
    load();
  }

  let wait = 0;
  box.addEventListener("input", () => {
    view.text = box.value.trim();
    clearTimeout(wait);
    wait = setTimeout(changed, 120);
  });
  box.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowDown" && event.key !== "Enter") return;
    event.preventDefault();
    rows.first();
  });
  family.addEventListener("change", () => {
    view.namespace = family.value;
    changed();
  });
  retired.addEventListener("change", () => {
    view.retired = retired.checked ? "1" : "";
    changed();
  });
  more.addEventListener("click", async () => {
    const at = body.childElementCount;
    await load(at);
    body.children[at]?.focus();
  });
  body.addEventListener("click", (event) => {
    const row = event.target.closest("tr");
    if (row && !event.target.closest("a") && !getSelection().toString()) go("entry", row.dataset.id);
  });
  changed();
  return () => stop.abort();
}

function line(e, colour, route) {
  const source = e.outcome === null ? null : h("span", { class: `source ${e.outcome ? "good" : "bad"}` }, e.outcome ? "from a success" : "from a failure");
  const rate = e.usage.shown ? `${e.usage.succeeded}/${e.usage.shown}` : "–";
  return h(
    "tr",
    { tabindex: -1, data: { id: e.id }, class: e.live ? null : "gone" },
    h("td", { class: "text" }, h("a", { href: route("entry", e.id), tabindex: -1 }, e.text), h("p", { class: "meta" }, h("code", {}, e.id), source, e.live ? null : h("span", {}, "has left"), h("span", { class: "narrow-only" }, e.namespace))),
    h("td", { class: "wide" }, h("span", { class: "family" }, h("i", { class: `swatch c${colour.get(e.namespace) ?? 4}` }), e.namespace)),
    h("td", { class: "num" }, number(e.step)),
    h("td", { class: "num" }, number(e.usage.shown)),
    h("td", { class: "num" }, rate),
    h("td", { class: "meter-cell" }, meter(e), h("span", { class: "num" }, e.utility.toFixed(2))),
  );
}
