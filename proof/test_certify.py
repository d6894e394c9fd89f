"""Certificates at full length: faults that samples alone show are found, honest drafters pass, and the two-sample test
fails as seldom as it says. Every other fault meets the kind of checks that must find it in tests/measure/certify, and
all of them before a release.

A wrong residual is planted in the engine itself: what is emitted after a rejection is drawn from the target's
distribution in place of what the draft left of it (of a draft model's: proof/test_law.py). Draws are the same in every
run. Of 2000 tests at level 0.05 a rate of 0.065 would be seen with probability 0.99.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

import foretoken
from foretoken import SpecConfig
from foretoken.core import Draft
from foretoken.measure.certify.asking import Asker
from foretoken.measure.certify.run import made_checks
from foretoken.measure.two_sample import beginnings, counted, two_sample_test
from foretoken.verify.rejection import RejectionRule
from tests.helpers.certify import asker, chat_folder, server_of, session_of
from tests.helpers.faulty_proxy import FAULTS, Fault, Upstream, faulty
from tests.measure.certify.dice import Dice
from tests.measure.certify.test_certify import BY_SAMPLES

RUNS, LEVEL, MOST = 2000, 0.05, 0.06
EFFECT = 0.4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("certify") / "target")


@pytest.fixture(scope="module")
def stage(folder: Path) -> Iterator[tuple[Asker, Upstream]]:
    """A, and the server that proxies stand before."""
    with server_of(folder) as url, asker("A", url, plain=True) as a:
        upstream = Upstream(url)
        yield a, upstream
        upstream.close()


def failures(a: Asker, b: Asker) -> list[str]:
    checks = list(made_checks(session_of(a, b, effect=EFFECT)))
    return [f"{check.name} ({check.where}): {check.found}" for check in checks if check.result == "fail"]


def test_an_honest_server_passes_every_check(stage: tuple[Asker, Upstream]) -> None:
    with faulty(stage[1], Fault("honest")) as url, asker("B", url) as b:
        assert failures(stage[0], b) == []


_FAULTS = [fault if fault.name in BY_SAMPLES else pytest.param(fault, marks=pytest.mark.release) for fault in FAULTS]


@pytest.mark.parametrize("fault", _FAULTS, ids=lambda fault: fault.name)
def test_every_fault_is_found(stage: tuple[Asker, Upstream], fault: Fault) -> None:
    with faulty(stage[1], fault) as url, asker("B", url) as b:
        assert failures(stage[0], b)


def test_a_wrong_residual_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(_: RejectionRule, _draft: Draft, target_probs: Tensor, rows: Sequence[int]) -> Tensor:
        return target_probs[list(rows)]

    monkeypatch.setattr(RejectionRule, "next_token_weights", wrong)
    looked_up = SpecConfig("ngram", num_draft=4, rule="rejection")
    with server_of(folder, looked_up) as url, asker("A", url, plain=True) as a, asker("B", url) as b:
        checks = list(made_checks(session_of(a, b, only=("distribution",), effect=0.25)))
    assert "fail" in {check.result for check in checks}, checks


_SLOW = [
    pytest.param(name, marks=pytest.mark.release)
    for name in ("ngram", "suffix", "recycling", "lookahead", "early_exit")
]


@pytest.mark.parametrize("drafter", ["draft_model", *_SLOW])
def test_an_honest_drafter_passes(drafter: str) -> None:
    report = foretoken.certify(
        "local",
        "local",
        b_drafter=drafter,
        target="reference:target",
        draft="reference:draft" if drafter == "draft_model" else None,
        dtype="float32",
        tolerance=0.001,
        effect=0.5,
        num_prompts=3,
        max_tokens=32,
    )
    assert report.passed, [check for check in report.results["checks"] if check.result == "fail"]


def test_the_two_sample_test_fails_as_seldom_as_it_says() -> None:
    """Of answers whose letters depend on each other, in bins that are made from the answers themselves."""
    dice, alarms = Dice(), {"beginnings": 0, "following": 0}
    generator = np.random.default_rng(31)
    pool = [dice._choice("p", {"seed": seed, "max_tokens": 6}, 0).text for seed in range(20_000)]
    for _ in range(RUNS):
        texts = [pool[place] for place in generator.integers(len(pool), size=120)]
        bins = beginnings(texts, 8)
        rows = np.eye(int(bins.max()) + 1)[bins]
        pairs = counted([list(pairwise(text)) for text in texts], 16)
        for name, counts in (("beginnings", rows), ("following", pairs)):
            alarms[name] += not two_sample_test([(counts[:60], counts[60:])], LEVEL).passed
    assert max(alarms.values()) / RUNS <= MOST, alarms
