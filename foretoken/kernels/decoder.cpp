// A decoder's layers over a few rows, and their parts one by one; row_kernels.py and layer_pass.py have the signatures.
//
// A row's result depends on that row, its past and its ancestors alone, to the last bit: neither on the rows beside it,
// nor on their number, nor on the threads. Sums run over lanes that follow from the row's own size, and over keys in
// ascending order; what a row does not see adds nothing. So a node of a token tree gets the bits of a chain.

#include "pass.h"

namespace {

using Product = foretoken_product;
using Weights = foretoken_decoder_layer;
using Pass = foretoken_pass;

// Calls `function` with a number of the type that the cache of rows of T holds.
template <class T, class Function>
void by_cache(int is_half, Function function) {
    if constexpr (std::is_same_v<T, float>)
        if (is_half) return function(Half{});
    function(T{});
}

template <class T>
class LayerPass {
public:
    explicit LayerPass(const Pass& pass)
        : pass_(pass), rows_(pass.num_rows), all_heads_(pass.num_heads + 2 * pass.num_groups) {
        int64_t widest = 0, wide = 0, intermediate = 0;  // layers may differ: the first of a head reads more
        for (int32_t i = 0; i < pass.num_layers; ++i) {
            const Weights& own = pass.layers[pass.order[i]];
            widest = std::max(widest, own.qkv.width);
            wide = std::max(wide, own.gate_up.num_outputs);
            intermediate = std::max(intermediate, own.down.width);
        }
        normed_.resize(rows_ * pass.hidden_size);
        seen_.resize(rows_ * widest);
        qkv_.resize(rows_ * all_heads_ * pass.head_dim);
        turned_.resize(rows_ * (pass.num_heads + pass.num_groups) * pass.head_dim);
        read_.resize(rows_ * pass.num_heads * pass.head_dim);
        wide_.resize(rows_ * wide);
        gated_.resize(rows_ * intermediate);
        change_.resize(rows_ * pass.hidden_size);
    }

    void run(int32_t index) {
        const Weights& own = pass_.layers[index];
        read_input(own);
        multiply(own.qkv, seen_, qkv_);
        attend(own, index);
        multiply(own.o, read_, change_);
        add_change(own.attention_out_norm);
        const std::vector<T>& in = mlp_input(own);
        if (own.experts != nullptr) {
            if (!experts_.run(*own.experts, in.data(), rows_, change_.data(), pass_.threads)) throw std::bad_alloc();
        } else {
            multiply(own.gate_up, in, wide_);
            activate_rows(wide_.data(), pass_.kind.activation, rows_, own.down.width, own.gate_up.num_outputs,
                          gated_.data(), pass_.threads);
            multiply(own.down, gated_, change_);
        }
        add_change(own.mlp_out_norm);
    }

    void put_logits(const foretoken_head& head) {
        const int64_t size = pass_.hidden_size;
        const T* from = x();
        if (head.rows != nullptr) {
            for (int64_t i = 0; i < head.num_rows; ++i)
                std::copy_n(x() + head.rows[i] * size, size, change_.data() + i * size);
            from = change_.data();
        }
        norm_rows(from, head.norm, pass_.kind.norm, head.num_rows, size, size, normed_.data(), size, pass_.threads);
        multiply(head.output, normed_.data(), head.num_rows, static_cast<T*>(head.logits));
    }

private:
    T* x() { return static_cast<T*>(pass_.x); }

    // What `qkv` reads, into `seen_`.
    void read_input(const Weights& own) {
        const int64_t size = pass_.hidden_size, stride = own.qkv.width;
        T* to = seen_.data() + (stride - size);
        if (own.beside_norm.weight != nullptr)
            normed(static_cast<const T*>(pass_.beside), own.beside_norm, seen_.data(), stride);
        if (own.attention_norm.weight != nullptr) normed(x(), own.attention_norm, to, stride);
        if (own.attention_norm.weight != nullptr && !own.keeps_normed) return;
        for (int64_t row = 0; row < rows_; ++row) {
            if (own.attention_norm.weight == nullptr) std::copy_n(x() + row * size, size, to + row * stride);
            if (own.keeps_normed) std::copy_n(to + row * stride, size, x() + row * size);
        }
    }

    const std::vector<T>& mlp_input(const Weights& own) {
        if (pass_.kind.is_parallel) return seen_;
        if (own.mlp_norm.weight == nullptr)
            std::copy_n(x(), rows_ * pass_.hidden_size, normed_.data());
        else
            normed(x(), own.mlp_norm, normed_.data(), pass_.hidden_size);
        return normed_;
    }

    void normed(const T* from, const NormWeights& norm, T* to, int64_t to_stride) {
        norm_rows(from, norm, pass_.kind.norm, rows_, pass_.hidden_size, pass_.hidden_size, to, to_stride,
                  pass_.threads);
    }

    // Adds `change_` to the stream, behind a norm if there is one; what is multiplied is rounded before it is added.
    void add_change(const NormWeights& norm) {
        const int64_t size = pass_.hidden_size;
        if (norm.weight != nullptr) normed(change_.data(), norm, change_.data(), size);
        for_each(rows_, pass_.threads, rows_ * size > FEW_NUMBERS, [&](int64_t row) {
            T *to = x() + row * size, *change = change_.data() + row * size;
            multiply_row(pass_.kind.residual_multiplier, change, size);
            by_lanes(
                size, [&](int64_t i) { store(load(to + i) + load(change + i), to + i); },
                [&](int64_t i, int64_t n) { store_some(load_some(to + i, n) + load_some(change + i, n), to + i, n); });
        });
    }

    void multiply_row(float by, T* row, int64_t size) {
        if (by == 1.0f) return;
        by_lanes(
            size, [&](int64_t i) { store(load(row + i) * by, row + i); },
            [&](int64_t i, int64_t n) { store_some(load_some(row + i, n) * by, row + i, n); });
    }

    void multiply(const Product& by, const std::vector<T>& from, std::vector<T>& to) {
        multiply(by, from.data(), rows_, to.data());
    }

    void multiply(const Product& by, const T* from, int64_t rows, T* to) {
        constexpr bool is_bf16 = sizeof(T) == 2;
        const auto run = [&](const void* in, void* out, bool narrow) {
            if (!by.multiply(in, rows, by.width, by.parts, by.num_parts, out, by.num_outputs, narrow, pass_.threads))
                throw std::bad_alloc();
        };
        if (by.bias == nullptr) return run(from, to, is_bf16);
        // A bias is added before the result is rounded.
        const T* bias = static_cast<const T*>(by.bias);
        std::vector<float> full(rows * by.width), sums(rows * by.num_outputs);
        for (size_t i = 0; i < full.size(); ++i) full[i] = number(from[i]);
        run(full.data(), sums.data(), false);
        for_each(rows, pass_.threads, rows * by.num_outputs > FEW_NUMBERS, [&](int64_t row) {
            for (int64_t n = 0; n < by.num_outputs; ++n)
                put(sums[row * by.num_outputs + n] + number(bias[n]), to[row * by.num_outputs + n]);
        });
    }

    void attend(const Weights& own, int32_t index) {
        const int64_t heads = pass_.num_heads, groups = pass_.num_groups, size = pass_.head_dim;
        const int64_t stride = all_heads_ * size, turned_stride = (heads + groups) * size;
        T* qkv = qkv_.data();
        if (own.q_norm.weight != nullptr) {
            norm_heads(own.q_norm, qkv, heads);
            norm_heads(own.k_norm, qkv + heads * size, groups);
        }
        const bool turns = own.rope >= 0;
        if (turns)
            rotate_rows(qkv, static_cast<const T*>(pass_.cos[own.rope]), static_cast<const T*>(pass_.sin[own.rope]),
                        pass_.positions, rows_, heads + groups, size, stride, turned_.data(), pass_.threads);
        const T* query = turns ? turned_.data() : qkv;
        const int64_t query_stride = turns ? turned_stride : stride;
        const foretoken_attention call = {pass_.keys[index], pass_.values[index], query,
                                          query + heads * size, qkv + (heads + groups) * size, read_.data(),
                                       pass_.write_slots, query_stride, query_stride, stride, rows_, heads, groups,
                                       pass_.num_slots, own.sinks, own.scale, own.softcap, own.window};
        by_cache<T>(pass_.is_half_cache, [&](auto cached) {
            ::attend<decltype(cached)>(call, pass_.segments, pass_.num_segments, size, pass_.threads);
        });
    }

    // In place: `count` heads of every row, each by itself or all of them at once.
    void norm_heads(const NormWeights& norm, T* first, int64_t count) {
        const int64_t size = pass_.head_dim, stride = all_heads_ * size;
        for_each(rows_, pass_.threads, rows_ * count * size > FEW_NUMBERS, [&](int64_t row) {
            T* own = first + row * stride;
            if (pass_.kind.norms_projection)
                norm_rows(own, norm, pass_.kind.norm, 1, count * size, 0, own, 0, 1);
            else
                norm_rows(own, norm, pass_.kind.norm, count, size, size, own, size, 1);
        });
    }

    const Pass& pass_;
    const int64_t rows_, all_heads_;
    std::vector<T> seen_, normed_, qkv_, turned_, read_, wide_, gated_, change_;
    ExpertRows<T> experts_;
};

// Calls `function` with a number of the type that all tensors have.
template <class Function>
void typed(int is_bf16, Function function) {
    if (is_bf16)
        function(uint16_t{});
    else
        function(float{});
}

}  // namespace

extern "C" {

// What the numbers below mean; a library of another interface is not used.
int foretoken_decoder_interface() { return 11; }

// All tensors of a call are bfloat16 or all float32; `stride` is from row to row of the input, in elements.

void foretoken_norm(const void* x, foretoken_norm_weights norm, void* out, int64_t rows, int64_t size, int64_t stride, float eps,
                    float offset, int is_layer, int is_bf16, int threads) {
    typed(is_bf16, [&](auto zero) {
        using T = decltype(zero);
        norm_rows(static_cast<const T*>(x), norm, {eps, offset, is_layer}, rows, size, stride,
                  static_cast<T*>(out), size, threads);
    });
}

void foretoken_activate(const void* x, void* out, int64_t rows, int64_t size, int64_t stride, int activation,
                        int is_bf16, int threads) {
    typed(is_bf16, [&](auto zero) {
        using T = decltype(zero);
        activate_rows(static_cast<const T*>(x), activation, rows, size, stride, static_cast<T*>(out), threads);
    });
}

void foretoken_softcap(const void* x, void* out, int64_t rows, int64_t size, float cap, int is_bf16, int threads) {
    typed(is_bf16, [&](auto zero) {
        using T = decltype(zero);
        softcap_rows(static_cast<const T*>(x), cap, rows, size, static_cast<T*>(out), threads);
    });
}

void foretoken_rotate(const void* x, const void* cos, const void* sin, void* out, int64_t rows, int64_t heads,
                      int64_t size, int64_t stride, int is_bf16, int threads) {
    typed(is_bf16, [&](auto zero) {
        using T = decltype(zero);
        rotate_rows(static_cast<const T*>(x), static_cast<const T*>(cos), static_cast<const T*>(sin), nullptr, rows,
                    heads, size, stride, static_cast<T*>(out), threads);
    });
}

// Stores the keys and values of all rows, then reads for the rows of `segments`. False: no memory for what lies between.
// `is_half_cache`: rows are float32, and the cache holds float16.
bool foretoken_attend(const foretoken_attention* call, const foretoken_segment* segments, int num_segments,
                      int64_t head_dim, int is_half_cache, int is_bf16, int threads) {
    try {
        typed(is_bf16, [&](auto zero) {
            by_cache<decltype(zero)>(is_half_cache, [&](auto cached) {
                attend<decltype(cached)>(*call, segments, num_segments, head_dim, threads);
            });
        });
    } catch (const std::bad_alloc&) {
        return false;
    }
    return true;
}

// A rank's channels of the experts that `x` [rows, hidden_size] goes to, at most MAX_ROUTED_ROWS rows; and which these
// are, best first, with their weights: `chosen` and `weights` [rows, slots]. False: no memory.
bool foretoken_expert_channels(const foretoken_experts* experts, const void* x, int32_t* chosen, float* weights,
                               float* channels, int64_t rows, int is_bf16, int threads) {
    bool is_done = false;
    try {
        typed(is_bf16, [&](auto zero) {
            using T = decltype(zero);
            ExpertRows<T> run;
            is_done = run.channels(*experts, static_cast<const T*>(x), rows, channels, threads);
            std::copy(run.chosen.begin(), run.chosen.end(), chosen);
            std::copy(run.weights.begin(), run.weights.end(), weights);
        });
    } catch (const std::bad_alloc&) {
        return false;
    }
    return is_done;
}

// A rank's part of what the experts make of them, from the `channels` of all ranks: `out` [rows, outputs of a rank].
bool foretoken_expert_outputs(const foretoken_experts* experts, const int32_t* chosen, const float* weights,
                              const float* channels, void* out, int64_t rows, int is_bf16, int threads) {
    bool is_done = false;
    try {
        typed(is_bf16, [&](auto zero) {
            using T = decltype(zero);
            ExpertRows<T> run;
            const int64_t slots = rows * (experts->num_active + experts->has_shared);
            run.chosen.assign(chosen, chosen + slots), run.weights.assign(weights, weights + slots);
            is_done = run.outputs(*experts, channels, rows, static_cast<T*>(out), threads);
        });
    } catch (const std::bad_alloc&) {
        return false;
    }
    return is_done;
}

// `x` [rows, hidden_size] through the experts of a layer, into `out` of the same shape. False: no memory.
bool foretoken_run_experts(const foretoken_experts* experts, const void* x, void* out, int64_t rows, int is_bf16,
                           int threads) {
    bool is_done = false;
    try {
        typed(is_bf16, [&](auto zero) {
            using T = decltype(zero);
            ExpertRows<T> run;
            is_done = run.run(*experts, static_cast<const T*>(x), rows, static_cast<T*>(out), threads);
        });
    } catch (const std::bad_alloc&) {
        return false;
    }
    return is_done;
}

// Runs the layers of a pass, and its head if it has one. False: no memory.
bool foretoken_run_layers(const foretoken_pass* pass) {
    try {
        typed(pass->is_bf16, [&](auto zero) {
            LayerPass<decltype(zero)> layers(*pass);
            const size_t bytes = size_t(pass->num_rows * pass->hidden_size) * sizeof zero;
            for (int32_t i = 0; i < pass->num_layers; ++i) {
                if (pass->taps != nullptr && pass->taps[i] != nullptr) std::memcpy(pass->taps[i], pass->x, bytes);
                layers.run(pass->order[i]);
            }
            if (pass->head != nullptr) layers.put_logits(*pass->head);
        });
    } catch (const std::bad_alloc&) {
        return false;
    }
    return true;
}
}
