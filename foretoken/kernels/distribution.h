// From a row of logits to the distribution that is sampled from: temperature, top_k, top_p, min_p, softmax.
//
// `text/sampling.py` has the same in torch's operations. A row without filters is read three times; one with filters is
// cut down as early as possible to a list of the tokens that may stay. Nothing is sorted but what is nearly equal to
// the last token that goes. A row's numbers depend on that row alone.

#ifndef FORETOKEN_DISTRIBUTION_H
#define FORETOKEN_DISTRIBUTION_H

#include <cmath>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "numbers.h"

// How a row is sampled, as Python fills it in. `temperature` 0: a point at the best token; `top_k` 0, `dropped` < 0 and
// `min_p` 0: no such filter.
struct foretoken_choice {
    int64_t top_k;
    float temperature, dropped, min_p;  // `dropped` is 1 - top_p
};

namespace {

using Choice = foretoken_choice;

constexpr float INF = std::numeric_limits<float>::infinity();
constexpr int64_t SUMMED = 1024;  // numbers that are added in float32; what they make is added in float64
constexpr float LOWEST_TEMPERATURE = 1e-37f;  // by a row's largest number; `text/sampling.py` has the same
constexpr int64_t GROUP = 512;    // numbers of which 16 maxima are kept

// A row of logits, float32 or bfloat16, and its largest number where Python knows which that is.
template <class T>
struct Row {
    const T* x;
    int64_t size;
    const int64_t* best;  // where the largest stands; null: not known
};

// The first `count` numbers of a row, -inf behind them.
template <class T>
inline Lanes load_scores(const T* from, int64_t count) {
    if (count >= LANES) return load(from);
    float all_of[LANES];
    std::fill_n(all_of, LANES, -INF);
    for (int64_t i = 0; i < count; ++i) all_of[i] = number(from[i]);
    return load(all_of);
}

// e^x of what is at most 0, down to the least number that float32 has.
FORETOKEN_INLINE Lanes exp_below(Lanes x) {
    x = choose(x < -104.0f, all(-104.0f), x);
    const Exponential own = exponential_of(x);
#if defined(__AVX512F__)  // the same bits: both round once
    return Lanes(_mm512_scalef_ps(__m512(own.rest), _mm512_cvtepi32_ps(__m512i(own.whole))));
#else
    const Words half = own.whole >> 1;
    return own.rest * Lanes((half + 127) << 23) * Lanes((own.whole - half + 127) << 23);
#endif
}

// The largest of a row; `maxima` gets 16 numbers of each group, each the largest of a part of it, where it is wanted.
template <class T>
inline float max_of(const T* x, int64_t size, std::vector<float>* maxima) {
    Lanes most = all(-INF);
    for (int64_t first = 0; first < size; first += GROUP) {
        Lanes own = all(-INF);
        const int64_t stop = std::min(first + GROUP, size);
        for (int64_t i = first; i < stop; i += LANES) {
            const Lanes here = load_scores(x + i, stop - i);
            own = choose(own > here, own, here);
        }
        if (maxima != nullptr) {
            maxima->resize(maxima->size() + LANES);
            store(own, maxima->data() + maxima->size() - LANES);
        }
        most = choose(most > own, most, own);
    }
    return max_of(most);
}

// Calls `each(i, e)` with e^(x / temperature - most) of the 16 numbers from `i` on, for the block of a row that begins
// at `first`; their sum.
template <class T, class Each>
inline float exps_of_block(const Row<T>& row, int64_t first, float temperature, float most, Each each) {
    const int64_t stop = std::min(first + SUMMED, row.size);
    Lanes sums = {};
    for (int64_t i = first; i < stop; i += LANES) {
        const Lanes own = exp_below(load_scores(row.x + i, stop - i) / temperature - most);
        sums += own;
        each(i, own);
    }
    return sum_of(sums);
}

// The same for a whole row.
template <class T, class Each>
inline double exps_of(const Row<T>& row, float temperature, float most, Each each) {
    double total = 0;
    for (int64_t first = 0; first < row.size; first += SUMMED)
        total += exps_of_block(row, first, temperature, most, each);
    return total;
}

// The tokens that may stay, in ascending order, with their exponentials; `total` is the sum of these and of `gone`,
// which top_p counts and leaves out.
struct Kept {
    std::vector<int32_t> ids;
    std::vector<float> weights;
    double total = 0, gone = 0;

    void add(int64_t id, float weight) {
        ids.push_back(int32_t(id));
        weights.push_back(weight);
    }

    // Drops what `stays(place)` is false for.
    template <class Stays>
    void cut(Stays stays) {
        size_t count = 0;
        for (size_t i = 0; i < ids.size(); ++i)
            if (stays(i)) ids[count] = ids[i], weights[count++] = weights[i];
        ids.resize(count), weights.resize(count);
        sum();
    }

    void sum() {
        total = gone = 0;
        for (const float weight : weights) total += weight;
    }

    // From scores that are at most `most` to exponentials.
    void exponentiate(float most) {
        for (size_t i = 0; i < weights.size(); i += LANES) {
            const int64_t left = int64_t(weights.size() - i);
            store_some(exp_below(load_scores(&weights[i], left) - most), &weights[i], std::min<int64_t>(LANES, left));
        }
        sum();
    }
};

// The scores x / temperature from `least` on.
template <class T>
inline void take_scores(const T* x, int64_t size, float temperature, float least, Kept* kept) {
    for (int64_t i = 0; i < size; i += LANES) {
        const Lanes own = load_scores(x + i, size - i) / temperature;
        uint32_t found = lanes_set(own >= least);
        if (size - i < LANES) found &= (1u << (size - i)) - 1;
        for (; found; found &= found - 1) kept->add(i + __builtin_ctz(found), own[__builtin_ctz(found)]);
    }
}

// The `top_k` largest scores and their equals. At least `top_k` scores are as large as the `top_k` largest of the
// groups' maxima, so what is smaller needs no order.
template <class T>
inline void take_top_k(const T* x, int64_t size, float temperature, int64_t top_k, std::vector<float> maxima,
                       Kept* kept) {
    float least = -INF;
    if (top_k <= int64_t(maxima.size())) {
        std::nth_element(maxima.begin(), maxima.begin() + (top_k - 1), maxima.end(), std::greater<float>());
        least = maxima[top_k - 1] / temperature;
    }
    take_scores(x, size, temperature, least, kept);
    std::vector<float> scores = kept->weights;
    if (int64_t(scores.size()) <= top_k) return;
    std::nth_element(scores.begin(), scores.begin() + (top_k - 1), scores.end(), std::greater<float>());
    const float last = scores[top_k - 1];
    kept->cut([&](size_t i) { return kept->weights[i] >= last; });
}

// The exponentials in `row` that top_p may keep: what is less than dropped / (2 * size) of the sum goes in any case,
// because all that together is less than half of `dropped`.
inline void take_likely(const float* row, int64_t size, double total, float dropped, Kept* kept) {
    const float least = float(total * dropped / (2.0 * double(size)));
    kept->total = total;
    for (int64_t first = 0; first < size; first += SUMMED) {
        const int64_t stop = std::min(first + SUMMED, size);
        Lanes sums = {};
        for (int64_t i = first; i < stop; i += LANES) {
            const Lanes own = stop - i >= LANES ? load(row + i) : load_some(row + i, stop - i);
            sums += choose(own < least, own, Lanes{});
            uint32_t found = lanes_set(own >= least);
            if (stop - i < LANES) found &= (1u << (stop - i)) - 1;
            for (; found; found &= found - 1) kept->add(i + __builtin_ctz(found), own[__builtin_ctz(found)]);
        }
        kept->gone += sum_of(sums);
    }
}

// Probabilities that differ by less than a sixty-fourth share a bucket; all below 2^-40 share the first.
constexpr int BUCKET_SHIFT = 17, FIRST_BUCKET = (127 - 40) << 6, NUM_BUCKETS = (40 << 6) + 2;

inline int bucket_of(float probability) {
    const int bucket = int(bits_of(probability) >> BUCKET_SHIFT) - FIRST_BUCKET;
    return std::max(0, std::min(NUM_BUCKETS - 1, bucket));
}

// Drops the least likely tokens as long as what was dropped stays at most `dropped` of the sum; of equals the lowest
// ids go first. At least one token stays.
inline void cut_top_p(float dropped, Kept* kept) {
    const size_t count = kept->ids.size();
    std::vector<float> probabilities(count);
    std::vector<double> masses(NUM_BUCKETS);
    for (size_t i = 0; i < count; ++i) {
        probabilities[i] = float(kept->weights[i] / kept->total);
        masses[bucket_of(probabilities[i])] += probabilities[i];
    }
    double mass = kept->gone / kept->total;
    int border = 0;
    while (border < NUM_BUCKETS - 1 && float(mass + masses[border]) <= dropped) mass += masses[border++];
    std::vector<std::pair<float, size_t>> equals;  // of the bucket whose last tokens stay
    for (size_t i = 0; i < count; ++i)
        if (bucket_of(probabilities[i]) == border) equals.emplace_back(probabilities[i], i);
    std::sort(equals.begin(), equals.end());
    std::vector<bool> goes(count);
    for (const auto& [probability, i] : equals) {
        mass += probability;
        if (float(mass) > dropped) break;
        goes[i] = true;
    }
    const float most = *std::max_element(probabilities.begin(), probabilities.end());
    size_t last = count - 1;
    while (last > 0 && probabilities[last] != most) --last;
    kept->cut([&](size_t i) { return i == last || (bucket_of(probabilities[i]) >= border && !goes[i]); });
}

inline bool has_filter(const Choice& choice, int64_t size) {
    return (choice.top_k > 0 && choice.top_k < size) || choice.dropped >= 0 || choice.min_p > 0;
}

// The largest score of a row whose largest number is `most`. Raises `temperature` where that would be infinite: numbers
// so large lie so far apart that nothing but the largest has a weight under either temperature.
inline float scored(float most, float& temperature) {
    temperature = std::max(temperature, std::fabs(most) * LOWEST_TEMPERATURE);
    return most / temperature;
}

// The same for a row.
template <class T>
inline float most_of(const Row<T>& row, float& temperature) {
    return scored(row.best != nullptr ? number(row.x[*row.best]) : max_of(row.x, row.size, nullptr), temperature);
}

// Writes the exponentials of a block's scores less the largest to its place in `out`; their sum.
template <class T>
inline float put_exps_of_block(const Row<T>& row, int64_t first, float temperature, float most, float* out) {
    return exps_of_block(row, first, temperature, most, [&](int64_t i, const Lanes& own) {
        if (row.size - i >= LANES)
            store(own, out + i);
        else
            store_some(own, out + i, row.size - i);
    });
}

// The same for a whole row.
template <class T>
inline double put_exps(const Row<T>& row, float temperature, float most, float* out) {
    double total = 0;
    for (int64_t first = 0; first < row.size; first += SUMMED)
        total += put_exps_of_block(row, first, temperature, most, out);
    return total;
}

// The tokens of a row that its filters keep, with their exponentials; none where the row cannot be summed, of which
// `check_finite` has told by then. `room` is for a row.
template <class T>
inline Kept kept_of(const Row<T>& row, const Choice& choice, float* room) {
    Kept kept;
    float temperature = choice.temperature;
    if (choice.top_k > 0 && choice.top_k < row.size) {
        std::vector<float> maxima;
        const float most = scored(max_of(row.x, row.size, &maxima), temperature);
        take_top_k(row.x, row.size, temperature, choice.top_k, std::move(maxima), &kept);
        kept.exponentiate(most);
    } else if (choice.dropped >= 0) {
        const float most = most_of(row, temperature);
        const double total = put_exps(row, temperature, most, room);
        if (total > 0) take_likely(room, row.size, total, choice.dropped, &kept);
    } else {
        const float most = most_of(row, temperature);
        const float margin = 1e-5f * (1.0f + std::fabs(most));  // of what is rounded before `exponentiate`
        take_scores(row.x, row.size, temperature, most + std::log(choice.min_p) - margin, &kept);
        kept.exponentiate(most);
    }
    if (choice.dropped >= 0 && !kept.ids.empty()) cut_top_p(choice.dropped, &kept);
    if (choice.min_p > 0) kept.cut([&](size_t i) { return kept.weights[i] >= choice.min_p; });
    return kept;
}

// The distribution of a row, written to `out`. At temperature 0 the row's best token must be known.
template <class T>
inline void distribution_of(const Row<T>& row, const Choice& choice, float* out) {
    if (choice.temperature == 0) {
        std::fill_n(out, row.size, 0.0f);
        out[*row.best] = 1.0f;
    } else if (has_filter(choice, row.size)) {
        const Kept kept = kept_of(row, choice, out);
        const float scale = float(1.0 / kept.total);
        std::fill_n(out, row.size, 0.0f);
        for (size_t i = 0; i < kept.ids.size(); ++i) out[kept.ids[i]] = kept.weights[i] * scale;
    } else {
        float temperature = choice.temperature;
        const float most = most_of(row, temperature);
        const double total = put_exps(row, temperature, most, out);
        const float scale = float(1.0 / total);
        for (int64_t i = 0; i < row.size; ++i) out[i] *= scale;
    }
}

// What `distribution_of` gives one token, to the bit, without writing it; `room` is for a row.
template <class T>
inline float probability_of(const Row<T>& row, const Choice& choice, int64_t token, float* room) {
    if (choice.temperature == 0) return token == *row.best ? 1.0f : 0.0f;
    if (has_filter(choice, row.size)) {
        const Kept kept = kept_of(row, choice, room);
        const auto found = std::lower_bound(kept.ids.begin(), kept.ids.end(), int32_t(token));
        if (found == kept.ids.end() || *found != int32_t(token)) return 0.0f;
        return kept.weights[found - kept.ids.begin()] * float(1.0 / kept.total);
    }
    float temperature = choice.temperature;
    const float most = most_of(row, temperature);
    const double total = exps_of(row, temperature, most, [](int64_t, const Lanes&) {});
    const int64_t first = token - token % LANES;
    const Lanes own = exp_below(load_scores(row.x + first, row.size - first) / temperature - most);
    return own[token % LANES] * float(1.0 / total);
}

}  // namespace

#endif
