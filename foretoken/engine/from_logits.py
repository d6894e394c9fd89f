"""Verification from logits in one compiled call: deterministic chains, and any draft under the coupled rule.

`verify_batch` on `TargetOutput.probs` decides the same, to the bit; it needs a distribution for each row. A chain of
given tokens, and a round without a draft, needs one probability for each draft token and one distribution for each
request. The coupled rule needs the rows that the accepted path reaches.
"""

from __future__ import annotations

from collections.abc import Sequence

from foretoken.core import Draft, RaceRows, Uniforms, Verdict
from foretoken.engine.runner import TargetOutput
from foretoken.kernels.sampling import kernel_for
from foretoken.text.sampling import KERNEL_DTYPES, choices_of
from foretoken.verify import COUPLED, verdict_at, verify_batch

_CHAIN_RULES = frozenset({"auto", "rejection", "greedy"})  # that decide alike on a deterministic chain


def verify_rows(draft: Draft, target: TargetOutput, uniforms: Uniforms, rules: Sequence[str]) -> Verdict:
    """The verdict on a batch: from logits where that applies, else by the rules from `target.probs`."""
    return (
        verify_chains(draft, target, uniforms, rules)
        or verify_coupled(draft, target, uniforms, rules)
        or verify_batch(draft, target.probs, uniforms, rules)
    )


def verify_chains(draft: Draft, target: TargetOutput, uniforms: Uniforms, rules: Sequence[str]) -> Verdict | None:
    """The verdict on a batch of deterministic chains; None where this does not apply: sampled tokens, trees, rules that
    decide otherwise, logits on a device or in other formats, nothing compiled.

    Leviathan et al. 2023 (arXiv 2211.17192) with a point mass for q: x is accepted with probability p(x), after a
    rejection the next token is sampled from p without x.
    """
    if draft.mass is not None or not _CHAIN_RULES.issuperset(rules):
        return None
    kernel = kernel_for(target.processed, KERNEL_DTYPES)
    if kernel is None or not all(draft.is_chain(b) for b in range(draft.num_requests)):
        return None
    choices = choices_of(target.params, target.processed.shape[-1])
    rows, next_tokens, chances = kernel.chains(
        target.processed, choices, target.best, draft.offsets, draft.tokens, uniforms.accept, uniforms.next
    )
    return verdict_at(draft, draft.host_tokens, rows, next_tokens, chances)


def verify_coupled(draft: Draft, target: TargetOutput, uniforms: Uniforms, rules: Sequence[str]) -> Verdict | None:
    """The verdict on a batch under the coupled rule alone; None where this does not apply: other rules, noise that is
    there already, logits on a device or in other formats, nothing compiled.

    Daliri et al. 2025 (arXiv 2408.07978), see `verify.coupled`.
    """
    races = [race for race in uniforms.race if isinstance(race, RaceRows)]
    if set(rules) != {COUPLED.name} or len(races) < draft.num_requests:
        return None
    kernel = kernel_for(target.processed, KERNEL_DTYPES)
    if kernel is None:
        return None
    parents, tokens = list[int](), list[int]()  # [R], -1 at an anchor
    for first, stop in zip(draft.offsets, draft.offsets[1:], strict=False):
        parents += (-1, *draft.parent_rows[first:stop])
        tokens += (-1, *draft.host_tokens[first:stop])
    winners = kernel.coupled(
        target.processed,
        choices_of(target.params, target.processed.shape[-1]),
        target.best,
        [offset + b for b, offset in enumerate(draft.offsets)],
        parents,
        tokens,
        [(*race.noise.key, position) for race in races for position in race.positions],
    )
    return COUPLED.verify_winners(draft, draft.host_tokens, winners)
