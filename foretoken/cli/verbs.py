"""The verbs, each imported when it is needed: help, a wrong verb and the completion of verbs need none of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from foretoken.cli.usage import USAGE_ERROR, Group
from foretoken.cli.verb import EngineVerb, Verb, signals_end


@dataclass(frozen=True)
class VerbSource:
    """Where a verb is: a function, or a `typer.Typer` of several, as `module:name` in this package; "" where both are
    called as the verb is. `summary` is the first paragraph of its help; `has_engine` says that the function needs the
    engine in this process.
    """

    summary: str
    place: str = ""
    has_engine: bool = True


VERBS: Mapping[str, VerbSource] = {
    "demo": VerbSource(
        "Answer the same prompts plainly and speculatively, and compare texts and time on this machine."
    ),
    "generate": VerbSource("Continue a text, with drafts unless --drafter none is given, and say what it cost."),
    "chat": VerbSource("Talk to a model: each line is a message, and the conversation is kept."),
    "serve": VerbSource(
        "Serve a model over an OpenAI-compatible HTTP interface; the default model is smollm2.", has_engine=False
    ),
    "audit": VerbSource(
        "Check greedy equality, the distribution of sampled tokens, seeds, logits and cache; exit code 5 if anything "
        "fails."
    ),
    "eval": VerbSource(
        "Measure acceptance by drafter, position and slice; compare it with an earlier result.", "eval:evaluate"
    ),
    "advise": VerbSource(
        "Say whether to speculate on your texts and load: with which drafter and how many tokens, and at what cost."
    ),
    "ab": VerbSource(
        "Replay requests on two backends in turns, and say which is faster, with an interval that holds at every look.",
        has_engine=False,
    ),
    "diagnose": VerbSource(
        "Say why the acceptance rate of a head or draft model is low, by trying repairs on the target's answers.",
        "advise:diagnose",
    ),
    "acceptance": VerbSource(
        "Say whether acceptance has fallen over the days that a server has served; exit code 5 if it has.",
        "advise:acceptance",
    ),
    "ab-live": VerbSource(
        "Divide live traffic between two servers by time, and say which is faster; a proxy that clients talk to.",
        "ab:ab_live",
        has_engine=False,
    ),
    "report": VerbSource(
        "Put the reports of runs on one self-contained page: verdicts first, plots, tables and raw values.",
        has_engine=False,
    ),
    "certify": VerbSource(
        "Check whether B, which speculates, gives the answers of A; exit code 5 if a check fails.",
        "ab:certify",
        has_engine=False,
    ),
    "plan": VerbSource(
        "Print the memory of weights, caches and a step, and which batch and context fit; exit code 1 if the requested "
        "ones do not."
    ),
    "simulate": VerbSource(
        "Run the scheduler and the controller on a virtual clock, once per setting, with the same requests and random "
        "numbers."
    ),
    "export": VerbSource(
        "Write a drafter in another engine's format, with the command that starts it; refuse pairs that cannot work."
    ),
    "models": VerbSource(
        "Get, list and remove models: packaged ones, the hub's cache, or the folders given.", "models:app"
    ),
    "doctor": VerbSource(
        "Describe this machine: cores, instruction sets, memory bandwidth, other load, threads, versions.",
        has_engine=False,
    ),
    "bench": VerbSource(
        "Measure speed, throughput under load, the cost of steps, or (--url) a server; without a command, speed.",
        "bench:app",
    ),
    "train": VerbSource(
        "Train heads and draft models for a target, or a language model from scratch. Interrupted runs resume.",
        "train:app",
    ),
    "config": VerbSource("Show the settings in effect, and where each comes from.", "settings:app"),
}

MOVED: Mapping[str, str] = {"widen": "python -m studies.widen"}  # verbs of earlier versions: what replaces them


class LazyVerbs(Mapping[str, Any]):
    """The commands of the root by name, made when they are asked for."""

    def __init__(self) -> None:
        self._made: dict[str, TyperCommand | TyperGroup] = {}

    def __getitem__(self, name: str) -> TyperCommand | TyperGroup:
        if name not in self._made:
            self._made[name] = _load(name)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(VERBS)

    def __len__(self) -> int:
        return len(VERBS)

    def __contains__(self, name: object) -> bool:
        return name in VERBS


class Root(Group):
    """The command itself. Its help and the completion of its verbs import none of them."""

    def __init__(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401 - typer's own
        super().__init__(*arguments, **options)
        self.commands: Any = LazyVerbs()

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ANN401, ARG002, D102
        return list(VERBS)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401
        """The verb that `args` begin with; a `USAGE_ERROR` names what replaces one of earlier versions."""
        if args[0] in MOVED:
            raise USAGE_ERROR(f"no such command: {args[0]}; use {MOVED[args[0]]}", ctx=ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401
        """Write the verbs."""
        with self._summaries():
            super().format_commands(ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:  # noqa: ANN401
        """The verbs and options that begin with `incomplete`."""
        with self._summaries():
            return super().shell_complete(ctx, incomplete)

    @contextmanager
    def _summaries(self) -> Iterator[None]:
        """Verbs that have a name and a help, and nothing else."""
        verbs = self.commands
        self.commands = {name: TyperCommand(name, help=source.summary) for name, source in VERBS.items()}
        try:
            yield
        finally:
            self.commands = verbs


def _load(name: str) -> TyperCommand | TyperGroup:
    """Import a verb.

    Raises:
        KeyError: there is none of this name.
    """
    source = VERBS[name]
    module, _, attribute = (source.place or f"{name}:{name}").partition(":")
    with signals_end():
        imported = importlib.import_module(f"foretoken.cli.{module}")
    found: typer.Typer | Callable[..., None] = getattr(imported, attribute)
    holder = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    holder.callback()(lambda: None)
    if isinstance(found, typer.Typer):
        holder.add_typer(found, name=name)
    else:
        holder.command(name, cls=EngineVerb if source.has_engine else Verb)(found)
    group = typer.main.get_command(holder)
    assert isinstance(group, TyperGroup)
    command = group.commands[name]
    assert isinstance(command, TyperCommand | TyperGroup)
    return command
