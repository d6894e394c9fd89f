"""Traces and random arrivals."""

from __future__ import annotations

from itertools import pairwise

import pytest

from foretoken.errors import InputError
from foretoken.simulate.inputs import Job, Lengths, chances_from_bench, parse_acceptance, parse_trace, poisson
from foretoken.simulate.metrics import percentile


def test_random_arrivals_have_the_rate_and_the_lengths() -> None:
    jobs = poisson(4.0, 4000, Lengths(3, 9), Lengths(7, 7), (0.5,), seed=1)
    gaps = [b.arrival_s - a.arrival_s for a, b in pairwise(jobs)]
    assert sum(gaps) / len(gaps) == pytest.approx(0.25, rel=0.05)
    assert sum(g * g for g in gaps) / len(gaps) == pytest.approx(2 * 0.25**2, rel=0.15)  # exponential, not regular
    assert {job.prompt_tokens for job in jobs} == set(range(3, 10))
    assert {job.output_tokens for job in jobs} == {7}
    assert jobs == poisson(4.0, 4000, Lengths(3, 9), Lengths(7, 7), (0.5,), seed=1)
    # The same requests in half the time: rates are compared on the same luck.
    faster = poisson(8.0, 4000, Lengths(3, 9), Lengths(7, 7), (0.5,), seed=1)
    assert [job.arrival_s for job in faster] == pytest.approx([job.arrival_s / 2 for job in jobs])
    assert [job.prompt_tokens for job in faster] == [job.prompt_tokens for job in jobs]
    with pytest.raises(InputError, match="above 0"):
        poisson(float("nan"), 1, Lengths(1, 1), Lengths(1, 1), (0.5,), 0)


def test_a_trace_is_sorted_and_filled_in() -> None:
    lines = [
        '{"arrival_s": 2, "prompt_tokens": 3, "output_tokens": 4, "acceptance": 0.5}',
        "",
        '{"prompt_tokens": 1, "output_tokens": 1}',
    ]
    assert parse_trace(lines, "code") == [Job(0.0, 1, 1, "code"), Job(2.0, 3, 4, (0.5,))]
    urgent = '{"prompt_tokens": 1, "output_tokens": 1, "arrival_s": 1, "priority": -3, "deadline_s": 2.5}'
    late = '{"prompt_tokens": 1, "output_tokens": 1, "arrival_s": 2, "deadline_s": null}'
    assert parse_trace([late, urgent], "code") == [Job(1.0, 1, 1, "code", -3, 2.5), Job(2.0, 1, 1, "code", 0, None)]
    for line, message in (
        (
            '{"prompt_tokens": 1, "output_tokens": 1, "urgency": 1}',
            "trace line 2='urgency': unknown key; known: .*priority, deadline_s",
        ),
        (
            '{"prompt_tokens": 1, "output_tokens": 1, "priority": 1.5}',
            "trace line 2: priority=1.5: must be a whole number",
        ),
        (
            '{"prompt_tokens": 1, "output_tokens": 1, "priority": 101}',
            "trace line 2: priority=101: must be at least -100 and at most 100",
        ),
        (
            '{"prompt_tokens": 1, "output_tokens": 1, "priority": null}',
            "trace line 2: priority=None: must be a whole number",
        ),
        ('{"prompt_tokens": 1, "output_tokens": 1, "deadline_s": 0}', r"trace line 2: deadline_s=0: must lie in \(0"),
        (
            '{"prompt_tokens": 1, "output_tokens": 1, "deadline_s": "soon"}',
            "trace line 2: deadline_s='soon': must be a finite number",
        ),
        ("{", "trace line 2='{': not JSON"),
        ("[]", "must be an object"),
        ('{"prompt_tokens": 1}', "output_tokens=None"),
        ('{"prompt_tokens": true, "output_tokens": 1}', "prompt_tokens=True"),
        (
            '{"prompt_tokens": 1000000000, "output_tokens": 1}',
            "trace line 2: prompt_tokens=1000000000: must be at least 1 and at most 16777216",
        ),
        ('{"prompt_tokens": 1, "output_tokens": 16777217}', "trace line 2: output_tokens=16777217: must be at least 1"),
        ('{"prompt_tokens": 1, "output_tokens": 1, "arrival_s": -1}', "arrival_s=-1"),
        ('{"prompt_tokens": 1, "output_tokens": 1, "arrival_s": NaN}', "not JSON: NaN is not a number"),
        ('{"prompt_tokens": 1, "output_tokens": 1, "acceptance": [0.5, 2]}', "acceptance"),
    ):
        with pytest.raises(InputError, match=message):
            parse_trace([lines[2], line], (0.0,))


def test_chances() -> None:
    assert parse_acceptance("code") == "code"
    assert parse_acceptance(1) == (1.0,)
    assert parse_acceptance([0.5, 0.25]) == (0.5, 0.25)
    for value in ([], "", True, None, {}, [0.5, "x"]):
        with pytest.raises(InputError):
            parse_acceptance(value)


def test_chances_of_a_bench_are_conditional_and_of_the_longest_drafts() -> None:
    rows = [
        {"drafter": "ngram", "slice": "code", "acceptance_per_position": [0.9, 0.8]},
        {"drafter": "ngram", "slice": "code", "acceptance_per_position": [0.8, 0.4, 0.4, 0.0, 0.0]},
        {"drafter": "ngram", "slice": "json", "acceptance_per_position": [0.5]},
        {"drafter": None, "slice": "json", "acceptance_per_position": []},
    ]
    found = chances_from_bench({"rows": rows})
    assert found == {"ngram": {"code": (0.8, 0.5, 1.0, 0.0, 0.0), "json": (0.5,)}}
    with pytest.raises(InputError, match="not a result"):
        chances_from_bench([1])


def test_percentiles() -> None:
    assert [percentile([4.0, 1.0, 3.0, 2.0], share) for share in (0.0, 0.5, 0.9, 1.0)] == pytest.approx(
        [1.0, 2.5, 3.7, 4.0]
    )
    assert percentile([7.0], 0.95) == 7.0
    assert percentile([], 0.5) == 0.0
