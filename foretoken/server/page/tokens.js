// Tokens with their provenance: which colour, which words, and which characters of the answer are theirs.

// Class, name in the legend, and what it means.
export const LEGEND = [
  ["model", "accepted: model", "accepted, drafted by a model"],
  ["lookup", "accepted: lookup", "accepted, found by lookup"],
  ["prediction", "accepted: prediction", "accepted, from the prediction"],
  ["grammar", "accepted: grammar", "accepted, forced by the grammar"],
  ["residual", "residual", "from the target, in place of a rejected draft token"],
  ["bonus", "bonus", "from the target, after an accepted draft"],
  ["plain", "plain", "from the target, nothing was drafted"],
];

// Why a step drafted nothing, or not all of a draft was accepted. Codes of the trace that are not here stay as they are.
const WHY = {
  off_request: "plain decoding was asked for",
  off_server: "the server has no drafter",
  prefill: "the prompt was read",
  warmup: "the cost of drafting was being learnt",
  k0_cost: "drafting would have cost more than it gains",
  k0_short: "short answers are decoded plainly",
  k0_load: "too many requests ran",
  k0_acceptance: "draft tokens were not expected to be accepted",
  no_match: "nothing was found to draft from",
  mismatch_at: "a draft token was rejected",
  budget_trimmed: "the step had reached its limit",
  length_clamped: "the answer was about to end",
  grammar_blocked: "the grammar forbids the draft token",
  vocab_unmapped: "the draft's vocabulary lacks the token",
  drafter_failed: "the drafter failed",
  drafter_disabled: "the drafter was disabled",
  prediction_disabled: "predictions are switched off",
  sampling_unsupported: "the drafter cannot follow these sampling parameters",
};

// The words for a reason: `mismatch_at:3` and `mismatch_at:5` are one.
export function reasonWords(why) {
  const code = why.split(":")[0];
  return WHY[code] || code;
}

// The class of a token; `groups` maps drafters to model, lookup or prediction.
export function classOf(token, groups) {
  if (token.kind !== "accepted") return token.kind;
  return token.drafter === "grammar" ? "grammar" : groups[token.drafter] || "model";
}

export function describe(token, groups) {
  const [, , meaning] = LEGEND.find(([name]) => name === classOf(token, groups)) || ["", "", token.kind];
  const parts = [meaning];
  if (token.drafter) parts.push(`drafter ${token.drafter}`);
  if (typeof token.p_accept === "number") parts.push(`accepted with probability ${token.p_accept.toFixed(3)}`);
  if (typeof token.logprob === "number") parts.push(`log-probability ${token.logprob.toFixed(2)}`);
  parts.push(`step ${token.step}${stepWords(token.of || {})}`, `id ${token.id}`);
  return parts.join(" · ");
}

// How many draft tokens a step had, in how large a batch it ran, and why no more were accepted.
function stepWords({ drafts = [], num_accepted: accepted, batch_size: batch, why }) {
  const drafted = drafts.reduce((sum, draft) => sum + draft.ids.length, 0);
  const words = [];
  if (drafted) words.push(`${accepted} of ${drafted} draft tokens accepted`);
  if (batch > 1) words.push(`batch of ${batch}`);
  if (why) words.push(reasonWords(why));
  return words.length ? ` (${words.join(", ")})` : "";
}

// Shares the text of an answer out among its tokens. A character belongs to the token that wrote its first byte; text
// may come later than its tokens, because of stop strings and characters of several tokens.
export class Speller {
  constructor() {
    this.waiting = [];
    this.last = null;
  }

  // Pairs of [token, text] for `text`, the next part of the answer, given the tokens that came with it.
  take(text, tokens) {
    for (const token of tokens) this.waiting.push({ token, left: byteCount(token) });
    const pairs = [];
    for (const character of text) {
      const owner = this.owner();
      const pair = pairs.at(-1);
      if (pair && pair[0] === owner) pair[1] += character;
      else pairs.push([owner, character]);
      this.spend(utf8Length(character));
    }
    return pairs;
  }

  owner() {
    while (this.waiting.length && this.waiting[0].left <= 0) this.waiting.shift();
    if (this.waiting.length) this.last = this.waiting[0].token;
    return this.last;
  }

  spend(count) {
    for (const one of this.waiting) {
      const used = Math.min(one.left, count);
      one.left -= used;
      count -= used;
      if (count <= 0) return;
    }
  }
}

function byteCount(token) {
  if (Array.isArray(token.bytes)) return token.bytes.length;
  let count = 0;
  for (const character of token.text || "") count += utf8Length(character);
  return count;
}

function utf8Length(character) {
  const code = character.codePointAt(0);
  return code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
}
