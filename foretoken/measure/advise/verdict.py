"""The answer: speculate or not, with what, where and up to which load, and why; and the rules of the field as checks
with the user's own numbers, each a finding with its remedy, or nothing.

The figures decide whether a drafter pays; the rules say why it does not, and what else to look at.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from foretoken.control.routing import RoutingRules
from foretoken.engine.adviser import Advice, of_draft_size, of_draft_text, of_temperature, text_format
from foretoken.measure.advise.cells import ALL_SLICES, SpeedCell
from foretoken.measure.advise.costs import LoadCosts
from foretoken.measure.advise.options import AdviseOptions
from foretoken.measure.stats import ratio_text
from foretoken.model.interface import LanguageModel
from foretoken.text.tokenizer import Tokenizer

LONG_PROMPT_TOKENS = 2048  # from here on a prompt is as long as those of retrieval
SHORT_ANSWER_TOKENS = 100
MIN_PREFILL_SHARE = 0.3  # of an answer's time, from which on reading prompts is said
SATURATED = 1.5  # plain steps that a step with draft tokens takes
Answer = Literal["yes", "only under this load", "only for these slices", "no"]
MARGIN = 0.03  # a gain that is smaller is none


@dataclass(frozen=True)
class Finding:
    """What a check found. `candidate` is "" where it is about the question itself; `rules_out` whether it is a reason
    not to use the candidate.
    """

    topic: str
    candidate: str
    finding: str
    remedy: str
    rules_out: bool = False

    def __str__(self) -> str:
        return f"{self.finding}: {self.remedy}"


def _from(advice: Advice | None, candidate: str, rules_out: bool = False) -> Iterator[Finding]:
    if advice is not None:
        yield Finding(advice.topic, candidate, advice.finding, advice.remedy, rules_out)


def of_pair(
    candidate: str,
    source: str,
    target: LanguageModel,
    draft: LanguageModel,
    texts: tuple[Tokenizer | None, Tokenizer | None],
) -> list[Finding]:
    """What is wrong with a draft model `source` for this target: its size, its tokenizer, its chat template."""
    found = [*_from(of_draft_size(source, target.step_bytes, draft.step_bytes), candidate, rules_out=True)]
    if draft.step_bytes >= target.step_bytes:
        finding = f"draft {source!r} reads {draft.step_bytes / 1e6:,.0f} MB per step, as much as the target"
        found.append(Finding("draft size", candidate, finding, "use a draft 10 or more times smaller", True))
    own, theirs = texts
    if own is None or theirs is None:
        return found
    difference = own.same_vocabulary(theirs)
    if difference is not None:
        finding = f"draft {source!r} has another tokenizer than the target ({difference})"
        others = "vLLM, SGLang, TensorRT-LLM and TGI"
        remedy = f"its text is translated here, and {others} refuse it; use a draft of the family"
        found.append(Finding("tokenizer", candidate, finding, remedy, True))
    else:
        found += _from(of_draft_text(source, text_format(own), text_format(theirs)), candidate)
    return found


def of_question(options: AdviseOptions, costs: LoadCosts) -> list[Finding]:
    """What lengths and temperature tell, whatever drafts."""
    found = [*_from(of_temperature(options.temperature), "")]
    answer_s = options.max_tokens * costs.plain_s(1)
    share = costs.prefill_s / (costs.prefill_s + answer_s)
    if share >= MIN_PREFILL_SHARE:
        long = " (as long as those of retrieval)" if costs.prompt_tokens >= LONG_PROMPT_TOKENS else ""
        finding = (
            f"reading prompts of {costs.prompt_tokens:,} tokens{long} takes {share:.0%} of the time of an answer of "
            f"{options.max_tokens} tokens, and no draft shortens it"
        )
        remedy = "keep prefixes in the cache; drafts from the prompt itself (ngram, suffix) cost no reading"
        found.append(Finding("prompt length", "", finding, remedy))
    if options.max_tokens < SHORT_ANSWER_TOKENS:
        finding = f"answers of {options.max_tokens} tokens are short"
        remedy = "look at the end-to-end speed-up, not at that of decoding; drafts without a model read no prompt"
        found.append(Finding("short answer", "", finding, remedy))
    return found


def of_cells(candidate: str, cells: Sequence[SpeedCell], costs: LoadCosts) -> list[Finding]:
    """What the best cells of a candidate over all texts tell: acceptance, saturation, and the shortest answer."""
    found = []
    own = [cell for cell in cells if cell.slice == ALL_SLICES]
    for cell in own:
        if cell.step_ratio >= SATURATED and cell.decode_speedup < 1:
            finding = (
                f"with {cell.concurrency} requests at once a step with draft tokens takes {cell.step_ratio:.2f} plain "
                f"steps and emits {cell.emitted_per_step:.2f} tokens a request"
            )
            remedy = "the machine has no arithmetic to spare at this load: set max_speculating_requests below it"
            found.append(Finding("load", candidate, finding, remedy, True))
    shortest = shortest_answer(candidate, own, costs)
    if shortest is not None and shortest > RoutingRules().min_tokens_for_draft_model:
        finding = (
            f"reading the prompt takes the draft {1e3 * costs.drafters[candidate].prompt_s:.0f} ms, which an answer "
            f"must have {shortest} tokens to save"
        )
        found.append(Finding("short answer", candidate, finding, "see the routing rules below"))
    return found


def shortest_answer(candidate: str, cells: Sequence[SpeedCell], costs: LoadCosts) -> int | None:
    """The fewest tokens of an answer that save what the draft's reading of the prompt takes, at the smallest load; None
    where none do, 0 where nothing is read.
    """
    prompt_s = costs.drafters[candidate].prompt_s
    if not prompt_s:
        return 0
    cell = min((cell for cell in cells if cell.slice == ALL_SLICES), key=lambda one: one.concurrency)
    saved_s = costs.plain_s(cell.concurrency) * (1 - 1 / cell.decode_speedup)
    return math.ceil(prompt_s * cell.concurrency / saved_s) if saved_s > 0 else None


@dataclass(frozen=True)
class CandidateVerdict:
    """One candidate: the answer for it alone, the loads at which it pays on all texts, the slices on which it pays at
    the smallest load, and why not.
    """

    candidate: str
    answer: Answer
    paying_loads: tuple[int, ...] = ()
    paying_slices: tuple[str, ...] = ()
    losing_slices: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class AdviceVerdict:
    """The answer of all: `candidate` is None for "no", then `nearest` is the one that came nearest.

    `routing` holds fields of `RoutingRules`.
    """

    answer: Answer
    candidate: str | None
    nearest: str | None
    num_draft: int
    sentence: str
    reasons: tuple[str, ...]
    routing: Mapping[str, int] = field(default_factory=dict)


def candidate_verdict(name: str, cells: Sequence[SpeedCell], findings: Sequence[Finding]) -> CandidateVerdict:
    """The answer for a candidate with these best cells."""
    overall = [cell for cell in cells if cell.slice == ALL_SLICES]
    loads = tuple(cell.concurrency for cell in overall if cell.pays(MARGIN))
    smallest = min(cell.concurrency for cell in overall)
    by_slice = [cell for cell in cells if cell.slice != ALL_SLICES and cell.concurrency == smallest]
    paying = tuple(cell.slice for cell in by_slice if cell.pays(MARGIN))
    losing = tuple(cell.slice for cell in by_slice if cell.speedup.value < 1)
    if len(loads) == len(overall):
        return CandidateVerdict(name, "yes", loads, paying, losing)
    reasons = tuple(_reasons(overall, findings))
    if loads:
        return CandidateVerdict(name, "only under this load", loads, paying, losing, reasons)
    answer: Answer = "only for these slices" if paying else "no"
    return CandidateVerdict(name, answer, (), paying, losing, reasons)


def _reasons(overall: Sequence[SpeedCell], findings: Sequence[Finding]) -> list[str]:
    """Why a candidate does not pay where it does not, the rules it breaks first."""
    found = [one.finding for one in findings if one.rules_out]
    for cell in overall:
        if cell.pays(MARGIN):
            continue
        requests = _requests(cell.concurrency)
        if not cell.plain_served:
            found.append(f"with {requests} at once none fits into the memory, not even without drafts: give it more")
        elif cell.served < cell.plain_served:
            found.append(
                f"with {requests} at once only {cell.served} fit into the memory beside it, and "
                f"{cell.plain_served} without"
            )
        elif cell.accepted_per_draft is None:
            found.append(f"with {requests} at once it finds nothing to draft in these texts")
        else:
            found.append(
                f"with {requests} at once a step emits {cell.emitted_per_step:.2f} tokens a request and takes "
                f"{cell.step_ratio:.2f} plain steps ({ratio_text(cell.speedup)} end to end)"
            )
    return list(dict.fromkeys(found))


def verdict_of(
    verdicts: Sequence[CandidateVerdict], cells: Sequence[SpeedCell], costs: LoadCosts, failed: Mapping[str, str]
) -> AdviceVerdict:
    """The answer of all candidates; `failed` are those that could not be measured, with the reason."""
    ranked = sorted(verdicts, key=lambda one: _gain(one, cells), reverse=True)
    best = next((one for one in ranked if one.answer != "no"), None)
    if best is None:
        return _no(ranked, failed)
    own = {cell.concurrency: cell for cell in cells if (cell.candidate, cell.slice) == (best.candidate, ALL_SLICES)}
    loads = best.paying_loads or tuple(own)[:1]
    num_draft = own[loads[0]].num_draft
    routing: dict[str, int] = {}
    run = _first_paying(best, own)
    if run and max(own) > run[-1]:
        routing["max_speculating_requests"] = run[-1]
    shortest = shortest_answer(best.candidate, list(own.values()), costs)
    if shortest:
        routing["min_tokens_to_speculate"] = shortest
    sentence = _sentence(best, own, cells)
    return AdviceVerdict(best.answer, best.candidate, None, num_draft, sentence, best.reasons, routing)


def _no(ranked: Sequence[CandidateVerdict], failed: Mapping[str, str]) -> AdviceVerdict:
    if not ranked:
        reasons = tuple(f"{name}: {reason}" for name, reason in failed.items())
        sentence = f"Don't speculate: nothing here can draft. {'; '.join(reasons)}."
        return AdviceVerdict("no", None, None, 0, sentence, reasons)
    nearest = ranked[0]
    why = f"{nearest.candidate}: {'; '.join(nearest.reasons)}."
    sentence = f"Don't speculate: of {len(ranked)} drafters none pays; {why}"
    if len(ranked) == 1:
        sentence = f"Don't speculate with {why}"
    return AdviceVerdict("no", None, nearest.candidate, 0, sentence, nearest.reasons)


def _gain(one: CandidateVerdict, cells: Sequence[SpeedCell]) -> tuple[bool, float]:
    """How much a candidate brings where it may be switched off: over all texts, else on the slices that it pays for."""
    own = [cell for cell in cells if cell.candidate == one.candidate]
    overall = [cell for cell in own if cell.slice == ALL_SLICES]
    if one.answer == "no":
        return False, max(cell.speedup.value for cell in overall)
    chosen = overall if one.paying_loads else [cell for cell in own if cell.slice in one.paying_slices]
    return bool(one.paying_loads), sum(math.log(max(1.0, cell.speedup.value)) for cell in chosen) / len(chosen)


def _sentence(best: CandidateVerdict, own: Mapping[int, SpeedCell], cells: Sequence[SpeedCell]) -> str:
    if not best.paying_loads:
        named = [
            f"{cell.slice} {ratio_text(cell.speedup)}"
            for cell in cells
            if cell.candidate == best.candidate and cell.slice in best.paying_slices and cell.concurrency == min(own)
        ]
        slices = " and ".join((", ".join(best.paying_slices[:-1]), best.paying_slices[-1])).removeprefix(" and ")
        return (
            f"Speculate only on {slices}, with {best.candidate}: with {_requests(min(own))} at once it answers "
            f"{', '.join(named)} as fast as plain decoding; on all texts together it does not pay."
        )
    run = _first_paying(best, own)
    parts = [
        f"{ratio_text(own[load].speedup)} as fast with {_requests(load)} at once ({_draft_tokens(own[load].num_draft)})"
        for load in run
    ]
    sentence = f"answers come {', '.join(parts)}"
    if best.losing_slices:
        sentence += f"; not on {', '.join(best.losing_slices)}"
    if best.answer == "yes":
        return f"Speculate with {best.candidate}: {sentence}."
    below = [cell for load, cell in own.items() if load < run[0]]
    beyond = [cell for load, cell in own.items() if load > run[-1]]
    where = f"{'with' if below and beyond else 'up to'} {_requests(run[-1])} at once"
    if below and run[0] < run[-1]:
        where = f"with {run[0]} to {_requests(run[-1])} at once"
    if not beyond:
        where = f"from {_requests(run[0])} at once on"
    sentence = f"Speculate with {best.candidate}, but only {where}: {sentence}"
    if below:
        sentence += f"; with fewer, it {_failure(below, best)}, and no setting stops drafting there"
    if beyond:
        sentence += f"; beyond, it {_failure(beyond, best)}"
    return f"{sentence}."


def _first_paying(best: CandidateVerdict, own: Mapping[int, SpeedCell]) -> tuple[int, ...]:
    """The smallest measured loads, one after the other, at which it pays: a routing rule knows one limit, the upper."""
    from_first = itertools.dropwhile(lambda load: load not in best.paying_loads, sorted(own))
    return tuple(itertools.takewhile(lambda load: load in best.paying_loads, from_first))


def _failure(cells: Sequence[SpeedCell], best: CandidateVerdict) -> str:
    """What was found at loads at which drafting is not advised."""
    others = ", ".join(f"{cell.concurrency}: {ratio_text(cell.speedup)}" for cell in cells)
    if any(cell.concurrency in best.paying_loads for cell in cells):
        return f"does not pay at every load ({others})"
    loses = all((cell.speedup.high or cell.speedup.value) <= 1 + MARGIN for cell in cells)
    return f"{'does not pay' if loses else 'is not shown to pay, and more prompts may tell'} ({others})"


def _draft_tokens(count: int) -> str:
    return "1 draft token" if count == 1 else f"{count} draft tokens"


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"
