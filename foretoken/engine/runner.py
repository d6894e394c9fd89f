"""One forward of the target over a whole batch: committed rows and draft nodes in, probabilities of every row out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from foretoken.config import SamplingParams
from foretoken.core import NO_TAPS, Batch, BatchEntry, Draft, RaceRows, TapRequest, Uniforms
from foretoken.model.interface import ForwardOutput, LanguageModel, Segment
from foretoken.text.processors import RequestProcessors
from foretoken.text.randomness import round_uniforms
from foretoken.text.sampling import check_finite, near_ties_of, target_probs, top_two
from foretoken.transfer import Later, to_device, to_host
from foretoken.verify import needs_uniforms


@dataclass(frozen=True)
class TargetOutput:
    """The target's output for every row: R = B + N rows of the decoding entries, in the order of `core`.

    `processed` [R, V] are what decides, the logits after each request's processors, rows that are not finite as zeros;
    `best` [R] is the argmax of each, `params` [R] are its sampling parameters. `logits` [R, V] are the model's own.
    `taps` by layer [R, D] are hidden states of the same rows; `prompt_taps` by request and layer [n, D] those of its
    rows before the anchor (of all rows of a chunk), for the requests that `TapRequest.whole` names. `prompt_logits`
    [n, V] by request, where prompt log-probabilities were asked for: one row for each of an entry's `num_prompt_rows`.
    `probe_logits` [P, V] are the model's own behind the draft's probes, None where there are none or they had to be
    left out. `faults` holds what a request's own processors or noise raised, by its place among the decoding entries:
    its rows are invalid, and it fails when the step emits.
    """

    best: Tensor
    params: Sequence[SamplingParams]
    processed: Tensor
    logits: Tensor
    taps: dict[int, Tensor]
    checks: RowChecks
    prompt_logits: dict[int, Tensor]
    probe_logits: Tensor | None = None
    prompt_taps: Mapping[int, Mapping[int, Tensor]] = field(default_factory=dict)
    faults: dict[int, Exception] = field(default_factory=dict)

    @cached_property
    def probs(self) -> Tensor:
        """The probabilities [R, V] after all sampling parameters: made for whoever asks, as greedy rows need none."""
        return target_probs(self.processed, self.params, self.best)


class RowChecks:
    """What the host asks of a forward's rows when it emits, along with what the requests' processors left unread.

    `peaks` [R] are the largest scores, `two` the two largest, None where no row can be a near tie; `greedy` are the
    rows that can, `dtype` what the model computed in. On a device they come with the numbers that decide about the
    draft: a step waits once for both.
    """

    def __init__(
        self,
        entries: Sequence[BatchEntry],
        peaks: Tensor,
        two: tuple[Tensor, Tensor] | None,
        greedy: frozenset[int],
        dtype: torch.dtype,
    ) -> None:
        self._waiting = [
            (entry.processors, len(entry.processors.unread))
            for entry in entries
            if isinstance(entry.processors, RequestProcessors) and entry.processors.unread
        ]
        flags = (one for processors, _ in self._waiting for one in processors.unread)
        self._read, self._has_two, self._greedy = Later(peaks, *(two or ()), *flags), two is not None, greedy
        self._dtype = dtype

    @cached_property
    def _found(self) -> list[list[float]]:
        """Host copies; the processors take theirs."""
        found, first = self._read.numbers, 3 if self._has_two else 1
        for processors, count in self._waiting:
            processors.take(found[first : first + count])
            first += count
        return found

    @cached_property
    def broken(self) -> frozenset[int]:
        """Rows whose logits are not finite; their probabilities are meaningless."""
        return frozenset(row for row, peak in enumerate(self._found[0]) if not math.isfinite(peak))

    @cached_property
    def near_ties(self) -> Mapping[int, float]:
        """By row, the gap of greedy rows whose choice hangs on rounding."""
        if not self._has_two:
            return {}
        near = near_ties_of(self._found[1], self._found[2], self._dtype)
        return {row: gap for row, gap in near.items() if row in self._greedy}


@dataclass(frozen=True)
class _Rows:
    """The target's output, sorted: rows that decode [R, V] with their taps, prompt rows by request, probes [P, V]."""

    logits: Tensor
    taps: dict[int, Tensor]
    prompt_logits: dict[int, Tensor]
    probe_logits: Tensor | None
    prompt_taps: dict[int, dict[int, Tensor]]


class Runner:
    """Lays a batch and its draft out as one flat run of tokens for the target."""

    def __init__(self, target: LanguageModel) -> None:
        self.target = target

    def forward(self, batch: Batch, draft: Draft, taps: TapRequest = NO_TAPS) -> TargetOutput:
        """Run every pending token, draft node and probe; returns the decoding entries' rows, and the taps wanted.

        Attention multiplies a masked key by 0, so one that is not finite spoils the other rows of its call. If logits
        are not finite, the step is run again without the probes, which may have caused it.
        """
        rows = self._run(batch, draft, taps)
        if draft.probes is not None and not all(to_host(check_finite(rows.logits))[0]):
            rows = self._run(batch, replace(draft, probes=None), taps)
        return self._distributions(batch, draft, rows)

    def _run(self, batch: Batch, draft: Draft, taps: TapRequest) -> _Rows:
        segments: list[Segment] = []
        pending: list[int] = []
        for b, entry in enumerate(batch.entries):
            parents: tuple[int, ...] = ()
            if entry.decodes:
                parents = draft.parents[draft.offsets[b] : draft.offsets[b + 1]]
                if draft.probes is not None:
                    probes = draft.probes.parents[draft.probes.offsets[b] : draft.probes.offsets[b + 1]]
                    parents = (*parents, *(_behind(parent, draft.lengths[b]) for parent in probes))
            num_answered = 1 + len(parents) if entry.decodes else 0
            segments.append(
                Segment(
                    entry.request.request_id,
                    len(entry.pending),
                    parents,
                    num_logits=entry.num_prompt_rows + num_answered,
                    num_taps=taps.num_rows(entry, num_answered),
                )
            )
            pending += entry.pending
        output = self.target.forward(_flat(batch, draft, pending, self.target.device), segments, taps.layers)
        return _split(batch, draft, segments, output)

    def _distributions(self, batch: Batch, draft: Draft, rows: _Rows) -> TargetOutput:
        params: list[SamplingParams] = []  # [R]
        for entry, length in zip(batch.decoding, draft.lengths, strict=True):
            params += [entry.request.params] * (1 + length)
        greedy = frozenset(row for row, own in enumerate(params) if own.greedy)
        logits = rows.logits
        has_near_ties = bool(greedy) and logits.dtype in (torch.bfloat16, torch.float16) and logits.shape[-1] > 1
        clean, top = logits, top_two(logits, has_near_ties)
        peaks = top.peaks  # what is not finite counts as largest, so this is `check_finite`
        if logits.device.type != "cpu" or not all(map(math.isfinite, peaks.tolist())):
            # Elsewhere asking would wait for the device. A broken row gets a harmless distribution; a request that
            # would use it fails when the step emits, its neighbours go on.
            clean = torch.where(peaks.isfinite().unsqueeze(-1), logits, torch.zeros_like(logits))
            top = top_two(clean, has_near_ties)
        faults: dict[int, Exception] = {}
        processed = _processed(batch, draft, clean, faults)
        if processed is not clean:
            top = top_two(processed, has_near_ties)
        two = (top.peaks, top.seconds) if has_near_ties and top.seconds is not None else None
        return TargetOutput(
            best=top.best,
            params=params,
            processed=processed,
            logits=logits,
            taps=rows.taps,
            checks=RowChecks(batch.decoding, peaks, two, greedy, logits.dtype),
            prompt_logits=rows.prompt_logits,
            probe_logits=rows.probe_logits,
            prompt_taps=rows.prompt_taps,
            faults=faults,
        )


def _flat(batch: Batch, draft: Draft, pending: Sequence[int], device: torch.device) -> Tensor:
    """The step's tokens [T]: for each entry its part of all `pending` tokens, its draft tokens, its probes. Draft
    tokens that the host does not have stay on their device.
    """
    probes = draft.probes
    if not draft.num_nodes and probes is None:
        return to_device(pending, device)
    if draft.has_host_tokens and probes is None:
        return to_device(_flat_on_host(batch, draft), device)
    own = to_device(pending, device)
    parts = [own, to_device(draft.tokens, device), *([] if probes is None else [to_device(probes.tokens, device)])]
    first, behind = 0, len(pending) + draft.num_nodes  # of an entry's pending tokens, of all probes
    order: list[int] = []
    for b, entry in enumerate(batch.entries):
        order += range(first, first + len(entry.pending))
        first += len(entry.pending)
        if entry.decodes:
            order += range(len(pending) + draft.offsets[b], len(pending) + draft.offsets[b + 1])
            order += () if probes is None else range(behind + probes.offsets[b], behind + probes.offsets[b + 1])
    return torch.cat(parts)[to_device(order, device)]


def _flat_on_host(batch: Batch, draft: Draft) -> list[int]:
    """`_flat` of a draft without probes whose tokens the host has: nothing is sorted on a device."""
    flat: list[int] = []
    for b, entry in enumerate(batch.entries):
        flat += entry.pending
        if entry.decodes:
            flat += draft.host_tokens[draft.offsets[b] : draft.offsets[b + 1]]
    return flat


def _behind(parent: int, num_nodes: int) -> int:
    """A probe's parent in the segment, where probes stand after the request's nodes."""
    return -1 if parent < 0 else num_nodes + parent


def _split(batch: Batch, draft: Draft, segments: Sequence[Segment], output: ForwardOutput) -> _Rows:
    """Separate the rows that decode from prompt rows and probes, for logits and for taps."""
    logits = output.logits
    taps, prompt_taps = _split_taps(batch, draft, segments, output.taps)
    if draft.probes is None and not any(entry.num_prompt_rows for entry in batch.entries):
        return _Rows(logits, taps, {}, None, prompt_taps)
    prompt_logits: dict[int, Tensor] = {}
    wanted: list[int] = []
    probed: list[int] = []
    for request_id, text, decoding, probes in _sections(batch, draft, [one.num_logits for one in segments]):
        if text:
            prompt_logits[request_id] = logits[text.start : text.stop]
        wanted += decoding
        probed += probes
    probe_logits = logits[_index(probed, logits)] if probed else None
    return _Rows(logits[_index(wanted, logits)], taps, prompt_logits, probe_logits, prompt_taps)


def _split_taps(
    batch: Batch, draft: Draft, segments: Sequence[Segment], taps: Mapping[int, Tensor]
) -> tuple[dict[int, Tensor], dict[int, dict[int, Tensor]]]:
    """Hidden states [R, D] by layer of the rows that decode, and by request [n, D] of the rows before its anchor."""
    if not taps:
        return {}, {}
    wanted: list[int] = []
    prompts: dict[int, dict[int, Tensor]] = {}
    for request_id, text, decoding, _ in _sections(batch, draft, [one.num_taps for one in segments]):
        wanted += decoding
        if text:
            prompts[request_id] = {layer: tap[text.start : text.stop] for layer, tap in taps.items()}
    return {layer: tap[_index(wanted, tap)] for layer, tap in taps.items()}, prompts


def _sections(batch: Batch, draft: Draft, counts: Sequence[int]) -> Iterator[tuple[int, range, range, range]]:
    """Of each entry, which has `counts` rows of a tensor: its request, then its rows of text, those that decode (the
    anchor and its nodes), and its probes.
    """
    first = 0
    for b, (entry, num_rows) in enumerate(zip(batch.entries, counts, strict=True)):
        stop = first + num_rows
        probes = stop - draft.probe_lengths[b] if entry.decodes else stop
        anchor = probes - 1 - draft.lengths[b] if entry.decodes else stop
        yield entry.request.request_id, range(first, anchor), range(anchor, probes), range(probes, stop)
        first = stop


def _index(rows: Sequence[int], tensor: Tensor) -> slice | Tensor:
    """An index of `rows`, which are some rows of `tensor`, in order."""
    if len(rows) == tensor.shape[0]:
        return slice(None)
    return to_device(rows, tensor.device)


def _processed(batch: Batch, draft: Draft, logits: Tensor, faults: dict[int, Exception]) -> Tensor:
    """Every request's own processors on its own rows: `[R, V]`, the input itself where nobody has any.

    Rows of a request whose processors raise stay as they are; the error goes to `faults`.
    """
    owners = [(b, entry.processors) for b, entry in enumerate(batch.decoding) if entry.processors is not None]
    if not owners:
        return logits
    processed = logits.clone() if logits.dtype in (torch.float32, torch.float64) else logits.float()
    for b, processors in owners:
        rows = slice(draft.anchor_row(b), draft.anchor_row(b) + 1 + draft.lengths[b])
        try:
            processed[rows] = processors.adjust(processed[rows], draft.paths(b))
        except Exception as error:  # noqa: BLE001 - a grammar or bias of one request is nobody else's concern
            faults[b] = error
    return processed


def uniforms_of(batch: Batch, draft: Draft, target: TargetOutput, rules: Sequence[str]) -> Uniforms:
    """The round's random numbers; where no rule reads any, numbers that would break one that did.

    Where the noise of a request raises, the error goes to the target's `faults`, and any noise will do.
    """
    entries, device = batch.decoding, target.processed.device
    if any(needs_uniforms(rule) for rule in set(rules)):
        seeds, starts = [entry.request.seed for entry in entries], [entry.round_start for entry in entries]
        uniforms = round_uniforms(draft, seeds, starts, device)
    else:
        uniforms = Uniforms(
            torch.full((draft.num_nodes,), torch.nan, device=device, dtype=torch.float32),
            torch.full((draft.num_requests,), torch.nan, device=device, dtype=torch.float32),
        )
    if all(entry.noise is None for entry in entries):
        return uniforms
    return replace(uniforms, race=tuple(_race_rows(entry, draft, b, target) for b, entry in enumerate(entries)))


def _race_rows(entry: BatchEntry, draft: Draft, b: int, target: TargetOutput) -> Tensor | RaceRows | None:
    """The coupled rule's noise `[1 + nodes, V]` for the rows of decoding entry `b`, None where its rule needs none."""
    if entry.noise is None:
        return None
    try:
        return entry.noise.rows([entry.round_start + depth for depth in (0, *draft.depths(b))])
    except Exception as error:  # noqa: BLE001 - as above
        target.faults[b] = error
        return torch.ones(
            1 + draft.lengths[b], target.processed.shape[-1], device=target.processed.device, dtype=torch.float32
        )
