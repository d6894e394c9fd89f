"""The trained head that a configuration names, ready to draft for its target after a short trial (`probe`).

A head whose layers are counted in the other way, or with a norm flag turned, runs without an error and drafts at
random: a checkpoint in that state was used at 1.2 % acceptance (vllm-project/vllm#50170). So the target continues a
token greedily for a few dozen steps, the head drafts along that text, and the neighbours of its configuration are tried
too.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from foretoken.config import QUANTISED, SpecConfig
from foretoken.draft.base import Factory
from foretoken.errors import ConfigError, SpeculationWarning, warn
from foretoken.heads.base import DraftVocabulary, Head, HeadBatch
from foretoken.heads.checkpoint import load_head, make_head
from foretoken.heads.config import BlockConfig, EagleConfig, ExitAdapterConfig, HeadConfig, MedusaConfig
from foretoken.heads.kind import head_kind
from foretoken.heads.mtp import MtpHead, load_mtp
from foretoken.heads.weights import pack
from foretoken.model.architecture import ModelConfig
from foretoken.model.interface import LanguageModel, QuantisedModel, Segment, SharesWeights
from foretoken.model.matrices.quant import drafts_at_speed, head_format
from foretoken.model.names import model_folder
from foretoken.model.open import native_config
from foretoken.spec_checks import A_HEAD

_Head = TypeVar("_Head", bound=Head)


def open_head(factory: Factory, spec: SpecConfig, network: type[_Head]) -> tuple[_Head, SharesWeights]:
    """The head of `spec.head`, a `network`, in the target's number format and place, and the target.

    Its matrices are quantised as `spec.draft_dtype` says; "auto" is `quant.head_format`.

    Raises:
        ConfigError: no head is named, it is of another kind, the target has no parts that a head can use, or a
            `draft_dtype` that is not the target's number format.
        InputError: a quantised format that does not run where the target does.
        CheckpointError, MismatchError, UnsupportedModelError: see `load_head`.
    """
    kind = network.name
    if spec.head is None:
        raise ConfigError("head", None, f"drafter={kind!r} needs {A_HEAD}")
    folder, target = model_folder(spec.head), factory.target
    found = head_kind(folder)
    if found != kind:
        raise ConfigError("head", spec.head, f"is a head of drafter={found!r}, not of {kind!r}; name that drafter")
    if not isinstance(target, SharesWeights):
        reason = "this target does not hand out its embedding and output matrix"
        raise ConfigError("head", spec.head, f"{reason}; choose a drafter without a head")
    width, dtype = _embedding_of(target, spec.head)
    weight_format = _weight_format(spec, target, dtype)
    config = native_config(factory.folder) or _described(target, width)
    head = load_head(folder, config, dtype, target.device, factory.folder).requires_grad_(False)
    assert isinstance(head, network)
    with factory.between_steps():
        probe_at_load(head, target)
    pack(head, weight_format)
    return head, target


def open_mtp(factory: Factory, spec: SpecConfig) -> tuple[MtpHead, SharesWeights]:
    """The MTP layer in the target's checkpoint, in the target's number format and place, and the target.

    Its matrices are quantised as those of a head: see `open_head`.

    Raises:
        ConfigError: the target runs through transformers, or hands out no parts that a head can use.
        CheckpointError, UnsupportedModelError: see `load_mtp`.
    """
    config, target = native_config(factory.folder), factory.target
    if config is None or not isinstance(target, SharesWeights):
        reason = f"no MTP layer is read of {factory.folder}, which does not run in our own decoder"
        raise ConfigError("drafter", spec.drafter, f"{reason}; choose another drafter")
    _, dtype = _embedding_of(target, "mtp")
    weight_format = _weight_format(spec, target, dtype)
    head = load_mtp(factory.folder, config, dtype, target.device).requires_grad_(False)
    with factory.between_steps():
        probe_at_load(head, target)
    pack(head, weight_format)
    return head, target


def _weight_format(spec: SpecConfig, target: SharesWeights, dtype: torch.dtype) -> str:
    """What the head's matrices are held in beside a target whose rows are `dtype`: "auto" is as they are stored, else
    "int8" or "int4".
    """
    wanted, own = spec.draft_dtype, str(dtype).removeprefix("torch.")
    if wanted == "auto":
        of_target = target.weight_format if isinstance(target, QuantisedModel) else "auto"
        wanted = head_format(of_target, dtype.itemsize, target.device)
    if wanted in QUANTISED:
        return wanted if drafts_at_speed(wanted, dtype, target.device) else "auto"
    if wanted not in ("auto", own):
        remedy = f"a head runs in the number format of its target, {own}: take that, auto, int8 or int4"
        raise ConfigError("draft_dtype", wanted, remedy)
    return "auto"


@torch.inference_mode()
def _embedding_of(target: SharesWeights, head: str) -> tuple[int, torch.dtype]:
    embedded = target.embed(torch.zeros(1, dtype=torch.int64, device=target.device))
    try:
        target.output_logits(embedded)
    except RuntimeError as error:
        reason = "embedding and output matrix of this target differ in width"
        raise ConfigError("head", head, f"{reason}; choose a drafter without a head") from error
    return embedded.shape[-1], embedded.dtype


def _described(target: LanguageModel, width: int) -> ModelConfig:
    """What a head must fit, of a target that runs through transformers; of its layers only their number counts."""
    return ModelConfig(
        model_type="other",
        vocab_size=target.vocab_size,
        hidden_size=width,
        intermediate_size=width,
        num_layers=target.num_layers,
        num_heads=1,
        num_kv_heads=1,
        head_dim=width,
        max_context_tokens=target.max_context_tokens,
    )


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
        warn(SpeculationWarning(f"{advice}; {PROBE_VARIABLE}=0 turns this trial off"), stacklevel=2)


@torch.inference_mode()
def probe(head: Head, target: SharesWeights, num_rows: int = NUM_ROWS) -> Probe:
    """Try `head`, whose matrices are plain, along `num_rows` tokens that `target` writes after token 0.

    Costs as many steps of the target as rows, one after the other (fewer if they take more than a second), and some
    passes of the head over them.
    """
    variants = list(neighbours(head))
    read = [layer for one in (head, *(other for _, other in variants)) for layer in one.hidden_layers()]
    batch = _own_text(target, num_rows, sorted({*read, target.num_layers}))
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


def _own_text(target: SharesWeights, num_rows: int, layers: list[int]) -> HeadBatch:
    """One window that the target continues greedily, with its states at `layers`."""
    sequence = -1  # no request has this number
    tokens, states = [0], list[dict[int, Tensor]]()
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
    for seed in range(_NUM_SEEDS if head.samples_rows else 1):
        for place in head.places(batch, target, _MAX_PLACES, seed):
            wanted = batch.tokens[0, place.rows + 1]
            hits = head.vocabulary.to_target(place.logits.argmax(-1)) == wanted
            own = head.vocabulary.expand(place.logits.float().log_softmax(-1))
            sure = own.gather(1, wanted[:, None]).squeeze(1).clamp(min=_MIN_LOG)
            rows = zip(place.rows.tolist(), hits.tolist(), sure.tolist(), strict=True)
            found |= {(place.number, row): (hit, log) for row, hit, log in rows}
    return found


def _shares(scores: _Scores) -> tuple[float, ...]:
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


def neighbours(head: Head) -> Iterator[tuple[str, Head]]:
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
        hits = (absolute[own] == tokens[place.rows + 1]).float()
        found.append(("d2t read as token numbers, not offsets", float(hits.mean())))
    return found
