"""What steps cost, known before the first request: from a file, from the cache of this machine, or measured now.

A cached profile is `profiles/FINGERPRINT.json` in the cache folder, named by what it holds for
(`plan.profile.fingerprint`): the machine, the target with its threads and device, the drafters that ask a model, the
versions.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from foretoken.config import SpecConfig
from foretoken.draft.group import own_drafters
from foretoken.engine.engine import Engine
from foretoken.engine.startup.profiling import load_profile, save_profile
from foretoken.engine.startup.start_profile import (
    Made,
    describe_drafter,
    describe_target,
    measure_start,
    model_drafters,
)
from foretoken.errors import ConfigError, InputError, StorageError, warn
from foretoken.files import CACHE_VARIABLE, cache_folder
from foretoken.machine.identity import machine, versions
from foretoken.model.interface import LanguageModel
from foretoken.plan.profile import Profile, fingerprint

MODES = ("auto", "off", "measure")
# A step that reads no more than this takes about a millisecond: a thousand of them teach more than a profile can, in
# less time.
_TINY_STEP_BYTES = 8_000_000
_LONG_S = 1.0  # measuring that takes longer says so


@dataclass(frozen=True)
class KnownCosts:
    """The profile that an engine begins with (None: it learns from its first steps), the file it is kept in, and what
    measuring it took.

    `specs` are what the profile's drafters, by name, are in this engine.
    """

    profile: Profile | None = None
    specs: Mapping[str, SpecConfig] = field(default_factory=dict)
    path: Path | None = None
    measured_s: float = 0.0


def check_mode(profile: object) -> str:
    """`auto`, `off`, `measure`, or the path of an existing file, as text.

    Raises:
        ConfigError: anything else.
    """
    if isinstance(profile, str | Path) and (str(profile) in MODES or os.path.isfile(profile)):
        return str(profile)
    remedy = f"use {', '.join(MODES)}, or an existing file that `foretoken bench profile --out DIR` wrote"
    raise ConfigError("profile", profile, remedy)


def seed_costs(
    engine: Engine, spec: SpecConfig, mode: str, name: str, tell: Callable[[str], None] | None
) -> KnownCosts:
    """Let an idle engine's controller begin with what steps of its target, called `name`, cost, and drafts by `spec`,
    as far as that is known; see `load_costs`.
    """
    made = [(own, engine.drafters.drafters[key]) for key, own in own_drafters(spec).items()]
    is_open = bool(made) and spec.num_draft == "auto"
    costs = load_costs(mode, engine.target, name, made, is_open, tell or (lambda _text: None))
    if costs.profile is not None:
        engine.seed(costs.profile, costs.specs)
    engine.stats.profile_s = costs.measured_s
    return costs


def load_costs(
    mode: str, target: LanguageModel, name: str, made: Sequence[Made], is_open: bool, tell: Callable[[str], None]
) -> KnownCosts:
    """The costs of an idle `target`, called `name`, and of the drafters `made`, as `mode` (`check_mode`) says.

    `auto` takes what is cached; otherwise it measures if `is_open`, that is if somebody is going to choose by costs. A
    target so tiny that it learns them sooner by itself is left alone. `tell` hears about measuring that takes longer
    than a second. Files that cannot be read or written are ignored, with a warning that names them.

    Raises:
        ConfigError: a file of another machine, target or draft, or `measure` with a context or cache that is too small.
        StorageError, InputError: a file that cannot be read, or is no profile.
    """
    if mode == "off" or (mode == "auto" and target.step_bytes <= _TINY_STEP_BYTES):
        return KnownCosts()
    drafters = model_drafters(made)
    specs = {label: spec for label, (spec, _) in drafters.items()}
    if mode not in MODES:
        profile = load_profile(Path(mode))
        _check_made_here(profile, mode, target, drafters)
        return KnownCosts(profile, specs, Path(mode))
    abouts = {label: describe_drafter(*pair) for label, pair in drafters.items()}
    path = (
        cache_folder("profiles")
        / f"{fingerprint(machine(), {'name': name, **describe_target(target)}, versions(), abouts)}.json"
    )
    cached = _cached(path) if mode == "auto" else None
    if cached is not None or (mode == "auto" and not is_open):
        return KnownCosts(cached, specs, path if cached else None)
    return _measured(mode, target, name, drafters, path, tell)


def _measured(
    mode: str, target: LanguageModel, name: str, drafters: Mapping[str, Made], path: Path, tell: Callable[[str], None]
) -> KnownCosts:
    told: list[float] = []

    def say(seconds: float) -> None:
        if seconds > _LONG_S and not told:
            told.append(seconds)
            tell(f"measuring what steps of {name} cost, once for this machine")

    began = time.perf_counter()
    profile = measure_start(target, drafters, name, say=say)
    took_s = time.perf_counter() - began
    specs = {label: spec for label, (spec, _) in drafters.items()}
    if profile is None:
        if mode == "measure":
            remedy = f"context ({target.max_context_tokens} tokens) or cache are too small to measure in; use 'off'"
            raise ConfigError("profile", mode, remedy)
        return KnownCosts(measured_s=took_s)
    try:
        save_profile(profile, path)
    except StorageError as error:
        warn(
            f"{error}; it will be measured again next time. Set {CACHE_VARIABLE} to a folder that can be written",
            stacklevel=2,
        )
        return KnownCosts(profile, specs, None, took_s)
    return KnownCosts(profile, specs, path, took_s)


def _cached(path: Path) -> Profile | None:
    """The profile in `path`, if it is one, and of what its name says."""
    if not path.exists():
        return None
    try:
        profile = load_profile(path)
    except (StorageError, InputError) as error:
        warn(f"cached profile {path} cannot be used and is ignored: {error}", stacklevel=2)
        return None
    if profile.fingerprint != path.stem:
        warn(
            f"cached profile {path} was measured for something else ({profile.fingerprint}) and is ignored",
            stacklevel=2,
        )
        return None
    return profile


def _check_made_here(profile: Profile, path: str, target: LanguageModel, drafters: Mapping[str, Made]) -> None:
    """Refuse a file of another machine, target or draft; drafters that it does not know are learnt from live steps."""
    remedy = "measure it here with `foretoken bench profile --out DIR`, or use profile='auto'"
    pairs = [("machine", dict(profile.machine), machine())]
    own = describe_target(target)
    pairs.append(("target", {key: profile.target.get(key) for key in own}, own))
    for label, made in drafters.items():
        if label in profile.drafters:
            pairs.append((f"drafter {label}", dict(profile.drafters[label].about), describe_drafter(*made)))
    for what, found, here in pairs:
        other = next((key for key in {**found, **here} if found.get(key) != here.get(key)), None)
        if other is not None:
            raise ConfigError(
                "profile",
                path,
                f"was made for another {what} ({other} {found.get(other)!r}, here {here.get(other)!r}); {remedy}",
            )
