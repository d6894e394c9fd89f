"""Early-exit adapters: a form of our own, as no other engine has a place for one."""

from __future__ import annotations

from typing import Any

from foretoken.heads.config import ExitAdapterConfig
from foretoken.heads.formats.pairing import check_sizes
from foretoken.heads.kind import EXIT_ADAPTER
from foretoken.model.architecture import ModelConfig
from foretoken.model.fields import Fields


def adapter_json(config: ExitAdapterConfig, dtype: str) -> dict[str, Any]:
    """`config.json` of an adapter; `exit_layer` counts the layers that run before it."""
    return {
        "architectures": ["EarlyExitAdapter"],
        "model_type": EXIT_ADAPTER,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "exit_layer": config.exit_layer,
        "rms_norm_eps": config.norm_eps,
        "torch_dtype": dtype,
    }


def adapter_from_json(fields: Fields, target: ModelConfig) -> ExitAdapterConfig:
    """The adapter that a `config.json` describes."""
    hidden, vocab = fields.whole("hidden_size"), fields.whole("vocab_size")
    exit_layer = fields.whole("exit_layer")
    check_sizes(fields.where, target, hidden, vocab, (exit_layer,))
    return ExitAdapterConfig(
        hidden_size=hidden,
        vocab_size=vocab,
        target_num_layers=target.num_layers,
        exit_layer=exit_layer,
        intermediate_size=fields.whole("intermediate_size"),
        norm_eps=fields.number("rms_norm_eps"),
    )
