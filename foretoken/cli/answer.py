"""Answers on a terminal or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from foretoken.cli.common import print_json
from foretoken.core import StepOutput, TokenOrigin
from foretoken.engine.llm import LLM
from foretoken.engine.request import GenerateOutput
from foretoken.engine.stats import RequestStats
from foretoken.printing.console import Console, Part
from foretoken.text.detokenizer import Detokenizer

# kind -> (style, what it means). The styles differ in weight and underline too, so colour is never alone.
_STYLES = {
    "accepted": ("underline green", "proposed by the drafter, accepted by the target"),
    "residual": ("bold red", "the target's own, in place of a rejected token"),
    "bonus": ("italic cyan", "the target's own, after a fully accepted draft"),
    "plain": ("dim", "from the target, nothing was drafted"),
}
_MARKS = {"accepted": "+", "residual": "!", "bonus": "*", "plain": "."}


def style_of(origin: TokenOrigin) -> str:
    """The style of a token."""
    return _STYLES[origin.kind][0]


def coloured(pieces: Sequence[str], provenance: Sequence[TokenOrigin]) -> list[Part]:
    """The pieces of an answer in the style of their provenance; the characters are unchanged."""
    return [(piece, style_of(origin)) for piece, origin in zip(pieces, provenance, strict=True)]


def marks(provenance: Sequence[TokenOrigin]) -> str:
    """One character per token: + accepted, ! residual, * bonus, . plain; a space ends each step."""
    line = ""
    for origin, following in zip(provenance, [*provenance[1:], None], strict=False):
        line += _MARKS[origin.kind] + (" " if following is None or following.step != origin.step else "")
    return line.rstrip()


def legend(provenance: Sequence[TokenOrigin]) -> list[Part]:
    """The meaning of styles and marks, with how often each occurs, a line each."""
    lines: list[Part] = []
    for kind, (style, meaning) in _STYLES.items():
        count = sum(origin.kind == kind for origin in provenance)
        lines += ["\n" if lines else "", (f"{_MARKS[kind]} {kind:<9}", style), f"{count:5d} tokens  {meaning}"]
    return lines


def print_shown(console: Console, pieces: Sequence[str], provenance: Sequence[TokenOrigin]) -> None:
    """The coloured answer, the same as marks, and the legend."""
    console.block(*coloured(pieces, provenance))
    console.line()
    console.line("by token, a group per step: ", marks(provenance), style="dim")
    console.block(*legend(provenance))


def print_counts(console: Console, stats: RequestStats) -> None:
    """Drafted and accepted tokens at each position of the draft and, with several drafters, by drafter."""
    if not stats.num_drafted:
        return
    rows = [(f"at position {place}", *counts) for place, counts in enumerate(stats.accepted_per_position, start=1)]
    if len(stats.drafted_by) > 1:
        rows += [(f"by {name}", drafted, stats.accepted_by.get(name, 0)) for name, drafted in stats.drafted_by.items()]
    console.line()
    cells = [
        (name, str(drafted), str(kept), f"{kept / drafted:.0%}" if drafted else "") for name, drafted, kept in rows
    ]
    console.table(("draft", "drafted", "accepted", "rate"), cells)


def print_pieces(outputs: list[StepOutput]) -> None:
    """Print what a step added, at once, and end the line where the answer ends."""
    console = Console()
    for output in outputs:
        console.answer(output.text)
        if output.finish_reason not in (None, "error"):
            console.line()


def report(llm: LLM, output: GenerateOutput, show: bool, as_json: bool, streamed: bool) -> None:
    """The answers in the form that was asked for, and what the first one cost."""
    for choice in output.choices if show or not as_json else ():
        _print_choice(llm, choice, show, streamed)
    if as_json:
        first, *others = (as_json_object(choice) for choice in output.choices)
        print_json(first | ({"others": others} if others else {}))
        return
    Console(stderr=True).line(summary(output.stats), style="dim")


def summary(stats: RequestStats) -> str:
    """What an answer cost: speed, acceptance, and what plain decoding would have taken by the measured steps."""
    line = (
        f"{stats.num_emitted} tokens in {stats.num_steps} steps, {stats.tokens_per_s:.1f} tokens/s, "
        f"first token after {stats.ttft_s:.2f} s"
    )
    if stats.num_drafted:
        line += f"; {stats.num_accepted} of {stats.num_drafted} draft tokens accepted ({stats.acceptance_rate:.0%})"
        line += f", {stats.wasted_s:.2f} of {stats.draft_s + stats.verify_s:.2f} s wasted on others"
        if stats.estimated_speedup is not None:
            plain_s = stats.estimated_speedup * stats.decode_s
            line += f"; estimated for plain decoding: {plain_s:.2f} s instead of {stats.decode_s:.2f} s"
            line += f" ({stats.estimated_speedup:.2f}x)"
    if stats.num_probed:
        line += f"; {stats.num_probed} rows of probes"
    if stats.lossy:
        line += f"; rule {stats.rule} is lossy: this is not the target's distribution"
    return line


def print_cost_profile(llm: LLM) -> None:
    """What measuring the costs of steps took before the first token, and where they are kept."""
    kept = f"kept in {llm.costs.path}" if llm.costs.path else "kept nowhere"
    line = f"costs of steps measured at the start in {llm.stats.profile_s:.2f} s, {kept}"
    Console(stderr=True).line(line, style="dim")


def as_json_object(output: GenerateOutput) -> dict[str, Any]:
    """One answer as plain values."""
    found: dict[str, Any] = {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "stats": output.stats.as_dict(),
        "provenance": [[origin.drafter, origin.kind, origin.step] for origin in output.provenance],
        "accept_probabilities": [origin.probability for origin in output.provenance],
    }
    if output.logprobs is not None:
        found["logprobs"] = [asdict(entry) for entry in output.logprobs]
    if output.prompt_logprobs is not None:
        found["prompt_logprobs"] = [None if entry is None else asdict(entry) for entry in output.prompt_logprobs]
    return found


def _print_choice(llm: LLM, output: GenerateOutput, show: bool, streamed: bool) -> None:
    console, pieces = Console(), token_pieces(llm, output)
    if show:
        print_shown(console, pieces if llm.tokenizer is None else answer_pieces(pieces, output), output.provenance)
        print_counts(console, output.stats)
    elif llm.tokenizer is None:
        console.line(",".join(str(token) for token in output.token_ids))
    elif not streamed:
        console.answer(output.text + "\n")
    if output.logprobs is not None:
        for piece, entry in zip(pieces, output.logprobs, strict=True):
            console.line(f"{entry.logprob:9.4f}  rank {entry.rank:<5d} {piece!r}")


def token_pieces(llm: LLM, output: GenerateOutput) -> list[str]:
    """The text each token added; bytes of one character appear with the token that completes it."""
    if llm.tokenizer is None:
        return [f"{token} " for token in output.token_ids]
    detokenizer = Detokenizer(llm.tokenizer, output.prompt_ids)
    pieces = [detokenizer.push(token) for token in output.token_ids]
    if pieces:
        pieces[-1] += detokenizer.flush()
    return pieces


def answer_pieces(pieces: Sequence[str], output: GenerateOutput) -> list[str]:
    """What of each token's text belongs to the answer: a stop string ends it, often inside a token."""
    room, kept = len(output.text), []
    for piece in pieces:
        kept.append(piece[:room])
        room -= len(kept[-1])
    assert "".join(kept) == output.text
    return kept
