"""`foretoken demo`: the shipped model answers the same prompts with and without speculation."""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.cli.common import JsonOption, print_json, progress
from foretoken.config import DRAFTERS, SamplingParams, SpecConfig
from foretoken.errors import ConfigError
from foretoken.printing.console import Console
from foretoken.registry import HEADS, MTP
from foretoken.train.corpus import edit_prompt

if TYPE_CHECKING:
    from foretoken.engine.llm import LLM
    from foretoken.engine.output import GenerateOutput

# Written for this demo, not taken from the training text, and chosen so that the answers end by themselves: a small
# model that continues falls into loops, which inflate the acceptance of every drafter.
PROMPTS = {
    "edit a function": edit_prompt(
        '''def lookup(table, name, default=None):
    """Return table[name], or default when name is missing."""
    if name not in table:
        if default is None:
            raise KeyError(name)
        return default
    value = table[name]
    return value''',
        "name",
        "key",
    ).rstrip(),
    "edit a method": edit_prompt(
        '''def push(self, item):
    """Put an item on top of the stack."""
    if self.closed:
        raise ValueError("the stack is closed")
    self._items.append(item)
    self._size += 1
    return self._size''',
        "push",
        "append",
    ).rstrip(),
    "complete a class": '''class Version:
    """A version number that can be compared."""

    def __init__(self, major, minor):
        self.major = major
        self.minor = minor

    def __eq__(self, other):
        if not isinstance(other, Version):
            return NotImplemented
        return (self.major, self.minor) == (other.major, other.minor)

    def __lt__(self, other):''',
}
_STOP = ("\n\n",)
_FREE_STANDING = tuple(  # "predicted" needs the answer beforehand, heads are part of --all, the target has no MTP
    name for name in DRAFTERS if name != "predicted" and name not in (*HEADS, MTP)
)
_DRAFTER = "draft_model"
_WITH_DRAFT = ("draft_model", "cascade")
# A draft model of a twentieth of its target, as in published pairs.
_DRAFT_SIZES = {"500m": "25m", "1b": "50m"}


@dataclass(frozen=True)
class Timing:
    """Decoding speed of one mode over all prompts: tokens/s of each repeat."""

    per_repeat: tuple[float, ...]

    @property
    def tokens_per_s(self) -> float:
        """Median over the repeats."""
        return statistics.median(self.per_repeat)


def demo(
    drafter: Annotated[str, typer.Option(help=f"Drafter: {', '.join(_FREE_STANDING)}.")] = _DRAFTER,
    num_draft: Annotated[int, typer.Option(help="Drafted tokens per step.")] = 5,
    max_tokens: Annotated[int, typer.Option(help="Tokens per answer.")] = 96,
    repeats: Annotated[int, typer.Option(help="Times each answer is measured; the median counts.")] = 5,
    to: Annotated[
        str,
        typer.Option(help="Widen the shipped pair first to a realistic cost: 500m or 1b, or none to run it as it is."),
    ] = "500m",
    every: Annotated[bool, typer.Option("--all", help="Every drafter on one prompt, in one table.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Answer the same prompts plainly and speculatively, and compare tokens and time on this machine."""
    from foretoken.cli.demo_all import every_drafter, packaged_heads
    from foretoken.engine.llm import LLM

    for field, value, low in (("max_tokens", max_tokens, 2), ("repeats", repeats, 1), ("num_draft", num_draft, 1)):
        if value < low:
            raise ConfigError(field, value, f"must be at least {low}")
    if every and drafter != _DRAFTER:
        raise ConfigError("drafter", drafter, "--all takes every drafter: leave --drafter out")
    if drafter not in _FREE_STANDING:
        raise ConfigError("drafter", drafter, f"choose one of {', '.join(_FREE_STANDING)}")
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, stop=_STOP)
    with tempfile.TemporaryDirectory(prefix="foretoken-demo-") as scratch:
        target, draft = _pair(to, Path(scratch))
        if every:
            with progress("preparing the trained heads"):
                heads = packaged_heads(None if to == "none" else to, Path(scratch) / "heads")
            specs, left_out = every_drafter(draft, heads, num_draft)
            _demo_all(target, specs, left_out, params, repeats, to, as_json)
            return
        spec = SpecConfig(drafter=drafter, draft=str(draft) if drafter in _WITH_DRAFT else None, num_draft=num_draft)
        with progress("loading the models"):
            llm = LLM(target, spec=spec)
        with llm:
            plain, speculative, answers = _measure(llm, params, spec, repeats)
            if not as_json:
                _show(llm, answers)
    identical = all(one.token_ids == other.token_ids for one, other in answers.values())
    speedup = speculative.tokens_per_s / plain.tokens_per_s
    if as_json:
        print_json(_summary(plain, speculative, answers, identical, speedup, to))
        return
    same = "the same tokens" if identical else "DIFFERENT tokens (near ties in 16-bit arithmetic)"
    console = Console()
    console.line(
        (f"{plain.tokens_per_s:.1f}", "bold"),
        " tokens/s plain, ",
        (f"{speculative.tokens_per_s:.1f}", "bold"),
        " speculative: ",
        (f"{speedup:.2f}x", "bold"),
        f", {same}. Median of {repeats} repeats on this machine, just now.",
    )
    if to != "none":
        widened = f"Target and draft are the shipped ones widened to {to} and {_DRAFT_SIZES[to]}"
        console.line(f"{widened}: the same answers at the cost of bigger models.", style="dim")


def _demo_all(
    target: Path,
    specs: Mapping[str, SpecConfig],
    left_out: Mapping[str, str],
    params: SamplingParams,
    repeats: int,
    to: str,
    as_json: bool,
) -> None:
    """Every drafter on the first prompt."""
    from foretoken.cli.demo_all import compare_drafters, show_drafters
    from foretoken.engine.llm import LLM

    name, prompt = next(iter(PROMPTS.items()))
    with progress("loading the models"):
        llm = LLM(target, spec=SpecConfig())
    with llm, progress(f"answering with {len(specs)} drafters in turn"):
        rows = compare_drafters(llm, specs, prompt, params, repeats)
    if as_json:
        print_json(
            {"prompt": name, "rows": [asdict(row) for row in rows], "left_out": dict(left_out), "widened_to": to}
        )
        return
    console = Console()
    console.line(f"{name}, median of {repeats} repeats on this machine, just now:")
    show_drafters(rows, left_out, console)


def _pair(to: str, scratch: Path) -> tuple[Path, Path]:
    """Folders of target and draft, as shipped or both widened."""
    from foretoken.bench.widen import widen as widen_checkpoint
    from foretoken.model.names import model_folder

    target, draft = model_folder("reference:target"), model_folder("reference:draft")
    if to == "none":
        return target, draft
    if to not in _DRAFT_SIZES:
        raise ConfigError("to", to, f"choose one of {', '.join(_DRAFT_SIZES)}, or none")
    with progress(f"widening the shipped pair to {to} and {_DRAFT_SIZES[to]}"):
        widen_checkpoint(target, scratch / "target", to)
        widen_checkpoint(draft, scratch / "draft", _DRAFT_SIZES[to])
    return scratch / "target", scratch / "draft"


def _measure(
    llm: LLM, params: SamplingParams, spec: SpecConfig, repeats: int
) -> tuple[Timing, Timing, dict[str, tuple[GenerateOutput, GenerateOutput]]]:
    """Both modes in turn on every prompt, after one warm-up of each; the answers of the last repeat.

    Every answer has its own tenant and every repeat new drafters: nothing is drafted from earlier answers to the same
    prompts.
    """
    tenants = map(str, itertools.count())
    answers: dict[str, tuple[GenerateOutput, GenerateOutput]] = {}
    speeds: tuple[list[float], list[float]] = ([], [])
    with progress("answering, plainly and speculatively in turn"):
        for ways in (SpecConfig(), spec):
            warm_up = SamplingParams(max_tokens=8, tenant=next(tenants))
            llm.generate([next(iter(PROMPTS.values()))], warm_up, spec=ways)
        for _ in range(repeats):
            _renew_drafters(llm, spec)
            tokens, seconds = [0, 0], [0.0, 0.0]
            for name, prompt in PROMPTS.items():
                plain, speculative = (
                    llm.generate([prompt], replace(params, tenant=next(tenants)), spec=ways)[0]
                    for ways in (SpecConfig(), spec)
                )
                pair = (plain, speculative)
                answers[name] = pair
                for way, output in enumerate(pair):
                    if output.error is not None:
                        raise output.error
                    tokens[way] += output.stats.num_emitted - 1
                    seconds[way] += output.stats.decode_s
            for way in (0, 1):
                speeds[way].append(tokens[way] / seconds[way])
    return Timing(tuple(speeds[0])), Timing(tuple(speeds[1])), answers


def _renew_drafters(llm: LLM, spec: SpecConfig) -> None:
    """New drafters without state, which share the draft model of the old ones; those are removed last."""
    old = dict(llm.engine.drafters.drafters)
    llm.engine.drafters.drafters.clear()
    llm.prepare(spec)
    old.clear()


def _show(llm: LLM, answers: dict[str, tuple[GenerateOutput, GenerateOutput]]) -> None:
    from foretoken.cli.answer import answer_pieces, token_pieces
    from foretoken.cli.show import coloured, legend

    console = Console()
    rows = []
    for name, (plain, speculative) in answers.items():
        ratio = speculative.stats.tokens_per_s / plain.stats.tokens_per_s
        rows.append(
            (
                name,
                f"{plain.stats.tokens_per_s:.1f}",
                f"{speculative.stats.tokens_per_s:.1f}",
                f"{ratio:.2f}",
                f"{speculative.stats.acceptance_rate:.0%}",
                f"{speculative.stats.emitted_per_step:.2f}",
                "yes" if plain.token_ids == speculative.token_ids else "no",
            )
        )
    sample, (plain, speculative) = next(iter(answers.items()))
    console.line("prompt ", (sample, "bold"), ":")
    console.block((PROMPTS[sample], "dim"))
    console.line()
    console.side_by_side(
        (f"plain: {plain.stats.num_steps} steps", [plain.text]),
        (
            f"speculative: {speculative.stats.num_steps} steps",
            coloured(answer_pieces(token_pieces(llm, speculative), speculative), speculative.provenance),
        ),
    )
    console.block(*legend(speculative.provenance))
    console.line()
    headings = ("prompt", "plain tok/s", "speculative tok/s", "ratio", "kept", "tok/step", "same")
    console.table(headings, rows)
    console.line()


def _summary(
    plain: Timing,
    speculative: Timing,
    answers: dict[str, tuple[GenerateOutput, GenerateOutput]],
    identical: bool,
    speedup: float,
    to: str,
) -> dict[str, object]:
    return {
        "identical": identical,
        "speedup": speedup,
        "plain": {"tokens_per_s": plain.tokens_per_s, "per_repeat": plain.per_repeat},
        "speculative": {"tokens_per_s": speculative.tokens_per_s, "per_repeat": speculative.per_repeat},
        "widened_to": None if to == "none" else to,
        "prompts": {
            name: {"plain": one.stats.as_dict(), "speculative": other.stats.as_dict()}
            for name, (one, other) in answers.items()
        },
    }
