"""The registry of rules, the choice by name, and batches that mix rules."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from foretoken.core import Draft, NextKind, Uniforms, Verdict
from foretoken.errors import ConfigError
from foretoken.transfer import to_device
from foretoken.verify.base import Rule, take
from foretoken.verify.block import BlockRule
from foretoken.verify.coupled import CoupledRule
from foretoken.verify.greedy import GreedyRule
from foretoken.verify.rejection import RejectionRule
from foretoken.verify.traversal import TraversalRule
from foretoken.verify.tree import TreeRule
from foretoken.verify.typical import TypicalRule

GREEDY = GreedyRule()
COUPLED = CoupledRule()
RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (GREEDY, RejectionRule(), BlockRule(), COUPLED, TreeRule(), TraversalRule(), TypicalRule())
}


def resolve(
    rule_name: str, greedy: bool, seeded: bool = False, allow_lossy: bool = False, shape_follows_draws: bool = False
) -> str:
    """Resolve the name of the rule for a request.

    "auto" becomes "greedy" if the target's distribution is a point mass (`greedy`), "coupled" if the user gave a seed
    (`seeded`), "tree" if the shape of a draft can depend on sampled tokens (`shape_follows_draws`: trees of a model,
    merged drafts), because the choice of a rule must not. Otherwise it stays "auto", and `verify_batch` chooses by the
    draft.

    Raises:
        ConfigError: an unknown rule, "greedy" where the target's distribution is not a point mass, or a lossy rule
            without `allow_lossy`.
    """
    if rule_name == "auto":
        return "greedy" if greedy else "coupled" if seeded else "tree" if shape_follows_draws else "auto"
    if rule_name not in RULES:
        raise ConfigError("rule", rule_name, f"choose one of auto, {', '.join(RULES)}")
    if rule_name == "greedy" and not greedy:
        raise ConfigError(
            "rule",
            rule_name,
            "it would change the distribution at temperature > 0; use rule='auto' or set temperature=0",
        )
    if not is_lossless(rule_name) and not allow_lossy:
        raise ConfigError(
            "rule",
            rule_name,
            "changes the target's distribution (lossy); set allow_lossy=True to accept that, or use rule='auto'",
        )
    return rule_name


def needs_race(rule_name: str) -> bool:
    """Whether a rule, by its resolved name, reads `Uniforms.race`."""
    return rule_name != "auto" and RULES[rule_name].needs_race


def needs_uniforms(rule_name: str) -> bool:
    """Whether a rule, by its resolved name, reads `Uniforms.accept` or `Uniforms.next`."""
    return rule_name == "auto" or RULES[rule_name].needs_uniforms


def takes_trees(rule_name: str) -> bool:
    """Whether a rule, by its resolved name, accepts drafts that are not chains."""
    return rule_name == "auto" or RULES[rule_name].takes_trees


def is_lossless(rule_name: str) -> bool:
    """Whether a rule, by its resolved name, keeps the target's distribution."""
    return rule_name == "auto" or RULES[rule_name].lossless


def rule_for(draft: Draft, request: int) -> str:
    """What "auto" means for a draft: "block" for a chain with a sampled or missing token, "rejection" for a
    deterministic chain (equally good there, and cheaper), else "tree".

    Valid for drafters whose shape is fixed before anything is sampled, and for chains. A drafter whose shape depends on
    sampled tokens needs a rule by name: this choice would depend on the sample.
    """
    if not draft.is_chain(request):
        return "tree"
    if draft.mass is None:
        return "rejection"
    sampled, distribution_of_row = draft.sampled or (False,) * draft.num_nodes, draft.mass.distribution_of_row
    if any(
        distribution_of_row[draft.parent_rows[node]] >= 0 and not sampled[node]
        for node in range(draft.offsets[request], draft.offsets[request + 1])
    ):
        return "tree"  # a sample of "nothing" beside a deterministic token
    return "block" if any(distribution_of_row[row] >= 0 for row in draft.rows_of([request])) else "rejection"


def verify_batch(draft: Draft, target_probs: Tensor, uniforms: Uniforms, rules: Sequence[str]) -> Verdict:
    """Verify a batch whose requests may use different rules; `rules[b]` is a resolved name, "auto" included.

    Shapes as in `Rule.verify`; the verdict is in the order of the requests.
    """
    assert len(rules) == draft.num_requests
    groups: dict[str, list[int]] = {}
    for b, rule in enumerate(rules):
        groups.setdefault(rule_for(draft, b) if rule == "auto" else rule, []).append(b)
    if len(groups) <= 1:
        return RULES[next(iter(groups), "greedy")].verify(draft, target_probs, uniforms)
    outcome: dict[int, tuple[tuple[int, ...], tuple[int, ...], int, NextKind, tuple[float | None, ...]]] = {}
    for rule, requests in groups.items():
        verdict = _verify_some(RULES[rule], draft, target_probs, uniforms, requests)
        parts = zip(
            verdict.paths, verdict.accepted, verdict.next_tokens, verdict.next_kinds, verdict.probabilities, strict=True
        )
        outcome.update(zip(requests, parts, strict=True))
    return Verdict(*zip(*(outcome[b] for b in range(draft.num_requests)), strict=True))


def _verify_some(rule: Rule, draft: Draft, target_probs: Tensor, uniforms: Uniforms, requests: list[int]) -> Verdict:
    """One rule on some requests of the batch, with their own rows and uniforms."""
    nodes = [node for b in requests for node in range(draft.offsets[b], draft.offsets[b + 1])]
    race = tuple(uniforms.race[b] for b in requests) if uniforms.race else ()
    accept, following = to_device(nodes, uniforms.accept.device), to_device(requests, uniforms.next.device)
    own = Uniforms(uniforms.accept[accept], uniforms.next[following], race)
    return rule.verify(draft.select(requests), take(target_probs, draft.rows_of(requests)), own)
