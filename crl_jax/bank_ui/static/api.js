// Asking the server. The token, where there is one, stays in this tab.

import { h } from "./dom.js";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const KEY = "crl-bank-token";

export const where = { revision: null };

export async function get(path, params = {}, { signal, current = false } = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) if (value !== "" && value !== null && value !== undefined) query.set(name, value);
  if (where.revision !== null && !current) query.set("revision", where.revision);
  const token = sessionStorage.getItem(KEY);
  let answer;
  try {
    answer = await fetch(`/api/${path}?${query}`, { signal, headers: token ? { Authorization: `Bearer ${token}` } : {} });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server does not answer: is `crl bank ui` still running?");
  }
  if (answer.status === 401) {
    await askToken();
    return get(path, params, { signal, current });
  }
  const found = await answer.json().catch(() => ({ error: `${answer.status} ${answer.statusText}` }));
  if (!answer.ok) throw new ApiError(answer.status, found.error);
  return found;
}

let asking = null;

function askToken() {
  asking ??= new Promise((resolve) => {
    const field = h("input", { type: "password", id: "token", autocomplete: "off", required: true });
    const form = h(
      "form",
      { method: "dialog" },
      h("h2", {}, "This bank is guarded"),
      h("label", { for: "token" }, "Token, the first line of the server's token file"),
      field,
      h("button", { type: "submit" }, "Open"),
    );
    const dialog = h("dialog", { "aria-label": "Token" }, form);
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    dialog.addEventListener("close", () => {
      sessionStorage.setItem(KEY, field.value);
      dialog.remove();
      asking = null;
      resolve();
    });
    document.body.append(dialog);
    dialog.showModal();
  });
  return asking;
}
