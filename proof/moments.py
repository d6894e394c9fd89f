"""Ranks that are lost, slowed or made to compute something else at random moments: the tokens of one process, or a
clear error, and never a hang.

    python -m proof.moments --state out/moments.json --turns 20        1,000 moments; again after an end: it goes on

A moment is one request: greedy, of a random drafter, to a target on 2 or 3 processes, one of which gets a fault at a
random exchange of the request. Slow ranks and ranks with other logits go on with the next moment; after a lost rank the
group starts anew, its ranks forked from a process that has imported torch. The state file has every moment that began,
so that one that hangs, which ends this program after `DEADLINE_S`, stays in it as `unfinished`.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import Tensor

from foretoken import LLM, RankError, SamplingParams, SpecConfig
from foretoken.parallel.exchange import RankExchange
from tests.engine.test_exactness import PROMPTS
from tests.helpers.checkpoints import related_pair
from tests.helpers.deadline import within
from tests.helpers.faulty_rank import Fault
from tests.helpers.forked_ranks import forked
from tests.parallel.test_ranks import SHAPE, opened

# By how often they are drawn; the first three end a group.
FAULTS = {"kill": 8, "stop": 1, "raise": 3, "slow": 4, "perturb": 4}
LOSING = ("kill", "stop", "raise")
GREEDY = SamplingParams(max_tokens=32, ignore_eos=True)
TURN = 50
DEADLINE_S, START_S = 30.0, 120.0  # of a request; of a group's start, on a loaded machine
EQUAL, LOST, WRONG, UNFINISHED = "equal tokens", "clear error", "other tokens", "unfinished"


@dataclass(frozen=True)
class Usual:
    """A request, its tokens in one process, and the number of its exchanges."""

    name: str
    spec: SpecConfig
    tokens: tuple[int, ...]
    num_exchanges: int


class Moments:
    """The state file, and the groups of ranks that answer."""

    def __init__(self, state: Path, folder: Path) -> None:
        self.state, self.order = state, folder / "fault"
        self.done: list[dict[str, Any]] = json.loads(state.read_text()) if state.exists() else []
        self.pair = related_pair(folder, **SHAPE)
        self.llm: LLM | None = None
        self.num_starts = 0

    def run(self, count: int) -> None:
        """That many moments more."""
        with forked(self.order):
            try:
                usual = self._usual()
                for number in range(len(self.done), len(self.done) + count):
                    self._moment(number, usual)
                    if len(self.done) % TURN == 0:
                        print(f"{len(self.done)} moments, {self.num_starts} groups started now", flush=True)
            finally:
                self._end()

    def _moment(self, number: int, usual: list[Usual]) -> None:
        rng = random.Random(number)
        world, one = rng.choice((2, 3)), rng.choice(usual)
        llm = self._opened(world)
        world = llm.config.tensor_parallel
        what = rng.choices(list(FAULTS), list(FAULTS.values()))[0]
        fault = Fault(rng.randrange(1, world), what, rng.randint(1, one.num_exchanges), number + 1)
        moment = {"ranks": world, "drafter": one.name, "rank": fault.rank, "fault": what, "exchange": fault.count}
        self.done.append({**moment, "outcome": UNFINISHED})
        self._save()
        fault.tell(self.order)
        try:
            with within(DEADLINE_S):
                (out,) = llm.generate([PROMPTS[2]], GREEDY, one.spec)
            outcome = EQUAL if out.token_ids == one.tokens else WRONG
        except RankError as error:
            outcome = LOST
            self.done[-1]["error"] = str(error)
            self._end()
        except KeyboardInterrupt:
            self.done.pop()
            self._save()
            raise
        self.done[-1]["outcome"] = outcome
        self._save()

    def _usual(self) -> list[Usual]:
        """What one process answers, which a group without a fault does too."""
        specs = {
            "none": SpecConfig(),
            "ngram": SpecConfig("ngram", num_draft=3),
            "draft_model": SpecConfig("draft_model", str(self.pair.draft), num_draft=3),
            "early_exit": SpecConfig("early_exit", exit_layer=1, num_draft=3),
        }
        found = []
        with opened(self.pair, 1) as one:
            for name, spec in specs.items():
                (out,) = one.generate([PROMPTS[2]], GREEDY, spec)
                with counted() as seen:
                    (divided,) = self._opened(2).generate([PROMPTS[2]], GREEDY, spec)
                assert divided.token_ids == out.token_ids, name
                found.append(Usual(name, spec, out.token_ids, seen[0]))
        return found

    def _opened(self, world: int) -> LLM:
        """The group that lives, or a new one of `world` ranks."""
        if self.llm is None:
            self.num_starts += 1
            with within(START_S):
                self.llm = opened(self.pair, world)
        return self.llm

    def _end(self) -> None:
        if self.llm is not None:
            self.llm.close()
            self.llm = None

    def _save(self) -> None:
        new = self.state.with_suffix(".new")
        new.write_text(json.dumps(self.done, indent=0) + "\n")
        new.replace(self.state)


@contextmanager
def counted() -> Iterator[list[int]]:
    """How many exchanges rank 0 takes part in."""
    seen, parts = [0], RankExchange._parts

    def counting(self: RankExchange, x: Tensor) -> list[Tensor]:
        seen[0] += 1
        return parts(self, x)

    with patch.object(RankExchange, "_parts", counting):
        yield seen


def counts(moments: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """By fault, how many moments ended how."""
    found = {what: collections.Counter[str]() for what in FAULTS}
    for moment in moments:
        found[moment["fault"]][moment["outcome"]] += 1
    return {what: dict(sorted(own.items())) for what, own in found.items()}


def failures(moments: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Moments that ended otherwise than they must: a lost rank in an error, any other in equal tokens."""
    return [moment for moment in moments if moment["outcome"] != (LOST if moment["fault"] in LOSING else EQUAL)]


def main() -> int:
    """Run turns of `TURN` moments, and say how all moments of the state file ended."""
    parser = argparse.ArgumentParser(
        prog="python -m proof.moments", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--state", type=Path, required=True, help="a JSON file that turns add to")
    parser.add_argument("--turns", type=int, default=1, help=f"of {TURN} moments")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        moments = Moments(options.state, Path(folder))
        with suppress(KeyboardInterrupt):
            moments.run(options.turns * TURN)
    for what, own in counts(moments.done).items():
        print(f"{what}: {', '.join(f'{count} {outcome}' for outcome, count in own.items())}")
    failed = failures(moments.done)
    for moment in failed:
        print(moment)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
