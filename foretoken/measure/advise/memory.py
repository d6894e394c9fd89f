"""What a drafter takes from the memory of the target: bytes, tokens of cache, requests at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from foretoken.engine.adviser import Advice, of_memory
from foretoken.heads.footprint import draft_shape_of, head_shape_of
from foretoken.machine.memory import available_bytes, parse_bytes
from foretoken.measure.advise.candidates import AdviseCandidate
from foretoken.measure.advise.cells import MemoryRoom
from foretoken.measure.advise.options import AdviseOptions
from foretoken.model.footprint import shape_of
from foretoken.model.names import model_folder
from foretoken.plan.memory import Budget, Load, ModelShape, account, largest_batch


@dataclass(frozen=True)
class MemoryRow:
    """A candidate beside the target at the highest load: bytes with and without it, and what it displaces.

    `displaced_tokens` are tokens of the target's cache that its bytes would hold. `left_free` is the share of the
    memory that is free then.
    """

    candidate: str
    draft_weight_bytes: int
    draft_kv_bytes: int
    total_bytes: int
    plain_bytes: int
    displaced_tokens: int
    left_free: float
    room: MemoryRoom

    @property
    def displaced_bytes(self) -> int:
        """What it takes in all."""
        return self.total_bytes - self.plain_bytes


def budget_of(options: AdviseOptions, device: torch.device) -> Budget:
    """The memory to plan with.

    Raises:
        InputError: no size.
        StorageError: the system does not report what is free.
    """
    known = available_bytes(device) if options.memory is None else parse_bytes(options.memory)
    return Budget(known, options.reserve)


def memory_rows(
    options: AdviseOptions,
    candidates: Sequence[AdviseCandidate],
    budget: Budget,
    prompt_tokens: int,
    device: torch.device,
) -> list[MemoryRow]:
    """A row for each candidate.

    Raises:
        ModelError: shapes that do not follow from the files.
    """
    target = shape_of(model_folder(options.target), options.target, options.dtype, device.type, options.weights)
    context = min(prompt_tokens + options.max_tokens, target.max_context_tokens)
    load = Load(options.loads[-1], context, 0)
    plain, plain_room = account(target, None, load), largest_batch(target, None, load, budget)
    own, found = Load(load.batch, load.context_tokens, max(options.lengths), load.max_prompt_tokens), []
    for one in candidates:
        draft = _shape(options, one, target, device)
        needed = account(target, draft, own)
        displaced = needed.total_bytes - plain.total_bytes
        row = MemoryRow(
            one.name,
            needed.draft_weight_bytes,
            needed.draft_kv_bytes,
            needed.total_bytes,
            plain.total_bytes,
            displaced // target.kv_bytes_per_token if target.kv_bytes_per_token else 0,
            1 - needed.total_bytes / budget.memory_bytes,
            MemoryRoom(plain_room, largest_batch(target, draft, own, budget)),
        )
        found.append(row)
    return found


def _shape(
    options: AdviseOptions, candidate: AdviseCandidate, target: ModelShape, device: torch.device
) -> ModelShape | None:
    spec = candidate.spec
    if candidate.kind == "draft model" and spec.draft is not None:
        return draft_shape_of(spec.draft, options.dtype, target.weight_format, spec.draft_dtype, device.type)
    if candidate.kind == "head" and spec.head is not None and spec.drafter != "early_exit":
        return head_shape_of(spec.head, options.target, target, spec.draft_dtype, device.type)
    return None


def memory_advice(row: MemoryRow, budget: Budget) -> Advice | None:
    """Whether weights and full caches leave the usual reserve free."""
    return of_memory(row.total_bytes, budget.memory_bytes, "the memory that was given or found")
