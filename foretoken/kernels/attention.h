// Attention of new rows over their sequences' keys and values, which are stored first.
//
// A row's result follows from its query, and from the keys and values of its own text, to the last bit: it is computed
// over positions in ascending order, in blocks and splits that begin at multiples of their size. Neither where a
// position is stored, nor the rows beside it, nor the threads change it. So a prompt gets the same bits however it is
// cut, and a node of a token tree those of the chain that leads to it.

#ifndef FORETOKEN_ATTENTION_H
#define FORETOKEN_ATTENTION_H

#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "attention_rows.h"
#include "rows.h"

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
    void *keys, *values;              // [groups, num_slots, head_dim], as the rows or in float16
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

constexpr int TILE_ROWS = 48;       // query rows for which keys are laid out once
constexpr int64_t SPLIT = 512;      // positions whose result is computed on its own, so that threads can share a text
constexpr int TILES_PER_THREAD = 4; // with fewer, splits are shared out

// The rows of a segment in the order of their texts: position of each, and for a tree the columns of the positions
// from `shared` on, which are those of its ancestors.
class Texts {
public:
    explicit Texts(const Segment& segment) : segment_(segment) {
        if (segment.visible == nullptr) return;
        const int64_t own = segment.num_columns - segment.shared;
        for (int64_t row = 0; row < segment.num_rows; ++row) {
            first_.push_back(int64_t(columns_.size()));
            for (int64_t c = 0; c < own; ++c)
                if (segment.visible[row * own + c]) columns_.push_back(segment.shared + c);
            positions_.push_back(segment.shared + int64_t(columns_.size()) - first_[row] - 1);
        }
    }

    const Segment& segment() const { return segment_; }
    bool is_tree() const { return segment_.visible != nullptr; }

    // Positions before this one have the same column for every row.
    int64_t common() const { return is_tree() ? segment_.shared : segment_.num_columns; }

    int64_t position(int64_t row) const {
        return is_tree() ? positions_[row] : segment_.num_columns - segment_.num_rows + row;
    }

    // Those of `count` positions from `first` on, times `size`.
    void slots(int64_t row, int64_t first, int64_t count, int64_t size, int64_t* to) const {
        const int64_t shared = std::min(count, std::max<int64_t>(0, common() - first));
        for (int64_t i = 0; i < shared; ++i) to[i] = slot(first + i) * size;
        const int64_t* own = columns_.data() + (is_tree() ? first_[row] + first - segment_.shared : 0);
        for (int64_t i = shared; i < count; ++i) to[i] = slot(own[i]) * size;
    }

private:
    int64_t slot(int64_t column) const {
        return segment_.slots == nullptr ? segment_.first_slot + column : segment_.slots[column];
    }

    const Segment& segment_;
    std::vector<int64_t> positions_, columns_, first_;
};

// Up to TILE_ROWS query rows of one key group; query row i is a head of the group at row i / heads per group of the
// segment. Their result over positions `first_split * SPLIT` to `last_split * SPLIT`.
struct Task {
    const Texts* texts;
    int64_t group, first, count, first_split, last_split;
    float* parts;  // [count, padded + 2] where the splits of a text are shared out: values, largest score, weight
};

template <class T>
void keep_numbers(const T* from, int64_t count, T* to) {
    std::copy_n(from, count, to);
}

inline void keep_numbers(const float* from, int64_t count, Half* to) {
    by_lanes(
        count, [&](int64_t i) { store(load(from + i), to + i); },
        [&](int64_t i, int64_t some) { store_some(load_some(from + i, some), to + i, some); });
}

template <class C>
void keep(const Call& call, int64_t row, int64_t head_dim) {
    const auto* key = static_cast<const Row<C>*>(call.key) + row * call.key_stride;
    const auto* value = static_cast<const Row<C>*>(call.value) + row * call.value_stride;
    for (int64_t g = 0; g < call.num_groups; ++g) {
        const int64_t to = (g * call.num_slots + call.write_slots[row]) * head_dim;
        keep_numbers(key + g * head_dim, head_dim, static_cast<C*>(call.keys) + to);
        keep_numbers(value + g * head_dim, head_dim, static_cast<C*>(call.values) + to);
    }
}

// Memory of a thread, not set to anything.
class Scratch {
public:
    explicit Scratch(int64_t bytes) : memory_(std::aligned_alloc(64, size_t(bytes + 63) / 64 * 64)) {
        if (memory_ == nullptr) throw std::bad_alloc();
        next_ = static_cast<char*>(memory_);
    }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch() { std::free(memory_); }

    template <class N>
    N* take(int64_t count) {
        N* own = reinterpret_cast<N*>(next_);
        next_ += (count * int64_t(sizeof(N)) + 63) / 64 * 64;
        return own;
    }

private:
    void* memory_;
    char* next_;
};

// A thread's tiles, one after the other; the cache holds C.
template <class C>
class Tile {
    using T = Row<C>;

public:
    Tile(const Call& call, int64_t head_dim)
        : call_(call), size_(head_dim), padded_((head_dim + LANES - 1) / LANES * LANES), words_(words_of<C>(head_dim)),
          heads_(call.num_heads / call.num_groups), scoring_{call.scale, call.softcap},
          scratch_(bytes_of(padded_, words_)), keys_(scratch_.take<Laid<C>>(KEY_BLOCK * words_)),
          query_(scratch_.take<uint32_t>(TILE_ROWS * words_)), weights_(scratch_.take<float>(TILE_ROWS * KEY_BLOCK)),
          split_values_(scratch_.take<float>(TILE_ROWS * padded_)),
          total_values_(scratch_.take<float>(TILE_ROWS * padded_)) {}

    void run(const Task& task) {
        begin(task);
        bool is_asked = false;  // for the block that is read next: each asks for the one behind it
        for (int64_t split = task.first_split; split < task.last_split; ++split) {
            const int64_t first = std::max(split * SPLIT, lowest_ / KEY_BLOCK * KEY_BLOCK);
            const int64_t last = std::min((split + 1) * SPLIT, highest_ + 1);
            if (first >= last) continue;
            for (int64_t i = 0; i < task.count; ++i) {
                open_[i] = {NONE, Lanes{}, split_values_ + i * padded_};
                std::fill_n(open_[i].values, padded_, 0.0f);
            }
            if (!is_asked) {
                prefetch(first, 0);
                next_.all();
                is_asked = true;
            }
            for (int64_t block = first; block < last; block += KEY_BLOCK) run_block(block);
            for (int64_t i = 0; i < task.count; ++i)
                merge(total_[i], open_[i].largest, sum_of(open_[i].weights), open_[i].values, padded_);
        }
        for (int64_t i = 0; i < task.count; ++i)
            if (task.parts == nullptr)
                finish(task, i, total_[i]);
            else
                store_part(total_[i], task.parts + i * (padded_ + 2));
    }

    // The result of a task's row from the parts of its splits, [splits, count, padded + 2].
    void join(const Task& task, int64_t i, const float* parts, int64_t num_splits) {
        RowSum sum = beginning(task, i);
        for (int64_t split = 0; split < num_splits; ++split) {
            const float* part = parts + (split * task.count + i) * (padded_ + 2);
            merge(sum, part[padded_], part[padded_ + 1], part, padded_);
        }
        finish(task, i, sum);
    }

private:
    static int64_t bytes_of(int64_t padded, int64_t words) {
        return 4 * (KEY_BLOCK * words + TILE_ROWS * (words + KEY_BLOCK + 2 * padded)) + 5 * 64;
    }

    int64_t row_of(const Task& task, int64_t i) const { return (task.first + i) / heads_; }
    int64_t head_of(const Task& task, int64_t i) const { return task.group * heads_ + (task.first + i) % heads_; }
    int64_t place_of(const Task& task, int64_t i, int64_t stride) const {
        return (task.texts->segment().first_row + row_of(task, i)) * stride + head_of(task, i) * size_;
    }

    RowSum beginning(const Task& task, int64_t i) const {
        float* values = total_values_ + i * padded_;
        std::fill_n(values, padded_, 0.0f);
        if (call_.sinks == nullptr) return {NONE, 0.0f, values};
        return {call_.sinks[head_of(task, i)], 1.0f, values};
    }

    void begin(const Task& task) {
        task_ = &task;
        const int64_t plane = task.group * call_.num_slots * size_;
        cached_keys_ = static_cast<const C*>(call_.keys) + plane;
        cached_values_ = static_cast<const C*>(call_.values) + plane;
        lowest_ = std::numeric_limits<int64_t>::max(), highest_ = 0;
        for (int64_t i = 0; i < task.count; ++i) {
            positions_[i] = task.texts->position(row_of(task, i));
            lowest_ = std::min(lowest_, first_seen(positions_[i]));
            highest_ = std::max(highest_, positions_[i]);
            const T* from = static_cast<const T*>(call_.query) + place_of(task, i, call_.query_stride);
            for (int64_t w = 0; w < words_; w += LANES) {
                const Words some = words_at<C>(from, size_, w);
                std::memcpy(query_ + i * words_ + w, &some, 4 * std::min<int64_t>(LANES, words_ - w));
            }
            // A part is merged with what is before it, sinks too, when all of them are there.
            total_[i] = beginning(task, i);
            if (task.parts != nullptr) total_[i].largest = NONE, total_[i].weight = 0.0f;
        }
    }

    int64_t first_seen(int64_t position) const {
        return call_.window == 0 ? 0 : std::max<int64_t>(0, position - call_.window + 1);
    }

    // The block's positions that row i sees, from its beginning on.
    int64_t low(int64_t i) const { return std::min(std::max<int64_t>(0, first_seen(positions_[i]) - block_), high(i)); }
    int64_t high(int64_t i) const { return std::min<int64_t>(KEY_BLOCK, std::max<int64_t>(0, positions_[i] + 1 - block_)); }

    // Ask for what all rows see of the block of positions that begins at `first`.
    void prefetch(int64_t first, int64_t calls) {
        const int64_t past = std::min({first + KEY_BLOCK, highest_ + 1, task_->last_split * SPLIT, task_->texts->common()});
        const int64_t count = std::max<int64_t>(0, past - first);
        task_->texts->slots(0, first, count, size_, next_at_);
        next_ = {cached_keys_, cached_values_, next_at_, count, size_, calls};
    }

    int64_t calls_per_block() const {
        const int64_t pieces = (task_->count + REGISTER_ROWS - 1) / REGISTER_ROWS;
        return KEY_BLOCK / LANES * (words_ / LANES) + pieces * (words_ / SCORES_EACH + KEY_BLOCK / VALUES_EACH);
    }

    void run_block(int64_t block) {
        block_ = block;
        const Texts& texts = *task_->texts;
        prefetch(block + KEY_BLOCK, calls_per_block());
        const int64_t end = std::min<int64_t>(KEY_BLOCK, highest_ + 1 - block);
        if (block + end <= texts.common()) {
            lay_out(0, 0, end);
            return run_rows(0, task_->count);
        }
        // A tree's own columns: vectors of keys before them are laid out once, the others for each of its rows.
        const int64_t common = std::max<int64_t>(0, texts.common() - block) / LANES * LANES;
        lay_out(0, 0, common);
        for (int64_t i = 0, next; i < task_->count; i = next) {
            const int64_t row = row_of(*task_, i);
            for (next = i + 1; next < task_->count && row_of(*task_, next) == row;) ++next;
            if (high(i) > common) lay_out(row, common, high(i));
            run_rows(i, next - i);
        }
    }

    // Positions `first` (a multiple of 16) to `last` of the block.
    void lay_out(int64_t row, int64_t first, int64_t last) {
        task_->texts->slots(row, block_ + first, last - first, size_, at_ + first);
        for (int64_t c = first; c < last; c += LANES)
            lay_out_keys(cached_keys_, at_ + c, std::min<int64_t>(LANES, last - c), size_, keys_ + c * words_, next_);
    }

    void run_rows(int64_t first, int64_t count) {
        in_pieces<REGISTER_ROWS>(count, [&](auto rows, int64_t row) { score_rows<decltype(rows)::value>(first + row); });
        for (int64_t i = first; i < first + count; ++i) {
            const int64_t from = low(i), to = high(i);
            const auto own = from % LANES == 0 && to % LANES == 0 ? weigh<true> : weigh<false>;
            if (from < to) own(weights_ + i * KEY_BLOCK, from, to, scoring_, open_[i], padded_);
        }
        in_pieces<REGISTER_ROWS>(count, [&](auto rows, int64_t row) { add_rows<decltype(rows)::value>(first + row); });
    }

    template <int ROWS>
    void score_rows(int64_t row) {
        int64_t from = KEY_BLOCK, to = 0;
        for (int64_t i = row; i < row + ROWS; ++i)
            if (low(i) < high(i)) from = std::min(from, low(i)), to = std::max(to, high(i));
        if (from >= to) return;
        from /= LANES, to = (to + LANES - 1) / LANES;
        in_pieces<register_vectors(ROWS)>(to - from, [&](auto vectors, int64_t v) {
            score<C, ROWS, decltype(vectors)::value>(keys_ + (from + v) * LANES * words_, query_ + row * words_, words_,
                                          weights_ + row * KEY_BLOCK + (from + v) * LANES, next_);
        });
    }

    template <int ROWS>
    void add_rows(int64_t row) {
        int64_t first = 0, last = KEY_BLOCK, highest = 0;  // what all rows see, and the last that one sees
        for (int64_t i = row; i < row + ROWS; ++i) {
            first = std::max(first, low(i)), last = std::min(last, high(i));
            highest = std::max(highest, high(i));
        }
        if (highest == 0) return;
        if (ROWS == 1 || first >= last) {
            for (int64_t i = row; i < row + ROWS; ++i) add<1>(i, low(i), high(i));
            return;
        }
        for (int64_t i = row; i < row + ROWS; ++i) add<1>(i, low(i), first);
        add<ROWS>(row, first, last);
        for (int64_t i = row; i < row + ROWS; ++i) add<1>(i, last, high(i));
    }

    template <int ROWS>
    void add(int64_t row, int64_t first, int64_t last) {
        if (first >= last) return;
        const int64_t whole = size_ / LANES;
        const float* weights = weights_ + row * KEY_BLOCK;
        in_pieces<register_vectors(ROWS)>(whole, [&](auto vectors, int64_t v) {
            add_values<C, ROWS, decltype(vectors)::value>(cached_values_ + v * LANES, at_, weights, first, last,
                                               open_[row].values + v * LANES, padded_, LANES, next_);
        });
        if (whole * LANES < size_)
            add_values<C, ROWS, 1>(cached_values_ + whole * LANES, at_, weights, first, last,
                                   open_[row].values + whole * LANES, padded_, size_ - whole * LANES,
                                   next_);
    }

    void store_part(const RowSum& sum, float* to) const {
        std::copy_n(sum.values, padded_, to);
        to[padded_] = sum.largest, to[padded_ + 1] = sum.weight;
    }

    void finish(const Task& task, int64_t i, const RowSum& sum) const {
        T* to = static_cast<T*>(call_.out) + place_of(task, i, call_.num_heads * size_);
        const float* from = sum.values;
        by_lanes(
            size_, [&](int64_t k) { store(load(from + k) / sum.weight, to + k); },
            [&](int64_t k, int64_t n) { store_some(load(from + k) / sum.weight, to + k, n); });
    }

    const Call& call_;
    const int64_t size_, padded_, words_, heads_;
    const Scoring scoring_;
    Scratch scratch_;
    Laid<C>* keys_;  // [KEY_BLOCK / 16, words, 16]
    uint32_t* query_;  // [TILE_ROWS, words]
    float *weights_, *split_values_, *total_values_;
    const Task* task_ = nullptr;
    const C *cached_keys_ = nullptr, *cached_values_ = nullptr;
    int64_t lowest_ = 0, highest_ = 0, block_ = 0;
    int64_t positions_[TILE_ROWS], at_[KEY_BLOCK];  // `at_`: of the block's rows in the cache
    int64_t next_at_[KEY_BLOCK];                    // and of the next block's
    Prefetch<C> next_;
    OpenSum open_[TILE_ROWS];
    RowSum total_[TILE_ROWS];
};

// Runs `function(tile, i)` for `i` below `count` on `threads` threads, each with a tile of its own.
template <class C, class Function>
void share_out(const Call& call, int64_t head_dim, int64_t count, int threads, Function function) {
    std::atomic<bool> has_memory{true};
    Queue queue(count);
    on_threads(threads, true, [&](int, int) {
        try {
            Tile<C> tile(call, head_dim);
            queue.work([&](int64_t i) { function(tile, i); });
        } catch (const std::bad_alloc&) {
            has_memory = false;
        }
    });
    if (!has_memory) throw std::bad_alloc();
}

template <class C>
void attend(const Call& call, const Segment* segments, int num_segments, int64_t head_dim, int threads) {
    for_each(call.num_rows, threads, call.num_rows * call.key_stride > FEW_NUMBERS,
             [&](int64_t row) { keep<C>(call, row, head_dim); });
    const std::vector<Texts> texts(segments, segments + num_segments);
    std::vector<Task> tiles;
    const int64_t heads = call.num_heads / call.num_groups;
    int64_t work = 0, splits = 0;
    for (const Texts& own : texts) {
        const Segment& segment = own.segment();
        const int64_t count = segment.num_rows * heads, last = (segment.num_columns + SPLIT - 1) / SPLIT;
        work += segment.num_columns * count * call.num_groups * head_dim;
        for (int64_t group = 0; group < call.num_groups; ++group)
            for (int64_t first = 0; first < count; first += TILE_ROWS, splits += last)
                tiles.push_back({&own, group, first, std::min<int64_t>(TILE_ROWS, count - first), 0, last, nullptr});
    }
    const int64_t num_tiles = int64_t(tiles.size());
    if (work <= FEW_NUMBERS) threads = 1;
    if (threads == 1 || num_tiles >= threads * TILES_PER_THREAD || splits == num_tiles)
        return share_out<C>(call, head_dim, num_tiles, threads, [&](Tile<C>& tile, int64_t i) { tile.run(tiles[i]); });
    const int64_t part = (head_dim + LANES - 1) / LANES * LANES + 2;
    std::vector<int64_t> begins;
    std::vector<Task> tasks;
    int64_t size = 0;
    for (const Task& tile : tiles) {
        begins.push_back(size);
        size += tile.count * tile.last_split * part;
    }
    const std::unique_ptr<float[]> parts(new float[size]);
    for (int64_t i = 0; i < num_tiles; ++i)
        for (int64_t split = 0; split < tiles[i].last_split; ++split) {
            tasks.push_back(tiles[i]);
            tasks.back().first_split = split, tasks.back().last_split = split + 1;
            tasks.back().parts = parts.get() + begins[i] + split * tiles[i].count * part;
        }
    share_out<C>(call, head_dim, int64_t(tasks.size()), threads, [&](Tile<C>& tile, int64_t i) { tile.run(tasks[i]); });
    Tile<C> tile(call, head_dim);
    for (int64_t i = 0; i < num_tiles; ++i)
        for (int64_t row = 0; row < tiles[i].count; ++row)
            tile.join(tiles[i], row, parts.get() + begins[i], tiles[i].last_split);
}

}  // namespace

#endif
