"""Shadow checks: a share of all answers is scored again by the target alone, while the engine runs, to test whether
emitted tokens follow its distributions.

An observer of the engine (`watch.Watcher`). Requests are selected on arrival, and their evidence is added in order of
arrival, so that neither the length of an answer nor the speed of the engine selects what is counted (see
`sequential_test.SequentialTest`). Work is done in small pieces between steps, in cache that no request needs at that
time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretoken.config import LOSSY_RULES
from foretoken.core import Request
from foretoken.engine.request import RequestState
from foretoken.engine.scheduler import Scheduler
from foretoken.engine.shadow.rescoring import Rescoring, ScoredRows
from foretoken.engine.shadow.sequential_test import (
    DraftChildren,
    Evidence,
    GreedyEvidence,
    SequentialTest,
    weigh,
    weigh_greedy,
)
from foretoken.engine.stats import ShadowStats
from foretoken.engine.watch import RoundView
from foretoken.errors import CapacityError, NumericsError, warn
from foretoken.model.interface import LanguageModel
from foretoken.text.processors import RequestProcessors
from foretoken.text.randomness import Purpose, uniforms
from foretoken.transfer import to_host

# How far 16-bit rounding may move the mean of a bounded score: half the variance of a logit's noise, and less
# (SequentialTest).
SLACK_16_BIT = 0.002
_LIKELIEST = 64  # stored tokens of a drafter's distribution; the rest counts as mass 0
_MAX_SEEDS = 1 << 16


@dataclass
class _Case:
    """One selected request: its output, its drafts, and finally its evidence."""

    request: Request
    children: list[DraftChildren | None] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    scored: bool = False
    evidence: Evidence = field(default_factory=Evidence)
    greedy: GreedyEvidence = field(default_factory=GreedyEvidence)
    error: str = ""


class Shadow:
    """Checks a share `rate` of requests, selected by their seeds and numbers.

    `room` lends cache of the target that no request needs. `fresh_processors` makes the processors of a request in
    their initial state, None where it has none. At most `max_waiting` requests are followed at a time. Lossy requests
    are left out, and so are requests whose given seed was seen before: equal seeds give equal choices, which would be
    counted twice.
    """

    def __init__(
        self,
        target: LanguageModel,
        rate: float,
        room: Scheduler,
        fresh_processors: Callable[[Request], RequestProcessors | None],
        alpha: float = 1e-6,
        tokens_per_step: int = 32,
        max_waiting: int = 256,
    ) -> None:
        assert 0 <= rate <= 1
        self.target, self.rate, self.tokens_per_step, self.max_waiting = target, rate, tokens_per_step, max_waiting
        self.monitor = SequentialTest(alpha)
        self._room, self._fresh_processors = room, fresh_processors
        self._cases: dict[int, _Case] = {}  # in order of arrival
        self._finished: deque[_Case] = deque()  # not scored yet
        self._running: Rescoring | None = None  # the first finished one
        self._seeds: set[int] = set()
        self._num_requests = self._num_tokens = 0
        self._greedy = GreedyEvidence()
        self._message = ""

    # ---- observer hooks

    def begin(self, state: RequestState) -> None:
        """Decide whether to select a new request, before anything is sampled: the output cannot influence it."""
        request = state.request
        if request.spec.rule in LOSSY_RULES or len(self._cases) >= self.max_waiting:
            return
        if float(uniforms([request.seed], Purpose.SHADOW, [request.request_id], [0])[0]) >= self.rate:
            return
        if not request.params.greedy and request.params.seed is not None:
            if request.seed in self._seeds or len(self._seeds) >= _MAX_SEEDS:
                return
            self._seeds.add(request.seed)
        self._cases[request.request_id] = _Case(request)

    def round(self, view: RoundView) -> None:
        """Record the drafts for the tokens of a round."""
        case = self._cases.get(view.entry.request.request_id)
        if case is not None and not case.request.params.greedy:
            case.children += children_of(view)

    def end(self, state: RequestState) -> None:
        """Queue an answer as far as it got; cancelled ones count, because the reason may be their text."""
        case = self._cases.get(state.request_id)
        if case is None:
            return
        case.output_ids = state.output_ids
        if case.output_ids:
            self._finished.append(case)
        else:
            case.scored = True
            self._settle()

    def between_steps(self) -> None:
        """A bounded amount of work."""
        self.advance(self.tokens_per_step)

    def close(self) -> None:
        """Release the cache and drop what is not scored; closing again does nothing."""
        self.release()
        self._finished.clear()
        self._cases.clear()

    # ---- work

    def advance(self, max_tokens: int) -> int:
        """Run up to `max_tokens` tokens of finished answers through the target; returns how many were run."""
        run = 0
        while self._finished and run < max_tokens:
            case = self._finished[0]
            if self._running is None and not self._start(case):
                break
            assert self._running is not None
            before = self._running.num_remaining
            try:
                self._weigh(case, self._running.advance(max_tokens - run))
            except NumericsError as error:
                case.error = str(error)
            except CapacityError:
                self.release()
                break
            run += before - self._running.num_remaining
            if case.error or not self._running.num_remaining:
                self._room.give_back()
                self._running = None
                case.scored = True
                self._finished.popleft()
                self._settle()
        return run

    def drain(self) -> ShadowStats:
        """Score everything that is finished, as far as the cache allows."""
        while self.advance(1 << 16):
            pass
        return self.stats

    def release(self) -> None:
        """Release the cache at once; the answer being scored is restarted later."""
        if self._running is not None:
            self._running.close()
            self._running = None
            self._room.give_back()
            self._finished[0].evidence, self._finished[0].greedy = Evidence(), GreedyEvidence()

    @property
    def stats(self) -> ShadowStats:
        """The results so far."""
        greedy = self._greedy
        return ShadowStats(
            self._num_requests,
            self._num_tokens,
            len(self._cases),
            self.monitor.e_value,
            greedy.num_tokens,
            greedy.num_other,
            greedy.max_gap,
            bool(self._message),
            self._message,
        )

    def _start(self, case: _Case) -> bool:
        request = case.request
        scoring = Rescoring(self.target, request.prompt_ids, case.output_ids, request.params)
        if not self._room.borrow(scoring.footprint_tokens, self.release):
            return False
        try:
            # Only now: a grammar takes long, and room is asked for every step.
            scoring.processors = self._fresh_processors(request)
        except BaseException:
            self._room.give_back()
            raise
        self._running = scoring
        return True

    def _weigh(self, case: _Case, rows: ScoredRows) -> None:
        if not len(rows.tokens):
            return
        if case.request.params.greedy:
            case.greedy += weigh_greedy(rows.logits, rows.tokens, rows.rounding)
            return
        places = range(rows.first, rows.first + len(rows.tokens))
        noise = uniforms([case.request.seed] * len(places), Purpose.SHADOW, places, [1] * len(places))
        children = case.children[places.start : places.stop]
        slack = SLACK_16_BIT if rows.dtype in (torch.bfloat16, torch.float16) else 0.0
        distributions, edges = rows.certain()
        case.evidence += weigh(distributions, rows.tokens, noise, children, edges, slack)

    def _settle(self) -> None:
        """Count scored answers, in order of arrival: one that is still running holds back later ones."""
        while self._cases:
            first = next(iter(self._cases))
            case = self._cases[first]
            if not case.scored:
                return
            del self._cases[first]
            self._num_requests += 1
            self._num_tokens += len(case.output_ids)
            self._greedy += case.greedy
            self.monitor.add(case.evidence)
            self._judge(case)

    def _judge(self, case: _Case) -> None:
        """Raise the alarm, once."""
        if self._message:
            return
        after = f"after {self._num_tokens} tokens of {self._num_requests} requests"
        if case.error:
            found = f"request {case.request.request_id}: {case.error}"
        elif case.greedy.num_beyond:
            found = (
                f"request {case.request.request_id}: {case.greedy.num_beyond} greedy tokens are not the "
                "target's choice, "
                f"by up to {case.greedy.max_gap:.3g} in logits, more than rounding explains"
            )
        elif case.evidence.num_impossible:
            found = (
                f"request {case.request.request_id}: {case.evidence.num_impossible} tokens "
                "have probability 0 under the target"
            )
        elif self.monitor.alarm:
            found = (
                f"sampled tokens do not follow the target's distribution: e-value {self.monitor.e_value:.3g} "
                f"(by chance it reaches {1 / self.monitor.alpha:.0e} in at most one of as many engines)"
            )
        else:
            return
        self._message = f"shadow check {after}: {found}; run `foretoken audit` on this model and these settings"
        warn(self._message, stacklevel=2)


def children_of(view: RoundView) -> list[DraftChildren | None]:
    """For every emitted token of a round, the drafter's distribution at that position; None if nothing was proposed.

    Under the coupled rule draft and target share their noise, so the draft is not independent of the sample: None.
    """
    draft, b, count = view.draft, view.b, len(view.output.token_ids)
    if view.entry.noise is not None:
        return [None] * count
    anchor = draft.anchor_row(b)
    rows = [anchor, *(anchor + 1 + node for node in view.verdict.paths[b])][:count]
    tokens = draft.host_tokens[draft.offsets[b] : draft.offsets[b + 1]]
    parent_rows = draft.parent_rows[draft.offsets[b] : draft.offsets[b + 1]]
    found: list[DraftChildren | None] = []
    for row in rows:
        distribution = -1 if draft.mass is None else draft.mass.distribution_of_row[row]
        if distribution >= 0:
            assert draft.mass is not None
            found.append(children_of_distribution(draft.mass.distributions[distribution]))
            continue
        children = sorted({token for token, parent in zip(tokens, parent_rows, strict=True) if parent == row})
        found.append(DraftChildren(tuple(children), (1 / len(children),) * len(children)) if children else None)
    return found


def children_of_distribution(distribution: Tensor) -> DraftChildren:
    """The most probable tokens of a drafter's distribution `[V]`; a score may ignore the others."""
    likeliest = distribution.topk(min(_LIKELIEST, len(distribution)))
    return DraftChildren(*map(tuple, to_host(likeliest.indices, likeliest.values)))
