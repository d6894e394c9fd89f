"""Steps of an EAGLE head as CUDA graphs: from the token ids and features of rows to logits, likeliest tokens and the
features of the next step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.heads.eagle import EagleHead
from foretoken.heads.eagle_chain import embedding_of, output_of
from foretoken.heads.graphs import HeadGraphs, Matrices, captured_matrices
from foretoken.heads.vocabulary import DraftVocabulary
from foretoken.model.graphs.shape import StepShape
from foretoken.model.interface import SharesWeights
from foretoken.model.paged_cache import ForwardInputs, PagedCache
from foretoken.text.sampling import check_finite


class EagleGraphs(HeadGraphs[EagleHead]):
    """Runs rows of `head` for `target` over the head's own `cache`; `matrices` are all that a step reads.

    `vocabulary` is the head's, on the device.
    """

    def __init__(
        self, head: EagleHead, target: SharesWeights, vocabulary: DraftVocabulary, cache: PagedCache, matrices: Matrices
    ) -> None:
        super().__init__(head, cache, matrices)
        self.target, self.vocabulary = target, vocabulary
        width, dtype = head.config.layer.hidden_size, head.norm_dtype
        self.features = self.buffer(width, dtype=dtype)
        # What a step computes for all rows of its bucket, until the next one.
        self.logits = self.buffer(head.config.draft_vocab_size, dtype=dtype)
        self.feedback = self.buffer(width, dtype=dtype)
        self.likeliest = self.buffer(dtype=torch.int64)

    def run(self, tokens: Tensor, features: Tensor, inputs: ForwardInputs) -> tuple[Tensor, Tensor] | None:
        """Own logits [R, V_d] and feedback [R, D] of the rows wanted of `tokens` [T] with their `features` [T, D].

        None, and nothing done, where they are to be run as usual.
        """
        return self._replayed_rows(self.logits, tokens, features, inputs)

    def next_tokens(self, tokens: Tensor, features: Tensor, inputs: ForwardInputs) -> tuple[Tensor, Tensor] | None:
        """The likeliest token [R] of the target's vocabulary in place of `run`'s logits."""
        return self._replayed_rows(self.likeliest, tokens, features, inputs)

    def step(self, shape: StepShape) -> None:
        """See `StepGraphs`."""
        num_rows = shape.rows
        positions, attention = self.attended(shape)
        rows = self.head.run(self.tokens[:num_rows], self.features[:num_rows], positions, attention, self.target)
        logits = self.head.logits(rows.output, self.target)
        assert logits.dtype == self.logits.dtype
        assert rows.feedback.dtype == self.feedback.dtype
        self.logits[:num_rows].copy_(logits)
        self.feedback[:num_rows].copy_(rows.feedback)
        self.likeliest[:num_rows].copy_(self.vocabulary.to_target(likeliest(logits)))

    def _replayed_rows(
        self, output: Tensor, tokens: Tensor, features: Tensor, inputs: ForwardInputs
    ) -> tuple[Tensor, Tensor] | None:
        shape = self.replay(inputs, [(self.tokens, tokens), (self.features, features)])
        if shape is None:
            return None
        wanted = self.wanted(shape, inputs)
        return output.index_select(0, wanted), self.feedback.index_select(0, wanted)


def likeliest(logits: Tensor) -> Tensor:
    """The first maximum [R] of each row of `logits` [R, V_d], 0 where it cannot be sampled from; no host reads it."""
    return logits.argmax(-1).masked_fill(~check_finite(logits), 0)


def eagle_graphs(
    head: EagleHead, target: SharesWeights, vocabulary: DraftVocabulary, cache: PagedCache
) -> EagleGraphs | None:
    """Graphs of `head`, whose keys and values are in `cache`; None where its steps are not captured."""
    beside = (embedding_of(head, target), output_of(head, target), head.fc)
    matrices = captured_matrices(head, cache, head.norm_dtype, beside)
    return None if matrices is None else EagleGraphs(head, target, vocabulary, cache, matrices)
