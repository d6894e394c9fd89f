"""The rules of the field as checks with the user's own numbers: each a finding with its remedy, or nothing.

The figures decide whether a drafter pays; the rules say why it does not, and what else to look at.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from foretoken.control.routing import RoutingRules
from foretoken.engine.advice import Advice, of_draft_size, of_draft_text, of_temperature
from foretoken.engine.adviser import text_format
from foretoken.measure.advise.cells import ALL_SLICES, SpeedCell
from foretoken.measure.advise.costs import LoadCosts
from foretoken.measure.advise.options import AdviseOptions
from foretoken.model.interface import LanguageModel
from foretoken.text.tokenizer import Tokenizer

LONG_PROMPT_TOKENS = 2048  # from here on a prompt is as long as those of retrieval
SHORT_ANSWER_TOKENS = 100
MIN_PREFILL_SHARE = 0.3  # of an answer's time, from which on reading prompts is said
SATURATED = 1.5  # plain steps that a step with draft tokens takes


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
        remedy = (
            "its text is translated here, and vLLM, SGLang, TensorRT-LLM and TGI refuse it; use a draft of the family"
        )
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
