"""The two ways to count the layers that a head reads; they differ by one.

- enter `i`: the hidden state that enters layer `i`, transformers' `hidden_states[i]`, our taps. EAGLE's reference,
  llama.cpp, and the top level `eagle_aux_hidden_state_layer_ids` of vLLM and speculators.
- output `j`: the output of layer `j`, which is enter `j + 1`. SGLang's `eagle_config`, TensorRT-LLM's
  `eagle3_layers_to_capture` and `target_layer_ids` of every `dflash_config`.
"""

from __future__ import annotations

from foretoken.errors import ConfigError
from foretoken.heads.config import default_taps


def taps_to_outputs(taps: tuple[int, ...]) -> list[int]:
    """Output ids of taps; tap 0, the embedding, becomes -1, which only foretoken reads."""
    return [tap - 1 for tap in taps]


def outputs_to_taps(ids: tuple[int, ...]) -> tuple[int, ...]:
    """Taps of output ids."""
    return tuple(number + 1 for number in ids)


def are_default_taps(taps: tuple[int, ...], num_layers: int) -> bool:
    """Whether every engine reads these layers of its own accord."""
    try:
        return taps == default_taps(num_layers)
    except ConfigError:  # too few layers to have defaults
        return False
