"""Memory of a run: weights, both caches, the working memory of a step and a reserve, from shapes alone.

Sizes are those of foretoken's own layout: a cache in blocks, one flat run of rows per step, logits for decoding rows
only. The reserve covers what shapes do not tell: the interpreter, unused memory of the allocator, a CUDA context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from foretoken.option import option

# Float32 values per vocabulary entry of a decoding row: logits, scaled logits, softmax, target probabilities, draft
# probabilities, and for top_p the sorted values, 8-byte indices and sums.
_PROBS_BYTES = 5 * 4 + 4 + 8 + 4


@dataclass(frozen=True)
class ModelShape:
    """Memory of a model: `weight_bytes` once, `kv_bytes_per_token` for every token of cache, the rest during a step.

    `row_bytes` is the maximum that one row of the flat run needs at a time, `mask_bytes` what a row adds for every
    token it can attend to, `gather_bytes` what a token of the longest sequence adds: one layer's keys and values
    (gathered when a sequence's blocks are not contiguous) and its entry in the tables of rotary embeddings.
    `weight_format` is "int8" or "int4" where most matrices are held in codes.
    """

    name: str
    weight_bytes: int
    kv_bytes_per_token: int
    row_bytes: int
    mask_bytes: int
    gather_bytes: int
    vocab_size: int
    itemsize: int
    max_context_tokens: int
    block_tokens: int
    weight_format: str = "auto"

    def cache_tokens(self, num_tokens: int) -> int:
        """Maximum cache of a request of `num_tokens`, prompt and answer together, in whole blocks."""
        return -(-min(num_tokens, self.max_context_tokens) // self.block_tokens) * self.block_tokens


@dataclass(frozen=True)
class Load:
    """A load: `batch` requests of at most `context_tokens`, prompt and answer together.

    `num_draft` drafted tokens per request and step; `max_prompt_tokens` prompt tokens per step over all requests.
    """

    batch: int = field(metadata=option("Concurrent requests."))
    context_tokens: int = field(
        metadata=option(
            "Tokens of a request, prompt and answer together; 4096, or the model's own if less.", name="context"
        )
    )
    num_draft: int
    max_prompt_tokens: int = 512


@dataclass(frozen=True)
class Account:
    """Bytes by purpose; the draft's are 0 without a draft model."""

    weight_bytes: int
    draft_weight_bytes: int
    kv_bytes: int
    draft_kv_bytes: int
    workspace_bytes: int

    @property
    def total_bytes(self) -> int:
        """Total without the reserve."""
        return self.weight_bytes + self.draft_weight_bytes + self.kv_bytes + self.draft_kv_bytes + self.workspace_bytes


@dataclass(frozen=True)
class Budget:
    """Memory of the machine, and the share of it that is kept free."""

    memory_bytes: int
    reserve: float = 0.2

    @property
    def usable_bytes(self) -> int:
        """Memory that can be planned with."""
        return int(self.memory_bytes * (1 - self.reserve))

    def missing_bytes(self, account: Account) -> int:
        """How much more usable memory `account` needs; 0 when it fits."""
        return max(0, account.total_bytes - self.usable_bytes)


def account(target: ModelShape, draft: ModelShape | None, load: Load) -> Account:
    """Memory of `load` on `target`, with the draft model `draft` or with a drafter that runs no model."""
    models = [target] if draft is None else [target, draft]
    caches = [load.batch * model.cache_tokens(load.context_tokens) * model.kv_bytes_per_token for model in models]
    return Account(
        weight_bytes=target.weight_bytes,
        draft_weight_bytes=0 if draft is None else draft.weight_bytes,
        kv_bytes=caches[0],
        draft_kv_bytes=0 if draft is None else caches[1],
        # Target and draft run in turn, but the allocator keeps the memory of both.
        workspace_bytes=sum(_workspace_bytes(model, load) for model in models),
    )


def largest_batch(target: ModelShape, draft: ModelShape | None, load: Load, budget: Budget) -> int:
    """Maximum number of requests of `load`'s length that fit at once, 0 if none; ignores `load.batch`."""

    def fits(batch: int) -> bool:
        return not budget.missing_bytes(account(target, draft, replace(load, batch=batch)))

    if not fits(1):
        return 0
    high = 2
    while fits(high) and high < 1 << 20:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def contexts_to_show(target: ModelShape, asked: int) -> tuple[int, ...]:
    """Lengths for a table: powers of two from 512 to the model's maximum, and the requested one."""
    powers = [1 << exponent for exponent in range(9, 31) if 1 << exponent < target.max_context_tokens]
    return tuple(sorted({*powers, target.max_context_tokens, min(asked, target.max_context_tokens)}))


def fitting(
    target: ModelShape,
    draft: ModelShape | None,
    load: Load,
    budget: Budget,
    batches: Sequence[int],
    contexts: Sequence[int],
) -> dict[int, dict[int, int]]:
    """Missing bytes by context and batch; 0 fits."""
    return {
        context: {
            batch: budget.missing_bytes(account(target, draft, replace(load, batch=batch, context_tokens=context)))
            for batch in batches
        }
        for context in contexts
    }


def _workspace_bytes(model: ModelShape, load: Load) -> int:
    """The most expensive step: every request decodes with all its drafted tokens beside a full prompt chunk."""
    context = min(load.context_tokens, model.max_context_tokens)
    answer_rows = load.batch * (1 + load.num_draft)
    chunk_rows = min(load.max_prompt_tokens, load.batch * context)
    rows = answer_rows + chunk_rows
    distributions = answer_rows * model.vocab_size * (model.itemsize + _PROBS_BYTES)
    # Masks are kept for a whole forward, gathered keys and values for one layer and request.
    return rows * model.row_bytes + rows * context * model.mask_bytes + context * model.gather_bytes + distributions
