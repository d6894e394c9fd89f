"""Acceptance of every drafter along held-out text and along the target's own answers, trained heads included.

    python -m studies.heads --eagle DIR --medusa DIR --block DIR --out benchmarks

Two tables. The first holds tokens per step by drafter, text that people wrote (`forced`) beside greedy and sampled
answers, with bootstrap intervals over prompts. The second compares two kinds of trees at one temperature, both exact:
greedy+1, whose nodes have one sampled child each, and the deterministic trees of the literature (EAGLE-2), which hold
the likeliest tokens whatever the temperature. Counts only: nothing is timed. See docs/studies.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from foretoken import LLM, SpecConfig
from foretoken.backend.drafting import DrafterChoice
from foretoken.core import Batch, BatchEntry, Draft
from foretoken.draft.base import Drafter
from foretoken.errors import ConfigError
from foretoken.measure.load.settings import NO_POLICIES, BatchSetting, Stage
from foretoken.measure.options import ALL
from foretoken.measure.progress import Tell, progress
from foretoken.measure.prompts import fit, with_template
from foretoken.measure.report import Report, Table
from foretoken.measure.stats import paired_ratio
from studies.command import arguments, command_line, run, words
from studies.held_out.measure import Walk, prompts_of, summarise_walks, walk_all, walk_tables
from studies.held_out.options import FORCED, GREEDY, SAMPLED, HeldOutOptions

HEADS = ("eagle", "medusa", "block")
FREE = ("ngram", "suffix", "recycling")
EXPLAINED = (
    "`forced` goes along the text that really follows the prompt, the other ways along the target's own answers of the "
    "same length. Tokens a step with a bootstrap interval over prompts (95 %)."
)


@dataclass(frozen=True)
class TreePair:
    """Tokens per step of both kinds of trees of one drafter along the same prompts, and their ratio with its
    interval.
    """

    drafter: str
    temperature: float
    num_prompts: int
    sampled_child: float
    deterministic: float
    ratio: float
    low: float | None
    high: float | None


class DeterministicStage(Stage):
    """A stage whose drafters make the trees of temperature 0 at every temperature: point masses, which the rule judges
    as such.
    """

    def enter(self, setting: BatchSetting) -> None:
        """See `Stage`."""
        spec = self.spec(setting)
        replaced = self.llm.take_drafters(spec)  # the last turn made these deterministic, for as long as they live
        super().enter(setting)
        for drafter in self.llm.loaded_drafters(spec):
            _make_deterministic(drafter)
        replaced.clear()  # not before: the new drafter shares the weights of the old one's draft model


def _make_deterministic(drafter: Drafter) -> None:
    propose = drafter.propose

    def as_if_greedy(batch: Batch) -> Draft:
        return propose(Batch(tuple(map(_greedy, batch.entries))))

    drafter.propose = as_if_greedy  # type: ignore[method-assign]


def _greedy(entry: BatchEntry) -> BatchEntry:
    return entry.under(replace(entry.request, params=replace(entry.request.params, temperature=0.0)), entry.num_draft)


def main() -> int:
    """Measure, and print or write the report."""
    parser = arguments("heads", __doc__, "heads")
    for kind in HEADS:
        parser.add_argument(f"--{kind}", help=f"folder, hub id or reference:{kind} of the head")
    parser.add_argument("--num-draft", type=int, default=5, help="draft tokens of a chain")
    parser.add_argument("--num-nodes", type=int, default=12, help="draft tokens of a tree")
    parser.add_argument("--slices", type=words, default=("code",), help=f"kinds of text, or {ALL}")
    parser.add_argument("--prompts-per-slice", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperatures", type=words, default=("0.8", "1.0"), help="of sampled answers")
    parser.add_argument("--tree-temperature", type=float, default=1.0)
    parser.add_argument("--without-chains", action="store_true", help="only the second table")
    parser.add_argument("--without-trees", action="store_true", help="only the first table")
    parser.add_argument("--seed", type=int, default=0)
    return run(study, parser.parse_args())


def study(given: argparse.Namespace) -> Report:
    """The study of drafters with heads.

    Raises:
        ForetokenError: a head or draft that cannot be used, or a failing engine.
    """
    draft = "reference:draft" if given.draft is None and given.target == "reference:target" else given.draft
    heads = {kind: getattr(given, kind) for kind in HEADS if getattr(given, kind)}
    options = HeldOutOptions(
        given.target,
        draft,
        slices=tuple(given.slices),
        prompts_per_slice=given.prompts_per_slice,
        max_tokens=given.max_tokens,
        dtype=given.dtype,
        device=given.device,
        threads=given.threads,
        seed=given.seed,
    )
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    temperatures = [_temperature(text) for text in given.temperatures]
    chains = [] if given.without_chains else chain_settings(heads, draft, given.num_draft)
    trees = [] if given.without_trees else tree_settings(heads, draft, given.num_nodes)
    num_prompts = len(prompts_of(options)[0])
    total = num_prompts * (len(chains) * (2 + len(temperatures)) + 2 * len(trees))
    walks, pairs, notes, interrupted = list[Walk](), list[TreePair](), list[str](), False
    with LLM(options.target, SpecConfig(), dtype=options.dtype, device=options.device) as llm, progress(total) as tell:
        try:
            notes += walk_chains(options, llm, chains, temperatures, walks, tell) if chains else []
            pairs += compare_trees(replace(options, temperature=given.tree_temperature), llm, trees, tell)
        except KeyboardInterrupt:
            interrupted = True
    rows = summarise_walks(walks)
    left_out = [f"{kind} was not measured: no head was given (--{kind})." for kind in HEADS if kind not in heads]
    return Report(
        title="Drafters with trained heads",
        command=command_line("heads"),
        options=asdict(options) | {"heads": heads, "num_draft": given.num_draft, "num_nodes": given.num_nodes},
        results={"rows": rows, "trees": pairs, "interrupted": interrupted},
        tables=(*walk_tables(rows), *([_tree_table(pairs)] if pairs else [])),
        explained=EXPLAINED,
        caveats=(*left_out, *notes, *(["The run was interrupted."] if interrupted else [])),
    )


def chain_settings(heads: Mapping[str, str], draft: str | None, num_draft: int) -> list[BatchSetting]:
    """Every drafter with chains of `num_draft` draft tokens."""
    choices = [DrafterChoice(name) for name in FREE]
    choices += [DrafterChoice("draft_model")] if draft is not None else []
    choices += [DrafterChoice(kind, (("head", head),)) for kind, head in heads.items()]
    return [BatchSetting(f"{choice.name}-{num_draft}", choice, num_draft) for choice in choices]


def tree_settings(heads: Mapping[str, str], draft: str | None, num_nodes: int) -> list[BatchSetting]:
    """Every drafter that asks a network, with trees of `num_nodes` draft tokens."""
    fields = (("tree", "best_first"), ("rule", "tree"))
    choices = [DrafterChoice("draft_model", fields)] if draft is not None else []
    choices += [DrafterChoice(kind, (("head", head), *fields)) for kind, head in heads.items()]
    return [BatchSetting(f"{choice.name}-{num_nodes}", choice, num_nodes) for choice in choices]


def walk_chains(
    options: HeldOutOptions,
    llm: LLM,
    settings: Sequence[BatchSetting],
    temperatures: Sequence[float],
    walks: list[Walk],
    tell: Tell,
) -> list[str]:
    """Append the walks of all settings: forced, greedy, and sampled at each temperature; notes on the prompts."""
    prompts, notes = prompts_of(options)
    prompts = with_template(prompts, llm)
    prompts, cut = fit(prompts, lambda text: len(llm.encode(text)), llm.target.max_context_tokens - options.max_tokens)
    stage = Stage(llm, options.draft, NO_POLICIES, options.seed)
    walk_all(replace(options, ways=(FORCED, GREEDY)), stage, settings, prompts, walks, tell)
    for temperature in temperatures:
        sampled: list[Walk] = []
        try:
            own = replace(options, ways=(SAMPLED,), temperature=temperature)
            walk_all(own, stage, settings, prompts, sampled, tell)
        finally:
            walks += [replace(walk, way=f"sampled {temperature:g}") for walk in sampled]
    return [*notes, *cut]


def compare_trees(options: HeldOutOptions, llm: LLM, settings: Sequence[BatchSetting], tell: Tell) -> list[TreePair]:
    """Both kinds of trees of every setting, along sampled answers to the same prompts."""
    prompts = with_template(prompts_of(options)[0], llm)
    prompts, _ = fit(prompts, lambda text: len(llm.encode(text)), llm.target.max_context_tokens - options.max_tokens)
    found: list[TreePair] = []
    for setting in settings:
        both: list[dict[tuple[int, int], tuple[float, float]]] = []
        for kind in (Stage, DeterministicStage):
            walks: list[Walk] = []
            own = replace(options, ways=(SAMPLED,))
            walk_all(own, kind(llm, options.draft, NO_POLICIES, options.seed), [setting], prompts, walks, tell)
            both.append({(walk.prompt, 0): (float(len(walk.token_ids)), float(walk.num_steps)) for walk in walks})
        ratio = paired_ratio(both[0], both[1])
        assert ratio is not None
        assert setting.choice is not None
        name, sampled_child, deterministic = setting.choice.name, _rate(both[0]), _rate(both[1])
        figures = (sampled_child, deterministic, ratio.ratio, ratio.low, ratio.high)
        found.append(TreePair(name, options.temperature, len(both[0]), *figures))
    return found


def _rate(walks: Mapping[tuple[int, int], tuple[float, float]]) -> float:
    return sum(tokens for tokens, _ in walks.values()) / sum(steps for _, steps in walks.values())


def _tree_table(pairs: Sequence[TreePair]) -> Table:
    lines = [
        (
            pair.drafter,
            f"{pair.temperature:g}",
            str(pair.num_prompts),
            f"{pair.sampled_child:.2f}",
            f"{pair.deterministic:.2f}",
            f"{pair.ratio:.3f}",
            "" if pair.low is None or pair.high is None else f"{pair.low:.3f}-{pair.high:.3f}",
        )
        for pair in pairs
    ]
    headings = ("drafter", "temperature", "prompts", "greedy+1", "deterministic", "ratio", "95 %")
    return Table("tokens a step of two kinds of trees, along sampled answers", headings, tuple(lines))


def _temperature(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError("temperatures", text, "give numbers, separated by commas") from error


if __name__ == "__main__":
    sys.exit(main())
