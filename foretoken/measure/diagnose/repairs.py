"""The likely mistakes that cost acceptance, each with its repair, which is tried.

One that a head's files or the engine's settings hold changes the head; one in what is asked changes the texts, so that
the target answers anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from foretoken.draft.open_head import neighbours
from foretoken.heads.base import DraftVocabulary, Head
from foretoken.heads.checkpoint import make_head
from foretoken.heads.config import BlockConfig, EagleConfig, HeadConfig
from foretoken.measure.diagnose.reference import Sampling
from foretoken.model.architecture import ModelConfig
from foretoken.train.students import Student

_ROPE_BASES = (10_000.0, 500_000.0, 1_000_000.0)
_LENGTHS = tuple(2**power for power in range(4, 16))
_MAX_LENGTHS = 3


@dataclass(frozen=True)
class Asking:
    """How prompts become tokens: through the chat template, with the first token (BOS) added or removed."""

    chat: bool = False
    turn_bos: bool = False


@dataclass(frozen=True)
class Repair:
    """One mistake undone: its `cause` by name, what is `changed`, and the `remedy`.

    `head` is the head with other settings, `length` the longest text that it sees; None: as it is.
    """

    cause: str
    changed: str
    remedy: str
    head: Head | None = None
    asking: Asking | None = None
    sampling: Sampling | None = None
    length: int | None = None


def head_repairs(head: Student, target: ModelConfig) -> Iterator[Repair]:
    """Repairs of the head's config.json and tables."""
    if not isinstance(head, Head):
        return
    for changed, other in neighbours(head):
        cause = "layer taps" if changed.startswith(("layers", "exit_layer")) else "norm flag"
        cause = "block flag" if changed.startswith(("causal", "sample_from_anchor")) else cause
        yield Repair(cause, changed, _config_remedy(other.config, changed), other)
    yield from _rope_repairs(head, target)
    yield from _vocabulary_repairs(head)


def text_repairs(asking: Asking, sampling: Sampling, has_template: bool) -> Iterator[Repair]:
    """Repairs of what the target is asked, and of how drafts are drawn."""
    if has_template:
        word, flag = ("without", "no --chat") if asking.chat else ("with", "--chat")
        remedy = f"ask {word} the chat template ({flag} here; chat/completions or completions of a server)"
        yield Repair("chat template", f"{word} the chat template", remedy, asking=replace(asking, chat=not asking.chat))
    remedy = "correct the post_processor of the target's tokenizer.json, or what the client puts before its text"
    changed = "BOS added where there was none, removed where there was one"
    yield Repair("BOS", changed, remedy, asking=replace(asking, turn_bos=True))
    if sampling.temperature > 0:
        remedy = f"lower the temperature of requests (now {sampling.temperature:g})"
        yield Repair("temperature", "temperature 0", remedy, asking=asking, sampling=Sampling())
        if sampling.greedy_drafts:
            remedy = "let the engine sample its drafts from the head's distribution"
            yield Repair("greedy drafts", "drafts sampled", remedy, sampling=replace(sampling, greedy_drafts=False))


def length_repairs(head: Student, longest: int, trained: int | None) -> Iterator[Repair]:
    """Windows of the length that the head was trained with, shorter than the `longest` text; without one (`trained`)
    a few powers of two.
    """
    if not isinstance(head, Head) or not isinstance(head.config, EagleConfig | BlockConfig):
        return
    known = [] if trained is None or trained >= longest else [trained]
    lengths: Sequence[int] = known or [length for length in _LENGTHS if length <= longest // 2][-_MAX_LENGTHS:]
    for length in lengths:
        remedy = f"the head was trained on texts of about {length} tokens: draft only in shorter ones, or train it on "
        remedy += "longer windows (foretoken train eagle --set train.length=N)"
        yield Repair("training length", f"the last {length} tokens only", remedy, length=length)


def _config_remedy(config: HeadConfig, changed: str) -> str:
    if isinstance(config, EagleConfig) and changed.startswith("layers"):
        return f"set eagle_aux_hidden_state_layer_ids to {list(config.taps)} in the head's config.json"
    if isinstance(config, BlockConfig) and changed.startswith("layers"):
        ids = [tap - 1 for tap in config.taps]
        return f"set target_layer_ids of dflash_config to {ids} in the head's config.json"
    return f"set {changed.partition(' in place')[0]} in the head's config.json"


def _rope_repairs(head: Head, target: ModelConfig) -> Iterator[Repair]:
    config = head.config
    if not isinstance(config, EagleConfig | BlockConfig):
        return
    ropes = {"the target's": target.rope} | {
        f"{theta:,.0f}": replace(config.layer.rope, theta=theta) for theta in _ROPE_BASES
    }
    tried = [config.layer.rope]
    for name, rope in ropes.items():
        if rope in tried:
            continue
        tried.append(rope)
        changed = f"rope_theta={rope.theta:.0f} ({name})" if name == "the target's" else f"rope_theta={rope.theta:.0f}"
        remedy = f"set rope_theta={rope.theta:.0f} in the head's config.json (it says {config.layer.rope.theta:.0f})"
        other = _remade(head, replace(config, layer=replace(config.layer, rope=rope)))
        yield Repair("rope base", changed, remedy, other)


def _vocabulary_repairs(head: Head) -> Iterator[Repair]:
    vocabulary = head.vocabulary
    if vocabulary.is_whole:
        return
    for step in (1, -1):
        ids = vocabulary.ids + step
        if int(ids[0]) >= 0 and int(ids[-1]) < vocabulary.target_vocab_size:
            other = _remade(head, head.config, DraftVocabulary(ids, vocabulary.target_vocab_size))
            remedy = f"add {step} to every entry of the tensor d2t in the head's weights, and shift t2d with it"
            yield Repair("d2t table", f"d2t {step:+d}", remedy, other)


def _remade(head: Head, config: HeadConfig, vocabulary: DraftVocabulary | None = None) -> Head:
    """The same weights under another configuration."""
    other = make_head(config, vocabulary or head.vocabulary)
    other.load_state_dict(head.state_dict(), assign=True)
    return other.requires_grad_(False)
