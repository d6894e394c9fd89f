"""Record worlds, measure their cost profiles, and run ablations of the policy over them.

python -m studies.worlds --ablate all --out DIR           every ablation over every world
python -m studies.worlds --profile 1b --target T --draft D     measure data/profile-1b.json on this machine
python -m studies.worlds --record                         record data/answers.json.gz from the reference pair
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from foretoken.machine.identity import machine, versions
from foretoken.printing import console as markdown
from studies.worlds import data
from studies.worlds.ablations import ABLATIONS, FULL, Ablation
from studies.worlds.profiles import measure
from studies.worlds.record import record
from studies.worlds.study import Outcome, Outcomes, Study
from studies.worlds.worlds import World, all_worlds

EXPLAINED = (
    "Tokens per second in simulated time, of recorded answers, at the costs of a measured profile. `full` is the same "
    "setting under the policy as it is, `best fixed` the fastest setting of the world whose number of draft tokens "
    "never changes, plain among them, picked after the fact. Means are geometric, over worlds."
)


def main(argv: list[str] | None = None) -> int:
    """Do what the options name; 2 for a name that does not exist."""
    parser = _parser()
    chosen = parser.parse_args(argv)
    if chosen.record:
        data.save(record(chosen.target, chosen.draft))
        _tell(f"written: {data.ANSWERS}")
    elif chosen.profile is not None:
        path = measure(chosen.profile, chosen.target, chosen.draft, chosen.passes, chosen.budget_s)
        _tell(f"written: {path}")
    elif chosen.ablate is not None:
        if chosen.out is None:
            parser.error("--ablate needs --out")
        _ablate(chosen, _ablations(chosen.ablate, parser), argv)
    else:
        parser.error("name one of --ablate, --profile, --record")
    return 0


def _ablate(chosen: argparse.Namespace, ablations: tuple[Ablation, ...], argv: list[str] | None) -> None:
    profiles, recording = data.profiles(), data.load()
    worlds = [world for world in all_worlds(profiles, recording.slices) if _wanted(world, chosen.worlds)]
    study = Study(
        worlds=tuple(worlds),
        ablations=ablations,
        profiles=profiles,
        recording=recording,
        settings=tuple(chosen.settings.split(",")),
        noise=chosen.noise,
        seeds=chosen.seeds,
    )
    outcomes: list[Outcome] = []
    interrupted, began = False, time.perf_counter()

    def tell(words: str) -> None:
        done = len({one.world for one in outcomes})
        left_s = (time.perf_counter() - began) / done * (len(worlds) - done) if done else None
        _tell(words + ("" if left_s is None else f", about {left_s / 60:.0f} min left"))

    try:
        study.measure(outcomes, tell, chosen.workers)
    except KeyboardInterrupt:
        interrupted = True
    command = "python -m studies.worlds " + shlex.join(_without_folders(argv or sys.argv[1:]))
    for path in _write(study, outcomes, command, interrupted, chosen.out):
        _tell(f"written: {path}")
    print("\n".join(_tables(Outcomes(outcomes), ablations)))


def _write(study: Study, outcomes: list[Outcome], command: str, interrupted: bool, folder: Path) -> tuple[Path, Path]:
    """The record, as JSON and Markdown; an earlier one of the day is kept, and this one numbered."""
    folder.mkdir(parents=True, exist_ok=True)
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    stem, taken = f"{date}-worlds", 1
    while (folder / f"{stem}.json").exists():
        taken += 1
        stem = f"{date}-worlds-{taken}"
    found = Outcomes(outcomes)
    about: dict[str, Any] = {
        "kind": "worlds",
        "command": command,
        "date": date,
        "machine": machine(),
        "versions": versions(),
        "noise": study.noise,
        "seeds": study.seeds,
        "interrupted": interrupted,
        "recording": dict(study.recording.about),
        "profiles": {
            name: {"date": one.date, "machine": dict(one.machine), "caveats": list(one.caveats)}
            for name, one in study.profiles.items()
        },
        "ablations": {
            one.name: {
                "about": one.about,
                "dials": one.dials,
            }
            for one in study.ablations
        },
    }
    raw, page = folder / f"{stem}.json", folder / f"{stem}.md"
    rows = [vars(one) for one in outcomes]
    raw.write_text(json.dumps({**about, "summary": found.summary(), "outcomes": rows}, indent=1) + "\n", "utf-8")
    lines = [
        f"# Ablations over {len(found.worlds)} recorded worlds, {date}",
        "",
        f"    {command}",
        "",
        *(
            f"- profile {name}: measured {one['date'][:10]} on {one['machine'].get('cpu')}"
            for name, one in about["profiles"].items()
        ),
        f"- answers: recorded {about['recording']['date']}",
        f"- scatter of a step: {study.noise:g}, seeds: {study.seeds}",
        f"- raw numbers: [{raw.name}]({raw.name})",
        *(["- The run was interrupted: this is what there was by then."] if interrupted else []),
        "",
        EXPLAINED,
        *_tables(found, study.ablations),
    ]
    page.write_text(markdown.page(lines), "utf-8")
    return raw, page


def _tables(found: Outcomes, ablations: tuple[Ablation, ...]) -> list[str]:
    """One table for each setting: a line for every ablation."""
    about = {one.name: one.about for one in (FULL, *ablations)}
    headings = ["policy", "what it means"]
    for to in ("full", "plain", "best fixed"):
        headings += [f"to {to}", "worst", "at", "best", "at"] if to == "full" else [f"to {to}", "worst", "at"]
    headings.append("below 0.97 of plain")
    lines: list[str] = []
    for setting in found.settings:
        rows = []
        for ablation in found.ablations:
            row = [ablation, about.get(ablation, "")]
            for to in ("full", "plain", "best_fixed"):
                one = found.compared(setting, ablation, to)
                if one is None:
                    continue
                row += [f"{one.mean:.3f}", f"{one.worst:.2f}", one.worst_at]
                row += [f"{one.best:.2f}", one.best_at] if to == "full" else []
            plain = found.compared(setting, ablation, "plain")
            rows.append([*row, "" if plain is None else f"{plain.num_below} of {len(found.worlds)}"])
        lines += ["", f"## {setting}", "", *markdown.table(headings, rows, "llr")]
    return lines


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m studies.worlds", description=__doc__)
    add = parser.add_argument
    add("--ablate", help="names of ablations separated by commas, or all")
    add("--out", type=Path, help="folder for the result of --ablate")
    add("--worlds", default="", help="only worlds whose name contains one of these words, separated by commas")
    add("--settings", default="auto", help="in which the policy decides: auto, ngram-auto, ...")
    add("--noise", type=float, default=0.05, help="relative scatter of a step's seconds")
    add("--seeds", type=int, default=2, help="simulations of each setting")
    add("--workers", type=int, default=1, help="processes that share the worlds")
    add("--record", action="store_true", help="record the answers again")
    add("--profile", help="measure the costs of --target and --draft, and keep them under this name")
    add("--target", default="reference:target")
    add("--draft", default="reference:draft")
    add("--passes", type=int, default=3, help="of --profile; the smallest time of each point counts")
    add("--budget-s", type=float, default=60.0, help="seconds of measuring for a pass")
    return parser


def _ablations(text: str, parser: argparse.ArgumentParser) -> tuple[Ablation, ...]:
    if text == "all":
        return ABLATIONS
    known = {one.name: one for one in (FULL, *ABLATIONS)}
    names = [name for name in text.split(",") if name]
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"no ablation {unknown[0]!r}; choose all, or from {', '.join(known)}")
    return tuple(known[name] for name in names if name != FULL.name)


def _wanted(world: World, words: str) -> bool:
    return not words or any(word in world.name for word in words.split(","))


def _without_folders(words: list[str]) -> list[str]:
    """The command for the record: of folders their last part."""
    return [Path(word).name if word.startswith("/") else word for word in words]


def _tell(words: str) -> None:
    print(time.strftime("%H:%M:%S"), words, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
