"""How a new EAGLE head begins: as the target's last layer, run once more over what the target ends with.

From random weights a head first has to learn what a layer of this target does; its own layer begins as the target's
last one instead, and `fc` hands the last tap on as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from foretoken.heads.eagle import EagleHead
from foretoken.model.decoder import Decoder
from foretoken.model.layers import MLP, RMSNorm


@torch.no_grad()
def begin_as_last_layer(head: EagleHead, target: Decoder) -> bool:
    """Copy the target's last layer into the head's first one; False, and nothing is changed, where their shapes or
    what they compute differ.
    """
    own, config = head.config, target.config
    last, layer = target.decoder_layers()[-1], head.first_layer
    norms = (last.attention_norm, last.mlp_norm, target.norm)
    fits = (
        config.has_llama_layers
        and own.layer.hidden_size == own.target_hidden_size == config.hidden_size
        and own.layer.intermediate_size == config.intermediate_size
        and isinstance(last.mlp, MLP)
        and last.q_norm is None
        and all(isinstance(norm, RMSNorm) for norm in norms)
        and not (own.norm_before_fc or own.fc_norm or own.norm_before_residual)
    )
    if not fits:
        return False
    assert isinstance(last.mlp, MLP)
    rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    query, key, value = _weight(last.qkv_proj).split_with_sizes((rows, kv_rows, kv_rows))
    attention, mlp = layer.self_attn, layer.mlp
    for projection, part in ((attention.q_proj, query), (attention.k_proj, key), (attention.v_proj, value)):
        _weight(projection)[:, -config.hidden_size :] = part  # version 3 reads the embedding in front of the stream
    gate, up = _weight(last.mlp.gate_up_proj).chunk(2)
    for to, part in ((mlp.gate_proj, gate), (mlp.up_proj, up), (mlp.down_proj, _weight(last.mlp.down_proj))):
        _weight(to).copy_(part)
    _weight(attention.o_proj).copy_(_weight(last.o_proj))
    stream_norm = layer.hidden_norm or layer.input_layernorm
    for to_norm, norm in ((stream_norm, norms[0]), (layer.post_attention_layernorm, norms[1]), (head.norm, norms[2])):
        if to_norm is not None and norm is not None:
            _weight(to_norm).copy_(_weight(norm))
    fc = _weight(head.fc)
    fc.zero_()
    fc[:, -config.hidden_size :].fill_diagonal_(1.0)
    return True


def _weight(module: nn.Module) -> Tensor:
    """The numbers of a module that holds them plainly."""
    weight = module.weight
    assert isinstance(weight, Tensor), "training begins before matrices are packed"
    return weight
