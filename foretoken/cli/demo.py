"""`foretoken demo`: a model answers the same prompts with and without speculation."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.common import DEFAULT_MODEL, JsonOption, fetch_models, print_json, progress
from foretoken.cli.demo_run import PROMPTS, DemoAnswer, DemoPrompt, DemoRun, kinds_of, num_identical, total_of
from foretoken.cli.flags import takes
from foretoken.config import DRAFTERS, PLAIN, SamplingParams, SpecConfig
from foretoken.engine_config import EngineConfig
from foretoken.errors import ConfigError, InputError, SpeculationWarning
from foretoken.machine.neighbours import Neighbour, OtherLoad, is_contended, neighbours, usable_cores
from foretoken.printing.console import Console
from foretoken.registry import HEADS, MTP

if TYPE_CHECKING:
    from foretoken.core import StepOutput
    from foretoken.engine.llm import LLM

_DRAFTER = "auto"
_NEEDS_DRAFT = ("draft_model", "cascade")
# Those that need nothing but the target: no draft model, no trained head, no layer of its own, no answer beforehand.
FREE_STANDING = tuple(name for name in DRAFTERS if name not in (*_NEEDS_DRAFT, *HEADS, MTP, "predicted"))


@takes(SamplingParams, fields=("max_tokens",))
@takes(EngineConfig, fields=("model",))
def demo(
    target: str = DEFAULT_MODEL,
    drafter: Annotated[str, typer.Option(help=f"Drafter: {', '.join(FREE_STANDING)}.")] = _DRAFTER,
    max_tokens: int = 128,
    every: Annotated[
        bool, typer.Option("--all", help="Every drafter that needs nothing but the target, in one table.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Answer the same prompts plainly and speculatively, and compare texts and time on this machine."""
    from foretoken.engine.llm import LLM

    if max_tokens < 2:
        raise ConfigError("max_tokens", max_tokens, "must be at least 2")
    if every and drafter != _DRAFTER:
        raise ConfigError("drafter", drafter, "--all takes every drafter: leave --drafter out")
    if drafter not in FREE_STANDING:
        raise ConfigError("drafter", drafter, f"choose one of {', '.join(FREE_STANDING)}")
    specs = {PLAIN: SpecConfig()} | {name: SpecConfig(name) for name in (FREE_STANDING if every else (drafter,))}
    fetch_models(target)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SpeculationWarning)  # advice on settings that nobody has chosen here
        with progress(f"loading {target}") as status:
            llm = LLM(target, spec=specs[drafter], on_profile=status.say)
        with llm:
            if llm.tokenizer is None:
                raise InputError("target", target, "has no tokenizer, and the demo's prompts are texts")
            load, run = OtherLoad(), DemoRun(llm, specs, max_tokens)
            with progress("warming up"):
                run.warm_up()
            streamed = () if every or as_json else PROMPTS[:1]
            answers = _streamed_answers(run, streamed, llm, target)
            answers += _other_answers(run, one_of_each_kind(PROMPTS) if every else PROMPTS[len(streamed) :])
            others = load.cores()
    if as_json:
        print_json(summary(answers, list(specs), others))
        return
    console = Console()
    _print_table(answers, list(specs), console)
    for line in plain_words(answers, list(specs)):
        console.line(line)
    if is_contended(None if others is None else others / len(usable_cores())):
        console.line(busy_line(others or 0.0, len(usable_cores()), neighbours()))


def one_of_each_kind(prompts: Sequence[DemoPrompt]) -> list[DemoPrompt]:
    """The first prompt of each kind."""
    return list({one.kind: one for one in reversed(prompts)}.values())[::-1]


def _streamed_answers(run: DemoRun, prompts: Sequence[DemoPrompt], llm: LLM, target: str) -> list[DemoAnswer]:
    console = Console()
    found: list[DemoAnswer] = []
    for prompt in prompts:
        console.line(f"{target} is asked: ", (prompt.text, "bold"))
        for answer in run.answers([prompt], lambda _, setting: _ShownAnswer(llm, setting, console)):
            found.append(answer)
            took = f"{answer.seconds:.2f} s, {len(answer.token_ids)} tokens in {answer.num_steps} steps of the model"
            console.line()
            console.line(took, style="dim")
    return found


def _other_answers(run: DemoRun, prompts: Sequence[DemoPrompt]) -> list[DemoAnswer]:
    """Answers behind a bar."""
    with Console(stderr=True).bar("answering", len(prompts), counts=True) as bar:

        def begin(prompt: DemoPrompt, setting: str) -> None:
            bar.update(f"{prompt.kind}: {prompt.name}, {shown(setting)}", completed=prompts.index(prompt))

        return list(run.answers(prompts, begin))


class _ShownAnswer:
    """Prints an answer while it comes, each token in the style of where it came from."""

    def __init__(self, llm: LLM, setting: str, console: Console) -> None:
        from foretoken.cli.conversation import StyledPieces
        from foretoken.text.detokenizer import Detokenizer

        assert llm.tokenizer is not None
        self._pieces, self._console = StyledPieces(Detokenizer(llm.tokenizer)), console
        note = "" if setting == PLAIN else " (underlined: drafted, and accepted by the model)"
        console.line((shown(setting), "bold"), note, ":")

    def __call__(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            for text, style in self._pieces.of(output):
                self._console.piece(text, style)


def shown(setting: str) -> str:
    """A setting's name for a reader."""
    return "plain" if setting == PLAIN else setting


def plain_words(answers: Sequence[DemoAnswer], settings: Sequence[str]) -> list[str]:
    """The results in sentences."""
    plain, others = total_of(answers, PLAIN), [name for name in settings if name != PLAIN]
    num_prompts = len({one.prompt for one in answers})
    found: list[str] = []
    for name in others:
        same = num_identical(answers, name)
        if same < num_prompts:
            found.append(f"{name}: {num_prompts - same} of {num_prompts} answers differ from plain decoding.")
    if not found:
        found.append(f"All {num_prompts} answers are the same, token for token.")
    if len(others) > 1:
        return found
    (name,) = others
    total = total_of(answers, name)
    by_kind = ", ".join(
        f"{kind} {total_of(answers, name, kind).tokens_per_s / total_of(answers, PLAIN, kind).tokens_per_s:.2f}x"
        for kind in kinds_of(answers)
    )
    found.append(
        f"Plain decoding took {plain.seconds:.1f} s, {name} {total.seconds:.1f} s, from the request to the last token, "
        f"prompt included: {total.tokens_per_s / plain.tokens_per_s:.2f}x ({by_kind})."
    )
    found.append(
        f"{name} drafted {total.num_drafted} tokens, and the model accepted {total.num_accepted}: "
        f"{total.emitted_per_step:.2f} tokens for each of its steps instead of 1."
        if total.num_drafted
        else f"{name} drafted nothing: no draft was worth its cost here."
    )
    return found


def busy_line(others: float, num_cores: int, found: Sequence[Neighbour] | None) -> str:
    """Why it was not faster, where other processes took the cores."""
    names = ", ".join(f"{one.name} {one.cores:.1f}" for one in (found or ())[:3])
    who = f" (now: {names})" if names else ""
    return (
        f"Meanwhile other processes took {others:.1f} of {num_cores} cores{who}. That slows every setting down, and "
        "leaves less to gain by drafting: run it again when they are done. `foretoken doctor` shows them."
    )


def summary(answers: Sequence[DemoAnswer], settings: Sequence[str], others: float | None) -> dict[str, Any]:
    """The object of --json. `speculative` is the setting beside plain decoding, with --all the fastest one."""
    totals = {name: total_of(answers, name) for name in settings}
    best = max((name for name in settings if name != PLAIN), key=lambda name: totals[name].tokens_per_s)
    num_prompts = len({one.prompt for one in answers})

    def by_kind(name: str) -> dict[str, object]:
        kinds = {kind: total_of(answers, name, kind).as_dict() for kind in kinds_of(answers)}
        return {**totals[name].as_dict(), "kinds": kinds, "num_identical": num_identical(answers, name)}

    return {
        "identical": all(num_identical(answers, name) == num_prompts for name in settings),
        "speedup": totals[best].tokens_per_s / totals[PLAIN].tokens_per_s,
        "drafter": best,
        "plain": by_kind(PLAIN),
        "speculative": by_kind(best),
        "settings": {name: by_kind(name) for name in settings},
        "others_cores": others,
        "answers": [
            {"kind": one.prompt.kind, "prompt": one.prompt.name, "setting": one.setting, "text": one.text}
            | {"num_tokens": len(one.token_ids), "seconds": one.seconds, "num_steps": one.num_steps}
            for one in answers
        ],
    }


def _print_table(answers: Sequence[DemoAnswer], settings: Sequence[str], console: Console) -> None:
    """Tokens per second by kind of prompt; with several drafters a row for each, the fastest first."""
    plain, *others = settings
    kinds = [*kinds_of(answers), None]
    num_prompts = len({one.prompt for one in answers})
    console.line()
    if len(others) > 1:
        others.sort(key=lambda name: -total_of(answers, name).tokens_per_s)
        rows = [
            (
                shown(name),
                *(f"{total_of(answers, name, kind).tokens_per_s:.1f}" for kind in kinds),
                f"{total_of(answers, name).emitted_per_step:.2f}",
                f"{num_identical(answers, name)} of {num_prompts}",
            )
            for name in (plain, *others)
        ]
        console.table(("tokens/s", *(kind or "all" for kind in kinds), "tok/step", "same"), rows)
    else:
        pairs = [(kind, total_of(answers, plain, kind), total_of(answers, others[0], kind)) for kind in kinds]
        rows = [
            (
                kind or "all",
                f"{one.tokens_per_s:.1f}",
                f"{other.tokens_per_s:.1f}",
                f"{other.tokens_per_s / one.tokens_per_s:.2f}",
            )
            for kind, one, other in pairs
        ]
        console.table(("tokens/s", "plain", others[0], "ratio"), rows)
    console.line()
