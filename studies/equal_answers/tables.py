"""How many answers differ, by checkpoint and setting, in each condition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.measure.report import Table
from studies.equal_answers.answers import Tokens

EXPLAINED = (
    "Greedy answers that differ from the expected ones, of so many: `0 / 100`. `alone`: one prompt at a time; `among "
    "N`: all prompts submitted together, N of them in a step. `cold`: the cache holds nothing of the prompt; `cached`: "
    "the same prompts again, whose whole blocks are in the prefix cache, while drafters remember the first answers. "
    "`accepted / drafted` are tokens over all conditions, `cached tokens` those of prompts that were read from the "
    "prefix cache, `near ties` greedy tokens whose two best logits differ by at most one "
    "rounding unit."
)

_COUNTS = ("num_drafted", "num_accepted", "num_probed", "num_cached_tokens", "num_near_ties")
Line = Mapping[str, Any]
Expected = Mapping[str, Mapping[int, Tokens]]


def rows(lines: Sequence[Line], expected: Expected) -> list[dict[str, Any]]:
    """One row for each setting, number of requests at once, and pass."""
    answers: dict[tuple[str, str, int, str], list[Line]] = {}
    for line in lines:
        for one in line["answers"]:
            key = (line["target"], line["setting"], line["num_requests"], one["pass"])
            answers.setdefault(key, []).append(one)
    return [
        {
            **dict(zip(("target", "setting", "num_requests", "pass"), key, strict=True)),
            "num_answers": len(own),
            "num_differing": sum(not _is_equal(one, expected[key[0]]) for one in own),
            "num_tokens": sum(len(one["token_ids"]) for one in own),
            **{name: sum(one.get(name, 0) for one in own) for name in _COUNTS},  # transformers counts nothing
        }
        for key, own in answers.items()
    ]


def differing(lines: Sequence[Line], expected: Expected) -> list[dict[str, Any]]:
    """Every answer that differs, beside the expected one."""
    return [
        {**{key: line[key] for key in ("target", "setting", "num_requests")}, **one}
        | {"expected": list(expected[line["target"]][one["place"]])}
        for line in lines
        for one in line["answers"]
        if not _is_equal(one, expected[line["target"]])
    ]


def tables(found: Sequence[Mapping[str, Any]]) -> tuple[Table, ...]:
    """A table for each checkpoint: a line for each setting, a column for each condition."""
    conditions = list(dict.fromkeys((row["num_requests"], row["pass"]) for row in found))
    headings = [f"{'alone' if n == 1 else f'among {n}'}, {name}" for n, name in conditions]
    return tuple(
        Table(
            target,
            ("setting", *headings, "accepted / drafted", "cached tokens", "near ties"),
            tuple(
                _cells([row for row in found if (row["target"], row["setting"]) == (target, setting)], conditions)
                for setting in dict.fromkeys(row["setting"] for row in found if row["target"] == target)
            ),
        )
        for target in dict.fromkeys(row["target"] for row in found)
    )


def _cells(own: Sequence[Mapping[str, Any]], conditions: Sequence[tuple[int, str]]) -> tuple[str, ...]:
    by_condition = {
        condition: [row for row in own if (row["num_requests"], row["pass"]) == condition] for condition in conditions
    }
    sums = {
        name: sum(row[name] for row in own)
        for name in ("num_drafted", "num_accepted", "num_cached_tokens", "num_near_ties")
    }
    return (
        own[0]["setting"],
        *(_count(rows) for rows in by_condition.values()),
        f"{sums['num_accepted']} / {sums['num_drafted']}",
        str(sums["num_cached_tokens"]),
        str(sums["num_near_ties"]),
    )


def _count(own: Sequence[Mapping[str, Any]]) -> str:
    if not own:
        return "-"
    return f"{sum(row['num_differing'] for row in own)} / {sum(row['num_answers'] for row in own)}"


def _is_equal(one: Mapping[str, Any], expected: Mapping[int, Tokens]) -> bool:
    return tuple(one["token_ids"]) == tuple(expected[one["place"]])
