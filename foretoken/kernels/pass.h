// All layers of a decoder, or of a head, over the rows of one forward: what `foretoken_run_layers` takes.

#ifndef FORETOKEN_PASS_H
#define FORETOKEN_PASS_H

#include "attention.h"
#include "experts.h"

// The weights of one layer; any norm may be missing. `qkv` reads the rows of the stream behind `attention_norm`, with
// those of `beside` of the pass behind `beside_norm` in front of them. `keeps_normed`: the stream goes on from normed
// rows. `rope`: number of its table of cos and sin, -1 where queries and keys are not rotated.
struct foretoken_decoder_layer {
    foretoken_product qkv, o, gate_up, down;
    foretoken_norm_weights beside_norm, attention_norm, q_norm, k_norm, attention_out_norm, mlp_norm, mlp_out_norm;
    const foretoken_experts* experts;  // null, or in place of `gate_up` and `down`
    int32_t keeps_normed, rope;
    const float* sinks;  // of its attention, see `foretoken_attention`
    float scale, softcap;
    int64_t window;
};

// What all layers of a decoder have in common. `norms_projection`: `q_norm` and `k_norm` are over all heads of a row at
// once. `is_parallel`: the MLP reads what attention reads.
struct foretoken_layer_kind {
    foretoken_norm_kind norm;
    float residual_multiplier;
    int32_t activation, norms_projection, is_parallel;
};

// What makes logits of some rows behind the last layer: a norm of the layers' kind, then the output matrix.
struct foretoken_head {
    foretoken_norm_weights norm;
    foretoken_product output;
    const int64_t* rows;  // [num_rows], null: all rows of the pass
    void* logits;         // [num_rows, output.num_outputs]
    int64_t num_rows;
};

// The rows of one forward and what they run through.
struct foretoken_pass {
    const foretoken_decoder_layer* layers;
    const int32_t* order;               // numbers of the layers to run, `num_layers` of them
    void *const *keys, *const *values;  // by layer, [num_groups, num_slots, head_dim]; float16 if `is_half_cache`
    void* x;                            // [num_rows, hidden_size], replaced by the result
    const void* beside;                 // [num_rows, hidden_size] or null
    const void *const *cos, *const *sin;  // by table, [*, head_dim]
    const int64_t* positions;             // [num_rows]: rows of these tables, null: its own number for each row
    const int64_t* write_slots;
    const foretoken_segment* segments;
    void* const* taps;  // by place in `order`, [num_rows, hidden_size] for what that layer gets, null where nobody reads it
    const foretoken_head* head;  // null: no logits
    int64_t num_rows, hidden_size, num_heads, num_groups, head_dim, num_slots;
    int32_t num_layers, num_segments, is_bf16, is_half_cache, threads;
    foretoken_layer_kind kind;
};

#endif
