// What a decoder does with each row on its own: norm, activation, rotation, soft cap.

#ifndef FORETOKEN_ROWS_H
#define FORETOKEN_ROWS_H

#include <cmath>

#include "numbers.h"
#include "threads.h"

// The weights of a norm, and its bias where it has one: [size], or [num_heads, size] of neighbouring rows. Without a
// norm `weight` is null.
struct foretoken_norm_weights {
    const void *weight, *bias;
    int64_t num_heads;
};

// What all norms of a decoder share: `offset` is added to the weights, and a layer norm takes off the mean.
struct foretoken_norm_kind {
    float eps, offset;
    int32_t is_layer;
};

namespace {

using NormWeights = foretoken_norm_weights;
using NormKind = foretoken_norm_kind;

// Up to here one thread works: waking others would take longer. An exponential takes as long as several other numbers.
constexpr int64_t FEW_NUMBERS = 1 << 16, FEW_EXPONENTIALS = 1 << 13;

// The first `count` numbers, zeros behind them.
inline Lanes only(Lanes from, int64_t count) {
    float all_of[LANES] = {};
    store_some(from, all_of, count);
    return load(all_of);
}

template <class T>
float mean_of(const T* x, int64_t size) {
    Lanes sums = {};
    by_lanes(size, [&](int64_t i) { sums += load(x + i); }, [&](int64_t i, int64_t n) { sums += load_some(x + i, n); });
    return sum_of(sums) / float(size);
}

template <class T>
void norm_row(const T* x, const T* weight, const T* bias, const NormKind& kind, int64_t size, T* out) {
    const float mean = kind.is_layer ? mean_of(x, size) : 0.0f;
    Lanes squares = {};
    const auto add = [&](Lanes own) { squares += own * own; };
    by_lanes(
        size, [&](int64_t i) { add(load(x + i) - mean); },
        [&](int64_t i, int64_t n) { add(only(load_some(x + i, n) - mean, n)); });
    const float scale = 1.0f / std::sqrt(sum_of(squares) / float(size) + kind.eps);
    const auto normed = [&](auto get, int64_t i) {
        const Lanes own = (get(x + i) - mean) * scale * (get(weight + i) + kind.offset);
        return bias == nullptr ? own : own + get(bias + i);
    };
    by_lanes(
        size, [&](int64_t i) { store(normed([](const T* at) { return load(at); }, i), out + i); },
        [&](int64_t i, int64_t n) {
            store_some(normed([&](const T* at) { return load_some(at, n); }, i), out + i, n);
        });
}

enum Activation { SILU, GELU, GELU_TANH };

// The sigmoid of `x` times `x`, and Gaussian error linear units (Hendrycks & Gimpel 1606.08415): x times the normal
// distribution function, and its approximation by tanh, which is a sigmoid of twice the argument.
template <Activation A>
FORETOKEN_INLINE Lanes activated(Lanes x) {
    if constexpr (A == SILU) return x / (1.0f + exp_of(-x));
    if constexpr (A == GELU_TANH) return x / (1.0f + exp_of(-1.5957691216f * (x + 0.044715f * x * x * x)));
    float all_of[LANES];
    store(x, all_of);
    for (float& own : all_of) own = 0.5f * own * std::erfc(-0.70710678118f * own);
    return load(all_of);
}

// `up` null: no gate.
template <Activation A, class T>
void activate_row(const T* x, const T* up, int64_t size, T* out) {
    const auto whole = [&](auto get, int64_t i) {
        const Lanes own = activated<A>(get(x + i));
        return up == nullptr ? own : own * get(up + i);
    };
    by_lanes(
        size, [&](int64_t i) { store(whole([](const T* at) { return load(at); }, i), out + i); },
        [&](int64_t i, int64_t n) {
            store_some(whole([&](const T* at) { return load_some(at, n); }, i), out + i, n);
        });
}

template <class T>
void softcap_row(const T* x, float cap, int64_t size, T* out) {
    const auto capped = [&](Lanes own) { return cap * (1.0f - 2.0f / (exp_of(own * (2.0f / cap)) + 1.0f)); };
    by_lanes(
        size, [&](int64_t i) { store(capped(load(x + i)), out + i); },
        [&](int64_t i, int64_t n) { store_some(capped(load_some(x + i, n)), out + i, n); });
}

// `heads` heads of one position; pairs are channel i and i + size / 2.
template <class T>
void rotate_row(const T* x, const T* cos, const T* sin, int64_t heads, int64_t size, T* out) {
    const int64_t half = size / 2;
    for (int64_t h = 0; h < heads; ++h, x += size, out += size) {
        const auto turn = [&](auto get, auto put, int64_t i) {
            const Lanes first = get(x + i), second = get(x + i + half);
            put(first * get(cos + i) - second * get(sin + i), out + i);
            put(second * get(cos + i + half) + first * get(sin + i + half), out + i + half);
        };
        const auto whole = [&](int64_t i) {
            turn([](const T* at) { return load(at); }, [](Lanes own, T* at) { store(own, at); }, i);
        };
        by_lanes(half, whole, [&](int64_t i, int64_t n) {
            turn([&](const T* at) { return load_some(at, n); }, [&](Lanes own, T* at) { store_some(own, at, n); }, i);
        });
    }
}

// The above for some rows; `stride` is from row to row of the input, `out_stride` of the result where its rows do not
// follow one another. `positions`: rows of cos and sin, null: the rows' own numbers.

template <class T>
void norm_rows(const T* x, const NormWeights& norm, const NormKind& kind, int64_t rows, int64_t size, int64_t stride,
               T* out, int64_t out_stride, int threads) {
    const T *weight = static_cast<const T*>(norm.weight), *bias = static_cast<const T*>(norm.bias);
    for_each(rows, threads, rows * size > FEW_NUMBERS, [&](int64_t row) {
        const int64_t at = row % norm.num_heads * size;
        norm_row(x + row * stride, weight + at, bias == nullptr ? nullptr : bias + at, kind, size,
                 out + row * out_stride);
    });
}

template <Activation A, class T>
void activate_rows(const T* x, int64_t rows, int64_t size, int64_t stride, T* out, int threads) {
    const bool is_gated = stride == 2 * size;
    for_each(rows, threads, rows * size > FEW_EXPONENTIALS, [&](int64_t row) {
        const T* own = x + row * stride;
        activate_row<A>(own, is_gated ? own + size : nullptr, size, out + row * size);
    });
}

// Rows of `stride` numbers: `size` of them, or twice as many, the second half of which multiplies the activated first.
template <class T>
void activate_rows(const T* x, int activation, int64_t rows, int64_t size, int64_t stride, T* out, int threads) {
    if (activation == SILU) return activate_rows<SILU>(x, rows, size, stride, out, threads);
    if (activation == GELU) return activate_rows<GELU>(x, rows, size, stride, out, threads);
    activate_rows<GELU_TANH>(x, rows, size, stride, out, threads);
}

template <class T>
void softcap_rows(const T* x, float cap, int64_t rows, int64_t size, T* out, int threads) {
    for_each(rows, threads, rows * size > FEW_NUMBERS,
             [&](int64_t row) { softcap_row(x + row * size, cap, size, out + row * size); });
}

template <class T>
void rotate_rows(const T* x, const T* cos, const T* sin, const int64_t* positions, int64_t rows, int64_t heads,
                 int64_t size, int64_t stride, T* out, int threads) {
    for_each(rows, threads, rows * heads * size > FEW_NUMBERS, [&](int64_t row) {
        const int64_t at = (positions == nullptr ? row : positions[row]) * size;
        rotate_row(x + row * stride, cos + at, sin + at, heads, size, out + row * heads * size);
    });
}

}  // namespace

#endif
