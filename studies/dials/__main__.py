"""Run the dials over recorded worlds, and judge them.

python -m studies.dials --out DIR      simulate what DIR/dials.jsonl lacks, then write DATE-dials.json and .md
python -m studies.dials --table        the table of docs/controller.md
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from foretoken.control.config import DEFAULT, PolicyConfig
from foretoken.machine.identity import machine, versions
from foretoken.printing import console as markdown
from studies.dials.dials import Variant, table, variants
from studies.worlds import data
from studies.worlds.simulator import Machine, known_of, run
from studies.worlds.worlds import World, all_worlds

MIXED = ("code", "docstring", "edit", "json", "chat", "random")
WORLDS = (
    World("1b", ("json",), 1),
    World("2ms", ("random>edit",), 1),
    World("1b", ("chat",), 2, "disturbed machine"),
    World("2ms", ("docstring",), 2),
    World("2ms", ("edit", "random"), 4),
    World("1b", ("code",), 8),
    World("1b", ("edit",), 16, "chances too low"),
    World("2ms", MIXED, 16),
)
SEEDS, NOISE, SETTING = 5, 0.05, "auto"
ERRORS = 2.0  # standard errors of the five seeds' mean, beyond which a difference is one
Key = tuple[str, str, str, int]  # world, dial, form, seed
_BASE = ("", "value")


def main(argv: list[str] | None = None) -> int:
    """Do what the options name."""
    parser = argparse.ArgumentParser(prog="python -m studies.dials", description=__doc__)
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--table", action="store_true", help="print the table of dials")
    parser.add_argument("--every", type=int, help="instead of eight worlds every so manieth of all recorded ones")
    parser.add_argument("--dials", default="", help="names, separated by commas; all that a world can tell")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--forms", default="neutral,halved,doubled", help="neutral, halved, doubled")
    chosen = parser.parse_args(argv)
    if chosen.table:
        print("\n".join(table()))
    if chosen.out is None:
        return 0
    chosen.out.mkdir(parents=True, exist_ok=True)
    wanted = [
        one
        for one in variants(tuple(chosen.forms.split(",")))
        if not chosen.dials or one.dial in chosen.dials.split(",")
    ]
    worlds = WORLDS if chosen.every is None else all_worlds(data.profiles(), data.load().slices)[:: chosen.every]
    found = measure(chosen.out / "dials.jsonl", worlds, chosen.seeds, wanted)
    words = " ".join(
        ["--out", "DIR", *(word for word in (argv or sys.argv[1:]) if word not in ("--out", str(chosen.out)))]
    )
    command = f"python -m studies.dials {words}"
    print(f"written: {write(chosen.out, found, command)}")
    return 0


def measure(path: Path, worlds: Sequence[World], seeds: int, wanted: Sequence[Variant]) -> dict[Key, float]:
    """Tokens per second of every world, variant and seed; what `path` holds already is not run again."""
    found: dict[Key, float] = {}
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        world, dial, form, seed, speed = json.loads(line)
        found[world, dial, form, seed] = speed
    recording, profiles = data.load(), data.profiles()
    jobs: list[tuple[str, str, PolicyConfig]] = [(*_BASE, DEFAULT)]
    jobs += [(one.dial, one.form, one.config) for one in wanted]
    known = {world: known_of(recording, world) for world in worlds}
    tokens = {world: max(len(a.tokens) for name in world.slices for a in recording.of(name)) for world in worlds}
    with path.open("a", encoding="utf-8") as kept:
        for number, (dial, form, config) in enumerate(jobs):
            for world in worlds:
                for seed in range(seeds):
                    key = (world.name, dial, form, seed)
                    if key in found:
                        continue
                    machine_ = Machine(profiles[world.profile], NOISE, config)
                    found[key] = run(world, SETTING, machine_, known[world], tokens[world], seed).tokens_per_s
                    kept.write(json.dumps([*key, found[key]]) + "\n")
                    kept.flush()
            print(time.strftime("%H:%M:%S"), f"{number + 1} of {len(jobs)}: {dial} {form}", file=sys.stderr, flush=True)
    return found


def ratios(found: Mapping[Key, float], dial: str, form: str) -> dict[str, list[float]]:
    """By world the speed of a variant over that of the policy as it is, seed by seed."""
    by_world: dict[str, list[float]] = {}
    for (world, own, shape, seed), speed in found.items():
        if (own, shape) == (dial, form) and (world, *_BASE, seed) in found:
            by_world.setdefault(world, []).append(speed / found[(world, *_BASE, seed)])
    return by_world


def is_worse(own: Sequence[float]) -> bool:
    """Whether a variant is slower than the policy beyond the scatter of its seeds."""
    error = stdev(own) / math.sqrt(len(own)) if len(own) > 1 else 0.0
    return fmean(own) + ERRORS * error < 1


def write(folder: Path, found: Mapping[Key, float], command: str) -> Path:
    """The record, as JSON and as a page."""
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    rows, judged = [], []
    for dial, form in dict.fromkeys((dial, form) for _, dial, form, _ in found if dial):
        by_world = ratios(found, dial, form)
        means = {world: fmean(own) for world, own in by_world.items()}
        worse = [world for world, own in by_world.items() if is_worse(own)]
        rounded = {world: [round(value, 4) for value in own] for world, own in by_world.items()}
        worst = min(means, key=lambda world: means[world])
        mean = math.exp(fmean(math.log(value) for value in means.values()))
        judged.append({"dial": dial, "form": form, "mean": round(mean, 4), "worlds": rounded, "worse_in": worse})
        rows.append([dial, form, f"{mean:.3f}", f"{means[worst]:.3f}", worst, f"{len(worse)} of {len(means)}"])
    raw = folder / f"{date}-dials.json"
    about: dict[str, Any] = {
        "kind": "dials",
        "command": command,
        "date": date,
        "machine": machine(),
        "versions": versions(),
    }
    about |= {"setting": SETTING, "noise": NOISE, "standard_errors": ERRORS}
    base = [[*key, speed] for key, speed in found.items() if key[1:3] == _BASE]
    raw.write_text(json.dumps({**about, "judged": judged, "tokens_per_s_as_it_is": base}, indent=1) + "\n", "utf-8")
    lines = [
        f"# Dials of the policy over recorded worlds, {date}",
        "",
        f"    {command}",
        "",
        f"- machine: {about['machine'].get('cpu')}; raw numbers: [{raw.name}]({raw.name})",
        "",
        "Tokens per second in simulated time, over those of the policy as it is with the same seed. Worse: below 1 by",
        f"more than {ERRORS:g} standard errors of the seeds' mean.",
        "",
        *markdown.table(["dial", "form", "mean", "worst", "at", "worse in"], rows, "llrrlr"),
    ]
    raw.with_suffix(".md").write_text(markdown.page(lines), "utf-8")
    return raw


if __name__ == "__main__":
    sys.exit(main())
