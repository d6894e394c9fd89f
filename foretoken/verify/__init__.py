"""May this token stand? Pure functions of (draft, target_probs, uniforms) that return a Verdict.

A new rule is one file with a subclass of `Rule` and one line in `dispatch.RULES`.
"""

from foretoken.verify.base import Rule, draw, race_winner
from foretoken.verify.dispatch import RULES, is_lossless, needs_race, resolve, rule_for, takes_trees, verify_batch

__all__ = ["RULES", "Rule", "draw", "is_lossless", "needs_race", "race_winner", "resolve", "rule_for", "takes_trees", "verify_batch"]
