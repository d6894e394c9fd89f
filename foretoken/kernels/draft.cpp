// The tokens that a trained head drafts one behind the other, for many requests in one call; model/chain_kernel.py has
// the signatures.
//
// All arithmetic is that of other libraries, whose functions come with the call: here are the largest logit of a row,
// copies of rows, and what each pass reads and writes. So a draft token has the bits of a pass that was called alone.

#include <cmath>
#include <new>
#include <vector>

#include "pass.h"
#include "top_two.h"

// One request: behind `num_past` rows in the cache come `num_text` rows of its text, then those of its draft tokens. All
// have the `slots`, or follow `first_slot` where that is null.
struct foretoken_chain_request {
    const int64_t* slots;
    int64_t first_slot, num_past, num_text, num_tokens;
};

// A table [*, width] of which a row is read at a time: numbers, or what `read` makes numbers of.
struct foretoken_table {
    bool (*read)(const void* table, const int64_t* index, int64_t rows, int64_t width, void* out, int is_bf16);
    const void* table;
};

// A norm with the function that computes it; none where `run` is null.
struct foretoken_norm_call {
    void (*run)(const void* x, foretoken_norm_weights weights, void* out, int64_t rows, int64_t size, int64_t stride,
                float eps, float offset, int is_layer, int is_bf16, int threads);
    foretoken_norm_weights weights;
    foretoken_norm_kind kind;
};

// What a head drafts with, and the requests it drafts for. Layers read features with the embeddings of tokens beside them,
// or `join` of both, the embedding first, each behind its norm. A row of logits is what `output` makes of a row of the
// stream behind `norm`; the features of the next pass are the stream, or its normed rows if `feeds_normed`.
struct foretoken_chain {
    bool (*run_layers)(const foretoken_pass* pass);
    foretoken_pass pass;  // all but its rows
    foretoken_norm_call norm, embedding_norm, feature_norm;
    foretoken_product join, output;  // `multiply` of `join` may be null
    foretoken_table embedding;
    const void *cos, *sin;      // [positions, head_dim]
    const int64_t* vocabulary;  // numbers of the head's tokens in the table, null: their own
    const foretoken_chain_request* requests;
    const int64_t* text;     // tokens of the rows of all texts, by request
    const void* features;    // of those rows, [rows, hidden_size]
    int64_t* tokens;         // what is drafted, by request
    int32_t num_requests, feeds_normed;
};

namespace {

template <class T>
class Drafting {
public:
    explicit Drafting(const foretoken_chain& chain)
        : chain_(chain), pass_(chain.pass), size_(chain.pass.hidden_size) {
        int64_t first = 0, rows = 0;
        for (int32_t r = 0; r < chain.num_requests; ++r) {
            growing_.push_back({&chain.requests[r], r, chain.tokens + first});
            first += chain.requests[r].num_tokens;
            rows += chain.requests[r].num_text;
        }
        stream_.resize(rows * size_);
        normed_.resize(rows * size_);
        embedded_.resize(rows * size_);
        wide_.resize(chain.join.multiply == nullptr ? 0 : rows * 2 * size_);
        logits_.resize(chain.num_requests * chain.output.num_outputs);
        positions_.resize(rows);
        last_.resize(rows);
        slots_.resize(rows);
        segments_.resize(chain.num_requests);
    }

    void run() {
        read_texts();
        for (int64_t place = 0;; ++place) {
            const T* normed = behind(chain_.norm, stream_.data(), num_growing());
            draft(normed, place);
            keep_growing(chain_.feeds_normed ? normed : stream_.data(), place + 1);
            if (growing_.empty()) return;
            go_on(place);
        }
    }

private:
    using Request = foretoken_chain_request;

    struct Growing {
        const Request* request;
        int64_t row;  // in what the last pass gave
        int64_t* tokens;
    };

    static constexpr int is_bf16() { return sizeof(T) == 2; }

    int64_t num_growing() const { return int64_t(growing_.size()); }

    // Rows of `x` behind a norm, in `normed_`; `x` itself where there is none.
    const T* behind(const foretoken_norm_call& norm, const T* x, int64_t rows) {
        if (norm.run == nullptr) return x;
        norm.run(x, norm.weights, normed_.data(), rows, size_, size_, norm.kind.eps, norm.kind.offset,
                 norm.kind.is_layer, is_bf16(), pass_.threads);
        return normed_.data();
    }

    void multiply(const foretoken_product& by, const T* x, T* to, int64_t rows) {
        if (!by.multiply(x, rows, by.width, by.parts, by.num_parts, to, by.num_outputs, is_bf16(), pass_.threads))
            throw std::bad_alloc();
    }

    // Runs the rows of all texts; `stream_` then holds the last one of each.
    void read_texts() {
        int64_t rows = 0;
        for (const Growing& one : growing_) {
            const Request& own = *one.request;
            see(one.row, own, rows, own.num_past, own.num_text);
            rows += own.num_text;
        }
        std::copy_n(chain_.text, rows, last_.data());
        std::copy_n(static_cast<const T*>(chain_.features), rows * size_, stream_.data());
        run_layers(rows);
        rows = 0;
        for (const Growing& one : growing_) {
            rows += one.request->num_text;
            take_row(stream_.data(), rows - 1, one.row);
        }
    }

    // The token at `place` of every request that still grows.
    void draft(const T* normed, int64_t place) {
        const int64_t num = num_growing(), count = chain_.output.num_outputs;
        multiply(chain_.output, normed, logits_.data(), num);
        for_each(num, pass_.threads, num > 1 && num * count > FEW_NUMBERS, [&](int64_t row) {
            const TopTwo top = top_two(&logits_[row * count], count);
            const int64_t best = std::isfinite(top.first) ? top.place : 0;  // such a draft is refused anyway
            growing_[row].tokens[place] = chain_.vocabulary == nullptr ? best : chain_.vocabulary[best];
            growing_[row].row = row;
        });
    }

    // Leaves out the requests that have `num_drafted` tokens; the others go on from their rows of `features`.
    void keep_growing(const T* features, int64_t num_drafted) {
        int64_t kept = 0;
        for (const Growing& own : growing_) {
            if (own.request->num_tokens <= num_drafted) continue;
            take_row(features, own.row, kept);
            last_[kept] = own.tokens[num_drafted - 1];
            growing_[kept++] = own;
        }
        growing_.resize(kept);
    }

    // Runs the tokens at `place`.
    void go_on(int64_t place) {
        for (int64_t row = 0; row < num_growing(); ++row) {
            const Request& own = *growing_[row].request;
            see(row, own, row, own.num_past + own.num_text + place, 1);
        }
        run_layers(num_growing());
    }

    // A row of `from` as the row `to` of the stream, which may be where it is.
    void take_row(const T* from, int64_t row, int64_t to) {
        if (from != stream_.data() || row != to) std::copy_n(from + row * size_, size_, &stream_[to * size_]);
    }

    // Segment `number`: `count` rows of a request behind `past` others, from `first` on in the pass.
    void see(int64_t number, const Request& own, int64_t first, int64_t past, int64_t count) {
        segments_[number] = {own.slots, nullptr, own.first_slot, past + count, past, first, count};
        for (int64_t i = 0; i < count; ++i) {
            const int64_t row = first + i, position = past + i;
            slots_[row] = own.slots == nullptr ? own.first_slot + position : own.slots[position];
            positions_[row] = position;
        }
    }

    // Rows of features in `stream_` and tokens in `last_` through the layers, into `stream_`.
    void run_layers(int64_t rows) {
        embed(rows);
        pass_.x = stream_.data();
        pass_.beside = embedded_.data();
        pass_.cos = &chain_.cos;
        pass_.sin = &chain_.sin;
        pass_.positions = positions_.data();
        pass_.write_slots = slots_.data();
        pass_.segments = segments_.data();
        pass_.num_rows = rows;
        pass_.num_segments = int32_t(num_growing());
        if (!chain_.run_layers(&pass_)) throw std::bad_alloc();
    }

    // The embeddings of the tokens, and where the head joins them with the features, what it makes of both.
    void embed(int64_t rows) {
        const foretoken_table& table = chain_.embedding;
        if (table.read == nullptr) {
            for (int64_t row = 0; row < rows; ++row)
                std::copy_n(static_cast<const T*>(table.table) + last_[row] * size_, size_, &embedded_[row * size_]);
        } else {
            table.read(table.table, last_.data(), rows, size_, embedded_.data(), is_bf16());  // all are in the table
        }
        if (chain_.join.multiply == nullptr) return;
        put_beside(behind(chain_.embedding_norm, embedded_.data(), rows), 0, rows);
        put_beside(behind(chain_.feature_norm, stream_.data(), rows), size_, rows);
        multiply(chain_.join, wide_.data(), stream_.data(), rows);
    }

    void put_beside(const T* from, int64_t at, int64_t rows) {
        for (int64_t row = 0; row < rows; ++row) std::copy_n(from + row * size_, size_, &wide_[row * 2 * size_ + at]);
    }

    const foretoken_chain& chain_;
    foretoken_pass pass_;
    const int64_t size_;
    std::vector<Growing> growing_;
    std::vector<T> stream_, normed_, embedded_, wide_, logits_;
    std::vector<int64_t> last_, slots_, positions_;
    std::vector<Segment> segments_;
};

}  // namespace

extern "C" {

// What the function below takes; a library of another interface is not used.
int foretoken_draft_interface() { return 3; }

// Runs the texts of all requests of a chain and drafts their tokens; each has at least one of both. False: no memory.
bool foretoken_draft_chain(const foretoken_chain* chain) {
    try {
        if (chain->pass.is_bf16)
            Drafting<uint16_t>(*chain).run();
        else
            Drafting<float>(*chain).run();
    } catch (const std::bad_alloc&) {
        return false;
    }
    return true;
}
}
