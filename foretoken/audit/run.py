"""Runs one audit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from foretoken.audit.checks import check_blocks, check_greedy, check_numerics, check_seeds
from foretoken.audit.distribution import check_distribution, rules_to_check
from foretoken.audit.plan import AuditOptions, Prompt
from foretoken.audit.report import AuditReport, Check
from foretoken.audit.session import Session
from foretoken.errors import CapacityError, NumericsError


def run_audit(
    options: AuditOptions,
    prompts: Sequence[Prompt],
    command: str,
    machine: Mapping[str, Any],
    versions: Mapping[str, str],
    tell: Callable[[str], None] = lambda _: None,
) -> AuditReport:
    """Open the models, run every check, close them; `tell` receives a short message before each piece of work.

    An engine that fails during a check fails the check.

    Raises:
        InputError, ModelError: settings that cannot be audited.
    """
    assert prompts
    tell("loading the models")
    session = Session(options, prompts)
    with session.llm:
        checks = _checks(session, tell)
    return AuditReport(tuple(checks), command, machine, versions, asdict(options), options.alpha)


def _checks(session: Session, tell: Callable[[str], None]) -> list[Check]:
    options, checks = session.options, list[Check]()
    if 0.0 in options.temperatures:
        tell("greedy answers against plain decoding")
        checks += _guarded("greedy answers", lambda: check_greedy(session))
    if options.sampled:
        rules = rules_to_check(session)
        combinations = [(temperature, rule) for temperature in options.sampled for rule in rules]
        for number, (temperature, rule) in enumerate(combinations):
            tell(f"the distribution at temperature {temperature:g}, rule {rule} ({number + 1} of {len(combinations)})")
            checks += _guarded(
                "distribution", partial(check_distribution, session, temperature, rule, number, len(combinations))
            )
        tell("answers of equal seeds")
        checks += _guarded("equal seeds", lambda: check_seeds(session))
    tell("logits of one row and of several")
    checks += _guarded("logits", lambda: check_numerics(session))
    return checks + check_blocks(session)


def _guarded(name: str, check: Callable[[], list[Check]]) -> list[Check]:
    try:
        return check()
    except (CapacityError, NumericsError) as error:
        return [Check(name, "", "fail", found=f"the engine failed: {error}")]
