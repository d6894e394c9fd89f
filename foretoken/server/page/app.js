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
const state = { model: "", offered: "", groups: {}, messages: [], running: null, refused: null };

// The numbers of the server; a key that was refused is not tried again until a message is sent.
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

// Reads the model and what it offers; the board calls it with every reading. The form is filled anew when they change, as
// they may when the server is started again.
async function stats() {
  const now = await readStats();
  const name = now.model ? now.model.name : "";
  const offered = JSON.stringify([now.model, now.drafters, now.rules]);
  if (name && offered !== state.offered) {
    [state.model, state.offered, state.groups] = [name, offered, now.groups];
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
  const isFull = error.code === "context_length_exceeded" && state.messages.length;
  find("error").textContent = isFull ? `${error.message}. Clear begins a new conversation.` : error.message;
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
  find("error").hidden = true;
  const running = (state.running = new AbortController());
  busy(true);
  state.refused = null; // a key is tried again with every message: another server may be there
  try {
    const problem = form.problem();
    if (problem) throw problem;
    if (!state.model) await stats(); // a key that was entered just now
    await converse(text, prompt, running.signal);
  } catch (error) {
    fail(error);
  } finally {
    state.running = null;
    busy(false);
  }
}

// A turn of the conversation. What was said until Stop stays in it; a message that got no answer goes back to its field.
async function converse(text, prompt, signal) {
  const mode = document.querySelector("input[name=mode]:checked").value;
  const turn = new Turn(text, mode === "both" ? ["plain", "speculative"] : [mode], state.groups);
  const { isChat, key, together } = form;
  const messages = [...state.messages, { role: "user", content: text }];
  const path = isChat ? "/v1/chat/completions" : "/v1/completions";
  find("turns").append(turn.root);
  if (isChat) prompt.value = "";
  turn.root.scrollIntoView({ block: "start" });
  let failure = null;
  try {
    await turn.run((one) => form.body(one, state.model, text, messages), path, { key, signal, together });
  } catch (error) {
    failure = error;
  }
  if (isChat && turn.root.isConnected) {
    if (!failure || (failure.name === "AbortError" && turn.answer)) state.messages = [...messages, { role: "assistant", content: turn.answer }];
    else prompt.value = prompt.value || text;
  }
  if (failure) throw failure;
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
