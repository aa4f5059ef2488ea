// The operator's orders: a dialog that asks for the token, and the POST that it makes.

import { byId, el, say } from "./elements.js";

const PATIENCE_MS = 8000;
const ORDERS = {
  hold: { button: "Hold", title: (engine) => `Hold ${engine}`,
    meaning: "Keeps the allocation that is applied now until somebody releases it. Broken promises, " +
      "old data and a deaf engine still fall back to the static plan." },
  release: { button: "Release", title: (engine) => `Release ${engine}`,
    meaning: "Ends a hold, forgets all trips and unlatches. The policy begins with a probation " +
      "under the static plan." },
  mode: { button: "Change mode", title: (engine) => `Change the mode of ${engine}`,
    meaning: "What the guard lets the policy do. A policy that may act again begins with a probation." },
};
let current = null;

/** Connect the buttons and the dialog.
 * @param {() => {engine: string, mode: string, count: number, modes: object}} look what is shown now
 * @param {() => void} done called after an order was taken */
export function listenForOrders(look, done) {
  for (const kind of Object.keys(ORDERS)) {
    byId(kind).addEventListener("click", () => open(kind, look()));
  }
  byId("order-cancel").addEventListener("click", () => byId("order").close());
  byId("order-mode").addEventListener("change", modeWords);
  byId("order-form").addEventListener("submit", (event) => {
    event.preventDefault();
    send(done);
  });
}

/** Let the buttons be used, or not. */
export function allowOrders(allowed) {
  for (const kind of Object.keys(ORDERS)) byId(kind).disabled = !allowed;
}

function open(kind, shown) {
  current = { kind, engine: shown.engine, modes: shown.modes };
  const order = ORDERS[kind];
  byId("order-title").textContent = order.title(shown.engine);
  byId("order-meaning").textContent = order.meaning;
  byId("order-go").textContent = order.button;
  byId("order-one").textContent = `${shown.engine} alone`;
  byId("order-scope").hidden = shown.count < 2;
  byId("order-scope").querySelector("input").checked = true;
  byId("order-mode-row").hidden = kind !== "mode";
  const modes = Object.keys(shown.modes).filter((mode) => mode !== "hold");
  byId("order-mode").replaceChildren(...modes.map((mode) =>
    el("option", { value: mode, selected: mode === shown.mode ? "" : null }, mode)));
  modeWords();
  fail("");
  byId("order").showModal();
  byId("order-token").focus();
}

function modeWords() {
  byId("order-mode-words").textContent = current.modes[byId("order-mode").value] ?? "";
}

async function send(done) {
  const { kind, engine } = current;
  const all = byId("order-form").elements.scope.value === "all" && !byId("order-scope").hidden;
  const order = { engine: all ? null : engine, by: byId("order-by").value };
  if (kind === "mode") order.mode = byId("order-mode").value;
  byId("order-go").disabled = true;
  try {
    const answer = await fetch(`api/${kind}`, {
      method: "POST",
      headers: { "Content-Type": "application/json", Authorization: `Bearer ${byId("order-token").value}` },
      body: JSON.stringify(order),
      signal: AbortSignal.timeout(PATIENCE_MS),
    });
    if (!answer.ok) throw new Error(await refusal(answer));
    byId("order").close();
    say(byId("ordered"), `${ORDERS[kind].button} ordered for ${all ? "all engines" : engine}; ` +
      "it takes effect at the next tick.");
    done();
  } catch (error) {
    fail(error instanceof TypeError || error.name === "TimeoutError"
      ? "The daemon does not answer; nothing was ordered, as far as this page knows." : error.message);
  } finally {
    byId("order-go").disabled = false;
  }
}

async function refusal(answer) {
  if (answer.status === 401 || answer.status === 403) byId("order-token").select();
  const said = await answer.json().catch(() => ({}));
  return `Refused: ${said.error ?? `status ${answer.status}`}.`;
}

const fail = (text) => say(byId("order-error"), text);
