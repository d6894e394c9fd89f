// The experts of a mixture (Shazeer et al. 1701.06538): each row goes to a few gated MLPs that a router chooses.
//
// The rows of a call are grouped by expert, so that the weights of an expert are read once for all of its rows. A row's
// sum over its experts runs in the order of their scores, which is the row's own: it does not depend on the other rows.
// Everything between the input and the sum is float32.

#ifndef FORETOKEN_EXPERTS_H
#define FORETOKEN_EXPERTS_H

#include <atomic>
#include <cmath>
#include <cstdint>
#include <new>
#include <vector>

#include "rows.h"

// A matrix with the function that multiplies by it, of whatever library: `foretoken_grouped_multiply` says what it takes.
struct foretoken_product {
    bool (*multiply)(const void* x, int64_t rows, int64_t width, const void* parts, int num_parts, void* out,
                     int64_t stride, int is_bf16, int threads);
    const void *parts, *bias;  // `bias` [num_outputs] or null
    int64_t width, num_outputs;
    int32_t num_parts;
};

// The experts of one layer. A shared expert, which every row goes to, is the last of the products.
struct foretoken_experts {
    const foretoken_product *gate_up, *down;  // num_experts + has_shared of each
    const float *router, *router_bias;        // [num_experts, hidden_size], [num_experts] or null
    const float* shared_gate;                 // [hidden_size]: scales the shared expert by a sigmoid; or null
    int64_t num_experts, num_active, hidden_size;
    int32_t has_shared;
    int32_t normalises;  // whether the weights of a row's experts sum to 1, else to their share of all
    int32_t clamps;      // the gate is `clamped_row` with the two numbers below, else silu
    float limit, alpha;
};

namespace {

using Experts = foretoken_experts;

constexpr int64_t MAX_TASK_ROWS = 64;   // rows that an expert takes at a time: bounds the memory of a thread
constexpr int64_t MAX_ROUTED_ROWS = 512;  // rows that are grouped at a time: bounds the memory of a call
constexpr int ROUTER_ROWS = 4;          // experts that are scored at a time: so many sums hide the latency of one

// gpt-oss: gate * sigmoid(alpha * gate) * (up + 1), the gate clamped from above, `up` on both sides; NaN stays NaN.
inline void clamped_row(const float* gate, const float* up, int64_t size, float limit, float alpha, float* out) {
    const auto gated = [&](Lanes x, Lanes y) {
        x = choose(x > limit, all(limit), x);
        y = choose(y > limit, all(limit), y);
        y = choose(y < -limit, all(-limit), y);
        return x / (1.0f + exp_of(x * -alpha)) * (y + 1.0f);
    };
    by_lanes(
        size, [&](int64_t i) { store(gated(load(gate + i), load(up + i)), out + i); },
        [&](int64_t i, int64_t n) { store_some(gated(load_some(gate + i, n), load_some(up + i, n)), out + i, n); });
}

// The products of a row with COUNT rows of `weights` [COUNT, size].
template <int COUNT>
inline void scores_of(const float* x, const float* weights, int64_t size, float* out) {
    Lanes sums[COUNT] = {};
    by_lanes(
        size,
        [&](int64_t i) {
            const Lanes own = load(x + i);
            for (int n = 0; n < COUNT; ++n) sums[n] += own * load(weights + n * size + i);
        },
        [&](int64_t i, int64_t count) {
            const Lanes own = load_some(x + i, count);
            for (int n = 0; n < COUNT; ++n) sums[n] += own * load_some(weights + n * size + i, count);
        });
    for (int n = 0; n < COUNT; ++n) out[n] = sum_of(sums[n]);
}

// The `num_active` experts of highest score in descending order, of equal ones the first; and their weights: a softmax
// over all experts, or over those that were chosen.
inline void choose(const Experts& experts, const float* scores, int32_t* chosen, float* weights) {
    const int64_t count = experts.num_active;
    for (int64_t slot = 0; slot < count; ++slot) {
        int64_t best = -1;
        for (int64_t e = 0; e < experts.num_experts; ++e) {
            if (best >= 0 && !(scores[e] > scores[best])) continue;
            if (std::find(chosen, chosen + slot, int32_t(e)) == chosen + slot) best = e;
        }
        chosen[slot] = int32_t(best);
    }
    const float largest = scores[chosen[0]];
    for (int64_t slot = 0; slot < count; ++slot) weights[slot] = std::exp(scores[chosen[slot]] - largest);
    float total = 0.0f;
    for (int64_t i = 0; i < (experts.normalises ? count : experts.num_experts); ++i)
        total += experts.normalises ? weights[i] : std::exp(scores[i] - largest);
    for (int64_t slot = 0; slot < count; ++slot) weights[slot] /= total;
}

// Whether `threads` threads take a task each, rather than all of them one task after the other, for which each waits
// for the others several times: not where more than a quarter of them would have nothing to do.
inline bool takes_tasks(int64_t tasks, int64_t threads) {
    const int64_t rounds = (tasks + threads - 1) / threads;
    return 4 * tasks >= 3 * rounds * threads;
}

// Rows [rows, hidden_size] through the experts of a layer. Keeps its memory from call to call.
template <class T>
class ExpertRows {
public:
    // False: no memory inside a product.
    bool run(const Experts& experts, const T* x, int64_t rows, T* out, int threads) {
        bool is_done = true;
        for (int64_t first = 0; first < rows; first += MAX_ROUTED_ROWS) {
            const int64_t count = std::min(MAX_ROUTED_ROWS, rows - first), at = first * experts.hidden_size;
            route(experts, x + at, count, threads);
            group(experts);
            is_done = multiply(experts, threads) && is_done;
            sum(experts.hidden_size, out + at, threads);
        }
        return is_done;
    }

    // A rank's channels of every expert: gates and ups have its share of the outputs. `out` holds them by place (see
    // `group`), those of the shared expert, which may be of another width, last; `chosen` and `weights` are those of
    // `route`. False: no memory inside a product.
    bool channels(const Experts& experts, const T* x, int64_t rows, float* out, int threads) {
        route(experts, x, rows, threads);
        group(experts);
        const int64_t width = half(experts, 0), shared = half(experts, experts.num_experts - 1 + experts.has_shared);
        const int64_t routed = rows * experts.num_active;
        return each_task(
            threads, [&](int64_t most) { return most * (experts.hidden_size + 2 * std::max(width, shared)); },
            [&](const Task& task, float* scratch, int own) {
                const int64_t beyond = std::max<int64_t>(0, task.first - routed);
                float* to = out + (task.first - beyond) * width + beyond * shared;
                return open(experts, task, scratch, to, own);
            });
    }

    // A rank's part of the sum over experts, from the channels of all ranks, laid out alike: `out` [rows, outputs].
    bool outputs(const Experts& experts, const float* channels, int64_t rows, T* out, int threads) {
        rows_ = rows, slots_ = experts.num_active + experts.has_shared;
        group(experts);
        const int64_t last = experts.num_experts - 1 + experts.has_shared;
        const int64_t width = experts.down[0].width, shared = experts.down[last].width;
        const int64_t routed = rows * experts.num_active, size = experts.down[0].num_outputs;
        results_.resize(chosen.size() * size);
        const bool is_done = each_task(threads, [](int64_t) { return 0; }, [&](const Task& task, float*, int own) {
            const int64_t beyond = std::max<int64_t>(0, task.first - routed);
            const float* from = channels + (task.first - beyond) * width + beyond * shared;
            return multiply(experts.down[task.expert], from, task.last - task.first, &results_[task.first * size], own);
        });
        sum(size, out, threads);
        return is_done;
    }

    // The experts of each row, best first, and their weights: `chosen` and `weights` [rows, slots].
    void route(const Experts& experts, const T* x, int64_t rows, int threads) {
        const int64_t size = experts.hidden_size, count = experts.num_experts;
        rows_ = rows, slots_ = experts.num_active + experts.has_shared;
        full_.resize(rows * size), scores_.resize(rows * count);
        chosen.resize(rows * slots_), weights.resize(rows * slots_);
        for (int64_t i = 0; i < rows * size; ++i) full_[i] = number(x[i]);
        const bool is_much = rows * size * count > FEW_NUMBERS;
        for_each((count + ROUTER_ROWS - 1) / ROUTER_ROWS, threads, is_much, [&](int64_t e) {
            for (int64_t row = 0; row < rows; ++row) score(experts, e * ROUTER_ROWS, row);
        });
        for_each(rows, threads, is_much, [&](int64_t row) {
            choose(experts, &scores_[row * count], &chosen[row * slots_], &weights[row * slots_]);
            if (experts.has_shared) share(experts, row);
        });
    }

    std::vector<int32_t> chosen;
    std::vector<float> weights;

private:
    struct Task {
        int64_t expert, first, last;  // the places of some of its rows
    };

    void score(const Experts& experts, int64_t e, int64_t row) {
        const int64_t size = experts.hidden_size;
        const float *x = &full_[row * size], *weights_of = experts.router + e * size;
        float* to = &scores_[row * experts.num_experts + e];
        const int64_t count = std::min<int64_t>(ROUTER_ROWS, experts.num_experts - e);
        if (count == ROUTER_ROWS)
            scores_of<ROUTER_ROWS>(x, weights_of, size, to);
        else
            for (int64_t n = 0; n < count; ++n) scores_of<1>(x, weights_of + n * size, size, to + n);
        for (int64_t n = 0; n < count && experts.router_bias != nullptr; ++n) to[n] += experts.router_bias[e + n];
    }

    // The shared expert takes the last slot of a row.
    void share(const Experts& experts, int64_t row) {
        const int64_t last = (row + 1) * slots_ - 1;
        chosen[last] = int32_t(experts.num_experts);
        weights[last] = 1.0f;
        if (experts.shared_gate == nullptr) return;
        float score;
        scores_of<1>(&full_[row * experts.hidden_size], experts.shared_gate, experts.hidden_size, &score);
        weights[last] = 1.0f / (1.0f + std::exp(-score));
    }

    // Gives every (row, slot) a place, those of an expert one behind the other in ascending order of rows.
    void group(const Experts& experts) {
        const int64_t count = experts.num_experts + experts.has_shared;
        std::vector<int64_t> starts(count + 1);
        for (int32_t expert : chosen) ++starts[expert + 1];
        for (int64_t e = 0; e < count; ++e) starts[e + 1] += starts[e];
        tasks_.clear();
        for (int64_t e = count - 1; e >= 0; --e)  // the shared expert first: it takes longest
            for (int64_t at = starts[e]; at < starts[e + 1]; at += MAX_TASK_ROWS)
                tasks_.push_back({e, at, std::min(at + MAX_TASK_ROWS, starts[e + 1])});
        places_.resize(chosen.size()), row_at_.resize(chosen.size());
        for (size_t i = 0; i < chosen.size(); ++i) {
            places_[i] = starts[chosen[i]]++;
            row_at_[places_[i]] = int64_t(i) / slots_;
        }
    }

    bool multiply(const Experts& experts, int threads) {
        int64_t widest = 0;
        for (const Task& task : tasks_) widest = std::max(widest, experts.down[task.expert].width);
        results_.resize(chosen.size() * experts.hidden_size);
        return each_task(
            threads, [&](int64_t most) { return most * (experts.hidden_size + 3 * widest); },
            [&](const Task& task, float* scratch, int own) {
                const foretoken_product& down = experts.down[task.expert];
                const int64_t size = experts.hidden_size, rows = task.last - task.first;
                float* gated = scratch + rows * (size + 2 * down.width);
                return open(experts, task, scratch, gated, own) &&
                       multiply(down, gated, rows, &results_[task.first * size], own);
            });
    }

    // Calls `run(task, scratch, threads)` for every task; `scratch_of(rows)` numbers of scratch do for so many rows.
    template <class Scratch, class Run>
    bool each_task(int threads, Scratch scratch_of, Run run) {
        int64_t max_rows = 0;
        for (const Task& task : tasks_) max_rows = std::max(max_rows, task.last - task.first);
        const int64_t tasks = int64_t(tasks_.size()), scratch = scratch_of(max_rows);
        const bool one_each = takes_tasks(tasks, threads);
        scratch_.resize((one_each ? threads : 1) * scratch);
        std::atomic<bool> is_done{true};
        Queue queue(tasks);
        on_threads(threads, one_each, [&](int thread, int) {
            float* own = scratch_.data() + thread * scratch;
            queue.work([&](int64_t i) {
                if (!run(tasks_[i], own, one_each ? 1 : threads)) is_done = false;
            });
        });
        return is_done;
    }

    static int64_t half(const Experts& experts, int64_t expert) { return experts.gate_up[expert].num_outputs / 2; }

    // The rows of a task up to the channels of its expert, `gated` [rows, channels].
    bool open(const Experts& experts, const Task& task, float* scratch, float* gated, int threads) {
        const int64_t size = experts.hidden_size, width = half(experts, task.expert), rows = task.last - task.first;
        float *in = scratch, *wide = in + rows * size;
        for (int64_t r = 0; r < rows; ++r) std::copy_n(&full_[row_at_[task.first + r] * size], size, in + r * size);
        if (!multiply(experts.gate_up[task.expert], in, rows, wide, threads)) return false;
        for (int64_t r = 0; r < rows; ++r, wide += 2 * width) {
            if (experts.clamps)
                clamped_row(wide, wide + width, width, experts.limit, experts.alpha, gated + r * width);
            else
                activate_row<SILU>(wide, wide + width, width, gated + r * width);
        }
        return true;
    }

    static bool multiply(const foretoken_product& by, const float* in, int64_t rows, float* out, int threads) {
        if (!by.multiply(in, rows, by.width, by.parts, by.num_parts, out, by.num_outputs, 0, threads)) return false;
        const T* bias = static_cast<const T*>(by.bias);
        for (int64_t r = 0; r < rows && bias != nullptr; ++r)
            for (int64_t n = 0; n < by.num_outputs; ++n) out[r * by.num_outputs + n] += number(bias[n]);
        return true;
    }

    void sum(int64_t size, T* out, int threads) {
        for_each(rows_, threads, rows_ * slots_ * size > FEW_NUMBERS, [&](int64_t row) {
            const auto total = [&](auto get, int64_t i) {
                Lanes sum = {};
                for (int64_t slot = row * slots_; slot < (row + 1) * slots_; ++slot)
                    sum += weights[slot] * get(&results_[places_[slot] * size + i]);
                return sum;
            };
            T* to = out + row * size;
            by_lanes(
                size, [&](int64_t i) { store(total([](const float* at) { return load(at); }, i), to + i); },
                [&](int64_t i, int64_t n) {
                    store_some(total([&](const float* at) { return load_some(at, n); }, i), to + i, n);
                });
        });
    }

    int64_t rows_ = 0, slots_ = 0;
    std::vector<float> full_, scores_, results_, scratch_;
    std::vector<int64_t> places_, row_at_;
    std::vector<Task> tasks_;
};

}  // namespace

#endif
