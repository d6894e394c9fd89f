"""Runs the audit of another engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from foretoken.audit.backend_checks import check_distribution, check_greedy, check_seeds, unasked
from foretoken.audit.backend_plan import BackendAuditOptions
from foretoken.audit.backend_session import BackendSession, questions_of
from foretoken.audit.judge import Judge
from foretoken.audit.plan import Prompt
from foretoken.audit.report import AuditReport, Check
from foretoken.backend.answering import Drafting
from foretoken.errors import ForetokenError, InputError, UnavailableError
from foretoken.measure.asked import chosen_draftings, drafting_name


def run_backend_audit(
    options: BackendAuditOptions,
    prompts: Sequence[Prompt],
    command: str,
    machine: Mapping[str, Any],
    versions: Mapping[str, str],
    tell: Callable[[str], None] = lambda _: None,
) -> AuditReport:
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
        checks = [check for drafting in draftings for check in _checks(session, drafting, alpha, tell)]
        found = {**versions, backend.name: backend.version()}
        if against is not None:
            found[against.name] = against.version()
        return AuditReport((*checks, *unasked()), command, machine, found, asdict(options), options.alpha)


def _checks(session: BackendSession, drafting: Drafting, alpha: float, tell: Callable[[str], None]) -> list[Check]:
    """All checks of one way to draft."""
    options, name, checks = session.options, drafting_name(drafting), list[Check]()
    if 0.0 in options.temperatures:
        tell(f"greedy answers, {name}")
        checks += _guarded("greedy answers", name, lambda: check_greedy(session, drafting))
    if options.sampled:
        tell(f"sampled answers, {name}")
        checks += _guarded("distribution", name, lambda: check_distribution(session, drafting, alpha))
        tell(f"answers of equal seeds, {name}")
        checks += _guarded("equal seeds", name, lambda: check_seeds(session, drafting))
    return checks


def _guarded(name: str, where: str, check: Callable[[], list[Check]]) -> list[Check]:
    try:
        return check()
    except (InputError, UnavailableError):
        raise
    except ForetokenError as error:
        return [Check(name, where, "fail", found=f"the engine failed: {error}")]
