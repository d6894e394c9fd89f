"""Tests of the distribution: whether sampled tokens follow that of the target alone, with a stated error rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from foretoken.config import LOSSY_RULES, SamplingParams, SpecConfig
from foretoken.engine.shadow.sequential_test import DistributionTest, Evidence, distribution_tests, weigh
from foretoken.measure.audit.session import Session
from foretoken.measure.checks import Check, Result
from foretoken.measure.stats import Array
from foretoken.text.randomness import Purpose, uniforms

_PROBE_TOKENS = 16
_WORDS = {"surprisal": "sharpness", "rank": "ranks", "draft": "no bias by the draft"}


def rules_to_check(session: Session) -> list[str]:
    """Names of the rules that sampled requests of the audited settings can resolve to.

    "auto" is coupled for a request with a seed; without one it depends on the draft, so a short run finds out.
    """
    spec = session.options.spec
    if spec.rule != "auto":
        return [spec.rule]
    if spec.drafter is None:
        return ["coupled", "rejection"]
    prompts = session.prompts[:2]
    count = min(_PROBE_TOKENS, session.options.max_tokens)
    params = SamplingParams(max_tokens=count, temperature=session.options.sampled[0], ignore_eos=True)
    rules = session.answers(prompts, [params] * len(prompts), spec).rules
    unseeded = "tree" if "tree" in rules else min(rules, default="rejection")
    return ["coupled", unseeded]


def check_distribution(session: Session, temperature: float, rule: str, number: int, count: int) -> list[Check]:
    """Sampled answers of a temperature and rule, check `number` of `count`, which share the false-alarm rate."""
    options = session.options
    plain = SpecConfig("ngram", num_draft=0)  # drafts nothing, but permits a rule by name
    spec = replace(plain if options.spec.drafter is None else options.spec, rule=rule)
    where = f"temperature {temperature:g}, {options.spec.drafter or 'plain'}, rule {rule}"
    evidence = _evidence(session, temperature, spec, options.seed + number * options.num_prompts)
    return judged(evidence, where, options.alpha / count, rule in LOSSY_RULES)


def judged(
    evidence: Evidence, where: str, alpha: float, lossy: bool = False, name: str = "distribution"
) -> list[Check]:
    """The checks of some tokens' distribution, of which a correct engine fails any with probability `alpha` at most."""
    result: Result = "not claimed" if lossy else "fail" if evidence.num_impossible else "pass"
    edges = f", {evidence.num_edges} at the edge of a filter" if evidence.num_edges else ""
    found = f"{evidence.num_impossible} impossible{edges}"
    check = Check(f"{name}: only possible tokens", where, result, evidence.num_tokens, found, "0 impossible")
    return [check, *(_check(test, where, lossy, name) for test in distribution_tests(evidence, alpha))]


def _check(test: DistributionTest, where: str, lossy: bool, name: str) -> Check:
    result: Result = (
        "not claimed" if lossy else "undecided" if not test.conclusive else "pass" if test.passed else "fail"
    )
    chance = "p < 1e-15" if test.p_value < 1e-15 else f"p = {test.p_value:.2g}"
    found = f"{test.statistic}, {chance}" if test.conclusive else test.statistic
    demanded, name = f"p >= {test.level:.2g}", f"{name}: {_WORDS[test.name]}"
    return Check(name, where, result, test.num_tokens, found, demanded, test.sees)


def _evidence(session: Session, temperature: float, spec: SpecConfig, seed: int) -> Evidence:
    options = session.options
    usual = SamplingParams(max_tokens=options.max_tokens, temperature=temperature, ignore_eos=True)
    params = [replace(usual, seed=seed + i) for i in range(options.num_prompts)]
    run = session.answers(session.prompts_in_turn(options.num_prompts), params, spec)
    total = Evidence()
    for output, choice, noted in zip(run.outputs, params, run.drafted, strict=True):
        drafted = session.draft_children(output, choice) or noted
        for rows in session.rescore(output, choice):
            places = range(rows.first, rows.first + len(rows.tokens))
            assert choice.seed is not None
            noise = shadow_noise([choice.seed] * len(places), places)
            distributions, edges = rows.certain()
            total += weigh(distributions, rows.tokens, noise, drafted[places.start : places.stop], edges)
    return total


def shadow_noise(seeds: Sequence[int], places: Sequence[int]) -> Array:
    """Uniforms [n] of a purpose of their own: independent of those that sampled the tokens, also in our engine."""
    return np.asarray(uniforms(list(seeds), Purpose.SHADOW, places, [1] * len(places)))
