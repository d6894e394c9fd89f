"""`foretoken ab`: a recorded file of requests replayed on two backends in turns, until it is clear which is faster."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from foretoken.backend.answering import Question, check_question
from foretoken.errors import ForetokenError, UnavailableError
from foretoken.field_text import from_mapping
from foretoken.measure.ab.options import AbOptions
from foretoken.measure.ab.pairs import Observed, Pair, PairPlan, block_means, paired, plan_pairs
from foretoken.measure.ab.report import ab_report
from foretoken.measure.ab.rows import PRIMARY
from foretoken.measure.kept import KeptFile, kept_run
from foretoken.measure.progress import progress
from foretoken.measure.prompts import read_prompts
from foretoken.measure.report import Report, load_average
from foretoken.measure.sequential import confidence_sequence, judge
from foretoken.measure.sides import OpenSide, open_sides
from foretoken.measure.write import write_report

_FREE_TO_CHANGE = ("stop_early", "margin")  # of a run that goes on: they decide about no answer
_MAX_FAILED_IN_A_ROW = 5


def ab(a: str, b: str, replay: str | Path, **options: Any) -> Report:  # noqa: ANN401 - the other fields of AbOptions
    """Replay requests on two backends and say which is faster; `options` are the other fields of `AbOptions`.

    `results["verdict"]` of the report is "faster", "equivalent", "slower" or "go on": what B is, measured against A.

    Raises:
        InputError: an option or a request that cannot be used; names it.
        UnavailableError: a backend does not answer.
        ForetokenError: a model that cannot be used.
    """
    given = {"a": a, "b": b, "replay": Path(replay)} | options
    return run_ab(from_mapping(AbOptions, given), command="foretoken.ab(...)")


@dataclass
class _Replay:
    """What was planned and what was observed so far, of A with itself and of A with B."""

    plans: Sequence[PairPlan]
    pairs: list[Pair] = field(default_factory=list)
    aa_pairs: list[Pair] = field(default_factory=list)
    is_resumed: bool = False


def run_ab(options: AbOptions, command: str = "foretoken ab") -> Report:
    """Measure, and write the result where options ask for it; the caller prints the report.

    Progress goes to standard error. After Ctrl-C the report holds what was measured until then, and says so.

    Raises:
        InputError, StorageError, UnavailableError, ForetokenError: see `ab`.
    """
    replay = _Replay(plan_pairs(options, read_prompts(options.replay, "replay")))
    load, interrupted = load_average(), False
    with open_sides(options) as opened:
        sides = AbSide(opened[0]), AbSide(opened[1])
        for side in opened:
            for plan in replay.plans:
                check_question(side.title, plan.question, side.drafting, side.backend.capabilities)
                side.check_room("replay", plan.name, plan.question)
        about = {side.label: side.identity for side in opened}
        with closing(_kept(options, replay, about)) as kept:
            try:
                _measure(options, replay, sides, kept)
            except KeyboardInterrupt:
                interrupted = True
        notes = [note for side in opened for note in side.backend.notes()]
    observed, said = (replay.pairs, replay.aa_pairs), dict.fromkeys(notes)
    report = ab_report(options, about, *observed, command, said, load, interrupted, replay.is_resumed)
    return write_report(report, options.out, options.name)


def _measure(options: AbOptions, replay: _Replay, sides: tuple[AbSide, AbSide], kept: KeptFile) -> None:
    """Warm up, compare A with itself where that is asked for, then A with B until there is a verdict."""
    a, b = sides
    _warm_up(options, replay, sides)
    aa_plans = [plan for plan in replay.plans if plan.block < options.aa_blocks]
    with progress(len(aa_plans) + len(replay.plans)) as tell:
        for plan in aa_plans[len(replay.aa_pairs) :]:
            tell(f"A against itself, {plan.slice}")
            replay.aa_pairs.append(_asked(plan, a, a))
            _keep(kept, "aa", replay.aa_pairs[-1])
        for plan in replay.plans[len(replay.pairs) :]:
            at_end_of_block = bool(replay.pairs) and replay.pairs[-1].plan.block != plan.block
            if at_end_of_block and options.stop_early and _is_decided(options, replay.pairs):
                return
            tell(plan.slice)
            replay.pairs.append(_asked(plan, a, b))
            _keep(kept, "ab", replay.pairs[-1])


def _is_decided(options: AbOptions, pairs: Sequence[Pair]) -> bool:
    found = confidence_sequence(block_means(pairs, PRIMARY))
    return judge(found, math.log1p(options.margin)) != "go on"


def _asked(plan: PairPlan, a: AbSide, b: AbSide) -> Pair:
    if plan.a_first:
        first = a.ask(plan.question)
        return paired(plan, first, b.ask(plan.question))
    second = b.ask(plan.question)
    return paired(plan, a.ask(plan.question), second)


def _warm_up(options: AbOptions, replay: _Replay, sides: Sequence[AbSide]) -> None:
    """Ask each side a few requests that are not counted, those of the end of the replay."""
    for side in sides:
        found = [side.ask(plan.question) for plan in replay.plans[-options.warmup :]]
        if all(one.error for one in found):
            raise UnavailableError(
                f"all {len(found)} requests of the warm-up to {side.side.title} failed "
                f"({found[0].error}); nothing was measured"
            )


def _kept(options: AbOptions, replay: _Replay, about: dict[str, dict[str, str]]) -> KeptFile:
    """The file of pairs, those that it holds already restored."""
    planned = {"requests": [asdict(plan) for plan in replay.plans]}
    agreeing = {"without": _FREE_TO_CHANGE, "models": (options.target, options.draft), "sides": about}
    file = kept_run(options.resume, "ab", planned, options, **agreeing)

    def read(line: dict[str, Any]) -> tuple[str, Pair]:
        plan = replay.plans[line["pair"]]
        return line["phase"], Pair(plan, Observed(**line["a"]), Observed(**line["b"]))

    known = file.restored(read)
    replay.aa_pairs += [pair for phase, pair in known if phase == "aa"]
    replay.pairs += [pair for phase, pair in known if phase == "ab"]
    replay.is_resumed = bool(known)
    return file


def _keep(kept: KeptFile, phase: str, pair: Pair) -> None:
    kept.append({"phase": phase, "pair": pair.plan.index, "a": asdict(pair.a), "b": asdict(pair.b)})


@dataclass
class AbSide:
    """One side, and how many answers in a row it has failed."""

    side: OpenSide
    num_failed_in_a_row: int = 0

    def ask(self, question: Question) -> Observed:
        """The answer to one question, timed; a failure is kept in it. An engine in this process has forgotten earlier
        answers by then: both sides may be one, and the other side has just answered the same.

        Raises:
            UnavailableError: so many answers in a row failed that there is nothing to compare.
        """
        self.side.backend.reset()
        began = time.perf_counter()
        try:
            answer = self.side.backend.answer(question, self.side.drafting)
        except ForetokenError as error:
            self.num_failed_in_a_row += 1
            if self.num_failed_in_a_row >= _MAX_FAILED_IN_A_ROW:
                why = f"{self.side.title} failed {self.num_failed_in_a_row} times in a row: {error}"
                raise UnavailableError(why) from error
            return Observed(time.perf_counter() - began, 0, error=f"{type(error).__name__}: {error}")
        # Not the time of the call: in it a server's counters are read, and llama.cpp's programs read their checkpoint.
        assert answer.e2e_s is not None, f"{self.side.title} tells no time of an answer"
        self.num_failed_in_a_row = 0
        itl_s = answer.decode_s / answer.decode_tokens if answer.decode_tokens > 0 and answer.decode_s > 0 else None
        return Observed(
            answer.e2e_s,
            answer.num_emitted,
            answer.ttft_s,
            itl_s,
            answer.text,
            is_counted=answer.is_counted,
            is_shown=self.side.drafting.kind is not None or self.side.backend.capabilities.plain_texts,
        )
