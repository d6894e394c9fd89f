"""A short trial of a head at load: does it agree with its target along a text that the target writes itself?

A head whose layers are counted in the other way, or with a norm flag turned, runs without an error and drafts at
random: a checkpoint in that state was used at 1.2 % acceptance (vllm-project/vllm#50170). The target continues a token
greedily for a few dozen steps, the head drafts along that text, and the neighbours of its configuration are tried too.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foretoken.errors import ConfigError, SpeculationWarning
from foretoken.heads.base import Head, HeadBatch
from foretoken.heads.checkpoint import make_head
from foretoken.heads.config import BlockConfig, EagleConfig, ExitAdapterConfig, HeadConfig, MedusaConfig
from foretoken.heads.kinds import kind_of_config
from foretoken.heads.vocabulary import DraftVocabulary
from foretoken.model.interface import Segment, SharesWeights

PROBE_VARIABLE = "FORETOKEN_PROBE"  # 0: no head is tried at load
NUM_ROWS = 48  # a share of them is known to 0.07
_MAX_S = 1.0  # a slow target writes fewer rows, but
_FEWEST_ROWS = 16
_MAX_PLACES = 4
_CHANCE = 0.1  # an untrained head hits the most frequent token at most that often
_NUM_SEEDS = 4
_MARGIN = 0.2  # two standard deviations of the difference of two shares of NUM_ROWS rows
_FEWEST_DEVIATIONS = 3.0  # of a paired difference; with five neighbours one head in a hundred is blamed by chance
_MIN_LOG = -20.0  # of a token that is not in the head's vocabulary, or that it deems impossible
_Scores = dict[tuple[int, int], tuple[bool, float]]  # by place and row: hit, log probability of the token


@dataclass(frozen=True)
class Probe:
    """Share of rows at which the head's first choice is the target's, by place; `better` names the neighbour of its
    configuration that agrees clearly more at the first place, with its share.
    """

    agreement: tuple[float, ...]
    num_rows: int
    better: tuple[str, float] | None

    @property
    def is_near_chance(self) -> bool:
        """Whether the head predicts no better than an untrained one."""
        return not self.agreement or self.agreement[0] < _CHANCE

    def advice(self) -> str | None:
        """What is wrong with the head, in one sentence; None if nothing seems to be."""
        if not self.is_near_chance and self.better is None:
            return None
        shares = ", ".join(f"{share:.0%}" for share in self.agreement)
        found = f"the head agrees with the target at {shares} of {self.num_rows} rows (by place)"
        if self.better is not None:
            name, share = self.better
            return f"{found}; with {name} it would be {share:.0%}: its config.json is probably wrong there"
        return (
            f"{found}, near chance; likely causes: it was trained for another target or chat template, layer ids "
            "counted the other way, a norm flag, or a d2t of another vocabulary"
        )


def probe_at_load(head: Head, target: SharesWeights) -> None:
    """Warn if `head`, whose matrices are plain, seems to be wired wrongly; `FORETOKEN_PROBE=0` turns it off.

    A target with no room for the rows is left alone.
    """
    if os.environ.get(PROBE_VARIABLE) == "0" or target.num_free_tokens() < target.footprint_tokens(NUM_ROWS + 1):
        return
    advice = probe(head, target).advice()
    if advice is not None:
        warnings.warn(f"{advice}; {PROBE_VARIABLE}=0 turns this trial off", SpeculationWarning, stacklevel=2)


@torch.inference_mode()
def probe(head: Head, target: SharesWeights, start: int = 0, num_rows: int = NUM_ROWS) -> Probe:
    """Try `head`, whose matrices are plain, along `num_rows` tokens that `target` writes after the token `start`.

    Costs as many steps of the target as rows, one after the other (fewer if they take more than a second), and some
    passes of the head over them.
    """
    variants = list(_neighbours(head))
    read = [layer for one in (head, *(other for _, other in variants)) for layer in one.hidden_layers()]
    batch = _own_text(target, start, num_rows, sorted({*read, target.num_layers}))
    ours = _scores(head, batch, target)
    if not ours:
        return Probe((), 0, None)
    agreement = _shares(ours)
    # A reading that hits other tokens is no matter of degree: it comes before any neighbour.
    found = [
        (math.inf, name, share) for name, share in _shifted(head, batch, target) if share >= agreement[0] + _MARGIN
    ]
    for name, one in variants:
        theirs = _scores(one, batch, target)
        deviations, share = _deviations(theirs, ours, batch.tokens[0].tolist()), _shares(theirs)[0]
        # A head that is hardly trained may be less wrong in another wiring: one at chance is no remedy.
        if deviations >= _FEWEST_DEVIATIONS and share >= max(agreement[0], _CHANCE):
            found.append((deviations, name, share))
    best = max(found, default=None)
    return Probe(agreement, batch.tokens.shape[1] - 1, None if best is None else best[1:])


def _own_text(target: SharesWeights, start: int, num_rows: int, layers: list[int]) -> HeadBatch:
    """One window that the target continues greedily, with its states at `layers`."""
    sequence = -1  # no request has this number
    tokens, states = [start], list[dict[int, Tensor]]()
    target.open(sequence)
    try:
        num_rows = min(num_rows, target.max_context_tokens - 1)
        begun = time.perf_counter()
        while len(states) < num_rows and (len(states) < _FEWEST_ROWS or time.perf_counter() < begun + _MAX_S):
            rows = torch.tensor(tokens[-1:], device=target.device)
            out = target.forward(rows, [Segment(sequence, 1, num_taps=1)], layers)
            target.commit(sequence, 1)
            tokens.append(int(out.logits[-1].argmax()))
            states.append({layer: tap.clone() for layer, tap in out.taps.items()})
    finally:
        target.close(sequence)
    joined = {layer: torch.cat([row[layer] for row in states])[None] for layer in layers}  # [1, S, D]
    normed = target.final_norm(joined[target.num_layers][0])[None]
    text = torch.tensor([tokens], device=target.device)
    return HeadBatch(text, torch.ones_like(text, dtype=torch.bool), joined, normed)


def _scores(head: Head, batch: HeadBatch, target: SharesWeights) -> _Scores:
    """What `head` makes of the text's tokens, by place and row."""
    found: _Scores = {}
    # A block drafter has anchors at some of the rows, an EAGLE head goes on from some: other ones for each seed.
    for seed in range(_NUM_SEEDS if kind_of_config(head.config).samples_rows else 1):
        for place in head.places(batch, target, _MAX_PLACES, seed):
            wanted = batch.tokens[0, place.rows + 1]
            hits = head.vocabulary.to_target(place.logits.argmax(-1)) == wanted
            own = head.vocabulary.expand(place.logits.float().log_softmax(-1))
            sure = own.gather(1, wanted[:, None]).squeeze(1).clamp(min=_MIN_LOG)
            rows = zip(place.rows.tolist(), hits.tolist(), sure.tolist(), strict=True)
            found |= {(place.number, row): (hit, log) for row, hit, log in rows}
    return found


def _shares(scores: _Scores) -> tuple[float, ...]:
    """Share of hits by place."""
    by_place: dict[int, list[bool]] = {}
    for (place, _), (hit, _) in sorted(scores.items()):
        by_place.setdefault(place, []).append(hit)
    return tuple(sum(hits) / len(hits) for hits in by_place.values())


def _deviations(theirs: _Scores, ours: _Scores, tokens: list[int]) -> float:
    """By how many standard errors one head finds the text more probable than another, along the rows of both.

    Hits alone are too few to tell neighbouring layers apart. Rows with the same token and the same next one are one
    observation: where a text repeats itself, they show the same thing again.
    """
    by_pair: dict[tuple[int, int, int], list[float]] = {}
    for (place, row), (_, log) in ours.items():
        if (place, row) in theirs:
            by_pair.setdefault((place, tokens[row], tokens[row + 1]), []).append(theirs[place, row][1] - log)
    if sum(map(len, by_pair.values())) < _FEWEST_ROWS or len(by_pair) < 2:
        return 0.0
    gains = torch.tensor([sum(own) / len(own) for own in by_pair.values()], dtype=torch.float64)
    return float(gains.mean() / gains.std()) * math.sqrt(len(gains)) if float(gains.std()) else 0.0


def _share(predicted: Tensor, wanted: Tensor) -> float:
    return float((predicted == wanted).float().mean()) if len(wanted) else 0.0


def _neighbours(head: Head) -> Iterator[tuple[str, Head]]:
    """Heads with the same weights and one likely mistake undone, each with its name."""
    for name, config in _other_configs(head.config):
        with torch.device("meta"):
            other = make_head(config, head.vocabulary)
        other.load_state_dict(head.state_dict(), assign=True)
        yield name, other


def _other_configs(config: HeadConfig) -> Iterator[tuple[str, HeadConfig]]:
    if isinstance(config, MedusaConfig):
        return
    if isinstance(config, ExitAdapterConfig):
        for layer in (config.exit_layer - 1, config.exit_layer + 1):
            if 1 <= layer < config.target_num_layers:
                yield f"exit_layer={layer} in place of {config.exit_layer}", replace(config, exit_layer=layer)
        return
    if isinstance(config, BlockConfig) or config.version == 3:
        for step in (-1, 1):
            taps = tuple(tap + step for tap in config.taps)
            try:
                yield f"layers {list(taps)} in place of {list(config.taps)}", replace(config, taps=taps)
            except ConfigError:  # the target has no such layer
                continue
    if isinstance(config, EagleConfig) and config.version == 3:
        for flag in ("norm_before_residual", "norm_output"):  # the other two come with tensors
            value = not getattr(config, flag)
            yield f"{flag}={str(value).lower()}", replace(config, **{flag: value})  # type: ignore[arg-type]
    if isinstance(config, BlockConfig):
        yield f"causal={str(not config.is_causal).lower()}", replace(config, is_causal=not config.is_causal)
        if config.predicts_at_anchor and config.block_size > 1:
            yield "sample_from_anchor=false", replace(config, predicts_at_anchor=False)
        if not config.predicts_at_anchor:
            yield "sample_from_anchor=true", replace(config, predicts_at_anchor=True)


def _shifted(head: Head, batch: HeadBatch, target: SharesWeights) -> list[tuple[str, float]]:
    """Agreement if the head predicted the token before or behind, or its vocabulary were read in another way."""
    place = next(iter(head.places(batch, target, 1, seed=0)), None)
    if place is None or not len(place.rows):
        return []
    tokens, own = batch.tokens[0], place.logits.argmax(-1)
    predicted, found = head.vocabulary.to_target(own), []
    for step, name in ((-1, "before"), (1, "behind")):
        inside = place.rows + 1 + step < len(tokens)
        wanted = tokens[place.rows[inside] + 1 + step]
        # A text that repeats a token has the same one before and behind.
        differs = wanted != tokens[place.rows[inside] + 1]
        share = float(((predicted[inside] == wanted) & differs).float().mean()) if len(wanted) else 0.0
        found.append((f"its predictions taken for the token {name}", share))
    ids: DraftVocabulary = head.vocabulary
    if not ids.is_whole:
        absolute = ids.ids - torch.arange(len(ids.ids), device=ids.ids.device)
        found.append(("d2t read as token numbers, not offsets", _share(absolute[own], tokens[place.rows + 1])))
    return found
