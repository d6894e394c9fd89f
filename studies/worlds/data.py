"""The file of recorded answers, and the cost profiles beside it.

    data/answers.json.gz      answers with what drafters would draft at each of their places
    data/profile-NAME.json    what `foretoken bench --profile` writes

A place is a token of the answer, the first one excepted: `looks[drafter].places[i]` is what a lookup shows once
`tokens[:i + 1]` are there, `chains[drafter][i]` what a model drafts there.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from foretoken.engine.startup.profiling import load_profile
from foretoken.plan.profile import Profile

DATA = Path(__file__).parent / "data"
ANSWERS = DATA / "answers.json.gz"
FORMAT = "foretoken-worlds-1"


@dataclass(frozen=True)
class Look:
    """The draft of a lookup at one place: nodes of a tree, best first, and the chance of the path to each."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    chances: tuple[float, ...]


@dataclass(frozen=True)
class Looks:
    """A lookup's draft tokens at every place of an answer, and the seconds of one look."""

    look_s: float
    places: tuple[Look, ...]


@dataclass(frozen=True)
class RecordedAnswer:
    """One answer of the target with what each drafter would have drafted; tokens equal to the answer's are accepted.

    That holds for sampled answers too: they were drawn with a seed under the coupled rule, in which target and draft
    share their noise.
    """

    slice: str
    prompt: str  # its name
    num_prompt_tokens: int
    tokens: tuple[int, ...]
    looks: Mapping[str, Looks] = field(default_factory=dict)
    chains: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Recording:
    """All answers, and how they were made."""

    about: Mapping[str, Any]
    answers: tuple[RecordedAnswer, ...]

    @property
    def slices(self) -> tuple[str, ...]:
        """Kinds of text."""
        return tuple(dict.fromkeys(one.slice for one in self.answers))

    def of(self, name: str) -> list[RecordedAnswer]:
        """The answers of a slice; of "A>B" answers of A that go on as answers of B."""
        first, *rest = ([one for one in self.answers if one.slice == part] for part in name.split(">"))
        for others in rest:
            first = [joined(one, other) for one, other in zip(first, others, strict=True)]
        return first


def joined(one: RecordedAnswer, other: RecordedAnswer) -> RecordedAnswer:
    """An answer that goes on as another one; at the joint nothing is drafted."""
    looks = {
        name: Looks(
            max(own.look_s, other.looks[name].look_s), (*own.places, Look((), (), ()), *other.looks[name].places)
        )
        for name, own in one.looks.items()
    }
    chains = {name: (*own, (), *other.chains[name]) for name, own in one.chains.items()}
    return replace(
        one, slice=f"{one.slice}>{other.slice}", tokens=(*one.tokens, *other.tokens), looks=looks, chains=chains
    )


def save(recording: Recording, path: Path = ANSWERS) -> None:
    """Write the file; the same recording gives the same bytes."""
    raw = {"format": FORMAT, "about": dict(recording.about), "answers": [_packed(one) for one in recording.answers]}
    text = json.dumps(raw, separators=(",", ":"), sort_keys=True)
    path.write_bytes(gzip.compress(text.encode("utf-8"), compresslevel=9, mtime=0))


def load(path: Path = ANSWERS) -> Recording:
    """Read the file.

    Raises:
        ValueError: another format.
    """
    raw = json.loads(gzip.decompress(path.read_bytes()))
    if raw.get("format") != FORMAT:
        raise ValueError(f"{path.name} has format {raw.get('format')!r}, expected {FORMAT!r}; record again")
    return Recording(raw["about"], tuple(map(_unpacked, raw["answers"])))


def profiles(folder: Path = DATA) -> dict[str, Profile]:
    """The cost profiles by name."""
    return {path.stem.removeprefix("profile-"): load_profile(path) for path in sorted(folder.glob("profile-*.json"))}


def _packed(answer: RecordedAnswer) -> dict[str, Any]:
    raw = asdict(answer)
    raw["looks"] = {
        name: {
            "look_s": looks.look_s,
            "places": [[one.tokens, one.parents, [round(c, 3) for c in one.chances]] for one in looks.places],
        }
        for name, looks in answer.looks.items()
    }
    return raw


def _unpacked(raw: Mapping[str, Any]) -> RecordedAnswer:
    looks = {
        name: Looks(one["look_s"], tuple(Look(*map(tuple, place)) for place in one["places"]))
        for name, one in raw["looks"].items()
    }
    chains = {name: tuple(map(tuple, own)) for name, own in raw["chains"].items()}
    return RecordedAnswer(raw["slice"], raw["prompt"], raw["num_prompt_tokens"], tuple(raw["tokens"]), looks, chains)
