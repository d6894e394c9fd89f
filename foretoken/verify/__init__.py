"""May this token stand? Pure functions of (draft, target_probs, uniforms) that return a Verdict.

A new rule is one file with a subclass of `Rule` and one line in `dispatch.RULES`.
"""

from foretoken.verify.base import Rule, draw
from foretoken.verify.dispatch import RULES, resolve, verify_batch

__all__ = ["RULES", "Rule", "draw", "resolve", "verify_batch"]
