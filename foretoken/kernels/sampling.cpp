// Sampling on a CPU: the two largest logits of rows, their distributions, the winners of exponential races, draws by
// inverse CDF, verdicts from logits on deterministic chains and by the coupled rule, uniform numbers.
// Each row's result is a function of that row; threads share rows, and races also pieces of a row.

#include <new>
#include <vector>

#include "chains.h"
#include "coupled.h"
#include "distribution.h"
#include "draw.h"
#include "race.h"
#include "threads.h"
#include "top_two.h"

namespace {

constexpr int64_t FEW_NUMBERS = 1 << 16;  // up to here one thread works: waking others would take longer
constexpr int64_t FEW_RACERS = 1 << 14;   // the same for a race, whose noise takes longer

template <class T>
void top_two_of_rows(const T* logits, int64_t rows, int64_t size, int64_t* places, float* tops, int threads) {
    for_each(rows, threads, rows > 1 && rows * size > FEW_NUMBERS, [=](int64_t row) {
        const TopTwo own = top_two(logits + row * size, size);
        places[row] = own.place, tops[row] = own.first, tops[rows + row] = own.second;
    });
}

template <class T>
bool distributions_of(const T* logits, const foretoken_choice* choices, const int64_t* best, int64_t rows, int64_t size,
                      float* out, int threads) {
    bool is_done = true;
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (rows > 1 && rows * size > FEW_NUMBERS)
    for (int64_t row = 0; row < rows; ++row) {
        try {
            const Row<T> own{logits + row * size, size, best != nullptr ? best + row : nullptr};
            distribution_of(own, choices[row], out + row * size);
        } catch (const std::bad_alloc&) {
#pragma omp atomic write
            is_done = false;
        }
    }
    return is_done;
}

}  // namespace

extern "C" {

// What the functions below take; a library of another interface is not used.
int foretoken_sampling_interface() { return 4; }

// Of `logits` [rows, size], float32 or bfloat16: the `places` [rows] of the largest, and in `tops` [2, rows] the largest
// and the second largest of each row.
void foretoken_top_two(const void* logits, int64_t rows, int64_t size, int64_t* places, float* tops, int is_bf16,
                       int threads) {
    if (is_bf16)
        top_two_of_rows(static_cast<const uint16_t*>(logits), rows, size, places, tops, threads);
    else
        top_two_of_rows(static_cast<const float*>(logits), rows, size, places, tops, threads);
}

// `logits` [rows, size], float32 or bfloat16, to distributions `out` of that shape. `best` [rows] is where each row's
// largest stands, null where that is not known and no temperature is 0. False: no memory.
bool foretoken_distributions(const void* logits, const foretoken_choice* choices, const int64_t* best, int64_t rows,
                             int64_t size, float* out, int is_bf16, int threads) {
    if (is_bf16)
        return distributions_of(static_cast<const uint16_t*>(logits), choices, best, rows, size, out, threads);
    return distributions_of(static_cast<const float*>(logits), choices, best, rows, size, out, threads);
}

// Verdicts on a deterministic chain for each request, see chains.h. False: no memory.
bool foretoken_chains(const void* logits, const foretoken_chains_in* in, const foretoken_chains_out* out, int is_bf16,
                      int threads) {
    try {
        if (is_bf16)
            verify_chains(static_cast<const uint16_t*>(logits), *in, *out, threads);
        else
            verify_chains(static_cast<const float*>(logits), *in, *out, threads);
    } catch (const std::bad_alloc&) {
        return false;
    }
    return true;
}

// Winners of the rows that the coupled rule reaches, see coupled.h. False: no memory.
bool foretoken_coupled(const void* logits, const foretoken_coupled_in* in, int64_t* winners, int is_bf16, int threads) {
    try {
        if (is_bf16)
            walk_coupled(static_cast<const uint16_t*>(logits), *in, winners, threads);
        else
            walk_coupled(static_cast<const float*>(logits), *in, winners, threads);
    } catch (const std::bad_alloc&) {
        return false;
    }
    return true;
}

// A number in [0, 1) of 53 bits for each column of `words` [4, count]: a seed, an index, a round's start, a purpose.
void foretoken_uniforms(const uint64_t* words, int64_t count, double* out) {
    for (int64_t i = 0; i < count; ++i)
        out[i] = uniform_of(words[i], {words[count + i], words[2 * count + i], words[3 * count + i]});
}

// The winner of each row's race: `weights` [rows, size], `keys` [rows, 3] of two words of a key and a position.
// False: no memory.
bool foretoken_race(const float* weights, const uint64_t* keys, int64_t rows, int64_t size, int64_t* winners,
                    int threads) {
    const int64_t pieces = (size + PIECE - 1) / PIECE;
    try {
        std::vector<Leader> leaders(rows * pieces);
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * size > FEW_RACERS)
        for (int64_t i = 0; i < rows * pieces; ++i) {
            const int64_t row = i / pieces, first = i % pieces * PIECE;
            const RaceKey key{keys[3 * row], keys[3 * row + 1], keys[3 * row + 2]};
            leaders[i] = race_piece(weights + row * size, first, std::min(first + PIECE, size), key);
        }
        for (int64_t row = 0; row < rows; ++row) winners[row] = best_of(leaders, row * pieces, pieces).id;
    } catch (const std::bad_alloc&) {
        return false;
    }
    return true;
}

// A token per row by inverse CDF: `weights` [rows, size], shares `u` [rows]. False: no memory.
bool foretoken_draw(const float* weights, const double* u, int64_t rows, int64_t size, int64_t* tokens, int threads) {
    const int64_t own = sums_of_draw(size);
    try {
        std::vector<double> sums(rows * own);
#pragma omp parallel for num_threads(threads) schedule(static) if (rows > 1 && rows * size > FEW_NUMBERS)
        for (int64_t row = 0; row < rows; ++row)
            tokens[row] = draw_row(weights + row * size, size, u[row], &sums[row * own]);
    } catch (const std::bad_alloc&) {
        return false;
    }
    return true;
}
}
