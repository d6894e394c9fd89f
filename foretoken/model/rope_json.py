"""How a `config.json` scales rotary embeddings: either spelling of it, and the length up to which a scaling holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.model.architecture import RopeConfig
from foretoken.model.families import Family
from foretoken.model.fields import Fields, shown

# The last position that the float32 arithmetic of rotary embeddings, here and in transformers, can count to.
MAX_CONTEXT_TOKENS = 2**24
# What families that transformers runs call their longest sequence; recurrent ones have none of their own, and a bound
# keeps the bookkeeping finite.
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length", "seq_length")
UNBOUNDED_CONTEXT_TOKENS = 131_072
# The original length that transformers assumes where config.json names none.
_LONGROPE_TRAINED_TOKENS = {"phi3": 4096, "phi4_multimodal": 4096}


def context_tokens(raw: Mapping[str, Any], stated: int) -> int:
    """The longest text of a model whose `raw` configuration states a context of `stated` tokens.

    YaRN stretches the trained length by its factor. Models tell their users to add such a scaling and nothing else
    (Qwen2.5), and vLLM and SGLang take the product for the context, too; transformers has no limit. Of `linear` files
    some state the stretched length already (Gemma 3): what is stated counts. See also `rope_context_cap`.
    """
    longest = max([stated, *(min(_stretched(raw, one), MAX_CONTEXT_TOKENS) for one in _scalings(raw))])
    return min(longest, rope_context_cap(raw) or longest)


def _scalings(raw: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What scales the rotation, and what does by layer type."""
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters")
    if not isinstance(scaling, Mapping):
        return []
    return [scaling, *(value for value in scaling.values() if isinstance(value, Mapping))]


def _stretched(raw: Mapping[str, Any], scaling: Mapping[str, Any]) -> int:
    """The length that YaRN stretches a trained one to; 0 without it."""
    kind, factor = scaling.get("rope_type") or scaling.get("type"), scaling.get("factor")
    names = "original_max_position_embeddings"
    trained = raw.get(names) or scaling.get(names) or raw.get("max_position_embeddings")
    if kind != "yarn" or raw.get("model_type") in _LONGROPE_TRAINED_TOKENS:
        return 0
    if not isinstance(factor, int | float) or not isinstance(trained, int) or not 0 < factor < math.inf:
        return 0
    return int(trained * factor)


def rope_context_cap(raw: Mapping[str, Any]) -> int | None:
    """The longest sequence over which the rotation of a position never changes; None where it never does.

    `raw` is a parsed `config.json`, its text part, or what `to_dict` of a transformers configuration gives. With
    `dynamic` and `longrope` scaling the frequencies switch once a sequence is longer than a trained length. Keys that
    are in the cache by then keep their old rotation, so that an answer would depend on which tokens ran together: no
    two ways of running it agree beyond that length.

    Raises:
        CheckpointError: a base of the frequencies that is not positive, which makes them infinite.
    """
    for parameters in _scalings(raw):
        theta = parameters.get("rope_theta")
        if isinstance(theta, int | float) and not theta > 0:
            raise CheckpointError(f"config.json: rope_theta={shown(theta)} must be a positive number")
    caps = [_switching_length(raw, parameters) for parameters in _scalings(raw)]
    return min((cap for cap in caps if cap is not None), default=None)


def _switching_length(raw: Mapping[str, Any], scaling: Mapping[str, Any]) -> int | None:
    kind = scaling.get("rope_type") or scaling.get("type")
    trained = raw.get("max_position_embeddings")
    # Phi reads both of its old names as longrope.
    if kind in ("longrope", "su") or (kind == "yarn" and raw.get("model_type") in _LONGROPE_TRAINED_TOKENS):
        original = raw.get("original_max_position_embeddings") or scaling.get("original_max_position_embeddings")
        lengths = (original or _LONGROPE_TRAINED_TOKENS.get(str(raw.get("model_type"))), trained)
    elif kind == "dynamic":
        lengths = (trained, None)
    else:
        return None
    return min((length for length in lengths if isinstance(length, int) and length > 0), default=None)


def rope_config(model_type: str, family: Family, fields: Fields, head_dim: int) -> tuple[RopeConfig, RopeConfig | None]:
    """How queries and keys are rotated, and how those of layers with a window are, where that differs.

    Reads either spelling, with the precedence of transformers 5: `rope_scaling` (4) before `rope_parameters` (5), then
    `rope_theta`.

    Raises:
        UnsupportedModelError: a scaling that the native decoder lacks.
        CheckpointError: a value of the wrong type or out of bounds.
    """
    reader = _RopeReader(model_type, family, fields, head_dim)
    named = (
        found for key in ("rope_scaling", "rope_parameters") if (found := fields.fields(key)) is not None and found.raw
    )
    scaling = next(named, Fields({}, fields.where))
    by_type = [key for key, value in scaling.raw.items() if isinstance(value, Mapping) or key.endswith("_attention")]
    if not family.has_local_rope:
        if by_type:
            raise UnsupportedModelError("rope parameters by layer type have no native implementation")
        return reader.read(scaling), None
    scalings, parameters = (fields.fields(key) for key in ("rope_scaling", "rope_parameters"))
    is_new, is_old = (one is not None and bool(one.raw) for one in (parameters, scalings))
    if is_new != bool(by_type) or (is_new and is_old):
        raise UnsupportedModelError(
            "rope_parameters that are not by layer type, or stand beside rope_scaling, and rope_scaling by layer type "
            "have no native implementation"
        )
    if not by_type:
        return reader.read(scaling), RopeConfig(
            theta=fields.number("rope_local_base_freq", above=1.0), original_max_tokens=reader.trained_tokens
        )
    whole, local = (scaling.fields(key) or Fields({}, scaling.where) for key in ("full_attention", "sliding_attention"))
    return reader.read(whole), reader.read(local, "rope_local_base_freq")


_KINDS = ("default", "linear", "dynamic", "yarn", "llama3")
_LONGROPE_KINDS = ("default", "longrope")  # transformers refuses Phi the others


class _RopeReader:
    def __init__(self, model_type: str, family: Family, fields: Fields, head_dim: int) -> None:
        self.model_type, self.family, self.fields, self.head_dim = model_type, family, fields, head_dim
        self.trained_tokens = fields.whole("max_position_embeddings", most=MAX_CONTEXT_TOKENS)

    def read(self, scaling: Fields, base: str = "rope_theta") -> RopeConfig:
        """One scaling; `base` is the key of `config.json` for the base that it does not name."""
        fields, trained = self.fields, self.trained_tokens
        kind = scaling.text("rope_type") or scaling.text("type") or "default"
        if self.family.has_longrope and kind in ("su", "yarn"):  # old names
            kind = "longrope"
        if kind not in (_LONGROPE_KINDS if self.family.has_longrope else _KINDS):
            raise UnsupportedModelError(f"rope_type={shown(kind)} has no native implementation")
        # A base of 1 turns all channels alike, and YaRN divides by its logarithm.
        theta = (
            scaling.number("rope_theta", above=1.0)
            if scaling.has("rope_theta")
            else fields.number_or(base, 10_000.0, above=1.0)
        )
        # The length beside the scaling comes first, but scalings by layer type know only their own.
        sources = (scaling,) if self.family.has_local_rope else (fields, scaling)
        outer = next((source for source in sources if source.has("original_max_position_embeddings")), None)
        original = (
            trained if outer is None else outer.whole("original_max_position_embeddings", most=MAX_CONTEXT_TOKENS)
        )
        rope = RopeConfig(
            theta=theta,
            kind=kind,
            original_max_tokens=original,
            partial_factor=self._partial_factor(scaling),
            is_interleaved=self.family.is_interleaved,
        )
        if kind == "default":
            return rope
        if kind == "longrope":
            return self._longrope(rope, scaling)
        if kind == "yarn" and "factor" in scaling.raw and not scaling.has("factor"):
            rope = replace(rope, factor=trained / original)
        else:
            rope = replace(rope, factor=scaling.number("factor"))
        if kind == "llama3":
            return replace(
                rope,
                low_freq_factor=scaling.number("low_freq_factor"),
                high_freq_factor=scaling.number("high_freq_factor"),
            )
        return _yarn_config(rope, scaling) if kind == "yarn" else rope

    def _partial_factor(self, scaling: Fields) -> float:
        source = next((one for one in (scaling, self.fields) if one.has("partial_rotary_factor")), None)
        factor = 1.0 if source is None else source.number("partial_rotary_factor")
        if factor == 1.0:
            return factor
        if not self.family.is_partial:
            raise UnsupportedModelError("partial_rotary_factor other than 1 has no native implementation")
        num_rotated = int(self.head_dim * factor)
        what = f"{self.fields.where}: partial_rotary_factor={factor:g} of head_dim={self.head_dim}"
        if factor > 1.0 or num_rotated < 1:
            raise CheckpointError(f"{what} must be a number of channels, at least one and at most all")
        if num_rotated % 2:  # transformers rotates one more, with the frequencies of the odd number
            raise UnsupportedModelError(f"{what} is an odd number of channels, which has no native implementation")
        return factor

    def _longrope(self, rope: RopeConfig, scaling: Fields) -> RopeConfig:
        """The factors of short texts, which hold up to the original length (LongRoPE, Ding et al. 2402.13753)."""
        original = self.fields.whole("original_max_position_embeddings", most=MAX_CONTEXT_TOKENS)
        factors = scaling.numbers("short_factor", int(self.head_dim * rope.partial_factor) // 2)
        factor = scaling.number_or("factor", self.trained_tokens / original)
        given = scaling.number("attention_factor") if scaling.has("attention_factor") else None
        attention = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
        return replace(
            rope,
            original_max_tokens=original,
            factors=factors,
            factor=factor,
            attention_factor=attention if given is None else given,
        )


def _yarn_config(rope: RopeConfig, scaling: Fields) -> RopeConfig:
    def optional(key: str) -> float | None:
        return scaling.number(key, zero=True) if scaling.has(key) else None

    return replace(
        rope,
        beta_fast=optional("beta_fast") or 32.0,  # transformers takes 0 as unset too
        beta_slow=optional("beta_slow") or 1.0,
        attention_factor=optional("attention_factor"),
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
        truncate=scaling.flag("truncate", default="truncate" not in scaling.raw),
    )
