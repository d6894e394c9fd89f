// Rows of the cache that are read next, asked for while others are computed with.

#ifndef FORETOKEN_PREFETCH_H
#define FORETOKEN_PREFETCH_H

#include <algorithm>
#include <cstdint>

#include "lanes.h"

namespace {

// Keys and values of a block of positions. While few rows read a long text, they come from memory, and a core takes only
// some tens of requests at a time: they are asked for a row at a time, evenly over all of a block's work, so that
// neither memory nor the units that multiply wait for the other.
template <class C>
class Prefetch {
public:
    Prefetch() = default;

    // Of `count` rows of `size` numbers at `at`, which stays; `calls` of `some` are expected.
    Prefetch(const C* keys, const C* values, const int64_t* at, int64_t count, int64_t size, int64_t calls)
        : keys_(reinterpret_cast<const char*>(keys)), values_(reinterpret_cast<const char*>(values)), at_(at),
          end_(at + count), row_bytes_(size * int64_t(sizeof(C))),
          calls_for_row_(std::max<int64_t>(1, calls / std::max<int64_t>(1, count))) {}

    // Its share of the rows.
    FORETOKEN_INLINE void some() {
        if (++called_ < calls_for_row_ || at_ == end_) return;
        called_ = 0;
        ask();
    }

    void all() {
        while (at_ != end_) ask();
    }

private:
    FORETOKEN_INLINE void ask() {
        const int64_t row = *at_++ * int64_t(sizeof(C));
        for (int64_t line = row; line < row + row_bytes_; line += LINE_BYTES) {
            __builtin_prefetch(keys_ + line, 0, 2);
            __builtin_prefetch(values_ + line, 0, 2);
        }
    }

    static constexpr int64_t LINE_BYTES = 64;
    const char *keys_ = nullptr, *values_ = nullptr;
    const int64_t *at_ = nullptr, *end_ = nullptr;
    int64_t row_bytes_ = 0, calls_for_row_ = 1, called_ = 0;
};

}  // namespace

#endif
