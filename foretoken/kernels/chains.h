// Verification of deterministic chains from logits: `RejectionRule` (verify/rejection.py) and, at temperature 0,
// `GreedyRule` decide the same, to the bit, from distributions in memory. Here a row before a draft token is summed and
// not written. One row for each request, where its round ends, is written to the thread's own room.

#ifndef FORETOKEN_CHAINS_H
#define FORETOKEN_CHAINS_H

#include <omp.h>

#include <atomic>
#include <memory>
#include <new>

#include "distribution.h"
#include "draw.h"

// Chains of `requests` requests, as Python lays them out: request b has the nodes from offsets[b] to offsets[b + 1] and,
// from offsets[b] + b on, one row more than nodes. `choices` and `best` are of rows, `tokens` and `accept` of nodes,
// `next` of requests.
struct foretoken_chains_in {
    int64_t requests, size;
    const foretoken_choice* choices;
    const int64_t *best, *offsets, *tokens;
    const double *accept, *next;
};

// The row where each request's round ends, the token drawn there, and the probability of accepting each node.
struct foretoken_chains_out {
    int64_t *rows, *next_tokens;
    float* probabilities;
};

namespace {

// Where the chain of a request is left: before its first node that is rejected.
inline int64_t end_of_chain(const foretoken_chains_in& in, const foretoken_chains_out& out, int64_t b) {
    int64_t node = in.offsets[b];
    while (node < in.offsets[b + 1] && in.accept[node] < double(out.probabilities[node])) ++node;
    return node;
}

// The token that ends a round in `row`, whose node `rejected` cannot be it (-1: nothing was proposed there). If rounding
// leaves nothing but that node, it is.
template <class T>
inline int64_t next_of(const Row<T>& row, const Choice& choice, int64_t rejected, double u, float* room, double* sums) {
    if (choice.temperature == 0) return *row.best;
    distribution_of(row, choice, room);
    if (rejected >= 0) {
        const float own = room[rejected];
        room[rejected] = 0.0f;
        if (std::all_of(room, room + row.size, [](float weight) { return !(weight > 0); })) room[rejected] = own;
    }
    return draw_row(room, row.size, u, sums);
}

template <class T>
void verify_chains(const T* logits, const foretoken_chains_in& in, const foretoken_chains_out& out, int threads) {
    const int64_t nodes = in.offsets[in.requests], rows = nodes + in.requests;
    const auto row_of = [&](int64_t row) { return Row<T>{logits + row * in.size, in.size, in.best + row}; };
    std::vector<int64_t> owners(nodes);
    for (int64_t b = 0; b < in.requests; ++b)
        std::fill(owners.begin() + in.offsets[b], owners.begin() + in.offsets[b + 1], b);
    std::atomic<bool> is_done{true};
#pragma omp parallel num_threads(threads) if (rows > 1)
    {
        const std::unique_ptr<float[]> room(new (std::nothrow) float[in.size]);
        const std::unique_ptr<double[]> sums(new (std::nothrow) double[sums_of_draw(in.size)]);
        const auto work = [&](auto function) {
            try {
                if (!room || !sums) throw std::bad_alloc();
                function();
            } catch (const std::bad_alloc&) {
                is_done = false;
            }
        };
#pragma omp for schedule(dynamic)
        for (int64_t node = 0; node < nodes; ++node)
            work([&] {
                const int64_t row = node + owners[node];  // of its parent
                const float p = probability_of(row_of(row), in.choices[row], in.tokens[node], room.get());
                out.probabilities[node] = std::min(p, 1.0f);
            });
#pragma omp for schedule(dynamic)
        for (int64_t b = 0; b < in.requests; ++b)
            work([&] {
                const int64_t node = end_of_chain(in, out, b), row = node + b;
                const int64_t rejected = node < in.offsets[b + 1] ? in.tokens[node] : -1;
                out.rows[b] = row;
                out.next_tokens[b] =
                    next_of(row_of(row), in.choices[row], rejected, in.next[b], room.get(), sums.get());
            });
    }
    if (!is_done) throw std::bad_alloc();
}

}  // namespace

#endif
