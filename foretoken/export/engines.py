"""What other engines run: which drafter by which name, since and until which version, and why a pair is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from foretoken.errors import ConfigError
from foretoken.heads.config import BlockConfig, EagleConfig, HeadConfig, MedusaConfig
from foretoken.model.names import is_own_name

# The newest versions whose options were compared (tests/export/options).
NEWEST = {
    "vllm": "0.33.0",
    "sglang": "0.5.23",
    "trtllm": "1.3.0",
    "llamacpp": "2026-10-01",
    "tgi": "3.3.6",
    "transformers": "5.23.0",
}
NAMES = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "trtllm": "TensorRT-LLM",
    "llamacpp": "llama.cpp",
    "tgi": "TGI",
    "transformers": "transformers",
}
# 0.33.0, v0.33.0, 1.3.0rc2, 0.5.23.post1+cpu; a build of llama.cpp (b10549) or its date.
_VERSION = re.compile(r"[vb]?\d([.-]?[a-z\d])*(\+[\w.-]+)?", re.ASCII | re.IGNORECASE)
_LAST_MEDUSA_VLLM = (0, 32)  # vLLM removed Medusa and MLP speculators behind it
_OLDEST_VLLM = (0, 20)  # before it, keys of --speculative-config differ
# By method (`HeadConfig.method`), the engines that have it, from their own sources.
_RUNS = {
    "eagle": ("vllm", "sglang"),
    "eagle3": ("vllm", "sglang", "trtllm", "llamacpp"),
    "medusa": ("vllm", "tgi"),
    "hydra": (),
    "adapter": (),
    "dflash": ("vllm", "sglang", "trtllm", "llamacpp"),
    "dspark": ("vllm", "sglang", "trtllm", "llamacpp"),
}


@dataclass(frozen=True)
class OtherEngine:
    """An engine by the name of `--to` and its version, given or the newest that is known here."""

    name: str
    version: str

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers in the version, for comparison."""
        return tuple(int(number) for number in re.findall(r"\d+", self.version))

    def __str__(self) -> str:
        return f"{NAMES[self.name]} {self.version}"


def engine_of(name: str, version: str | None) -> OtherEngine:
    """The engine called `name`.

    Raises:
        ConfigError: an engine that is not known, or a text that is no version.
    """
    if name not in NEWEST:
        raise ConfigError("to", name, f"choose one of {', '.join(NEWEST)}")
    if version is not None and not _VERSION.fullmatch(version):
        raise ConfigError("engine_version", version, f"give a version such as {NEWEST[name]}")
    return OtherEngine(name, version or NEWEST[name])


def refusal_reason(config: HeadConfig, engine: OtherEngine) -> str | None:
    """Why `engine` cannot run such a head; None if it can."""
    method, known = config.method, [name for name, engines in _RUNS.items() if engine.name in engines]
    if engine.name not in _RUNS[method]:
        takes = f"it takes {', '.join(known)}" if known else "it takes no trained head"
        return f"{NAMES[engine.name]} does not run {method} heads ({takes})"
    return version_reason(engine) or _REASONS[config.kind](config, engine)


def version_reason(engine: OtherEngine) -> str | None:
    """Why this version of `engine` is not started here, with a head or without one; None if it is."""
    if engine.name == "vllm" and engine.numbers < _OLDEST_VLLM:
        return "the configuration of vLLM before 0.20 is not written here; give a later --engine-version"
    return None


def target_reason(target: str, engine: OtherEngine, has_head: bool) -> str | None:
    """Why `engine` is not started here with a target of this name or path; None if it can be."""
    if is_own_name(target):
        return f"{NAMES[engine.name]} knows no such name; give the folder or hub id of the target"
    if not target.lower().endswith(".gguf") or (engine.name == "llamacpp" and not has_head):
        return None
    reader = "llama.cpp's converter of heads" if engine.name == "llamacpp" else NAMES[engine.name]
    given = f"{reader} is given a folder with config.json here, not a GGUF file"
    return f"{given}; name the folder or hub id it was made of"


def _eagle_reason(config: EagleConfig, engine: OtherEngine) -> str | None:
    name = NAMES[engine.name]
    if config.layer.model_type != "llama":
        return f"layers as in {config.layer.model_type} are not portable; export a head with llama's"
    if config.version == 1:
        if config.fc_bias and engine.name == "vllm":
            return "vLLM's EAGLE-1 has no fc.bias; train the head with fc_bias=false"
        return None
    if config.norm_before_residual and engine.name in ("sglang", "trtllm"):
        return f"{name} does not read norm_before_residual and would compute something else without a word"
    if (config.fc_norm or config.norm_output) and engine.name == "llamacpp":
        return "llama.cpp reads neither fc_norm nor norm_output"
    if config.layer.num_layers > 1:
        return (
            f"EAGLE-3 heads of {config.layer.num_layers} layers are computed in different ways by the engines "
            "(later layers); only one layer is portable"
        )
    if config.fc_bias and engine.name in ("vllm", "llamacpp"):
        return f"{name} refuses fc.bias"
    if config.layer.qkv_bias or config.layer.mlp_bias:
        return "biases in the layers of an EAGLE-3 head are not portable"
    if len(config.taps) != 3 and engine.name == "llamacpp":
        return f"llama.cpp reads exactly 3 hidden states, this head {len(config.taps)}"
    if 0 in config.taps and engine.name in ("sglang", "trtllm"):
        return f"{name} counts outputs of layers, and tap 0 is the embedding"
    if config.target_num_layers <= 5 and engine.name == "trtllm":
        return f"TensorRT-LLM refuses targets of five layers or fewer; this one has {config.target_num_layers}"
    if config.layer.hidden_size != config.target_hidden_size and engine.name == "sglang":
        return "SGLang needs a head as wide as its target"
    return None


def _block_reason(config: BlockConfig, engine: OtherEngine) -> str | None:
    if 0 in config.taps:
        return f"{NAMES[engine.name]} counts outputs of layers, and tap 0 is the embedding"
    if config.is_causal and engine.name != "vllm":
        return f"{NAMES[engine.name]} runs blocks whose slots see each other both ways; this head was trained causal"
    if config.predicts_at_anchor and config.method == "dflash" and engine.name != "vllm":
        return (
            f"a slot of a DFlash predicts its own token in {NAMES[engine.name]}; this head's slots predict the token "
            "behind them (train it with head.predicts_at_anchor=false)"
        )
    if config.draft_vocab_size < config.layer.vocab_size and config.method == "dflash":
        return "a DFlash head has no output matrix of its own, so its vocabulary cannot be cut"
    return None


def _medusa_reason(config: MedusaConfig, engine: OtherEngine) -> str | None:
    if engine.name == "vllm" and engine.numbers[:2] > _LAST_MEDUSA_VLLM:
        return "vLLM runs Medusa up to 0.32 only; give --engine-version 0.32, or train an eagle head"
    if engine.name == "tgi" and not config.has_own_output and config.num_blocks > 1:
        return "TGI runs one block per head where the heads share the target's output matrix"
    return None


# By kind, those of them that some engine runs: why an engine that knows the method cannot run such a head.
_REASONS: Mapping[str, Callable[[Any, OtherEngine], str | None]] = {
    "eagle": _eagle_reason,
    "medusa": _medusa_reason,
    "block": _block_reason,
}
