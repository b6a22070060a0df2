// The page as a whole: which part is shown, at which revision, and the keys.

import { get, where } from "./api.js";
import { h, number, say } from "./dom.js";
import { overview } from "./overview.js";
import { entries } from "./entries.js";
import { entry } from "./entry.js";
import { search } from "./search.js";
import { map } from "./map.js";

const PAGES = { overview, entries, search, map, entry };
const TITLES = { overview: "Growth", entries: "Experiences", search: "Search", map: "Duplicates", entry: "Entry" };
const TABS = ["overview", "entries", "search", "map"];
const main = document.getElementById("main");
const slider = document.getElementById("revision");
const shown = document.getElementById("revision-text");
const nowButton = document.getElementById("now");
const badge = document.getElementById("verify");
const fresh = document.getElementById("fresh");
let summary = null;
let loaded; // the revision that was asked for when the summary came
let close = null;

export function go(page, arg = "", params = {}) {
  location.hash = route(page, arg, params);
}

export function route(page, arg = "", params = {}) {
  const query = new URLSearchParams(Object.entries(params).filter(([, value]) => value !== "" && value !== null && value !== undefined));
  if (where.revision !== null) query.set("at", where.revision);
  const text = query.toString();
  return `#${page}${arg ? `/${encodeURIComponent(arg)}` : ""}${text ? `?${text}` : ""}`;
}

function here() {
  const [path, query = ""] = location.hash.slice(1).split("?");
  const [page, ...rest] = path.split("/");
  const params = Object.fromEntries(new URLSearchParams(query));
  const known = Object.hasOwn(PAGES, page) ? page : "overview";
  return { page: known, arg: rest.map(decodeURIComponent).join("/"), params };
}

async function show() {
  const { page, arg, params } = here();
  const at = /^\d{1,15}$/.test(params.at ?? "") ? Number(params.at) : null;
  where.revision = at;
  if (summary === null || at !== loaded) await load();
  for (const [n, link] of document.querySelectorAll(".tabs a").entries()) {
    link.setAttribute("href", route(TABS[n]));
    if (TABS[n] === page) {
      link.setAttribute("aria-current", "page");
      link.parentElement.scrollTo({ left: link.offsetLeft - 40 });
    }
    else link.removeAttribute("aria-current");
  }
  document.title = `${TITLES[page]} – ${summary?.name ?? "experience bank"}`;
  close?.();
  close = null;
  main.replaceChildren();
  main.dataset.page = page;
  close = PAGES[page](main, { summary, arg, params, go, route }) ?? null;
}

async function load() {
  const asked = where.revision;
  try {
    summary = await get("summary");
    loaded = asked;
  } catch (error) {
    summary = null;
    shown.textContent = "–";
    if (error.status === 404 && where.revision !== null) {
      where.revision = null;
      say(error.message);
      location.hash = route("overview");
      return load();
    }
    return;
  }
  document.getElementById("run").textContent = summary.name;
  document.getElementById("run").title = summary.path;
  slider.min = summary.oldest;
  slider.max = summary.newest;
  slider.value = summary.revision;
  label(summary.revision);
  fresh.hidden = true;
}

function label(revision) {
  const past = where.revision !== null || revision !== summary.newest;
  shown.textContent = past ? `${number(revision)} of ${number(summary.newest)}` : `${number(revision)}, now`;
  slider.setAttribute("aria-valuetext", past ? `${revision} of ${summary.newest}` : `${revision}, now`);
  nowButton.hidden = !past;
  document.body.classList.toggle("past", past);
}

function travel(revision) {
  const { page, arg, params } = here();
  where.revision = revision;
  delete params.at;
  location.hash = route(page, arg, params);
}

let settle = 0;
slider.addEventListener("input", () => {
  label(Number(slider.value));
  clearTimeout(settle);
  settle = setTimeout(() => travel(Number(slider.value) === summary.newest ? null : Number(slider.value)), 180);
});
nowButton.addEventListener("click", () => {
  travel(null);
  slider.focus();
});

async function check(again) {
  badge.className = "badge";
  badge.textContent = "Checking…";
  try {
    const verdict = await get("verify", { again: again ? 1 : "" }, { current: true });
    badge.classList.add(verdict.whole ? "good" : "bad");
    badge.textContent = verdict.whole ? "✓ Verified" : `✕ ${verdict.faults.length} faults`;
    const what = `revision ${verdict.revision}, ${verdict.operations} operations, ${verdict.generations} generations`;
    badge.title = verdict.whole ? `The log replays to the stored state, byte for byte (${what}). Click to check again.` : verdict.faults.join("\n");
    badge.setAttribute("aria-label", `${badge.textContent}. ${badge.title}`);
  } catch (error) {
    badge.classList.add("bad");
    badge.textContent = "Not checked";
    badge.title = error.message;
  }
}
badge.addEventListener("click", () => check(true));

async function watch() {
  if (document.hidden || summary === null || where.revision !== null) return;
  try {
    const now = await get("summary", {}, { current: true });
    if (now.newest === summary.newest) return;
    fresh.textContent = `${number(now.newest - summary.newest)} new changes: show them`;
    fresh.hidden = false;
  } catch {
    // the panels say so when they are asked again
  }
}
fresh.addEventListener("click", () => {
  summary = null;
  show();
});
setInterval(watch, 5000);

const help = document.getElementById("help");
document.getElementById("help-button").addEventListener("click", () => help.showModal());

document.addEventListener("keydown", (event) => {
  const field = event.target.closest("input:not([type=range]):not([type=checkbox]), select, textarea");
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (event.key === "Escape") {
    if (field) {
      field.blur();
      main.focus();
    } else if (here().page === "entry") history.length > 1 ? history.back() : go("entries");
    return;
  }
  if (field) return;
  if (event.key === "/") {
    event.preventDefault();
    const box = main.querySelector("input[type=search]");
    if (box) box.focus();
    else go("search");
  } else if (event.key === "?") help.showModal();
  else if (/^[1-4]$/.test(event.key)) go(TABS[Number(event.key) - 1]);
});

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
addEventListener("hashchange", show);
show().then(() => check(false));
if (!main.childElementCount) main.append(h("p", { class: "hidden" }, "Loading"));
