"""Which rule decides for which request: the registry, the choice by name, and batches that mix rules."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.core import Draft, NextKind, Uniforms, Verdict
from foretoken.errors import ConfigError
from foretoken.verify.base import Rule
from foretoken.verify.greedy import GreedyRule
from foretoken.verify.rejection import RejectionRule

RULES: dict[str, Rule] = {rule.name: rule for rule in (GreedyRule(), RejectionRule())}


def resolve(rule_name: str, greedy: bool) -> str:
    """Name of the rule to run: "auto" takes "greedy" when the target's law is a point (`greedy`), else "rejection".

    Raises:
        ConfigError: an unknown rule, or "greedy" where the target's law is not a point.
    """
    if rule_name == "auto":
        return "greedy" if greedy else "rejection"
    if rule_name not in RULES:
        raise ConfigError("rule", rule_name, f"choose one of auto, {', '.join(RULES)}")
    if rule_name == "greedy" and not greedy:
        raise ConfigError("rule", rule_name, "it would change the law at temperature > 0; use rule='auto' or set temperature=0")
    return rule_name


def verify_batch(draft: Draft, target_probs: Tensor, uniforms: Uniforms, rules: Sequence[str]) -> Verdict:
    """Verify a batch whose requests may use different rules; `rules[b]` is a resolved name.

    Shapes as in `Rule.verify`; the verdict is in the order of the requests.
    """
    assert len(rules) == draft.num_requests
    groups: dict[str, list[int]] = {}
    for b, rule in enumerate(rules):
        groups.setdefault(rule, []).append(b)
    if len(groups) <= 1:
        return RULES[rules[0] if rules else "greedy"].verify(draft, target_probs, uniforms)
    outcome: dict[int, tuple[tuple[int, ...], tuple[int, ...], int, NextKind]] = {}
    for rule, requests in groups.items():
        verdict = _verify_some(RULES[rule], draft, target_probs, uniforms, requests)
        parts = zip(verdict.paths, verdict.accepted, verdict.next_tokens, verdict.next_kinds, strict=True)
        outcome.update(zip(requests, parts, strict=True))
    paths, accepted, tokens, kinds = zip(*(outcome[b] for b in range(draft.num_requests)), strict=True)
    return Verdict(paths, accepted, tokens, kinds)


def _verify_some(rule: Rule, draft: Draft, target_probs: Tensor, uniforms: Uniforms, requests: list[int]) -> Verdict:
    """One rule on some requests of the batch, with their own rows and uniforms."""
    device = target_probs.device
    nodes = [node for b in requests for node in range(draft.offsets[b], draft.offsets[b + 1])]
    at_nodes = torch.tensor(nodes, dtype=torch.int64, device=device)
    at_requests = torch.tensor(requests, dtype=torch.int64, device=device)
    rows = torch.tensor(draft.rows_of(requests), dtype=torch.int64, device=device)
    own = Uniforms(uniforms.accept[at_nodes], uniforms.next[at_requests])
    return rule.verify(draft.select(requests), target_probs[rows], own)
