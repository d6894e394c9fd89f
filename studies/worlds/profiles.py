"""Cost profiles of a pair on this machine: several passes of `foretoken bench --profile`, the smallest time of each.

Other work on the machine can only make a step slower, so the smallest of several passes is the best estimate of what it
takes alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from foretoken.backend.drafting import parse_drafters
from foretoken.engine.startup.profiling import save_profile
from foretoken.measure.speed.options import ProfileOptions
from foretoken.measure.speed.profile import run_profile
from foretoken.plan.profile import Curve, DrafterCost, Profile
from studies.worlds.data import DATA

DRAFTERS = ("draft_model", "ngram", "suffix")


def measure(name: str, target: str, draft: str, passes: int, budget_s: float, folder: Path = DATA) -> Path:
    """Measure and write `profile-NAME.json`.

    In the file the models are called by their last part, so that it names no folder of this machine.
    """
    options = ProfileOptions(target, draft, parse_drafters(DRAFTERS), dtype="bfloat16", budget_s=budget_s)
    found: list[Profile] = []
    for number in range(passes):
        print(f"pass {number + 1} of {passes}", file=sys.stderr, flush=True)
        found.append(run_profile(options, f"python -m studies.worlds --profile {name}"))
    profile = smallest(found)
    profile = replace(profile, target={**profile.target, "name": f"{name} pair"})
    path = folder / f"profile-{name}.json"
    save_profile(profile, path)
    return path


def smallest(found: Sequence[Profile]) -> Profile:
    """The smallest time of every point that any pass measured; curves of rows, requests, prompts and drafts ascend."""
    first = found[-1]
    drafters = {
        name: DrafterCost(
            _smallest([one.drafters[name].guesses for one in found]),
            _smallest([one.drafters[name].batch for one in found]),
            first.drafters[name].batch_num_draft,
            _smallest([one.drafters[name].prompt for one in found]),
            first.drafters[name].about,
        )
        for name in first.drafters
    }
    caveats = (*first.caveats, f"Each time is the smallest of {len(found)} passes.")
    return replace(
        first,
        rows=_smallest([one.rows for one in found]),
        batch=_smallest([one.batch for one in found]),
        context=_smallest([one.context for one in found]),
        chunk=_smallest([one.chunk for one in found]),
        drafters=drafters,
        caveats=tuple(caveat for caveat in caveats if not caveat.startswith("Not measured")),
    )


def _smallest(curves: Sequence[Curve]) -> Curve:
    times: dict[int, float] = {}
    for curve in curves:
        for count, seconds in curve.points:
            times[count] = min(seconds, times.get(count, seconds))
    points: list[tuple[int, float]] = []
    for count, seconds in sorted(times.items(), reverse=True):  # what more work took bounds what less takes
        points.append((count, min(seconds, points[-1][1]) if points else seconds))
    return Curve(tuple(reversed(points)))
