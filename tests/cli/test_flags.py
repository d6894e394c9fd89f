"""Flags come from the fields of configurations: in every verb that takes them, and nowhere by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import typer
from typer.core import TyperGroup, TyperOption

from foretoken.cli.app import app as own_app
from foretoken.cli.flags import config_from, flags_taken, takes
from foretoken.cli.verb import Verb
from foretoken.config import SamplingParams, SpecConfig
from foretoken.control.routing import RoutingRules
from foretoken.engine_config import EngineConfig
from foretoken.errors import ConfigError
from foretoken.field_text import numbers, wholes, wholes_or_auto, words
from foretoken.option import check_fields, option, options_of, same_option, setting_name
from foretoken.server.api.config import ApiConfig
from foretoken.server.config import ServerConfig
from foretoken.server.guard.config import GuardConfig
from foretoken.server.life.config import LifeConfig
from foretoken.server.observe.config import ObserveConfig

CONFIGS = (
    *(SpecConfig, SamplingParams, EngineConfig, RoutingRules),
    *(ServerConfig, ApiConfig, GuardConfig, LifeConfig, ObserveConfig),
)
# Flags by hand that are called as a field of a configuration, and are not that field.
OTHERS = {
    "plan": {"draft", "head", "seed"},  # several, to compare them; of failures in a day
    "demo": {"drafter"},  # of those that need no other file
    "export": {"target", "head", "drafter", "draft", "num_draft"},  # for another engine
    "train lm": {"corpus", "device"},  # a folder of a run; the CPU by default
    "train answers": {"prompts", "out"},  # JSON lines of prompts, and the file of the answers
    "eval": {"prompts", "slices", "out"},  # also prompts of token ids; one JSON file
    "simulate": {"seed"},
    "bench profile": {"out"},  # a folder only
}


def _check_width(name: str, value: float) -> None:
    if value > 9:
        raise ConfigError(name, value, "is wider than the wall; give at most 9")


@dataclass(frozen=True)
class Paint:
    """What a verb could be given."""

    colour: str = field(default="red", metadata=option("Colour: {choices}.", group="Look", choices=("red", "blue")))
    layers: int | Literal["auto"] = field(default="auto", metadata=option("Layers, or auto.", group="Look"))
    brushes: tuple[int, ...] = field(default=(1, 2), metadata=option("Sizes, with commas.", read=wholes))
    marks: tuple[str, ...] = field(default=(), metadata=option("A mark.", name="mark", repeats=True))
    dries: bool = field(default=True, metadata=option("Wait."))
    width: float | None = field(default=None, metadata=option("Width.", flags=("--width", "-w"), valid=_check_width))
    inner: int = 0

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Wall:
    """A configuration with an option of another one."""

    colour: str = field(default="blue", metadata=same_option(Paint, "colour"))


@pytest.fixture
def made() -> tuple[Callable[..., int], list[Any]]:
    """A program of three verbs, and what they were given."""
    program, seen = typer.Typer(), []

    @program.command("all", cls=Verb)
    @takes(Paint)
    def _all(context: typer.Context, width: float = 2.0) -> None:
        seen.append((config_from(Paint, context.params), width))

    @program.command("look", cls=Verb)
    @takes(Paint, "Look", fields=("dries",))
    def _look(context: typer.Context) -> None:
        seen.append((config_from(Paint, context.params, inner=7), sorted(context.params)))

    @program.command("wall", cls=Verb)
    @takes(Wall)
    def _wall(context: typer.Context) -> None:
        seen.append(config_from(Wall, context.params))

    def call(*words: str) -> int:
        return int(typer.main.get_command(program).main(args=list(words), standalone_mode=False) or 0)

    return call, seen


def test_a_field_is_a_flag_of_every_verb_that_takes_it(
    made: tuple[Callable[..., int], list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    call, seen = made
    call("all")
    assert seen.pop() == (Paint(width=2.0), 2.0)
    call(
        "all",
        "--colour",
        "blue",
        "--layers",
        "3",
        "--brushes",
        "4,5",
        "--mark",
        "a",
        "--mark",
        "b",
        "--no-dries",
        "-w",
        "1",
    )
    assert seen.pop() == (Paint("blue", 3, (4, 5), ("a", "b"), dries=False, width=1.0), 1.0)
    call("look", "--layers", "auto", "--no-dries")
    assert seen.pop() == (Paint(dries=False, inner=7), ["colour", "dries", "layers"])
    call("wall")
    assert seen.pop() == Wall("blue")
    for verb in ("all", "look", "wall"):
        call(verb, "--help")
        shown = capsys.readouterr().out
        assert "Look:\n  --colour <str>" in shown
        assert "Colour: red, blue." in shown
        assert "inner" not in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("wall", "--colour", "green"), "colour='green': choose one of red, blue"),
        (("all", "-w", "10"), "width=10.0: is wider than the wall; give at most 9"),
        (("all", "--layers", "few"), "layers='few': must be a whole number or auto"),
        (("all", "--brushes", "1,x"), "brushes='x': must be whole numbers separated by commas"),
        (("all", "--brushes", ","), "brushes=',': name at least one"),
    ],
)
def test_a_wrong_value_names_the_flag(
    made: tuple[Callable[..., int], list[Any]], words: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError) as found:
        made[0](*words)
    assert message in str(found.value)
    assert made[1] == []


def test_a_verb_takes_what_there_is_and_once() -> None:
    with pytest.raises(TypeError, match="Paint has no option or group of options Frame"):
        takes(Paint, "Frame")
    with pytest.raises(TypeError, match="verb has --colour already"):

        @takes(Wall)
        @takes(Paint)
        def verb(context: typer.Context) -> None: ...


def verbs(command: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(command, TyperGroup):
        for name, child in command.commands.items():
            yield from verbs(child, f"{path} {name}".strip())
    else:
        yield path, command


def test_no_flag_is_declared_by_hand_for_a_field_of_a_configuration() -> None:
    known = {setting_name(one) for kind in CONFIGS for one, _ in options_of(kind)}
    found: dict[str, set[str]] = {}
    for path, command in verbs(typer.main.get_command(own_app)):
        taken: Mapping[str, tuple[type, str]] = flags_taken(command.callback)
        own = {one.name for one in command.params if isinstance(one, TyperOption)} - taken.keys()
        named = known | {setting_name(one) for kind, _ in taken.values() for one, _ in options_of(kind)}
        found[path] = own & named
    assert {path: names for path, names in found.items() if names} == OTHERS


def test_an_item_of_a_list_that_is_named_twice_counts_once() -> None:
    assert words("slices", "code, chat,code") == ("code", "chat")
    assert wholes("batches", "4,1,4,04") == (4, 1)
    assert wholes_or_auto("num_draft", "auto,4,auto,4") == ("auto", 4)
    assert numbers("temperatures", "0.8,0,0.80,0.0") == (0.8, 0.0)
