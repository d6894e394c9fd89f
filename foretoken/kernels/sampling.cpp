// Sampling on a CPU: the two largest logits of rows, their distributions, the winners of exponential races, draws by
// inverse CDF.
// Each row's result is a function of that row; threads share rows, and races also pieces of a row.

#include <new>
#include <vector>

#include "distribution.h"
#include "race.h"
#include "threads.h"
#include "top_two.h"

namespace {

constexpr int64_t FEW_NUMBERS = 1 << 16;   // up to here one thread works: waking others would take longer
constexpr int64_t FEW_RACERS = 1 << 14;    // the same for a race, whose noise takes longer
constexpr int64_t PIECE = 1 << 13;         // tokens of a race that one thread looks at
constexpr int64_t SUMMED_DRAW = 512;       // weights whose sum is kept while the place of a draw is looked for

inline Leader best_of(const std::vector<Leader>& pieces, int64_t first, int64_t count) {
    Leader best;
    for (int64_t i = first; i < first + count; ++i) best.meet(pieces[i].ratio, pieces[i].id);
    return best;
}

inline double sum_of_some(const float* weights, int64_t size) {
    double sums[8] = {};
    int64_t i = 0;
    for (; i + 8 <= size; i += 8)
        for (int k = 0; k < 8; ++k) sums[k] += double(weights[i + k]);
    for (; i < size; ++i) sums[0] += double(weights[i]);
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

// The last token with weight before `stop`, 0 where there is none.
inline int64_t last_usable(const float* weights, int64_t stop) {
    while (stop > 1 && !(weights[stop - 1] > 0)) --stop;
    return stop - 1;
}

// The first token at which the sum of the weights exceeds the share `u` of all; `sums` gets those before each block.
inline int64_t draw_row(const float* weights, int64_t size, double u, double* sums) {
    int64_t blocks = 0;
    sums[0] = 0;
    for (int64_t first = 0; first < size; first += SUMMED_DRAW, ++blocks)
        sums[blocks + 1] = sums[blocks] + sum_of_some(weights + first, std::min(SUMMED_DRAW, size - first));
    const double point = u * sums[blocks];
    int64_t block = 0;
    while (block < blocks && !(sums[block + 1] > point)) ++block;
    if (block == blocks) return last_usable(weights, size);  // the product was rounded up to all
    const int64_t first = block * SUMMED_DRAW, stop = std::min(first + SUMMED_DRAW, size);
    double reached = sums[block];
    for (int64_t i = first; i < stop; ++i) {
        reached += double(weights[i]);
        if (reached > point && weights[i] > 0) return i;
    }
    return last_usable(weights, stop);  // one by one the block's weights made less than together
}

template <class T>
void top_two_of_rows(const T* logits, int64_t rows, int64_t size, int64_t* places, float* tops, int threads) {
    for_each(rows, threads, rows > 1 && rows * size > FEW_NUMBERS, [=](int64_t row) {
        const TopTwo own = top_two(logits + row * size, size);
        places[row] = own.place, tops[row] = own.first, tops[rows + row] = own.second;
    });
}

}  // namespace

extern "C" {

// What the functions below take; a library of another interface is not used.
int foretoken_sampling_interface() { return 2; }

// Of `logits` [rows, size], float32 or bfloat16: the `places` [rows] of the largest, and in `tops` [2, rows] the largest
// and the second largest of each row.
void foretoken_top_two(const void* logits, int64_t rows, int64_t size, int64_t* places, float* tops, int is_bf16,
                       int threads) {
    if (is_bf16)
        top_two_of_rows(static_cast<const uint16_t*>(logits), rows, size, places, tops, threads);
    else
        top_two_of_rows(static_cast<const float*>(logits), rows, size, places, tops, threads);
}

// `logits` [rows, size] to distributions `out` of that shape. False: no memory.
bool foretoken_distributions(const float* logits, const foretoken_choice* choices, int64_t rows, int64_t size,
                             float* out, int threads) {
    bool is_done = true;
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (rows > 1 && rows * size > FEW_NUMBERS)
    for (int64_t row = 0; row < rows; ++row) {
        try {
            distribution_of(logits + row * size, size, choices[row], out + row * size);
        } catch (const std::bad_alloc&) {
#pragma omp atomic write
            is_done = false;
        }
    }
    return is_done;
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
    const int64_t blocks = (size + SUMMED_DRAW - 1) / SUMMED_DRAW;
    try {
        std::vector<double> sums(rows * (blocks + 1));
#pragma omp parallel for num_threads(threads) schedule(static) if (rows > 1 && rows * size > FEW_NUMBERS)
        for (int64_t row = 0; row < rows; ++row)
            tokens[row] = draw_row(weights + row * size, size, u[row], &sums[row * (blocks + 1)]);
    } catch (const std::bad_alloc&) {
        return false;
    }
    return true;
}
}
