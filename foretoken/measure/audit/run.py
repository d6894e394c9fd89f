"""Runs one audit, of our engine or of another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from foretoken.backend.answering import Drafting
from foretoken.errors import CapacityError, ForetokenError, InputError, NumericsError, UnavailableError
from foretoken.machine.identity import versions
from foretoken.measure.asked import chosen_draftings, drafting_name
from foretoken.measure.audit import backend as outside
from foretoken.measure.audit.backend import BackendSession, questions_of, unasked
from foretoken.measure.audit.checks import check_blocks, check_greedy, check_numerics, check_seeds
from foretoken.measure.audit.distribution import check_distribution, rules_to_check
from foretoken.measure.audit.judge import Judge
from foretoken.measure.audit.options import AuditOptions, BackendAuditOptions, Prompt
from foretoken.measure.audit.report import audit_report
from foretoken.measure.audit.session import Session
from foretoken.measure.checks import Check
from foretoken.measure.report import Report

_Failures = type[ForetokenError] | tuple[type[ForetokenError], ...]


def run_audit(
    options: AuditOptions, prompts: Sequence[Prompt], command: str, tell: Callable[[str], None] = lambda _: None
) -> Report:
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
    return audit_report(options, checks, command)


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


def run_backend_audit(
    options: BackendAuditOptions, prompts: Sequence[Prompt], command: str, tell: Callable[[str], None] = lambda _: None
) -> Report:
    """Open the backend and what judges it, run every check that can be asked, close them; `tell` receives a short
    message before each piece of work.

    An answer that fails during a check fails the check.

    Raises:
        InputError: what the backend cannot be asked; names the field.
        UnavailableError: it does not answer, or stopped.
        ModelError: a model that cannot be loaded.
    """
    assert prompts
    with ExitStack() as stack:
        tell("opening the backend")
        backend = stack.enter_context(options.source.open())
        draftings = chosen_draftings(backend, "drafter", options.draftings, options.num_draft)
        against = None if options.against is None else stack.enter_context(options.against.open())
        questions = questions_of(prompts, options, backend)
        judge = None
        if options.target is not None:
            tell("loading the target")
            judge = stack.enter_context(Judge(options))
        ids = [] if judge is None else [judge.prompt_ids(question) for question in questions]
        session = BackendSession(options, backend, questions, judge, against, ids)
        alpha = options.alpha / len(draftings)
        checks = [check for drafting in draftings for check in _checks_of_backend(session, drafting, alpha, tell)]
        found = versions() | {one.name: one.version() for one in (backend, against) if one is not None}
        return audit_report(options, (*checks, *unasked()), command, versions=found)


def _checks_of_backend(
    session: BackendSession, drafting: Drafting, alpha: float, tell: Callable[[str], None]
) -> list[Check]:
    """All checks of one way to draft."""
    options, name, checks = session.options, drafting_name(drafting), list[Check]()
    guarded = partial(_guarded, where=name, failures=ForetokenError)
    if 0.0 in options.temperatures:
        tell(f"greedy answers, {name}")
        checks += guarded("greedy answers", lambda: outside.check_greedy(session, drafting))
    if options.sampled:
        tell(f"sampled answers, {name}")
        checks += guarded("distribution", lambda: outside.check_distribution(session, drafting, alpha))
        tell(f"answers of equal seeds, {name}")
        checks += guarded("equal seeds", lambda: outside.check_seeds(session, drafting))
    return checks


def _guarded(
    name: str, check: Callable[[], list[Check]], where: str = "", failures: _Failures = (CapacityError, NumericsError)
) -> list[Check]:
    """The checks, or one that failed where the engine did."""
    try:
        return check()
    except (InputError, UnavailableError):
        raise
    except failures as error:
        return [Check(name, where, "fail", found=f"the engine failed: {error}")]
