"""How the advice is carried out: the line that starts each engine, and the settings of ours."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from foretoken.errors import ConfigError, ForetokenError
from foretoken.export.engines import NAMES, OtherEngine, engine_of, refusal_reason, target_reason
from foretoken.export.launch import Launch, launch_of, plain_launch
from foretoken.heads.checkpoint import load_head
from foretoken.measure.advise.candidates import AdviseCandidate
from foretoken.model.loader import read_config
from foretoken.model.names import is_own_name, model_folder

OURS = "foretoken"
# The engine chooses the number of draft tokens, the head's files say its kind, and options have a flag of their own.
_NOT_BY_NAME = frozenset({"num_draft", "head_kind", "options"})
OTHERS = ("vllm", "sglang", "llamacpp", "trtllm", "tgi")


@dataclass(frozen=True)
class LaunchLine:
    """One engine: its command, the files that it names and what runs first; or why it cannot run this."""

    engine: str
    command: str = ""
    prepare: tuple[str, ...] = ()
    files: Mapping[str, str] | None = None
    refusal: str = ""


def settings_of(candidate: AdviseCandidate | None, target: str, routing: Mapping[str, int]) -> dict[str, Any]:
    """The settings of `foretoken serve`, as the table [serve] of foretoken.toml holds them; no candidate: plain."""
    found: dict[str, Any] = {"target": target}
    if candidate is None:
        return found | {"drafter": "none"}
    spec = candidate.spec
    for one in fields(spec):
        value = getattr(spec, one.name)
        if one.name not in _NOT_BY_NAME and value != one.default:
            found[one.name] = ",".join(map(str, value)) if isinstance(value, tuple) else value
    if spec.options:
        found["drafter_option"] = [f"{name}={value}" for name, value in spec.options.items()]
    return found | dict(routing)


def as_toml(settings: Mapping[str, Any]) -> str:
    """The same as text."""
    return "\n".join(["[serve]", *(f"{name} = {json.dumps(value)}" for name, value in settings.items())])


def launch_lines(
    candidate: AdviseCandidate | None,
    target: str,
    num_draft: int,
    routing: Mapping[str, int],
    engines: Sequence[str] = (OURS, *OTHERS),
) -> list[LaunchLine]:
    """The lines of these engines; without a candidate only ours, which decodes plainly."""
    lines = [_own_line(candidate, target, routing)] if OURS in engines else []
    if candidate is None:
        return lines
    return lines + [_elsewhere(candidate, target, name, num_draft) for name in engines if name != OURS]


def lost_rules(lines: Sequence[LaunchLine], routing: Mapping[str, int]) -> list[str]:
    """A note where rules of routing are settings of ours that lines of other engines do not hold."""
    others = [one.engine for one in lines if one.engine != OURS and one.command]
    if not others or not routing:
        return []
    rules = ", ".join(f"{name} = {value}" for name, value in routing.items())
    return [f"{rules}: a setting of foretoken; started by its line, {', '.join(others)} drafts for every request."]


def _own_line(candidate: AdviseCandidate | None, target: str, routing: Mapping[str, int]) -> LaunchLine:
    words = [OURS, "serve"]
    for name, value in settings_of(candidate, target, routing).items():
        for item in value if isinstance(value, list) else [value]:
            words += [f"--{name.replace('_', '-')}", str(item)]
    return LaunchLine(OURS, shlex.join(words))


def _elsewhere(candidate: AdviseCandidate, target: str, name: str, num_draft: int) -> LaunchLine:
    engine = engine_of(name, None)
    target = str(model_folder(target)) if is_own_name(target) else target
    try:
        launch = _head_launch(candidate, target, engine, num_draft) or plain_launch(
            str(candidate.spec.drafter), engine, target, candidate.spec.draft, num_draft
        )
    except ForetokenError as error:
        return LaunchLine(NAMES[name], refusal=getattr(error, "remedy", str(error)))
    prepare = tuple(shlex.join(words) for words in launch.prepare)
    return LaunchLine(NAMES[name], launch.command(), prepare, launch.files or None)


def _head_launch(candidate: AdviseCandidate, target: str, engine: OtherEngine, num_draft: int) -> Launch | None:
    """Of a trained head, which `foretoken export` writes in the engine's variant first; None of anything else."""
    head = candidate.spec.head
    if candidate.kind != "head" or head is None:
        return None
    folder = model_folder(target)
    config = load_head(model_folder(head), read_config(folder), target_folder=folder).config
    reason = refusal_reason(config, engine) or target_reason(target, engine, has_head=True)
    if reason is not None:
        raise ConfigError("head", head, reason)
    export = ("foretoken", "export", "--target", target, "--head", head, "--to", engine.name, "--out", "head")
    launch = launch_of(config, engine, target, "head", num_draft)
    return Launch(launch.argv, launch.files, (export, *launch.prepare), launch.notes)
