"""One forward of the target over a whole batch: committed rows and guesses in, the target's law of every row out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foretoken.core import Batch, Draft
from foretoken.model.interface import ForwardOutput, LanguageModel, Segment
from foretoken.model.sampling import check_finite, target_probs, tie_gaps


@dataclass(frozen=True)
class TargetOutput:
    """What the target says of every row: R = B + N rows of the decoding entries, in the order of `core`.

    `probs` [R, V] float32 is the law after all sampling parameters, `processed` [R, V] the logits after each request's
    processors, `logits` [R, V] the model's own. `taps` by layer [R, D]. `prompt_logits` [n, V] by request, where prompt
    log-probabilities were asked for: one row for each of an entry's `num_prompt_rows`. `probe_logits` [P, V] are
    the model's own behind the draft's probes, None where there are none or they had to be left out.
    """

    probs: Tensor
    processed: Tensor
    logits: Tensor
    taps: dict[int, Tensor]
    broken: frozenset[int]  # rows whose logits are not finite; their law here means nothing
    tie_gaps: tuple[float, ...]  # [R] gap of greedy rows whose choice hangs on rounding, infinity elsewhere
    prompt_logits: dict[int, Tensor]
    probe_logits: Tensor | None = None


@dataclass(frozen=True)
class _Rows:
    """The target's answers, sorted: rows that decode [R, V] with their taps, prompt rows by request, probes [P, V]."""

    logits: Tensor
    taps: dict[int, Tensor]
    prompt_logits: dict[int, Tensor]
    probe_logits: Tensor | None


class Runner:
    """Lays a batch and its draft out as one flat run of tokens for the target."""

    def __init__(self, target: LanguageModel) -> None:
        self.target = target

    def forward(self, batch: Batch, draft: Draft, taps: Sequence[int] = ()) -> TargetOutput:
        """Run every pending token, guess and probe; answer for the decoding entries' rows, `taps` included.

        A masked key that is not finite still spoils the rows that share its call. Probes that may have done so are left out.
        """
        rows = self._run(batch, draft, taps)
        if draft.probes is not None and not bool(check_finite(rows.logits).all()):
            rows = self._run(batch, replace(draft, probes=None), taps)
        return self._law(batch, draft, rows)

    def _run(self, batch: Batch, draft: Draft, taps: Sequence[int]) -> _Rows:
        segments: list[Segment] = []
        pieces: list[Tensor] = []
        device = self.target.device
        for b, entry in enumerate(batch.entries):
            nodes = slice(draft.offsets[b], draft.offsets[b + 1]) if entry.decodes else slice(0, 0)
            parents, probes = draft.parents[nodes], slice(0, 0)
            if entry.decodes and draft.probes is not None:
                probes = slice(draft.probes.offsets[b], draft.probes.offsets[b + 1])
                parents = (*parents, *(_behind(parent, draft.lengths[b]) for parent in draft.probes.parents[probes]))
            num_logits = entry.num_prompt_rows + (1 + len(parents) if entry.decodes else 0)
            segments.append(Segment(entry.request.request_id, len(entry.pending), parents, num_logits))
            pieces.append(torch.tensor(entry.pending, dtype=torch.int64, device=device))
            if parents:
                pieces.append(draft.tokens[nodes].to(device))
                pieces += [] if draft.probes is None else [draft.probes.tokens[probes].to(device)]
        output = self.target.forward(torch.cat(pieces), segments, taps)
        return _split(batch, draft, segments, output)

    def _law(self, batch: Batch, draft: Draft, rows: _Rows) -> TargetOutput:
        logits = rows.logits
        finite = check_finite(logits)
        broken: frozenset[int] = frozenset()
        clean = logits
        if not bool(finite.all()):
            broken = frozenset(row for row, fine in enumerate(finite.tolist()) if not fine)
            # A broken row gets a harmless law; a request that would use it fails when the step emits, its neighbours go on.
            clean = torch.where(finite[:, None], logits, torch.zeros_like(logits))
        processed = _processed(batch, draft, clean)
        params = [entry.request.params for b, entry in enumerate(batch.decoding) for _ in range(1 + draft.lengths[b])]
        gaps = [torch.inf] * len(params)
        if any(p.greedy for p in params):
            gaps = [gap if p.greedy else torch.inf for gap, p in zip(tie_gaps(processed, logits.dtype).tolist(), params, strict=True)]
        probs = target_probs(processed, params)
        return TargetOutput(probs, processed, logits, rows.taps, broken, tuple(gaps), rows.prompt_logits, rows.probe_logits)


def _behind(parent: int, num_nodes: int) -> int:
    """A probe's parent in the segment, where probes stand after the request's nodes."""
    return -1 if parent < 0 else num_nodes + parent


def _split(batch: Batch, draft: Draft, segments: Sequence[Segment], output: ForwardOutput) -> _Rows:
    """Tell the rows that decode from those that only serve prompt log-probabilities or are probes."""
    logits, taps = output.logits, output.taps
    counts = [entry.num_prompt_rows for entry in batch.entries]
    if not any(counts) and draft.probes is None:
        return _Rows(logits, taps, {}, None)
    prompt_logits: dict[int, Tensor] = {}
    wanted: list[int] = []
    probed: list[int] = []
    first = 0
    for b, (entry, segment, count) in enumerate(zip(batch.entries, segments, counts, strict=True)):
        if count:
            prompt_logits[entry.request.request_id] = logits[first : first + count]
        stop = first + segment.num_logits
        last = stop - draft.probe_lengths[b] if entry.decodes else stop
        wanted += range(first + count, last)
        probed += range(last, stop)
        first = stop
    rows = torch.tensor(wanted, dtype=torch.int64, device=logits.device)
    return _Rows(logits[rows], {layer: tap[rows] for layer, tap in taps.items()}, prompt_logits, logits[probed] if probed else None)


def _processed(batch: Batch, draft: Draft, logits: Tensor) -> Tensor:
    """Every request's own processors on its own rows: `[R, V]`, the input itself where nobody has any."""
    owners = [(b, entry.processors) for b, entry in enumerate(batch.decoding) if entry.processors is not None]
    if not owners:
        return logits
    processed = logits.clone() if logits.dtype in (torch.float32, torch.float64) else logits.float()
    for b, processors in owners:
        rows = slice(draft.anchor_row(b), draft.anchor_row(b) + 1 + draft.lengths[b])
        processed[rows] = processors.adjust(processed[rows], draft.paths(b))
    return processed
