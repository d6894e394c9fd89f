// The two largest numbers of a row, and where the first of the largest stands.

#ifndef FORETOKEN_TOP_TWO_H
#define FORETOKEN_TOP_TWO_H

#include <algorithm>
#include <limits>

#include "numbers.h"

namespace {

// `second` is the largest of all others: equal to `first` where two are. NaN counts as largest, as in numpy.
struct TopTwo {
    float first, second;
    int64_t place;
};

constexpr int64_t PIECE_OF_ROW = 4096;  // numbers among which the place is looked for

// The two largest of `count` numbers, NaN if there is one among them; no place.
template <class T>
TopTwo top_two_of_piece(const T* numbers, int64_t count) {
    constexpr float LEAST = -std::numeric_limits<float>::infinity();
    Lanes most = all(LEAST), next = all(LEAST), broken = {};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const Lanes own = load(numbers + i);
        const auto is_more = own > most;
        next = choose(is_more, most, choose(own > next, own, next));
        most = choose(is_more, own, most);
        broken = choose(own == own, broken, own);
    }
    TopTwo top{LEAST, LEAST, 0};
    float any = sum_of(broken);
    const auto meet = [&](float own) {
        if (own > top.first)
            top.second = top.first, top.first = own;
        else if (own > top.second)
            top.second = own;
    };
    for (int lane = 0; lane < LANES; ++lane) meet(most[lane]), meet(next[lane]);
    for (; i < count; ++i) {
        const float own = number(numbers[i]);
        meet(own);
        if (own != own) any = own;
    }
    if (any != any) top.first = top.second = any;
    return top;
}

template <class T>
TopTwo top_two(const T* row, int64_t size) {
    TopTwo top{-std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(), 0};
    for (int64_t first = 0; first < size; first += PIECE_OF_ROW) {
        const TopTwo own = top_two_of_piece(row + first, std::min(PIECE_OF_ROW, size - first));
        if (own.first != own.first) {
            for (top = {own.first, own.first, first}; number(row[top.place]) == number(row[top.place]);) ++top.place;
            return top;
        }
        if (own.first > top.first)
            top = {own.first, std::max(top.first, own.second), first};
        else
            top.second = std::max(top.second, own.first);
    }
    while (top.place < size && number(row[top.place]) != top.first) ++top.place;
    return top;
}

}  // namespace

#endif
