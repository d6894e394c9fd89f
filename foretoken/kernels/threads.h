// Loops that threads share out where that is worth waking them. Even a parallel region of one thread takes half a
// microsecond, and a small model's layer has fifteen such loops: so none is begun.

#ifndef FORETOKEN_THREADS_H
#define FORETOKEN_THREADS_H

#include <omp.h>

#include <atomic>
#include <cstdint>

namespace {

// Calls `function(thread, number of threads)` on each thread, or here alone. What it calls may do so again with one.
template <class Function>
inline void on_threads(int threads, bool is_worth_it, Function function) {
    if (threads == 1 || !is_worth_it) return function(0, 1);
#pragma omp parallel num_threads(threads)
    function(omp_get_thread_num(), omp_get_num_threads());
}

// Calls `function(i)` for the share of thread `t` of `n` in `count`.
template <class Function>
inline void for_share(int64_t count, int64_t t, int64_t n, Function function) {
    for (int64_t i = count * t / n, end = count * (t + 1) / n; i < end; ++i) function(i);
}

// Calls `function(i)` for all `i` below `count`, each thread its share.
template <class Function>
inline void for_each(int64_t count, int threads, bool is_worth_it, Function function) {
    on_threads(threads, is_worth_it, [&](int t, int n) { for_share(count, t, n, function); });
}

// Hands out the numbers below `count` one by one.
class Queue {
public:
    explicit Queue(int64_t count) : count_(count) {}

    // Calls `function(i)` for those that are left.
    template <class Function>
    void work(Function function) {
        for (int64_t i = next_++; i < count_; i = next_++) function(i);
    }

private:
    const int64_t count_;
    std::atomic<int64_t> next_{0};
};

}  // namespace

#endif
