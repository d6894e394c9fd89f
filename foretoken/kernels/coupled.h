// Verification by the coupled rule from logits: `CoupledRule` (verify/coupled.py) decides the same, to the bit, from
// distributions in memory. A row is read only where the path of equal tokens arrives: a round of one accepted token
// costs two rows, however many were drafted.

#ifndef FORETOKEN_COUPLED_H
#define FORETOKEN_COUPLED_H

#include <atomic>
#include <memory>
#include <new>

#include "distribution.h"
#include "race.h"
#include "threads.h"

// Drafts of `requests` requests, as Python lays them out: request b has the rows from starts[b] to starts[b + 1], the
// first of which is its anchor. Of a row: `choices`, where its largest stands (`best`), the row of its parent and its
// token (`parents`, `tokens`; -1 for an anchor), three words of the key of its race (`keys`).
struct foretoken_coupled_in {
    int64_t requests, size;
    const foretoken_choice* choices;
    const int64_t *best, *starts, *parents, *tokens;
    const uint64_t* keys;
};

namespace {

// What one request at a time needs: weights of a row, sums of its blocks, leaders of its pieces.
struct RaceRoom {
    std::unique_ptr<float[]> weights;
    std::vector<float> sums;
    std::vector<Leader> leaders;

    explicit RaceRoom(int64_t size)
        : weights(new float[size]), sums((size + SUMMED - 1) / SUMMED), leaders((size + PIECE - 1) / PIECE) {}
};

// Writes the exponentials of a row without filters to `room`; the number that makes probabilities of them.
template <class T>
float weigh(const Row<T>& row, float temperature, RaceRoom* room, int threads) {
    const float most = most_of(row, temperature);
    const int64_t blocks = int64_t(room->sums.size());
    for_each(blocks, threads, true, [&](int64_t block) {
        room->sums[block] = put_exps_of_block(row, block * SUMMED, temperature, most, room->weights.get());
    });
    double total = 0;
    for (const float sum : room->sums) total += sum;
    return float(1.0 / total);
}

// The token that a row's race makes it end with; `threads` share the row.
template <class T>
int64_t winner_of(const Row<T>& row, const Choice& choice, const RaceKey& key, RaceRoom* room, int threads) {
    if (choice.temperature == 0) return *row.best;
    float scale = 1.0f;
    if (has_filter(choice, row.size))
        distribution_of(row, choice, room->weights.get());
    else
        scale = weigh(row, choice.temperature, room, threads);
    const int64_t pieces = int64_t(room->leaders.size());
    for_each(pieces, threads, true, [&](int64_t piece) {
        const int64_t first = piece * PIECE, stop = std::min(first + PIECE, row.size);
        float* weights = room->weights.get();
        for (int64_t i = first; i < stop; ++i) weights[i] *= scale;
        room->leaders[piece] = race_piece(weights, first, stop, key);
    });
    return best_of(room->leaders, 0, pieces).id;
}

// The winners of the rows of request `b` that paths of equal tokens reach, -1 for the others; `threads` share each row.
template <class T>
void walk_request(const T* logits, const foretoken_coupled_in& in, int64_t b, int64_t* winners, RaceRoom* room,
                  int threads) {
    for (int64_t r = in.starts[b]; r < in.starts[b + 1]; ++r) {
        const bool is_reached = in.parents[r] < 0 || winners[in.parents[r]] == in.tokens[r];
        const RaceKey key{in.keys[3 * r], in.keys[3 * r + 1], in.keys[3 * r + 2]};
        const Row<T> row{logits + r * in.size, in.size, in.best + r};
        winners[r] = is_reached ? winner_of(row, in.choices[r], key, room, threads) : -1;
    }
}

// The same for all requests, which the threads share where there are enough of them. Rows are not shared in there: a
// region inside a region starts threads anew.
template <class T>
void walk_coupled(const T* logits, const foretoken_coupled_in& in, int64_t* winners, int threads) {
    if (in.requests < 2 * threads) {
        RaceRoom room(in.size);
        for (int64_t b = 0; b < in.requests; ++b) walk_request(logits, in, b, winners, &room, threads);
        return;
    }
    std::atomic<bool> is_done{true};
#pragma omp parallel num_threads(threads)
    {
        std::unique_ptr<RaceRoom> room;
#pragma omp for schedule(dynamic)
        for (int64_t b = 0; b < in.requests; ++b) {
            try {
                if (!room) room.reset(new RaceRoom(in.size));
                walk_request(logits, in, b, winners, room.get(), 1);
            } catch (const std::bad_alloc&) {
                is_done = false;
            }
        }
    }
    if (!is_done) throw std::bad_alloc();
}

}  // namespace

#endif
