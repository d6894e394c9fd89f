"""Will it fit? Weights, both caches, the working memory of a step and a reserve, from shapes alone.

Sizes are those of foretoken's own layout: a cache in blocks, one flat run of rows per step, logits for decoding rows
only. What cannot be known from shapes (the interpreter, the allocator's slack, a CUDA context) is what the reserve is
for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

# Numbers per vocabulary entry of a decoding row while its law is made: logits in float32, scaled, softmax, law, the
# drafter's law, and for top_p an order (values, 8-byte places) and its sums.
_LAW_BYTES = 5 * 4 + 4 + 8 + 4


@dataclass(frozen=True)
class ModelShape:
    """What a model takes: `weight_bytes` once, `kv_bytes_per_token` for every token of cache, the rest while a step
    runs.

    `row_bytes` is the most that one row of the flat run needs at a time, `mask_bytes` what a row adds for every token
    it may see, `gather_bytes` what a token of the longest sequence adds: one layer's keys and values (read together
    when a sequence's blocks lie scattered) and its place in the tables of rotary embeddings.
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

    def cache_tokens(self, num_tokens: int) -> int:
        """Cache that one request of `num_tokens`, prompt and answer together, may come to hold; whole blocks."""
        return -(-min(num_tokens, self.max_context_tokens) // self.block_tokens) * self.block_tokens


@dataclass(frozen=True)
class Load:
    """What is to run at once: `batch` requests of at most `context_tokens`, prompt and answer together.

    `num_draft` guesses per request and step; `max_prompt_tokens` of prompts are taken per step over all requests.
    """

    batch: int
    context_tokens: int
    num_draft: int
    max_prompt_tokens: int = 512


@dataclass(frozen=True)
class Account:
    """Bytes by purpose; the draft's are 0 where no draft model runs."""

    weight_bytes: int
    draft_weight_bytes: int
    kv_bytes: int
    draft_kv_bytes: int
    workspace_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it, without the reserve."""
        return self.weight_bytes + self.draft_weight_bytes + self.kv_bytes + self.draft_kv_bytes + self.workspace_bytes


@dataclass(frozen=True)
class Budget:
    """Memory of the machine, and the share of it that stays free."""

    memory_bytes: int
    reserve: float = 0.2

    @property
    def usable_bytes(self) -> int:
        """What may be planned with."""
        return int(self.memory_bytes * (1 - self.reserve))

    def missing_bytes(self, account: Account) -> int:
        """How much more usable memory `account` needs; 0 when it fits."""
        return max(0, account.total_bytes - self.usable_bytes)


def account(target: ModelShape, draft: ModelShape | None, load: Load) -> Account:
    """What `load` takes on `target`, with the draft model `draft` or with guesses that need no model."""
    models = [target] if draft is None else [target, draft]
    caches = [load.batch * model.cache_tokens(load.context_tokens) * model.kv_bytes_per_token for model in models]
    return Account(
        weight_bytes=target.weight_bytes,
        draft_weight_bytes=0 if draft is None else draft.weight_bytes,
        kv_bytes=caches[0],
        draft_kv_bytes=0 if draft is None else caches[1],
        # Target and draft take turns, but an allocator keeps what either of them had.
        workspace_bytes=sum(_workspace_bytes(model, load) for model in models),
    )


def largest_batch(target: ModelShape, draft: ModelShape | None, load: Load, budget: Budget) -> int:
    """Most requests of `load`'s length that fit at once; 0 when not even one does. `load.batch` is not looked at."""

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
    """Lengths for a table: powers of two from 512 to the longest that the model was made for, and the one asked for."""
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
    """The dearest step: every request decodes with all its guesses beside a full chunk of prompts."""
    context = min(load.context_tokens, model.max_context_tokens)
    answer_rows = load.batch * (1 + load.num_draft)
    chunk_rows = min(load.max_prompt_tokens, load.batch * context)
    rows = answer_rows + chunk_rows
    laws = answer_rows * model.vocab_size * (model.itemsize + _LAW_BYTES)
    # Masks are kept for a whole forward, gathered keys and values for one layer and request.
    return rows * model.row_bytes + rows * context * model.mask_bytes + context * model.gather_bytes + laws
