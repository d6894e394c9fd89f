"""Verification of deterministic chains from logits, in one compiled call.

A lookup's draft, and a round without a draft, needs one probability for each draft token and one distribution for each
request, not a distribution for each row. `verify_batch` on `TargetOutput.probs` decides the same, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

from foretoken.core import Draft, Uniforms, Verdict
from foretoken.engine.runner import TargetOutput
from foretoken.kernels.sampling import kernel_for
from foretoken.text.sampling import KERNEL_DTYPES, choices_of
from foretoken.verify import verdict_at, verify_batch

_RULES = frozenset({"auto", "rejection", "greedy"})  # that decide alike on a deterministic chain


def verify_rows(draft: Draft, target: TargetOutput, uniforms: Uniforms, rules: Sequence[str]) -> Verdict:
    """The verdict on a batch: from logits where that applies, else by the rules from `target.probs`."""
    return verify_chains(draft, target, uniforms, rules) or verify_batch(draft, target.probs, uniforms, rules)


def verify_chains(draft: Draft, target: TargetOutput, uniforms: Uniforms, rules: Sequence[str]) -> Verdict | None:
    """The verdict on a batch of deterministic chains; None where this does not apply: sampled tokens, trees, rules that
    decide otherwise, logits on a device or in other formats, nothing compiled.

    Leviathan et al. 2023 (arXiv 2211.17192) with a point mass for q: x is accepted with probability p(x), after a
    rejection the next token is sampled from p without x.
    """
    if draft.mass is not None or not _RULES.issuperset(rules):
        return None
    kernel = kernel_for(target.processed, KERNEL_DTYPES)
    if kernel is None or not all(draft.is_chain(b) for b in range(draft.num_requests)):
        return None
    choices = choices_of(target.params, target.processed.shape[-1])
    rows, next_tokens, chances = kernel.chains(
        target.processed, choices, target.best, draft.offsets, draft.tokens, uniforms.accept, uniforms.next
    )
    return verdict_at(draft, draft.host_tokens, rows, next_tokens, chances)
