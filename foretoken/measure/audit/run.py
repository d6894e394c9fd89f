"""Runs one audit, of our engine or of another."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import partial
from typing import Any

from foretoken.backend.answering import Drafting
from foretoken.errors import CapacityError, ForetokenError, InputError, NumericsError, UnavailableError
from foretoken.files import as_plain
from foretoken.machine.identity import versions
from foretoken.measure.asked import chosen_draftings, drafting_name
from foretoken.measure.audit import backend as outside
from foretoken.measure.audit.backend import BackendSession, questions_of, unasked
from foretoken.measure.audit.checks import check_blocks, check_greedy, check_numerics, check_seeds
from foretoken.measure.audit.distribution import check_distribution, rules_to_check
from foretoken.measure.audit.judge import Judge
from foretoken.measure.audit.options import AuditOptions, BackendAuditOptions, Prompt, prompt_name
from foretoken.measure.audit.session import Session
from foretoken.measure.checks import Check, check_table, read_checks, verdict
from foretoken.measure.kept import KeptFile, kept_run
from foretoken.measure.report import Report, interruption_notes
from foretoken.measure.write import write_report


def audit_report(
    options: AuditOptions | BackendAuditOptions,
    checks: Sequence[Check],
    command: str,
    interrupted: bool = False,
    notes: Sequence[str] = (),
    **about: Any,  # noqa: ANN401 - versions, machine and date, where they are known
) -> Report:
    """The report of the checks that were made, with the verdict as its heading."""
    line, passed = verdict(checks, interrupted)
    return Report(
        title="Audit",
        command=command,
        options=asdict(options),
        results={
            "verdict": line,
            "passed": passed,
            "checks": tuple(checks),
            "false_alarm_rate": options.alpha,
            "interrupted": interrupted,
        },
        tables=(check_table(checks),),
        explained=(
            "A correct engine fails any of the statistical checks with probability "
            f"{options.alpha:g} at most; the other checks never fail by chance."
        ),
        caveats=(*interruption_notes(interrupted, options.resume), *notes),
        verdict=line,
        passed=passed,
        **about,
    )


_Failures = type[ForetokenError] | tuple[type[ForetokenError], ...]


def run_audit(
    options: AuditOptions, prompts: Sequence[Prompt], command: str, tell: Callable[[str], None] = lambda _: None
) -> Report:
    """Open the models, run every check, close them, and write the report where options ask for it; `tell` receives a
    short message before each piece of work. After Ctrl-C the report holds the checks that were made until then.

    An engine that fails during a check fails the check.

    Raises:
        InputError, ModelError: settings that cannot be audited.
        StorageError: see `KeptFile`, and `write_report`.
    """
    assert prompts
    tell("loading the models")
    session = Session(options, prompts)
    spec = options.spec
    models, files = (options.target, spec.draft, spec.head), (spec.corpus, spec.ngram_table)
    asked, about = {"prompts": as_plain(prompts)}, {"models": models, "files": files, "versions": versions()}
    with session.llm, closing(kept_run(options.resume, "audit", asked, options, **about)) as kept:
        checks, interrupted = _made(_checks(session, kept, tell))
    return write_report(audit_report(options, checks, command, interrupted, session.notes), options.out, options.name)


def _made(checks: Iterator[Check]) -> tuple[list[Check], bool]:
    """The checks, and whether an interrupt ended them early."""
    found: list[Check] = []
    try:
        found.extend(checks)
    except KeyboardInterrupt:
        return found, True
    return found, False


def _checks(session: Session, kept: KeptFile, tell: Callable[[str], None]) -> Iterator[Check]:
    """Every check when it is made; those that `kept` holds are not made again."""
    options = session.options

    def made(name: str, check: Callable[[], list[Check]], place: str = "") -> list[Check]:
        session.begin()
        return kept.once(name + place, read_checks, partial(_guarded, name, check))

    if 0.0 in options.temperatures:
        tell("greedy answers against plain decoding")
        yield from made("greedy answers", partial(check_greedy, session))
    if options.sampled:
        combinations = list(itertools.product(options.sampled, rules_to_check(session)))
        for number, (temperature, rule) in enumerate(combinations):
            place = f" at temperature {temperature:g}, rule {rule} ({number + 1} of {len(combinations)})"
            tell(f"the distribution{place}")
            check = partial(check_distribution, session, temperature, rule, number, len(combinations))
            yield from made("distribution", check, place)
        tell("answers of equal seeds")
        yield from made("equal seeds", partial(check_seeds, session))
    tell("logits of one row and of several")
    yield from made("logits", partial(check_numerics, session))
    yield from check_blocks(session)


def run_backend_audit(
    options: BackendAuditOptions, prompts: Sequence[Prompt], command: str, tell: Callable[[str], None] = lambda _: None
) -> Report:
    """Open the backend and what judges it, run every check that can be asked, close them, and write the report; see
    `run_audit`.

    An answer that fails during a check fails the check.

    Raises:
        InputError: what the backend cannot be asked; names the field.
        UnavailableError: it does not answer, or stopped.
        ModelError: a model that cannot be loaded.
        StorageError: see `run_audit`.
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
        ids = [] if judge is None else [judge.prompt_ids(prompt_name(i), one) for i, one in enumerate(questions)]
        session = BackendSession(options, backend, questions, judge, against, ids)
        found = {one.name: one.version() for one in (backend, against) if one is not None}
        about = {
            "models": (options.target,),
            "versions": versions(),
            "backend": options.source.identity_of(backend) | found,
            "drafting": [drafting_name(one) for one in draftings],
        }
        asked = {"prompts": as_plain(prompts)}
        kept = stack.enter_context(closing(kept_run(options.resume, "audit of a backend", asked, options, **about)))
        alpha = options.alpha / len(draftings)
        checks, interrupted = _made(
            check for drafting in draftings for check in _checks_of_backend(session, kept, drafting, alpha, tell)
        )
        report = audit_report(options, (*checks, *unasked()), command, interrupted, versions=versions() | found)
    return write_report(report, options.out, options.name)


def _checks_of_backend(
    session: BackendSession, kept: KeptFile, drafting: Drafting, alpha: float, tell: Callable[[str], None]
) -> Iterator[Check]:
    """All checks of one way to draft when they are made; those that `kept` holds are not made again."""
    options, name = session.options, drafting_name(drafting)

    def made(words: str, check: Callable[[], list[Check]]) -> list[Check]:
        guarded = partial(_guarded, words, check, where=name, failures=ForetokenError)
        return kept.once(f"{words}, {name}", read_checks, guarded)

    if 0.0 in options.temperatures:
        tell(f"greedy answers, {name}")
        yield from made("greedy answers", partial(outside.check_greedy, session, drafting))
    if options.sampled:
        tell(f"sampled answers, {name}")
        yield from made("distribution", partial(outside.check_distribution, session, drafting, alpha))
        tell(f"answers of equal seeds, {name}")
        yield from made("equal seeds", partial(outside.check_seeds, session, drafting))


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
