// From two readings of the server's counters to what happened between them. Pure functions.

const PHASES = ["schedule_s", "draft_s", "target_s", "rule_s", "commit_s", "observe_s", "emit_s"];

function delta(before, now, name) {
  return Math.max(0, (now[name] || 0) - (before[name] || 0));
}

function deltas(before = {}, now = {}) {
  return Object.fromEntries(Object.keys(now).map((name) => [name, delta(before, now, name)]));
}

// Figures of the time between two readings of /v1/stats.
export function figuresOf(before, now) {
  const [a, b] = [before.engine, now.engine];
  const seconds = now.time_s - before.time_s;
  const emitted = delta(a, b, "num_emitted");
  const steps = delta(a, b, "num_steps");
  const rounds = Math.max(0, emitted - delta(a, b, "num_accepted")); // a round emits one token that was not drafted
  const drafted = deltas(a.drafted_by, b.drafted_by);
  const accepted = deltas(a.accepted_by, b.accepted_by);
  return {
    tokensPerSecond: seconds > 0 ? emitted / seconds : 0,
    emitted,
    batch: steps ? rounds / steps : 0,
    perStep: rounds ? emitted / rounds : 0,
    drafters: Object.entries(drafted)
      .filter(([, count]) => count > 0)
      .map(([name, count]) => ({ name, drafted: count, accepted: accepted[name] || 0 })),
    phases: PHASES.map((name) => ({ name: name.slice(0, -2), seconds: delta(a, b, name) })),
    draftingShare: rounds ? Math.min(1, delta(a, b, "num_drafts") / rounds) : 0,
    draftLength: delta(a, b, "num_drafts") ? delta(a, b, "num_drafted") / delta(a, b, "num_drafts") : 0,
    wastedShare: share(delta(a, b, "wasted_s"), delta(a, b, "draft_s") + delta(a, b, "verify_s")),
    failures: Object.entries(deltas(a.draft_failures, b.draft_failures)).filter(([, count]) => count > 0),
    speedup: b.estimated_speedup,
    positions: positionsOf(a.accepted_per_position, b.accepted_per_position),
  };
}

function share(part, whole) {
  return whole > 0 ? part / whole : 0;
}

function positionsOf(before = [], now = []) {
  return now
    .map(([drafted, accepted], place) => {
      const [d, k] = before[place] || [0, 0];
      return { place: place + 1, drafted: drafted - d, accepted: accepted - k };
    })
    .filter(({ drafted }) => drafted > 0);
}

// What the controller chose in that time, and the figures that it goes by, in words.
export function choiceOf(figures) {
  if (!figures.emitted) return ["Nothing was decoded.", ""];
  const failed = figures.failures.map(([name, count]) => `${name} failed ${count} times. `).join("");
  const pay = figures.speedup ? `Measured so far: ${figures.speedup.toFixed(2)}x the speed of plain decoding.` : "The gain of drafts is not measured yet.";
  if (!figures.drafters.length)
    return ["Plain decoding: no round had a draft.", `${failed}The requests asked for none, or no draft was expected to pay. ${pay}`];
  const names = figures.drafters.map(({ name, drafted }) => `${name} (${drafted} tokens)`).join(", ");
  const [drafted, accepted] = figures.drafters.reduce(([d, k], one) => [d + one.drafted, k + one.accepted], [0, 0]);
  return [
    `${Math.round(100 * figures.draftingShare)} % of rounds with a draft of ${figures.draftLength.toFixed(1)} tokens: ${names}.`,
    `${failed}${Math.round((100 * accepted) / drafted)} % of drafted tokens were accepted, ${figures.perStep.toFixed(2)} tokens came from a round of a request, ${Math.round(100 * figures.wastedShare)} % of the time went into rejected ones. ${pay}`,
  ];
}

// Acceptance by day as the page shows it: series that fell first, then those with most requests.
export function seriesOf({ series }) {
  const weight = (one) => (one.has_fallen ? Infinity : one.days.reduce((sum, day) => sum + day.requests, 0));
  return [...series]
    .sort((a, b) => (weight(a) === weight(b) ? 0 : weight(b) - weight(a)))
    .slice(0, 4)
    .map((one) => ({
      name: one.slice ? `${one.drafter}, ${one.slice}` : one.drafter,
      rates: one.days.map((day) => day.rate ?? 0),
      hasFallen: one.has_fallen,
      words: one.has_fallen ? `fell on ${one.fell_on}; ${one.cause}.` : dailyWords(one),
    }));
}

function dailyWords({ before, after, place }) {
  if (before === null || after === null) return "no verdict yet, it needs more than a week.";
  return `no drop; token ${place} ${Math.round(100 * after)} % in the last week, ${Math.round(100 * before)} % before.`;
}
