// The request that the form describes. The key is kept for this tab alone, the other fields are not kept.

import { ServerError } from "./stream.js";

const KEY = "foretoken.key";
const NUMBERS = ["max_tokens", "temperature", "top_p", "seed"];

// What `use` finds in the tab's storage; null where the browser allows no page to keep anything.
function kept(use) {
  try {
    return use(sessionStorage);
  } catch {
    return null;
  }
}

export class RequestForm {
  constructor(form) {
    this.form = form;
    this.hasChat = null; // not known yet
    this.field("key").value = kept((storage) => storage.getItem(KEY)) || "";
    this.field("key").addEventListener("change", () => this.keep());
    form.addEventListener("input", (event) => event.target.removeAttribute("aria-invalid"));
    form.addEventListener("submit", (event) => event.preventDefault());
  }

  field(name) {
    return this.form.elements.namedItem(name);
  }

  keep() {
    kept((storage) => (this.key ? storage.setItem(KEY, this.key) : storage.removeItem(KEY)));
  }

  get key() {
    return this.field("key").value.trim();
  }

  get isChat() {
    return this.field("format").value === "chat";
  }

  get together() {
    return this.field("turns").value === "together";
  }

  // What the server knows: its drafters and rules, and whether the model has a chat template.
  offer(known) {
    fill(this.field("drafter"), known.drafters);
    fill(this.field("rule"), known.rules);
    const chat = this.field("format").querySelector("[value=chat]");
    if (known.model.has_chat_template === this.hasChat) return;
    this.hasChat = known.model.has_chat_template;
    chat.disabled = !this.hasChat;
    chat.textContent = chat.disabled ? "chat (the model has no template)" : "chat";
    this.field("format").value = chat.disabled ? "completion" : "chat";
  }

  // The first field whose text is no value, as an error; null if there is none. Such a field reads as if it were empty,
  // and a seed that JavaScript has no number for would be sent as another one.
  problem() {
    for (const { name, validity, value } of this.form.elements) {
      if (validity.badInput) return new ServerError(`${name}: this is no number`, 0, name);
      if (validity.patternMismatch) return new ServerError(`${name}: enter a whole number, or auto`, 0, name);
      if (name === "seed" && Number(value) > Number.MAX_SAFE_INTEGER)
        return new ServerError(`seed: this page sends seeds up to ${Number.MAX_SAFE_INTEGER}`, 0, name);
    }
    return null;
  }

  // The body of a request; `mode` is plain or speculative.
  body(mode, model, text, messages) {
    const body = { model, stream: true, stream_options: { include_usage: true }, foretoken: { trace: true } };
    if (this.isChat) body.messages = messages;
    else body.prompt = text;
    for (const name of NUMBERS) {
      const value = this.field(name).value;
      if (value !== "") body[name] = Number(value);
    }
    const stop = this.field("stop").value.split("\n").filter((line) => line !== "");
    if (stop.length) body.stop = stop;
    const spec = mode === "plain" ? { drafter: null } : this.spec();
    if (Object.keys(spec).length) body.spec = spec;
    return body;
  }

  spec() {
    const spec = {};
    const count = this.field("num_draft").value.trim();
    if (this.field("drafter").value) spec.drafter = this.field("drafter").value;
    if (count) spec.num_draft = count === "auto" ? "auto" : Number(count);
    if (this.field("rule").value) spec.rule = this.field("rule").value;
    return spec;
  }

  // Marks the field that an error names, and returns it if there is one.
  blame(param) {
    const fields = param.split(".").map((name) => this.field(name));
    const field = fields.findLast((one) => one instanceof HTMLElement);
    if (field) field.setAttribute("aria-invalid", "true");
    return field;
  }
}

function fill(select, names) {
  const chosen = select.value;
  while (select.options.length > 1) select.remove(1);
  for (const name of names) select.add(new Option(name, name));
  select.value = names.includes(chosen) ? chosen : "";
}
