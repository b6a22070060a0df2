// Search as the actor sees it: the candidates of a query in the order of the ranking, with the reasons.

import { get } from "./api.js";
import { empty, failed, h, number, roving, say, skeleton } from "./dom.js";

const PARTS = [["rank", "similarity rank"], ["showings", "times shown"], ["recent", "shown recently"], ["utility", "success of readers"], ["penalty", "other family"]];

export function search(main, { summary, params, route, go }) {
  const names = Object.keys(summary?.namespaces ?? {});
  const box = h("input", { type: "search", id: "query", placeholder: "The words of a task's goal", value: params.text ?? "", autocomplete: "off", maxlength: 4000 });
  const family = h("select", { id: "asks" }, names.map((name) => h("option", { value: name, selected: name === params.namespace }, name)));
  const button = h("button", { type: "submit", class: "strong" }, "Search");
  const form = h("form", { class: "toolbar", role: "search" }, h("label", { for: "query", class: "hidden" }, "Query"), box, names.length > 1 && h("span", { class: "asks" }, h("label", { for: "asks" }, "asked by"), family), button);
  const result = h("div", {});
  main.append(h("p", { class: "lead" }, "What an episode of this family would be shown for a goal: nearest entries, then re-ranked so that nothing is shown too often. Looking changes no counter."), form, result);
  let stop = new AbortController();

  async function run() {
    const text = box.value.trim();
    history.replaceState(null, "", route("search", "", { text, namespace: names.length > 1 ? family.value : "" }));
    stop.abort();
    stop = new AbortController();
    const mine = stop;
    if (!text) {
      result.replaceChildren(summary?.entries ? empty("Ask as the actor does", `Write a goal, such as “${example(summary)}”.`) : empty("No experience yet", "The bank is empty at this revision."));
      return;
    }
    const first = !summary?.embedder_ready;
    result.replaceChildren(first ? h("div", {}, h("p", { class: "note" }, "The embedding model is loaded for the first search. This takes a few seconds."), skeleton(5)) : skeleton(5));
    try {
      const found = await get("search", { text, namespace: names.length > 1 ? family.value : names[0] }, { signal: mine.signal });
      if (mine !== stop) return;
      if (summary) summary.embedder_ready = true;
      result.replaceChildren(...answer(found, route));
      const shown = found.found.filter((r) => r.in_prompt).length;
      say(`${found.found.length} candidates, ${shown} would be shown`);
      const list = result.querySelector("ol");
      if (list) roving(list, "li", { open: (item) => go("entry", item.dataset.id) });
    } catch (error) {
      if (error.name !== "AbortError") result.replaceChildren(failed(error, run));
    }
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    run();
  });
  family.addEventListener("change", run);
  box.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowDown") return;
    const item = result.querySelector("li[data-id]");
    if (item) {
      event.preventDefault();
      item.focus();
    }
  });
  box.focus();
  run();
  return () => stop.abort();
}

function example(summary) {
  return summary.namespaces.dungeon ? "find the stairs of the amber cellar" : "open the red door";
}

function answer(found, route) {
  if (!found.found.length) return [empty("Nothing near", "The actor would play without experience.")];
  const rules = `The first ${found.k === 1 ? "entry goes" : `${found.k} entries go`} into the prompt. Score = −rank − ${found.lambda_count} · log(1 + times shown) − 1 if shown recently.`;
  return [h("p", { class: "note" }, rules, found.embedded_now ? ` ${number(found.embedded_now)} entries had no stored vector and were embedded again.` : ""), h("ol", { class: "hits" }, found.found.map((r) => hit(r, route)))];
}

function hit(r, route) {
  const parts = r.score ? PARTS.filter(([key]) => r.score[key]).map(([key, name]) => h("span", { class: "part" }, name, " ", h("b", {}, signedPart(r.score[key])))) : [];
  return h(
    "li",
    { tabindex: -1, data: { id: r.id }, class: r.in_prompt ? "hit chosen" : r.score ? "hit" : "hit below" },
    h("div", { class: "place", "aria-hidden": "true" }, r.score ? r.place : "–"),
    h(
      "div",
      { class: "hit-body" },
      h("a", { href: route("entry", r.id), tabindex: -1 }, r.text),
      h("p", { class: "meta" }, r.in_prompt && h("span", { class: "pill" }, "shown to the actor"), h("code", {}, r.id), h("span", {}, `${number(r.shown)} reads`), h("span", {}, `utility ${r.utility.toFixed(2)}`), r.outcome !== null && h("span", { class: `source ${r.outcome ? "good" : "bad"}` }, r.outcome ? "from a success" : "from a failure")),
      r.score ? h("p", { class: "parts" }, parts, h("span", { class: "part total" }, "score ", h("b", {}, r.score.total < 0 ? `−${(-r.score.total).toFixed(2)}` : r.score.total.toFixed(2)))) : h("p", { class: "meta" }, r.why),
    ),
    h("div", { class: "cosine" }, h("b", {}, r.similarity.toFixed(3)), h("span", { class: "meter", "aria-hidden": "true" }, h("span", { style: { width: `${Math.max(0, 100 * r.similarity)}%` } })), h("span", { class: "meta" }, `cosine, ${ordinal(r.similarity_rank)} nearest`)),
  );
}

const signedPart = (value) => (value < 0 ? `−${trim(-value)}` : `+${trim(value)}`);
const trim = (value) => (Number.isInteger(value) ? String(value) : value.toFixed(2));
const ordinal = (n) => `${n}${["th", "st", "nd", "rd"][n % 100 > 10 && n % 100 < 14 ? 0 : n % 10] ?? "th"}`;
