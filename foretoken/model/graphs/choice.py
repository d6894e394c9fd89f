"""Whether steps of a model or a trained head are captured: where the Triton kernel reads its cache, unless
`FORETOKEN_GRAPHS` says otherwise (`on`, `off`).
"""

from __future__ import annotations

import os

from foretoken.errors import ConfigError, warn
from foretoken.model.attention.choice import AttentionKind
from foretoken.model.attention.fused import FusedAttention
from foretoken.model.decoder import Decoder
from foretoken.model.expert_launches import can_launch
from foretoken.model.layers import Embedding, Linear

GRAPHS_VARIABLE = "FORETOKEN_GRAPHS"
OTHER_ATTENTION = "its attention is not the Triton kernel (FORETOKEN_ATTENTION=triton)"
PACKED = "its weights are read by kernels of their own"


class NotCaptured(RuntimeError):
    """The device did not capture a step, which runs as usual there; its cause says why."""


class GraphWarning(UserWarning):
    """Steps run without graphs where they were to be captured; the message ends with a remedy."""


def why_not(decoder: Decoder, attention: AttentionKind, cuts_rows: bool) -> str | None:
    """Why no step of a model can be captured; None if steps can."""
    if not issubclass(attention, FusedAttention):
        return OTHER_ATTENTION
    if cuts_rows:
        return "strict numerics run rows in tiles of their own"
    if decoder.config.experts is not None and not can_launch(decoder.norm.weight):
        return "without Triton kernels for it, rows of a mixture of experts are sorted on the host"
    if decoder.shard.world > 1:
        return "other ranks hold parts of it"
    if any(isinstance(module, Linear | Embedding) and module.packed is not None for module in decoder.modules()):
        return PACKED
    return None


def takes_graphs(decoder: Decoder, attention: AttentionKind, cuts_rows: bool = False) -> bool:
    """Whether steps of a model are captured."""
    return are_wanted("model", why_not(decoder, attention, cuts_rows))


def are_wanted(what: str, reason: str | None) -> bool:
    """Whether steps of `what` are captured; `reason`: why they cannot be.

    Raises:
        ConfigError: the variable is neither `on` nor `off`, or `on` where no step can be captured.
    """
    name = os.environ.get(GRAPHS_VARIABLE) or None
    if name not in (None, "on", "off"):
        raise ConfigError(GRAPHS_VARIABLE, name, "choose on or off, or leave it unset")
    if name == "on" and reason is not None:
        raise ConfigError(GRAPHS_VARIABLE, name, f"no step of this {what} can be captured: {reason}; leave it unset")
    return name != "off" and reason is None


def tell_of(failure: NotCaptured) -> None:
    """Warn of a step that was not captured.

    Raises:
        ConfigError: graphs were asked for.
    """
    cause = failure.__cause__ or failure
    reason = f"a step could not be captured ({type(cause).__name__}: {str(cause).partition(chr(10))[0]})"
    if os.environ.get(GRAPHS_VARIABLE) == "on":
        raise ConfigError(GRAPHS_VARIABLE, "on", f"{reason}; leave it unset") from cause
    words = f"{reason}, and runs without a graph, slower; {GRAPHS_VARIABLE}=off leaves all graphs out"
    warn(GraphWarning(words), stacklevel=3)
