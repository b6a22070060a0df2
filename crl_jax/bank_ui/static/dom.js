// Elements without HTML strings: text of a bank is only ever put in as text.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, run] of Object.entries(value)) node.addEventListener(event, run);
    else if (name === "data") Object.assign(node.dataset, value);
    else if (name === "style") for (const [key, text] of Object.entries(value)) node.style.setProperty(key, text);
    else if (name === "value") node.value = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false));
  return node;
}

export const h = (tag, props, ...children) => fill(document.createElement(tag), props, children);
export const s = (tag, props, ...children) => fill(document.createElementNS(SVG, tag), props, children);

export function say(text) {
  document.getElementById("live").textContent = text;
}

// A part of the page that is loaded: it says that it loads, that it failed (with a way to try again), or shows what came.
export function panel(host, load, show, { lines = 4 } = {}) {
  let turn = 0;
  async function again() {
    const mine = ++turn;
    const timer = setTimeout(() => mine === turn && host.replaceChildren(skeleton(lines)), host.childElementCount ? 250 : 0);
    host.setAttribute("aria-busy", "true");
    try {
      const found = await load();
      if (mine === turn) host.replaceChildren(...[show(found)].flat());
    } catch (error) {
      if (mine === turn && error.name !== "AbortError") host.replaceChildren(failed(error, again));
    } finally {
      clearTimeout(timer);
      if (mine === turn) host.removeAttribute("aria-busy");
    }
  }
  return again;
}

export function skeleton(lines) {
  const bars = Array.from({ length: lines }, (_, n) => h("span", { class: "bar", style: { width: `${92 - ((n * 23) % 50)}%` } }));
  return h("div", { class: "skeleton", role: "status", "aria-label": "Loading" }, bars);
}

export function empty(title, text) {
  return h("div", { class: "state" }, h("p", { class: "state-title" }, title), h("p", {}, text));
}

export function failed(error, again) {
  return h(
    "div",
    { class: "state bad", role: "alert" },
    h("p", { class: "state-title" }, "This could not be loaded"),
    h("p", {}, error.message),
    h("button", { type: "button", on: { click: again } }, "Try again"),
  );
}

// One tab stop for a list of elements: arrows, Home and End move inside it.
export function roving(host, selector, { open, keys = ["ArrowUp", "ArrowDown"] } = {}) {
  const items = () => [...host.querySelectorAll(selector)];
  const settle = () => {
    const all = items();
    if (all.length && !all.some((item) => item.tabIndex === 0)) all[0].tabIndex = 0;
  };
  function go(to) {
    const all = items();
    const next = all[Math.max(0, Math.min(all.length - 1, to))];
    if (!next) return;
    for (const item of all) item.tabIndex = item === next ? 0 : -1;
    next.focus();
    next.scrollIntoView({ block: "nearest" });
  }
  host.addEventListener("keydown", (event) => {
    const at = items().indexOf(event.target);
    if (at < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
    const to = { [keys[0]]: at - 1, [keys[1]]: at + 1, Home: 0, End: items().length - 1, PageUp: at - 10, PageDown: at + 10 }[event.key];
    if (to !== undefined) {
      event.preventDefault();
      go(to);
    } else if (event.key === "Enter" && open) {
      event.preventDefault();
      open(event.target);
    }
  });
  host.addEventListener("focusin", (event) => {
    if (items().includes(event.target)) for (const item of items()) item.tabIndex = item === event.target ? 0 : -1;
  });
  settle();
  return { settle, first: () => go(0) };
}

export const number = (value) => Number(value).toLocaleString("en");
export const percent = (value, digits = 0) => (value === null || Number.isNaN(value) ? "–" : `${(100 * value).toFixed(digits)}\u00a0%`);
export const signed = (value, digits = 2) => (value === null ? "–" : `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(digits)}`);

export function families(names) {
  return new Map([...names].sort().map((name, n) => [name, n % 8]));
}
