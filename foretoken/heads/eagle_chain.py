"""Chains of an EAGLE head's likeliest tokens in one compiled call, where all that the head computes has a kernel.

`CachedEagle.run`, called for one place of the draft after the other, gives the same tokens.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.heads.eagle import EagleHead
from foretoken.model.chain_kernel import (
    ChainFields,
    NormCall,
    Reach,
    address_of,
    chain_library,
    draft_chain,
    table_fields,
)
from foretoken.model.interface import SharesModules, SharesWeights
from foretoken.model.layer_pass import PassFields, layer_table
from foretoken.model.layers import Embedding, Linear
from foretoken.model.matrices.dense import Product, ProductFields
from foretoken.model.paged_cache import PagedCache
from foretoken.model.row_kernels import kernels_for


@dataclass(frozen=True)
class EagleChain:
    """What a head drafts with, as the kernel takes it: addresses in what is `held`."""

    head: EagleHead
    library: ctypes.CDLL
    fields: ChainFields
    held: tuple[object, ...]

    def draft(self, tokens: Tensor, features: Tensor, requests: Sequence[Reach]) -> Tensor:
        """Run rows of text, `tokens` [T] with their `features` [T, D], then draft the tokens of all requests: one
        request behind the other.
        """
        rotary = self.head.rotary
        assert features.dtype == rotary.cos.dtype, "one format of all rows"
        rotary.cover(max(one.num_rows for one in requests))
        self.fields.cos, self.fields.sin = rotary.cos.data_ptr(), rotary.sin.data_ptr()
        return draft_chain(self.library, self.fields, tokens, features, requests)


def eagle_chain(head: EagleHead, target: SharesWeights, cache: PagedCache) -> EagleChain | None:
    """The chain of `head`, whose keys and values are in `cache`; None where a part of it has no kernel here:

    - nothing can be compiled, rows are neither bfloat16 nor float32, or not on a CPU;
    - a matrix is held in plain numbers or by oneDNN, or has a bias beside others of the same input (`layer_table`);
    - the target does more than reading rows of its table (a factor on embeddings, another rank's part) or multiplying
      by its output matrix (a factor or a cap on logits), or does not show these;
    - norms or tables are of another format than the rows.
    """
    norms = (head.norm, *head.join_norms)
    dtype = head.norm_dtype
    with torch.inference_mode():
        kernels = kernels_for(torch.empty(0, dtype=dtype, device=cache.device))
    layers = None if kernels is None else layer_table(head)
    library = None if layers is None else chain_library()
    embedding, output = embedding_of(head, target), output_of(head, target)
    if kernels is None or library is None or layers is None or embedding is None or output is None:
        return None
    table, multiply = table_fields(embedding, dtype), _product(output)
    joins = head.config.version == 1
    join = _product(head.fc) if joins else None
    if table is None or multiply is None or (joins and join is None):
        return None
    if any(norm is not None and norm.weight.dtype != dtype for norm in norms):
        return None
    order = (ctypes.c_int32 * len(layers.layers))(*range(len(layers.layers)))
    ids = None if head.vocabulary.is_whole else head.vocabulary.ids.to(cache.device).contiguous()
    fields = ChainFields(
        address_of(kernels.library.foretoken_run_layers),
        PassFields.without_rows(head.layer_shape, layers, cache.pool, order, dtype),
        *(NormCall.of(norm, kernels) for norm in norms),
        *(ProductFields() if join is None else join.fields(None), multiply.fields(None)),
        table,
        vocabulary=None if ids is None else ids.data_ptr(),
        feeds_normed=head.feeds_normed,
    )
    held = (layers, order, cache.pool, ids, embedding.packed, embedding.weight, output.packed, head.fc.packed, norms)
    return EagleChain(head, library, fields, held)


def embedding_of(head: EagleHead, target: SharesWeights) -> Embedding | None:
    """The table that the head's tokens are looked up in; None where more is done than that."""
    if head.embed_tokens is not None:
        return head.embed_tokens
    return target.embedding_module() if isinstance(target, SharesModules) else None


def output_of(head: EagleHead, target: SharesWeights) -> Linear | None:
    """The matrix that gives the head's logits; None where more is done than that."""
    if head.lm_head is not None:
        return head.lm_head
    return target.output_module() if isinstance(target, SharesModules) else None


def _product(linear: Linear) -> Product | None:
    """What a matrix multiplies with, if it has no bias."""
    return None if linear.packed is None or linear.bias is not None else linear.packed.product
