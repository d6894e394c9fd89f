// Attention of new rows over their sequences' keys and values, which are stored first.

#ifndef FORETOKEN_ATTENTION_H
#define FORETOKEN_ATTENTION_H

#include <limits>
#include <new>
#include <vector>

#include "rows.h"

namespace {

constexpr int MOST_ROWS = 8;   // query rows for which keys and values are loaded once
constexpr int KEY_BLOCK = 16;  // values that are widened at a time

}  // namespace

// New rows of one sequence, as Python fills it in.
struct foretoken_segment {
    const int64_t* slots;    // of its columns, or null: they follow `first_slot`
    const uint8_t* visible;  // [num_rows, num_columns - shared] of a tree, or null: a row sees all up to its own column
    int64_t first_slot, num_columns;
    int64_t shared;          // columns before those that only some rows see
    int64_t first_row, num_rows;
};

// One layer of the cache and what a pass brings; strides are in elements.
struct foretoken_attention {
    void *keys, *values;              // [groups, num_slots, head_dim]
    const void *query, *key, *value;  // [rows, heads or groups, head_dim], `*_stride` from row to row
    void* out;                        // [rows, heads, head_dim]
    const int64_t* write_slots;       // [rows]
    int64_t query_stride, key_stride, value_stride;
    int64_t num_rows, num_heads, num_groups, num_slots;
    const float* sinks;     // [heads] scores without a value that take part in the softmax, or null
    float scale, softcap;   // of dot products; a score s becomes softcap * tanh(s / softcap), unless that is 0
    int64_t window;         // positions up to a row's own that it sees, 0: all
};

namespace {

using Segment = foretoken_segment;
using Call = foretoken_attention;

// Up to MOST_ROWS query rows of one key group: row i of the segment and one of the heads that share the group.
struct Task {
    const Segment* segment;
    int64_t group, first, count;
};

template <class T>
void keep(const Call& call, int64_t row, int64_t head_dim) {
    const T *key = static_cast<const T*>(call.key) + row * call.key_stride;
    const T *value = static_cast<const T*>(call.value) + row * call.value_stride;
    for (int64_t g = 0; g < call.num_groups; ++g) {
        const int64_t to = (g * call.num_slots + call.write_slots[row]) * head_dim;
        std::copy_n(key + g * head_dim, head_dim, static_cast<T*>(call.keys) + to);
        std::copy_n(value + g * head_dim, head_dim, static_cast<T*>(call.values) + to);
    }
}

inline int64_t slot_of(const Segment& segment, int64_t column) {
    return segment.slots == nullptr ? segment.first_slot + column : segment.slots[column];
}

inline bool sees(const Segment& segment, int64_t row, int64_t column) {
    if (segment.visible == nullptr) return column <= segment.num_columns - segment.num_rows + row;
    const int64_t own = segment.num_columns - segment.shared;
    return column < segment.shared || segment.visible[row * own + column - segment.shared];
}

// `weights` [count, columns] of the softmax before its division, 0 for what a row does not see; `padded` from one row
// to the next.
template <class T, int K>
void weigh(const Segment& segment, const T* keys, const Lanes (*query)[K / LANES], const int64_t* rows, int64_t count,
           float* weights, int64_t padded) {
    constexpr float NONE = -std::numeric_limits<float>::infinity();
    const int64_t columns = segment.num_columns;
    for (int64_t c = 0; c < columns; ++c) {
        const T* at = keys + slot_of(segment, c) * K;
        Lanes key[K / LANES];
        for (int k = 0; k < K / LANES; ++k) key[k] = load(at + k * LANES);
        for (int64_t r = 0; r < count; ++r) {
            Lanes products = query[r][0] * key[0];
            for (int k = 1; k < K / LANES; ++k) products += query[r][k] * key[k];
            weights[r * padded + c] = sum_of(products);
        }
    }
    for (int64_t r = 0; r < count; ++r) {
        float *own = weights + r * padded, largest = NONE;
        std::fill(own + columns, own + padded, NONE);
        for (int64_t c = segment.shared; c < columns; ++c)
            if (!sees(segment, rows[r], c)) own[c] = NONE;
        for (int64_t c = 0; c < columns; ++c) largest = own[c] > largest ? own[c] : largest;
        for (int64_t c = 0; c < padded; c += LANES) store(exp_of(load(own + c) - largest), own + c);
        for (int64_t c = segment.shared; c < columns; ++c)
            if (!sees(segment, rows[r], c)) own[c] = 0.0f;
    }
}

template <class T, int K>
void read_rows(const Segment& segment, const T* keys, const T* values, const Lanes (*query)[K / LANES],
               const int64_t* rows, int64_t count, std::vector<float>& scratch, Lanes (*out)[K / LANES]) {
    const int64_t columns = segment.num_columns, padded = (columns + LANES - 1) / LANES * LANES;
    scratch.resize(count * padded);
    weigh<T, K>(segment, keys, query, rows, count, scratch.data(), padded);
    float sums[MOST_ROWS] = {};
    for (int64_t r = 0; r < count; ++r) std::fill_n(out[r], K / LANES, Lanes{});
    for (int64_t first = 0; first < columns; first += KEY_BLOCK) {
        const int64_t size = std::min<int64_t>(KEY_BLOCK, columns - first);
        Lanes value[KEY_BLOCK][K / LANES];
        for (int64_t c = 0; c < size; ++c) {
            const T* at = values + slot_of(segment, first + c) * K;
            for (int k = 0; k < K / LANES; ++k) value[c][k] = load(at + k * LANES);
        }
        for (int64_t r = 0; r < count; ++r) {
            const float* weight = scratch.data() + r * padded + first;
            Lanes total[K / LANES];
            std::copy_n(out[r], K / LANES, total);
            for (int64_t c = 0; c < size; ++c) {
                if (weight[c] == 0.0f) continue;  // unseen: a guess that overflowed must not reach other rows
                sums[r] += weight[c];
                for (int k = 0; k < K / LANES; ++k) total[k] += weight[c] * value[c][k];
            }
            std::copy_n(total, K / LANES, out[r]);
        }
    }
    for (int64_t r = 0; r < count; ++r)
        for (int k = 0; k < K / LANES; ++k) out[r][k] /= sums[r];
}

template <class T, int K>
void read_task(const Call& call, const Task& task, std::vector<float>& scratch) {
    const Segment& segment = *task.segment;
    const int64_t shared_by = call.num_heads / call.num_groups, plane = task.group * call.num_slots * K;
    const T *keys = static_cast<const T*>(call.keys) + plane, *values = static_cast<const T*>(call.values) + plane;
    const float scale = call.scale;
    Lanes query[MOST_ROWS][K / LANES], out[MOST_ROWS][K / LANES];
    int64_t rows[MOST_ROWS];
    const auto head_at = [&](int64_t i, int64_t stride) {  // where query row i of the task lies
        const int64_t head = task.group * shared_by + (task.first + i) % shared_by;
        return (segment.first_row + rows[i]) * stride + head * K;
    };
    for (int64_t i = 0; i < task.count; ++i) {
        rows[i] = (task.first + i) / shared_by;
        const T* from = static_cast<const T*>(call.query) + head_at(i, call.query_stride);
        for (int k = 0; k < K / LANES; ++k) query[i][k] = load(from + k * LANES) * scale;
    }
    read_rows<T, K>(segment, keys, values, query, rows, task.count, scratch, out);
    for (int64_t i = 0; i < task.count; ++i) {
        T* to = static_cast<T*>(call.out) + head_at(i, call.num_heads * K);
        for (int k = 0; k < K / LANES; ++k) store(out[i][k], to + k * LANES);
    }
}

template <class T, int K>
void attend(const Call& call, const Segment* segments, int num_segments, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (call.num_rows * call.key_stride > FEW_NUMBERS)
    for (int64_t row = 0; row < call.num_rows; ++row) keep<T>(call, row, K);
    std::vector<Task> tasks;
    const int64_t shared_by = call.num_heads / call.num_groups;
    int64_t work = 0;
    for (const Segment* segment = segments; segment < segments + num_segments; ++segment) {
        const int64_t count = segment->num_rows * shared_by;
        work += segment->num_columns * count * call.num_groups * K;
        for (int64_t group = 0; group < call.num_groups; ++group)
            for (int64_t first = 0; first < count; first += MOST_ROWS)
                tasks.push_back({segment, group, first, std::min<int64_t>(MOST_ROWS, count - first)});
    }
    bool has_memory = true;
#pragma omp parallel num_threads(threads) if (work > FEW_NUMBERS)
    {
        std::vector<float> scratch;
#pragma omp for schedule(dynamic)
        for (size_t i = 0; i < tasks.size(); ++i) try {
                read_task<T, K>(call, tasks[i], scratch);
            } catch (const std::bad_alloc&) {
#pragma omp atomic write
                has_memory = false;
            }
    }
    if (!has_memory) throw std::bad_alloc();
}

template <class T>
bool attend(const Call& call, const Segment* segments, int num_segments, int64_t head_dim, int threads) {
    switch (head_dim) {
        case 16: attend<T, 16>(call, segments, num_segments, threads); return true;
        case 32: attend<T, 32>(call, segments, num_segments, threads); return true;
        case 64: attend<T, 64>(call, segments, num_segments, threads); return true;
        case 96: attend<T, 96>(call, segments, num_segments, threads); return true;
        case 128: attend<T, 128>(call, segments, num_segments, threads); return true;
        case 256: attend<T, 256>(call, segments, num_segments, threads); return true;
        default: return false;
    }
}

}  // namespace

#endif
