"""`foretoken certify`: whether B, which speculates, answers as A does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any

from foretoken.backend.answering import Question
from foretoken.backend.requesting import requester_of
from foretoken.errors import UnavailableError
from foretoken.field_text import from_mapping
from foretoken.measure.certify.asking import Asker, CertifySession, SideFailedError, request_of
from foretoken.measure.certify.forms import check_forms
from foretoken.measure.certify.greedy import check_greedy, check_parameters
from foretoken.measure.certify.options import KINDS, CertifyOptions
from foretoken.measure.certify.sampled import SETTINGS, check_distribution, check_seeds, level_of, num_answers
from foretoken.measure.certify.whole import check_limits, check_stream
from foretoken.measure.checks import Check, check_table, verdict
from foretoken.measure.kept import kept_run
from foretoken.measure.progress import progress
from foretoken.measure.prompts import read_prompts
from foretoken.measure.report import Report, interruption_notes
from foretoken.measure.sides import OpenSide, open_sides, side_table
from foretoken.measure.workload import Prompt, in_turns, slices
from foretoken.measure.write import write_report


def certify_report(
    options: CertifyOptions,
    about: Mapping[str, Mapping[str, str]],
    checks: Sequence[Check],
    rows: Sequence[Mapping[str, Any]],
    drafted: Mapping[str, int] | None,
    command: str,
    caveats: Sequence[str],
    interrupted: bool,
) -> Report:
    """The report of the checks; `about` says of each side what it is, `rows` are all requests with their answers,
    `drafted` what B drafted in this run and how much of it was accepted, None where it does not count.
    """
    line, passed = verdict(checks, interrupted)
    results: dict[str, Any] = {
        "kind": "certify",
        "verdict": line,
        "passed": passed,
        "checks": checks,
        "false_alarm_rate": options.alpha,
        "sides": about,
        "drafted": drafted,
        "rows": rows,
        "interrupted": interrupted,
    }
    return Report(
        title="Certificate",
        command=command,
        options=asdict(options),
        results=results,
        tables=(check_table(checks, "B against A"), side_table(about)),
        explained=_explained(options, drafted),
        caveats=tuple(caveats),
        verdict=line,
        passed=passed,
    )


def _explained(options: CertifyOptions, drafted: Mapping[str, int] | None) -> str:
    count = num_answers(options.effect, options.alpha)
    told = ""
    if drafted:
        told = f"B drafted {drafted['drafted']:,} tokens, of which {drafted['accepted']:,} were accepted. "
    drawn = (
        f"A correct B fails any of the tests of sampled answers with probability {options.alpha:g} at most: each of "
        f"the {2 * len(SETTINGS)} is made at level {level_of(options.alpha):.2g}, on {count} answers of each side. The "
        "other checks"
    )
    return told + (
        f"{drawn if 'distribution' in options.only else 'Sampled answers were not tested. The checks'} never fail by "
        "chance, if rounding moves log-probabilities by no more than "
        f"{options.tolerance:g}. sees: what a check misses with probability 0.01 at most. not asked: a side refuses "
        "the request, or does not report what the check needs. undecided: A does the same, or nothing could differ."
    )


_CHECKS: Mapping[str, Callable[[CertifySession], Iterator[Check]]] = {
    "greedy": check_greedy,
    "parameters": check_parameters,
    "limits": check_limits,
    "stream": check_stream,
    "distribution": check_distribution,
    "seeds": check_seeds,
    "forms": check_forms,
}

_FREE_TO_CHANGE = ("only", "tolerance", "effect", "alpha")  # of a run that goes on: they decide about no answer

_NUM_LOGPROBS = 5  # the most that every server gives


def certify(a: str, b: str, **options: Any) -> Report:  # noqa: ANN401 - the other fields of CertifyOptions
    """Compare B's answers with A's; `options` are the other fields of `CertifyOptions`.

    `results["passed"]` of the report says whether no check failed, `results["checks"]` what each found and would have
    seen, `results["rows"]` every request with its answer.

    Raises:
        InputError: an option that cannot be used; names it.
        UnavailableError: a backend does not answer.
        ForetokenError: a model that cannot be used.
    """
    return run_certify(from_mapping(CertifyOptions, {"a": a, "b": b} | options), command="foretoken.certify(...)")


def run_certify(options: CertifyOptions, command: str = "foretoken certify") -> Report:
    """Ask, check, and write the result where options ask for it; the caller prints the report.

    Progress goes to standard error. After Ctrl-C the report holds the checks that were made until then.

    Raises:
        InputError, StorageError, UnavailableError, ForetokenError: see `certify`.
    """
    assert tuple(_CHECKS) == KINDS
    prompts = _prompts(options)
    checks: list[Check] = []
    caveats: list[str] = []
    interrupted = False
    with open_sides(options) as sides:
        for side in sides:
            for prompt in prompts:
                asked = request_of(options, prompt)
                side.check_room("prompts", prompt.name, Question(asked.text, asked.messages))
        about = {side.label: side.identity for side in sides}
        planned = {"prompts": [(prompt.text, prompt.messages) for prompt in prompts]}
        agreeing = {"without": _FREE_TO_CHANGE, "models": (options.target, options.draft), "sides": about}
        with closing(kept_run(options.resume, "certify", planned, options, **agreeing)) as kept:
            a, b = (Asker(side.label, requester_of(side.backend, side.drafting), kept) for side in sides)
            before = sides[1].backend.counters()
            try:
                for row in kept.restored(dict):
                    (a if row["side"] == a.label else b).restore(row)
                session, caveats = _session(options, a, b, prompts, sides)
                with progress(len(options.only)) as tell:
                    checks.extend(made_checks(session, tell))
            except KeyboardInterrupt:
                interrupted = True
        drafted, after = None, None if b.lost or before is None else sides[1].backend.counters()
        if before is not None and after is not None:  # else B does not count its draft tokens
            drafted = {name: round(after[name] - before[name]) for name in ("drafted", "accepted")}
        caveats += interruption_notes(interrupted, options.resume)
        caveats += _lost(a, b) or _doubt(drafted, b.num_restored > 0)
        caveats += [note for side in sides for note in side.backend.notes()]
    rows = [*a.rows, *b.rows]
    report = certify_report(options, about, checks, rows, drafted, command, list(dict.fromkeys(caveats)), interrupted)
    return write_report(report, options.out, options.name)


def _lost(a: Asker, b: Asker) -> list[str]:
    return [
        f"{side.label} stopped in this run: what it had not answered before was not asked. Start it again, and go on "
        "with --resume, or with --only other kinds."
        for side in (a, b)
        if side.lost
    ]


def _doubt(drafted: dict[str, int] | None, is_resumed: bool) -> list[str]:
    """A certificate says nothing of drafts that were not made; those for answers of an earlier run are not counted."""
    if drafted is None:
        return ["B does not report what it drafts; see elsewhere that it speculates."]
    if not drafted["drafted"] and not is_resumed:
        return ["B drafted no token in this run, which says nothing about speculation then."]
    return []


def made_checks(session: CertifySession, tell: Callable[[str], None] = lambda _: None) -> Iterator[Check]:
    """The checks that are asked for, each when it is made; `tell` receives the kind before each kind."""
    for kind in KINDS:
        if kind in session.options.only:
            tell(kind)
            yield from _CHECKS[kind](session)


def _prompts(options: CertifyOptions) -> list[Prompt]:
    """Prompts of the slices in turn."""
    every = read_prompts(options.prompts) if options.prompts is not None else slices(per_slice=options.num_prompts)
    return in_turns(every, lambda prompt: prompt.slice)[: options.num_prompts]


def _session(
    options: CertifyOptions, a: Asker, b: Asker, prompts: Sequence[Prompt], sides: Sequence[OpenSide]
) -> tuple[CertifySession, list[str]]:
    """The sides with what both of them report."""
    conversations = all(side.backend.capabilities.conversations for side in sides)
    session = CertifySession(options, a, b, prompts, _NUM_LOGPROBS, conversations)
    request = session.request(prompts[0])
    try:
        replies = [(side.label, side.ask([request])[0]) for side in (a, b)]
    except SideFailedError as error:
        raise UnavailableError(str(error)) from error
    silent = [label for label, reply in replies if not reply.choices or not reply.choices[0].pieces]
    if not silent:
        return session, []
    caveat = (
        f"{' and '.join(silent)} reported no log-probabilities: every difference between greedy answers counts, near "
        "ties too."
    )
    return CertifySession(options, a, b, prompts, None, conversations), [caveat]
