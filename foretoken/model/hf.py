"""Any other causal language model, run by transformers behind our interface: exact, though slower.

A sequence is a list of token ids. Its cache is only a shortcut: before a forward it is cut back to the longest prefix
it shares with what is to be read, and the rest is run again. So `commit` and `rollback` merely edit the list, and a
family whose cache cannot be cut back (recurrent, hybrid, chunked) is recomputed from the start each time.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from foretoken.errors import CapacityError, UnsupportedModelError
from foretoken.model.hf_loading import load_with_transformers
from foretoken.model.interface import ForwardOutput, Segment
from foretoken.model.loader import read_raw_config
from foretoken.model.quiet import quiet_transformers
from foretoken.model.rope_json import CONTEXT_KEYS, UNBOUNDED_CONTEXT_TOKENS, context_tokens
from foretoken.model.trial import Findings, try_out
from foretoken.transfer import to_device, to_host

_DEFAULT_CAPACITY_TOKENS = 65_536

_Foreign: TypeAlias = Any  # objects of transformers, which has no types


@dataclass
class _Sequence:
    """`tokens` are committed; `cached`: ids whose keys and values `cache` holds; `reserved`: rows promised."""

    tokens: list[int] = field(default_factory=list)
    reserved: int = 0
    cache: _Foreign = None
    cached: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)  # of the last forward
    nodes: list[int] = field(default_factory=list)  # of the last forward, held ones included


class TransformersModel:
    """A transformers causal language model as a `LanguageModel`.

    `capacity_tokens` bounds the tokens of all open sequences together; `max_context_tokens` is the longest sequence
    over which every way to run the model agrees, or a bound of our own for models without one. Tap number `num_layers`
    comes after the model's final norm, because that is what transformers reports; the others are the residual stream.

    Raises:
        UnsupportedModelError: not a causal language model, or one that needs code from its own repository.
        CheckpointError: a file is missing or broken.
    """

    numerics = "default"
    kv_bytes_per_token = 0  # what a family keeps of a token does not follow from its configuration
    logit_softcap = 0.0  # of `output_logits`, whatever the family does to them afterwards

    def __init__(
        self,
        folder: Path,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "cpu",
        capacity_tokens: int | None = None,
    ) -> None:
        self.folder = folder
        raw = read_raw_config(folder)
        with quiet_transformers() as reports:
            self._model = load_with_transformers(folder, raw, dtype, torch.device(device), reports)
            text = self._model.config.get_text_config(decoder=True)
            findings, self.max_context_tokens = _try_out(self._model, text)
        self.eos_token_ids = _as_ids(raw.get("eos_token_id", getattr(text, "eos_token_id", None)))
        self._keeps_logits = "logits_to_keep" in inspect.signature(self._model.forward).parameters
        self.can_crop, self.vocab_size = findings.uses_cache, findings.num_columns
        self.num_layers = findings.num_layers or int(text.num_hidden_layers)
        parameters: list[Tensor] = list(self._model.parameters())
        self.dtype, self.device = parameters[0].dtype, torch.device(self._model.device)
        self.num_parameters = sum(parameter.numel() for parameter in parameters)
        self.weight_bytes = sum(parameter.nbytes for parameter in parameters)
        self.capacity_tokens = capacity_tokens or max(_DEFAULT_CAPACITY_TOKENS, self.max_context_tokens)
        self._sequences: dict[int, _Sequence] = {}

    @property
    def step_bytes(self) -> int:
        """Weights that a step of one token reads, all experts of a mixture counted."""
        table, head = self._model.get_input_embeddings(), self._model.get_output_embeddings()
        tied = table is None or (head is not None and head.weight is table.weight)
        return self.weight_bytes - (0 if tied else table.weight.nbytes)

    def footprint_tokens(self, num_tokens: int) -> int:
        """What a sequence of `num_tokens` takes: nothing is rounded."""
        return num_tokens

    def fresh(self) -> TransformersModel:
        """See `interface.OpenModel`."""
        fresh = copy.copy(self)
        fresh._sequences = {}
        return fresh

    @torch.inference_mode()
    def embed(self, tokens: Tensor) -> Tensor:
        """See `interface.SharedWeights`: rows of the table, without what a family does to them afterwards.

        Raises:
            UnsupportedModelError: the family has no such table.
        """
        embedded: Tensor = self._part(self._model.get_input_embeddings(), "embedding table")(tokens)
        return embedded

    def final_norm(self, hidden: Tensor) -> Tensor:
        """See `interface.SharedWeights`: the last tap of such a model comes after its final norm already."""
        return hidden

    @torch.inference_mode()
    def output_logits(self, normed: Tensor) -> Tensor:
        """See `interface.SharedWeights`: the output matrix alone.

        Raises:
            UnsupportedModelError: the family has none.
        """
        logits: Tensor = self._part(self._model.get_output_embeddings(), "output matrix")(normed)
        return logits

    def _part(self, module: _Foreign, what: str) -> _Foreign:
        if module is None:
            raise UnsupportedModelError(f"{self.folder} has no {what} that a trained head could use; draft without one")
        return module

    def open(self, sequence: int) -> None:
        """Begin an empty sequence."""
        assert sequence not in self._sequences, f"sequence {sequence} is open already"
        self._sequences[sequence] = _Sequence()

    def close(self, sequence: int) -> None:
        """Forget a sequence."""
        del self._sequences[sequence]

    def length(self, sequence: int) -> int:
        """Number of committed tokens."""
        return len(self._sequences[sequence].tokens)

    def num_free_tokens(self) -> int:
        """Tokens that can still be held over all sequences."""
        return self.capacity_tokens - sum(state.reserved for state in self._sequences.values())

    def reserve(self, sequence: int, num_rows: int) -> bool:
        """Make room for `num_rows` more rows; False (and no change) if there is none."""
        state = self._sequences[sequence]
        wanted = max(state.reserved, len(state.tokens) + num_rows)
        if wanted - state.reserved > self.num_free_tokens():
            return False
        state.reserved = wanted
        return True

    @torch.inference_mode()
    def forward(self, tokens: Tensor, segments: Sequence[Segment], taps: Sequence[int] = ()) -> ForwardOutput:
        """Run the flat `tokens` [T], one sequence after the other; each path of a tree is a continuation of its own.

        Raises:
            CapacityError: no room for the rows.
        """
        taps = taps if any(segment.num_taps for segment in segments) else ()
        for segment in segments:
            if not self.reserve(segment.sequence, segment.num_held + segment.num_rows):
                raise CapacityError(f"no room for {segment.num_rows} more rows of sequence {segment.sequence}")
        flat: list[int] = to_host(tokens)[0]
        logits: list[Tensor] = []
        tapped: dict[int, list[Tensor]] = {layer: [] for layer in taps}
        start = 0
        for segment in segments:
            rows, hidden = self._segment(flat[start : start + segment.num_rows], segment, taps)
            start += segment.num_rows
            logits.append(rows)
            for layer in taps:
                tapped[layer].append(hidden[layer])
        return ForwardOutput(torch.cat(logits), {layer: torch.cat(parts) for layer, parts in tapped.items()})

    def commit(self, sequence: int, num_pending: int, path: Sequence[int] = ()) -> None:
        """Keep the pending rows and the nodes of `path`, forget the other nodes."""
        state = self._sequences[sequence]
        assert num_pending <= len(state.pending)
        state.tokens += state.pending[:num_pending] + [state.nodes[node] for node in path]
        state.pending, state.nodes, state.reserved = [], [], len(state.tokens)

    def rollback(self, sequence: int, length: int) -> None:
        """Forget everything after the first `length` tokens."""
        state = self._sequences[sequence]
        assert length <= len(state.tokens)
        del state.tokens[length:]
        state.pending, state.nodes, state.reserved = [], [], length

    def _segment(self, rows: list[int], segment: Segment, taps: Sequence[int]) -> tuple[Tensor, dict[int, Tensor]]:
        """Logits `[num_logits, V]` and taps `[num_taps, D]` of the last rows of one segment."""
        state = self._sequences[segment.sequence]
        state.pending, state.nodes = (
            rows[: segment.num_pending],
            state.nodes[: segment.num_held] + rows[segment.num_pending :],
        )
        num_logits, num_taps = segment.num_logits, segment.num_taps if taps else 0
        if segment.is_chain:
            return self._run(state, state.pending + state.nodes, num_logits, num_taps, taps)
        logits, hidden = _RowTable(), {layer: _RowTable() for layer in taps}
        for path in _paths(segment.parents):
            if path[-1] < segment.num_held:
                continue  # nothing new on it
            numbers = [*range(segment.num_pending), *(segment.num_pending + node for node in path)]
            # All rows of the path whose logits or taps are wanted: at most the pending ones and the path itself.
            most = len(numbers)
            found, taken = self._run(
                state,
                state.pending + [state.nodes[node] for node in path],
                min(num_logits, most),
                min(num_taps, most),
                taps,
            )
            logits.add(numbers, found)
            for layer in taps:
                hidden[layer].add(numbers, taken[layer])
        last = segment.num_pending + len(state.nodes)
        return logits.take(range(last - num_logits, last)), {
            layer: table.take(range(last - num_taps, last)) for layer, table in hidden.items()
        }

    def _run(
        self, state: _Sequence, rows: list[int], num_logits: int, num_taps: int, taps: Sequence[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Logits `[num_logits, V]` and taps `[num_taps, D]` of the last of `rows`, read behind the committed tokens."""
        whole = state.tokens + rows
        num_logits_run = max(num_logits, 1)
        kept = self._cut_back(state, whole, len(whole) - max(num_logits_run, num_taps))
        options: dict[str, Any] = {"logits_to_keep": num_logits_run} if self._keeps_logits else {}
        if taps:
            options["output_hidden_states"] = True
        if self.can_crop:
            options["past_key_values"] = state.cache
        output = self._model(to_device([whole[kept:]], self.device), use_cache=self.can_crop, **options)
        if self.can_crop:
            state.cached = whole
        logits: Tensor = output.logits[0]
        hidden = {layer: _last(output.hidden_states[layer][0], num_taps) for layer in taps}
        return _last(logits, num_logits), hidden

    def _cut_back(self, state: _Sequence, whole: list[int], most: int) -> int:
        """Crop the cache to the prefix it shares with `whole`, at most `most` tokens; return how many it holds."""
        if not self.can_crop:
            return 0
        if state.cache is None:
            state.cache, state.cached = _new_cache(self._model.config), []
        shared = min(len(state.cached), most)
        if state.cached[:shared] != whole[:shared]:
            shared = next(i for i in range(shared) if state.cached[i] != whole[i])
        if shared < len(state.cached):
            state.cache.crop(shared - len(state.cached))
        return shared


def _context_tokens(text: _Foreign) -> int:
    known = [getattr(text, key, None) for key in CONTEXT_KEYS]
    stated = next((int(value) for value in known if isinstance(value, int) and value > 0), UNBOUNDED_CONTEXT_TOKENS)
    # Doge chooses which tokens of a longer text to keep, and looks at later ones for it.
    longest = context_tokens(text.to_dict(), stated)
    return min(longest, getattr(text, "keep_window_size", None) or longest)


@torch.inference_mode()
def _try_out(model: _Foreign, text: _Foreign) -> tuple[Findings, int]:
    """What a few tokens show, and the longest sequence that may be run."""
    context = _context_tokens(text)
    takes_cache = (
        "past_key_values" in inspect.signature(model.forward).parameters and _new_cache(model.config) is not None
    )
    findings = try_out(
        model, int(text.vocab_size), context, (lambda: _new_cache(model.config)) if takes_cache else None
    )
    return findings, min(context, findings.num_positions or context)


def _new_cache(config: _Foreign) -> _Foreign:
    """A cache that keeps all keys and values, also of sliding layers (the mask hides the old ones).

    None where a layer keeps something else, which cannot be cut back, or where the mask needs to know that old keys are
    gone.
    """
    from transformers import cache_utils
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    known = {DynamicLayer, DynamicSlidingWindowLayer, getattr(cache_utils, "DummyLayer", None)}  # later than 5.17
    try:
        cache = DynamicCache(config=config)
    except (AttributeError, KeyError, TypeError, ValueError):  # a cache of the family's own making
        return None
    kinds = {type(layer) for layer in cache.layers}
    types = getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
    if not kinds or kinds - known or "chunked_attention" in types:
        return None
    cache.layers = [DynamicLayer() if type(layer) is DynamicSlidingWindowLayer else layer for layer in cache.layers]
    # A decoder may have more layers than the configuration counts: the encoder's.
    cache.layer_class_to_replicate = DynamicLayer
    return cache


def _last(rows: Tensor, count: int) -> Tensor:
    """The last `count` rows, none for 0."""
    return rows[rows.shape[0] - count :]


class _RowTable:
    """Rows of a segment by their number in it (held nodes counted), collected path by path."""

    def __init__(self) -> None:
        self._rows: dict[int, Tensor] = {}
        self._empty = torch.empty(0, dtype=torch.float32)

    def add(self, numbers: Sequence[int], rows: Tensor) -> None:
        """`rows` [n, ...] are those of the last n of `numbers`; a row that is known already stays as it is."""
        self._empty = rows[:0]
        for number, row in zip(numbers[len(numbers) - len(rows) :], rows, strict=True):
            self._rows.setdefault(number, row)

    def take(self, numbers: Sequence[int]) -> Tensor:
        return torch.stack([self._rows[number] for number in numbers]) if numbers else self._empty


def _paths(parents: Sequence[int]) -> list[list[int]]:
    """Every root-to-leaf path of a tree."""
    leaves = set(range(len(parents))) - set(parents)
    paths = []
    for leaf in sorted(leaves):
        path, node = [], leaf
        while node >= 0:
            path.append(node)
            node = parents[node]
        paths.append(path[::-1])
    return paths


def _as_ids(eos: int | Sequence[int] | None) -> tuple[int, ...]:
    return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
