"""Verification rules: pure functions of (draft, target_probs, uniforms) that return a Verdict

A new rule is one file with a subclass of `Rule` and one line in `dispatch.RULES`.
"""

from foretoken.verify.base import Rule, draw, first_max, race_winner, race_winners, verdict_at
from foretoken.verify.dispatch import (
    COUPLED,
    GREEDY,
    RULES,
    is_lossless,
    needs_race,
    needs_uniforms,
    resolve,
    rule_for,
    takes_trees,
    verify_batch,
)

__all__ = [
    "COUPLED",
    "GREEDY",
    "RULES",
    "Rule",
    "draw",
    "first_max",
    "is_lossless",
    "needs_race",
    "needs_uniforms",
    "race_winner",
    "race_winners",
    "resolve",
    "rule_for",
    "takes_trees",
    "verdict_at",
    "verify_batch",
]
