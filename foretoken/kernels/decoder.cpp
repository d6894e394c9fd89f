// A decoder's layers over a few rows, and their parts one by one; row_kernels.py and layer_pass.py have the signatures.
//
// A row's result depends on that row, its past and its ancestors alone, to the last bit: neither on the rows beside it,
// nor on their number, nor on the threads. Sums run over lanes that follow from the row's own size, and over keys in
// ascending order; what a row does not see adds nothing. So a node of a token tree gets the bits of a chain.

#include "attention.h"

// A matrix with the function that multiplies by it, see `foretoken_grouped_multiply`.
struct foretoken_product {
    bool (*multiply)(const void* x, int64_t rows, int64_t width, const void* parts, int num_parts, void* out,
                     int64_t stride, int is_bf16, int threads);
    const void *parts, *bias;  // `bias` [num_outputs] or null
    int64_t width, num_outputs;
    int32_t num_parts;
};

// The weights of one layer; norms but the last may be null. `qkv` reads the normed rows of the stream, with
// `beside_norm` behind the normed rows of `beside` of the pass. `keeps_normed`: the stream goes on from normed rows.
struct foretoken_decoder_layer {
    foretoken_product qkv, o, gate_up, down;
    const void *beside_norm, *input_norm, *q_norm, *k_norm, *post_norm;
    int32_t keeps_normed;
    const float* sinks;  // of its attention, see `foretoken_attention`
    float scale, softcap;
    int64_t window;
};

// The rows of one forward and what they run through.
struct foretoken_pass {
    const foretoken_decoder_layer* layers;
    const int32_t* order;               // numbers of the layers to run, `num_layers` of them
    void *const *keys, *const *values;  // by layer, [num_groups, num_slots, head_dim]
    void* x;                            // [num_rows, hidden_size], replaced by the result
    const void* beside;                 // [num_rows, hidden_size] or null
    const void *cos, *sin;              // [num_rows, head_dim]
    const int64_t* write_slots;
    const foretoken_segment* segments;
    int64_t num_rows, hidden_size, num_heads, num_groups, head_dim, num_slots;
    int32_t num_layers, num_segments, is_bf16, threads;
    float eps;
};

namespace {

using Product = foretoken_product;
using Weights = foretoken_decoder_layer;
using Pass = foretoken_pass;

template <class T>
class LayerPass {
public:
    explicit LayerPass(const Pass& pass)
        : pass_(pass), rows_(pass.num_rows), all_heads_(pass.num_heads + 2 * pass.num_groups) {
        const int64_t intermediate = pass.layers[pass.order[0]].down.width;
        normed_.resize(rows_ * pass.hidden_size);
        int64_t widest = 0;  // the first layer of a head may read more than the others
        for (int32_t i = 0; i < pass.num_layers; ++i)
            widest = std::max(widest, pass.layers[pass.order[i]].qkv.width);
        seen_.resize(rows_ * widest);
        qkv_.resize(rows_ * all_heads_ * pass.head_dim);
        turned_.resize(rows_ * (pass.num_heads + pass.num_groups) * pass.head_dim);
        read_.resize(rows_ * pass.num_heads * pass.head_dim);
        wide_.resize(rows_ * 2 * intermediate);
        gated_.resize(rows_ * intermediate);
        change_.resize(rows_ * pass.hidden_size);
    }

    void run(int32_t index) {
        const Weights& own = pass_.layers[index];
        read_input(own);
        multiply(own.qkv, seen_, qkv_);
        attend(own, index);
        multiply(own.o, read_, change_);
        add_change();
        normed(x(), own.post_norm, normed_.data(), pass_.hidden_size);
        multiply(own.gate_up, normed_, wide_);
        gate_rows(wide_.data(), rows_, own.down.width, gated_.data(), pass_.threads);
        multiply(own.down, gated_, change_);
        add_change();
    }

private:
    T* x() { return static_cast<T*>(pass_.x); }

    // What `qkv` reads, into `seen_`.
    void read_input(const Weights& own) {
        const int64_t size = pass_.hidden_size, stride = own.qkv.width;
        T* to = seen_.data() + (stride - size);
        if (own.beside_norm != nullptr)
            normed(static_cast<const T*>(pass_.beside), own.beside_norm, seen_.data(), stride);
        if (own.input_norm != nullptr) normed(x(), own.input_norm, to, stride);
        if (own.input_norm != nullptr && !own.keeps_normed) return;
        for (int64_t row = 0; row < rows_; ++row) {
            if (own.input_norm == nullptr) std::copy_n(x() + row * size, size, to + row * stride);
            if (own.keeps_normed) std::copy_n(to + row * stride, size, x() + row * size);
        }
    }

    void normed(const T* from, const void* weight, T* to, int64_t to_stride) {
        norm_rows(from, static_cast<const T*>(weight), pass_.eps, rows_, pass_.hidden_size, pass_.hidden_size, to,
                  to_stride, pass_.threads);
    }

    void add_change() {
        const int64_t size = pass_.hidden_size;
#pragma omp parallel for num_threads(pass_.threads) schedule(static) if (rows_ * size > FEW_NUMBERS)
        for (int64_t row = 0; row < rows_; ++row) {
            T* to = x() + row * size;
            const T* change = change_.data() + row * size;
            by_lanes(
                size, [&](int64_t i) { store(load(to + i) + load(change + i), to + i); },
                [&](int64_t i, int64_t n) { store_some(load_some(to + i, n) + load_some(change + i, n), to + i, n); });
        }
    }

    void multiply(const Product& by, const std::vector<T>& from, std::vector<T>& to) {
        constexpr bool is_bf16 = sizeof(T) == 2;
        const auto run = [&](const void* in, void* out, bool narrow) {
            if (!by.multiply(in, rows_, by.width, by.parts, by.num_parts, out, by.num_outputs, narrow, pass_.threads))
                throw std::bad_alloc();
        };
        if (by.bias == nullptr) return run(from.data(), to.data(), is_bf16);
        // A bias is added before the result is rounded.
        const T* bias = static_cast<const T*>(by.bias);
        std::vector<float> full(rows_ * by.width), sums(rows_ * by.num_outputs);
        for (size_t i = 0; i < full.size(); ++i) full[i] = number(from[i]);
        run(full.data(), sums.data(), false);
#pragma omp parallel for num_threads(pass_.threads) schedule(static) if (rows_ * by.num_outputs > FEW_NUMBERS)
        for (int64_t row = 0; row < rows_; ++row)
            for (int64_t n = 0; n < by.num_outputs; ++n)
                put(sums[row * by.num_outputs + n] + number(bias[n]), to[row * by.num_outputs + n]);
    }

    void attend(const Weights& own, int32_t index) {
        const int64_t heads = pass_.num_heads, groups = pass_.num_groups, size = pass_.head_dim;
        const int64_t stride = all_heads_ * size;
        T* qkv = qkv_.data();
        const int64_t normed = own.q_norm == nullptr ? 0 : rows_;
#pragma omp parallel for num_threads(pass_.threads) schedule(static) if (normed * stride > FEW_NUMBERS)
        for (int64_t row = 0; row < normed; ++row)
            for (int64_t head = 0; head < heads + groups; ++head) {
                T* at = qkv + row * stride + head * size;
                norm_row(at, static_cast<const T*>(head < heads ? own.q_norm : own.k_norm), pass_.eps, size, at);
            }
        rotate_rows(qkv, static_cast<const T*>(pass_.cos), static_cast<const T*>(pass_.sin), rows_, heads + groups,
                    size, stride, turned_.data(), pass_.threads);
        const int64_t turned_stride = (heads + groups) * size;
        const foretoken_attention call = {pass_.keys[index], pass_.values[index], turned_.data(),
                                          turned_.data() + heads * size, qkv + (heads + groups) * size, read_.data(),
                                          pass_.write_slots, turned_stride, turned_stride, stride, rows_, heads, groups,
                                          pass_.num_slots, own.sinks, own.scale, own.softcap, own.window};
        ::attend<T>(call, pass_.segments, pass_.num_segments, size, pass_.threads);
    }

    const Pass& pass_;
    const int64_t rows_, all_heads_;
    std::vector<T> seen_, normed_, qkv_, turned_, read_, wide_, gated_, change_;
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
int foretoken_decoder_interface() { return 3; }

// All tensors of a call are bfloat16 or all float32; `stride` is from row to row of the input, in elements.

void foretoken_norm(const void* x, const void* weight, void* out, int64_t rows, int64_t size, int64_t stride, float eps,
                    int is_bf16, int threads) {
    typed(is_bf16, [&](auto zero) {
        using T = decltype(zero);
        norm_rows(static_cast<const T*>(x), static_cast<const T*>(weight), eps, rows, size, stride,
                  static_cast<T*>(out), size, threads);
    });
}

void foretoken_gate(const void* x, void* out, int64_t rows, int64_t size, int is_bf16, int threads) {
    typed(is_bf16, [&](auto zero) {
        using T = decltype(zero);
        gate_rows(static_cast<const T*>(x), rows, size, static_cast<T*>(out), threads);
    });
}

void foretoken_rotate(const void* x, const void* cos, const void* sin, void* out, int64_t rows, int64_t heads,
                      int64_t size, int64_t stride, int is_bf16, int threads) {
    typed(is_bf16, [&](auto zero) {
        using T = decltype(zero);
        rotate_rows(static_cast<const T*>(x), static_cast<const T*>(cos), static_cast<const T*>(sin), rows, heads, size,
                    stride, static_cast<T*>(out), threads);
    });
}

// Stores the keys and values of all rows, then reads for the rows of `segments`. False: no memory for what lies between.
bool foretoken_attend(const foretoken_attention* call, const foretoken_segment* segments, int num_segments,
                      int64_t head_dim, int is_bf16, int threads) {
    try {
        typed(is_bf16,
              [&](auto zero) { attend<decltype(zero)>(*call, segments, num_segments, head_dim, threads); });
    } catch (const std::bad_alloc&) {
        return false;
    }
    return true;
}

// Runs the layers of a pass. False: no memory.
bool foretoken_run_layers(const foretoken_pass* pass) {
    try {
        typed(pass->is_bf16, [&](auto zero) {
            LayerPass<decltype(zero)> layers(*pass);
            for (int32_t i = 0; i < pass->num_layers; ++i) layers.run(pass->order[i]);
        });
    } catch (const std::bad_alloc&) {
        return false;
    }
    return true;
}
}
