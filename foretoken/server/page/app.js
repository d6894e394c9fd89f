// The page: wires the form, the conversation and the board together.

import { Turn } from "./answer.js";
import { Board } from "./board.js";
import { element, find } from "./dom.js";
import { RequestForm } from "./settings.js";
import { ServerError, request } from "./stream.js";
import { LEGEND } from "./tokens.js";

// Texts of the kinds that the reference model was trained on: the library of Python.
const EXAMPLES = [
  ["a function", 'def read_lines(path, encoding="utf-8"):\n    """Return the lines of a file without their ends."""\n'],
  [
    "a rename",
    "# Rename `value` to `item`.\n\n# Before:\ndef find(values, wanted):\n    for index, value in enumerate(values):\n" +
      "        if value == wanted:\n            return index\n    return -1\n\n# After:\n",
  ],
  ["tests", "class TestStack(unittest.TestCase):\n    def test_push(self):\n        stack = Stack()\n        stack.push(1)\n        self.assertEqual(len(stack), 1)\n\n    def test_pop(self):\n"],
];
const THEMES = ["system", "light", "dark"];
const form = new RequestForm(find("fields"));
const state = { model: "", groups: {}, messages: [], running: null, refused: null };

// The numbers of the server; a key that was refused is not tried again.
async function readStats() {
  if (state.refused === form.key) throw new ServerError("The server requires an API key", 401);
  try {
    return await (await request("/v1/stats", { key: form.key })).json();
  } catch (error) {
    if (error.status === 401) {
      state.refused = form.key;
      find("model").textContent = "The server requires an API key: enter it under Request";
    }
    throw error;
  }
}

// Reads the model and what it offers; the board calls it with every reading, the form is filled when the model changes.
async function stats() {
  const now = await readStats();
  const name = now.model ? now.model.name : "";
  if (name && name !== state.model) {
    state.model = name;
    state.groups = now.groups;
    form.offer(now);
    show();
  }
  const words = name ? `${name} · ${now.model.max_model_len} tokens of context` : now.state;
  if (find("model").textContent !== words) find("model").textContent = words;
  return now;
}

function show() {
  find("prompt-label").textContent = form.isChat ? "Message" : "Prompt, to be continued";
  find("examples").hidden = form.isChat;
  find("prompt-help").textContent = form.isChat ? "Enter sends, Shift+Enter starts a line" : "Ctrl+Enter sends, Escape stops";
}

function fail(error) {
  if (error.name === "AbortError") return;
  find("error").textContent = error.message;
  find("error").hidden = false;
  const field = form.blame(error.status === 401 ? "key" : error.param || "");
  if (field) {
    find("settings").open = true;
    field.focus();
  }
}

async function send() {
  const prompt = find("prompt");
  const text = prompt.value;
  if (state.running || !text) return;
  const mode = document.querySelector("input[name=mode]:checked").value;
  const turn = new Turn(text, mode === "both" ? ["plain", "speculative"] : [mode], state.groups);
  const messages = [...state.messages, { role: "user", content: text }];
  find("turns").append(turn.root);
  find("error").hidden = true;
  state.running = new AbortController();
  busy(true);
  if (form.isChat) prompt.value = "";
  turn.root.scrollIntoView({ block: "start" });
  try {
    const options = { key: form.key, signal: state.running.signal, together: form.together };
    const path = form.isChat ? "/v1/chat/completions" : "/v1/completions";
    await turn.run((one) => form.body(one, state.model, text, messages), path, options);
    if (form.isChat) state.messages = [...messages, { role: "assistant", content: turn.answer }];
  } catch (error) {
    fail(error);
  } finally {
    state.running = null;
    busy(false);
  }
}

function busy(isBusy) {
  find("send").disabled = isBusy;
  find("stop").disabled = !isBusy;
}

function stop() {
  if (state.running) state.running.abort();
}

function clear() {
  stop();
  state.messages = [];
  find("turns").replaceChildren();
  find("error").hidden = true;
  find("prompt").focus();
}

function turnTheme() {
  const now = document.documentElement.dataset.theme || "system";
  const next = THEMES[(THEMES.indexOf(now) + 1) % THEMES.length];
  if (next === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  find("theme").textContent = `Theme: ${next}`;
}

function pressed(event) {
  const isSend = event.key === "Enter" && !event.isComposing && (event.ctrlKey || event.metaKey || (form.isChat && !event.shiftKey));
  if (isSend) {
    event.preventDefault();
    send();
  }
}

find("legend").append(
  ...LEGEND.map(([name, label, meaning]) =>
    element("span", { role: "listitem", title: meaning }, element("span", { class: `tok ${name}` }, label)),
  ),
);
for (const [name, text] of EXAMPLES) {
  const button = element("button", { type: "button", class: "quiet small" }, name);
  button.addEventListener("click", () => {
    find("prompt").value = text;
    find("prompt").focus();
  });
  find("examples").append(button);
}
find("turns").dataset.empty = "Type a prompt. Every token of the answer shows where it came from:\npoint at one, or go through them with the arrow keys.";
find("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
find("prompt").addEventListener("keydown", pressed);
find("stop").addEventListener("click", stop);
find("clear").addEventListener("click", clear);
find("theme").addEventListener("click", turnTheme);
form.field("format").addEventListener("change", show);
document.addEventListener("keydown", (event) => event.key === "Escape" && stop());
show();
const days = async () => (await request("/v1/acceptance", { key: form.key })).json();
new Board(find("figures"), find("board-state"), stats, days).run();
