// What a decoder does with each row on its own: norm, gate, rotation.

#ifndef FORETOKEN_ROWS_H
#define FORETOKEN_ROWS_H

#include <cmath>

#include "numbers.h"

namespace {

constexpr int64_t FEW_NUMBERS = 1 << 16;  // up to here one thread works: waking others would take longer

template <class T>
void norm_row(const T* x, const T* weight, float eps, int64_t size, T* out) {
    Lanes squares = {};
    const auto add = [&](Lanes own) { squares += own * own; };
    by_lanes(size, [&](int64_t i) { add(load(x + i)); }, [&](int64_t i, int64_t n) { add(load_some(x + i, n)); });
    const float scale = 1.0f / std::sqrt(sum_of(squares) / float(size) + eps);
    by_lanes(
        size, [&](int64_t i) { store(load(x + i) * scale * load(weight + i), out + i); },
        [&](int64_t i, int64_t n) { store_some(load_some(x + i, n) * scale * load_some(weight + i, n), out + i, n); });
}

template <class T>
void gate_row(const T* gate, const T* up, int64_t size, T* out) {
    const auto gated = [](Lanes x, Lanes y) { return x / (1.0f + exp_of(-x)) * y; };
    by_lanes(
        size, [&](int64_t i) { store(gated(load(gate + i), load(up + i)), out + i); },
        [&](int64_t i, int64_t n) { store_some(gated(load_some(gate + i, n), load_some(up + i, n)), out + i, n); });
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

// `norm_row`, `gate_row` and `rotate_row` of some rows; `stride` is from row to row of the input, `out_stride` of the
// result where its rows do not follow one another.

template <class T>
void norm_rows(const T* x, const T* weight, float eps, int64_t rows, int64_t size, int64_t stride, T* out,
               int64_t out_stride, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * size > FEW_NUMBERS)
    for (int64_t row = 0; row < rows; ++row) norm_row(x + row * stride, weight, eps, size, out + row * out_stride);
}

template <class T>
void gate_rows(const T* x, int64_t rows, int64_t size, T* out, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * size > FEW_NUMBERS)
    for (int64_t row = 0; row < rows; ++row)
        gate_row(x + 2 * row * size, x + (2 * row + 1) * size, size, out + row * size);
}

template <class T>
void rotate_rows(const T* x, const T* cos, const T* sin, int64_t rows, int64_t heads, int64_t size, int64_t stride,
                 T* out, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * heads * size > FEW_NUMBERS)
    for (int64_t row = 0; row < rows; ++row)
        rotate_row(x + row * stride, cos + row * size, sin + row * size, heads, size, out + row * heads * size);
}

}  // namespace

#endif
