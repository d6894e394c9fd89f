"""Certificates at full length: faults that samples alone show are found, honest drafters pass, and the two-sample test
fails as seldom as it says. Of a server, as many sampled answers are compared here as find a total variation of 0.6 with
probability 0.99; the other checks, and the faults that each of them must find, are in tests/measure/certify. Before a
release every fault meets all checks, with as many answers as find 0.4.

A wrong residual is planted in the engine itself: what is emitted after a rejection is drawn from the target's
distribution in place of what the draft left of it (of a draft model's: proof/test_law.py). Draws are the same in every
run. Of 2000 tests at level 0.05 a rate of 0.065 would be seen with probability 0.99.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

import foretoken
from foretoken import SpecConfig
from foretoken.core import Draft
from foretoken.measure.certify.asking import Asker
from foretoken.measure.certify.run import made_checks
from foretoken.measure.certify.sampled import beginnings, counted, two_sample_test
from foretoken.verify.rejection import RejectionRule
from tests.helpers.certify import asker, chat_folder, server_of, session_of
from tests.helpers.faulty_proxy import FAULTS, Fault, Upstream, faulty
from tests.measure.certify.dice import Dice
from tests.measure.certify.test_certify import BY_SAMPLES

RUNS, LEVEL, MOST = 2000, 0.05, 0.06
ASKED: dict[str, dict[str, Any]] = {
    "samples": {"only": ("distribution",), "effect": 0.6},
    "all checks": {"effect": 0.4},
}


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


def failures(a: Asker, b: Asker, asked: str) -> list[str]:
    checks = list(made_checks(session_of(a, b, **ASKED[asked])))
    assert checks
    return [f"{check.name} ({check.where}): {check.found}" for check in checks if check.result == "fail"]


@pytest.mark.parametrize("asked", ["samples", pytest.param("all checks", marks=pytest.mark.release)])
def test_an_honest_server_passes(stage: tuple[Asker, Upstream], asked: str) -> None:
    with faulty(stage[1], Fault("honest")) as url, asker("B", url) as b:
        assert failures(stage[0], b, asked) == []


_FAULTS = [
    *((fault, "samples") for fault in FAULTS if fault.name in BY_SAMPLES),
    *(pytest.param(fault, "all checks", marks=pytest.mark.release) for fault in FAULTS),
]


@pytest.mark.parametrize(("fault", "asked"), _FAULTS, ids=lambda value: getattr(value, "name", value))
def test_every_fault_is_found(stage: tuple[Asker, Upstream], fault: Fault, asked: str) -> None:
    with faulty(stage[1], fault) as url, asker("B", url) as b:
        assert failures(stage[0], b, asked)


@pytest.mark.parametrize("effect", [0.4, pytest.param(0.25, marks=pytest.mark.release)])
def test_a_wrong_residual_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch, effect: float) -> None:
    def wrong(_: RejectionRule, _draft: Draft, target_probs: Tensor, rows: Sequence[int]) -> Tensor:
        return target_probs[list(rows)]

    monkeypatch.setattr(RejectionRule, "next_token_weights", wrong)
    # The compiled verdicts would stand in for the rule.
    monkeypatch.setattr("foretoken.engine.from_logits.verify_chains", lambda *_: None)
    looked_up = SpecConfig("ngram", num_draft=4, rule="rejection")
    with server_of(folder, looked_up) as url, asker("A", url, plain=True) as a, asker("B", url) as b:
        checks = list(made_checks(session_of(a, b, only=("distribution",), effect=effect)))
    assert "fail" in {check.result for check in checks}, checks


_DRAFTERS = ("draft_model", "ngram", "suffix", "recycling", "lookahead", "early_exit")


@pytest.mark.parametrize(
    ("drafter", "asked"),
    [
        ("draft_model", ASKED["samples"]),
        *(pytest.param(name, {"effect": 0.5}, marks=pytest.mark.release) for name in _DRAFTERS),
    ],
)
def test_an_honest_drafter_passes(drafter: str, asked: dict[str, Any]) -> None:
    report = foretoken.certify(
        "local",
        "local",
        b_drafter=drafter,
        target="reference:target",
        draft="reference:draft" if drafter == "draft_model" else None,
        dtype="float32",
        tolerance=0.001,
        num_prompts=3,
        max_tokens=32,
        **asked,
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
