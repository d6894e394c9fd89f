// The request that the form describes. The key is kept for this tab alone, the other fields are not kept.

const KEY = "foretoken.key";
const NUMBERS = ["max_tokens", "temperature", "top_p", "seed"];

export class RequestForm {
  constructor(form) {
    this.form = form;
    this.field("key").value = sessionStorage.getItem(KEY) || "";
    this.field("key").addEventListener("change", () => this.keep());
    form.addEventListener("input", (event) => event.target.removeAttribute("aria-invalid"));
    form.addEventListener("submit", (event) => event.preventDefault());
  }

  field(name) {
    return this.form.elements.namedItem(name);
  }

  keep() {
    if (this.key) sessionStorage.setItem(KEY, this.key);
    else sessionStorage.removeItem(KEY);
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
    chat.disabled = !known.model.has_chat_template;
    chat.textContent = chat.disabled ? "chat (the model has no template)" : "chat";
    this.field("format").value = chat.disabled ? "completion" : "chat";
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

  // Marks the field that an error names, and says whether there is one.
  blame(param) {
    const name = param.split(".").at(-1);
    const field = name ? this.field(name) : null;
    if (!(field instanceof HTMLElement)) return null;
    field.setAttribute("aria-invalid", "true");
    return field;
  }
}

function fill(select, names) {
  const chosen = select.value;
  while (select.options.length > 1) select.remove(1);
  for (const name of names) select.add(new Option(name, name));
  select.value = names.includes(chosen) ? chosen : "";
}
