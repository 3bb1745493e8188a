// Depth reads and stream writes on a CPU: one pass over memory each, float32 arithmetic, any width.
//
// Legend: N tokens, D width, S sources of a read, M streams, J targets of a read, R reads that see a source.
// A tensor [N, D] comes as the address of its first row and the distance between rows, in elements.
// `ops/cpu.py` builds this file, loads it and describes each function's arguments next to its call.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

int thread_number() {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

constexpr int TOKENS = 8;  // tokens that share one load of the queries

#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
typedef float Lanes __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));

int padded(int width) { return (width + 2 * LANES - 1) / (2 * LANES) * (2 * LANES); }
Lanes load(const float* x) { return *reinterpret_cast<const Lanes*>(x); }
void store(float* x, Lanes value) { *reinterpret_cast<Lanes*>(x) = value; }
float sum(Lanes x) {
    float total = 0;
    for (int lane = 0; lane < LANES; ++lane) total += x[lane];
    return total;
}

// The three element types. A cast to float is exact; `narrow` rounds to nearest even and keeps NaN.
struct Half { _Float16 value; operator float() const { return static_cast<float>(value); } };
struct Brain {
    uint16_t bits;
    operator float() const {
        uint32_t wide = static_cast<uint32_t>(bits) << 16;
        float value;
        std::memcpy(&value, &wide, sizeof value);
        return value;
    }
};
template <class T> T narrow(float value);
template <> float narrow<float>(float value) { return value; }
template <> Half narrow<Half>(float value) { return {static_cast<_Float16>(value)}; }
template <> Brain narrow<Brain>(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return {static_cast<uint16_t>(value == value ? rounded : 0x7fc0)};
}

struct Rows {
    void* base;
    int64_t stride;
    template <class T> T* row(int64_t n) const { return static_cast<T*>(base) + n * stride; }
    bool operator!() const { return base == nullptr; }
    explicit operator bool() const { return base != nullptr; }
};

// Asks for the next token's row while this one is worked on: so many streams are more than the hardware follows.
template <class T>
void prefetch(const T* row, int width) {
    const char* bytes = reinterpret_cast<const char*>(row);
    for (size_t offset = 0; offset < width * sizeof(T); offset += 64) __builtin_prefetch(bytes + offset, 0, 2);
}

// C[i] += sum_k A[i, k] B[k] for rows of a padded width; A is small and strided.
template <int HEIGHT>
void add_product_rows(int depth, int d, const float* a, int64_t a_row, int64_t a_column, const float* b, float* c,
                      int width) {
    Lanes left[HEIGHT], right[HEIGHT];
#pragma GCC unroll 4
    for (int i = 0; i < HEIGHT; ++i) left[i] = load(c + i * width + d), right[i] = load(c + i * width + d + LANES);
    for (int k = 0; k < depth; ++k) {
        const Lanes b_left = load(b + int64_t(k) * width + d), b_right = load(b + int64_t(k) * width + d + LANES);
#pragma GCC unroll 4
        for (int i = 0; i < HEIGHT; ++i) {
            const float scale = a[i * a_row + k * a_column];
            left[i] += scale * b_left, right[i] += scale * b_right;
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < HEIGHT; ++i) store(c + i * width + d, left[i]), store(c + i * width + d + LANES, right[i]);
}

void add_product(int height, int depth, const float* a, int64_t a_row, int64_t a_column, const float* b, float* c,
                 int width) {
    for (int d = 0; d < width; d += 2 * LANES) {
        int i = 0;
        for (; i + 4 <= height; i += 4)
            add_product_rows<4>(depth, d, a + i * a_row, a_row, a_column, b, c + i * width, width);
        for (; i < height; ++i)
            add_product_rows<1>(depth, d, a + i * a_row, a_row, a_column, b, c + i * width, width);
    }
}

// out[t * out_row + r] = <x[t], w[r]> for COUNT tokens and PAIR rows of w at once.
template <int COUNT, int PAIR>
void products(const float* x, const float* w, int width, float* out, int64_t out_row) {
    Lanes total[COUNT][PAIR] = {};
    for (int d = 0; d < width; d += LANES)
#pragma GCC unroll 4
        for (int t = 0; t < COUNT; ++t)
#pragma GCC unroll 2
            for (int r = 0; r < PAIR; ++r) total[t][r] += load(x + t * width + d) * load(w + r * width + d);
    for (int t = 0; t < COUNT; ++t)
        for (int r = 0; r < PAIR; ++r) out[t * out_row + r] = sum(total[t][r]);
}

template <int COUNT>
void products_with_all(const float* x, const float* w, int reads, int width, float* out, int64_t out_row) {
    int r = 0;
    for (; r + 2 <= reads; r += 2) products<COUNT, 2>(x, w + int64_t(r) * width, width, out + r, out_row);
    for (; r < reads; ++r) products<COUNT, 1>(x, w + int64_t(r) * width, width, out + r, out_row);
}

std::vector<float> padded_rows(const float* rows, int count, int width, int wide) {
    std::vector<float> copy(static_cast<size_t>(count) * wide, 0.0f);
    for (int i = 0; i < count; ++i) std::memcpy(&copy[int64_t(i) * wide], rows + int64_t(i) * width, width * sizeof(float));
    return copy;
}

// out = sum_s weight[s] row_s, four rows at a time.
template <class T>
void mix(int sources, const T* const* row, const float* weight, float* __restrict out, int width) {
    int s = 0;
    if (sources >= 2) {
        const T *a = row[0], *b = row[1];
        const float wa = weight[0], wb = weight[1];
#pragma omp simd
        for (int d = 0; d < width; ++d) out[d] = wa * float(a[d]) + wb * float(b[d]);
        s = 2;
    } else {
        const T* a = row[0];
        const float wa = weight[0];
#pragma omp simd
        for (int d = 0; d < width; ++d) out[d] = wa * float(a[d]);
        s = 1;
    }
    for (; s + 4 <= sources; s += 4) {
        const T *a = row[s], *b = row[s + 1], *c = row[s + 2], *e = row[s + 3];
        const float wa = weight[s], wb = weight[s + 1], wc = weight[s + 2], we = weight[s + 3];
#pragma omp simd
        for (int d = 0; d < width; ++d)
            out[d] += (wa * float(a[d]) + wb * float(b[d])) + (wc * float(c[d]) + we * float(e[d]));
    }
    for (; s < sources; ++s) {
        const T* a = row[s];
        const float wa = weight[s];
#pragma omp simd
        for (int d = 0; d < width; ++d) out[d] += wa * float(a[d]);
    }
}

// dots[m] = <g, x_m> and dx_m += scale[m] g, with one load of g; `stream` floats lie between x_0 and x_1.
template <class T, int STREAMS>
void dot_and_add(const T* g, const float* x, float* dx, int64_t stream, const float* scale, float* dots, int width) {
    const float *x0 = x, *x1 = x + (STREAMS - 1) * stream;
    float *dx0 = dx, *dx1 = dx + (STREAMS - 1) * stream;
    const float scale0 = scale[0], scale1 = scale[STREAMS - 1];
    float dot0 = 0, dot1 = 0;
#pragma omp simd reduction(+ : dot0, dot1)
    for (int d = 0; d < width; ++d) {
        const float value = float(g[d]);
        dot0 += value * x0[d];
        dx0[d] += scale0 * value;
        if (STREAMS == 2) {
            dot1 += value * x1[d];
            dx1[d] += scale1 * value;
        }
    }
    dots[0] = dot0;
    if (STREAMS == 2) dots[1] = dot1;
}

template <class T>
float dot(const T* a, const T* b, int width) {
    float total = 0;
#pragma omp simd reduction(+ : total)
    for (int d = 0; d < width; ++d) total += float(a[d]) * float(b[d]);
    return total;
}

template <class T>
void depth_read(int64_t tokens, int width, int sources, int streams, int targets, const int* value_streams,
                const Rows* source, const float* const* logits, const int64_t* logits_row,
                const int64_t* logits_target, const float* shares, int64_t shares_row, Rows out,
                const Rows* spreads, float* lse, int threads) {
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> mixed(static_cast<size_t>(targets) * width), weights(sources);
        std::vector<const T*> rows(sources);
#pragma omp for schedule(static)
        for (int64_t n = 0; n < tokens; ++n) {
            for (int j = 0; j < targets; ++j) {
                float top = -INFINITY;
                for (int s = 0; s < sources; ++s) {
                    weights[s] = logits[s][n * logits_row[s] + j * logits_target[s]];
                    top = std::max(top, weights[s]);
                }
                float total = 0;
                for (int s = 0; s < sources; ++s) total += weights[s] = std::exp(weights[s] - top);
                for (int s = 0; s < sources; ++s) weights[s] /= total;
                lse[n * targets + j] = top + std::log(total);
                for (int s = 0; s < sources; ++s) rows[s] = source[s * streams + value_streams[j]].template row<T>(n);
                mix(sources, rows.data(), weights.data(), &mixed[int64_t(j) * width], width);
            }
            T* row = out.row<T>(n);
            const float* first = mixed.data();
            if (targets == 1) {
#pragma omp simd
                for (int d = 0; d < width; ++d) row[d] = narrow<T>(first[d]);
                continue;
            }
            const float* share = shares + n * shares_row;
            if (spreads)
                for (int j = 1; j < targets; ++j) {
                    const float* target = &mixed[int64_t(j) * width];
                    T* spread = spreads[j - 1].template row<T>(n);
#pragma omp simd
                    for (int d = 0; d < width; ++d) spread[d] = narrow<T>(target[d] - first[d]);
                }
            for (int j = 1; j < targets; ++j) {
                const float* target = &mixed[int64_t(j) * width];
                const float scale = share[j], scale_first = j == 1 ? share[0] : 1.0f;
                float* total = mixed.data();
#pragma omp simd
                for (int d = 0; d < width; ++d) total[d] = scale_first * total[d] + scale * target[d];
            }
#pragma omp simd
            for (int d = 0; d < width; ++d) row[d] = narrow<T>(first[d]);
        }
    }
}

template <class T>
void depth_read_backward(int64_t tokens, int width, int targets, Rows gradient, Rows out, const Rows* spreads,
                         const float* lse, const float* shares, int64_t shares_row, float* scalars, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t n = 0; n < tokens; ++n) {
        const T* g = gradient.row<T>(n);
        float *lse_out = scalars + n * 3 * targets, *share_out = lse_out + targets, *delta = share_out + targets;
        float first = dot(g, out.row<T>(n), width);  // <g, h_0>, h_0 = out - sum_j share_j spread_j
        for (int j = 1; j < targets; ++j) {
            delta[j] = dot(g, spreads[j - 1].template row<T>(n), width);
            first -= shares[n * shares_row + j] * delta[j];
        }
        for (int j = 0; j < targets; ++j) {
            lse_out[j] = lse[n * targets + j];
            share_out[j] = targets == 1 ? 1.0f : shares[n * shares_row + j];
            delta[j] = j == 0 ? first : first + delta[j];
        }
    }
}

template <class T>
void stream_write(int64_t tokens, int width, int streams, int targets, int reads, const int* key_streams,
                  const Rows* carried, Rows output, const float* rho, int64_t rho_row, const float* beta,
                  int64_t beta_row, const float* queries, float eps, const Rows* written, float* logits, float* scale,
                  int threads) {
    const int wide = padded(width);
    const std::vector<float> query = padded_rows(queries, targets * reads, width, wide);
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> block(static_cast<size_t>(streams) * TOKENS * wide, 0.0f);  // [M, TOKENS, wide]
#pragma omp for schedule(static)
        for (int64_t begin = 0; begin < tokens; begin += TOKENS) {
            const int count = static_cast<int>(std::min<int64_t>(TOKENS, tokens - begin));
            for (int t = 0; t < count; ++t) {
                const int64_t n = begin + t;
                const float step = rho ? 1 - rho[n * rho_row] : 0.0f;
                for (int m = 0; m < streams; ++m) {
                    float* x = &block[(int64_t(m) * TOKENS + t) * wide];
                    const float added = beta ? beta[n * beta_row + m] : 1.0f;
                    if (!carried) {
                        const T* y = output.row<T>(n);
#pragma omp simd
                        for (int d = 0; d < width; ++d) x[d] = added * float(y[d]);
                    } else if (!output) {
                        const T* own = carried[m].template row<T>(n);
#pragma omp simd
                        for (int d = 0; d < width; ++d) x[d] = float(own[d]);
                    } else {
                        const T *y = output.row<T>(n), *own = carried[m].template row<T>(n);
                        const T* other = carried[streams - 1 - m].template row<T>(n);
#pragma omp simd
                        for (int d = 0; d < width; ++d)
                            x[d] = float(own[d]) + step * (float(other[d]) - float(own[d])) + added * float(y[d]);
                    }
                    if (written) {
                        T* row = written[m].template row<T>(n);
#pragma omp simd
                        for (int d = 0; d < width; ++d) row[d] = narrow<T>(x[d]);
                        if (sizeof(T) < sizeof(float))
                            for (int d = 0; d < width; ++d) x[d] = float(row[d]);
                    }
                    float squares = 0;
#pragma omp simd reduction(+ : squares)
                    for (int d = 0; d < width; ++d) squares += x[d] * x[d];
                    scale[n * streams + m] = 1.0f / std::sqrt(squares / width + eps);
                }
            }
            for (int j = 0; j < targets; ++j) {
                const float* x = &block[int64_t(key_streams[j]) * TOKENS * wide];
                const float* w = query.data() + int64_t(j) * reads * wide;
                const int64_t row = int64_t(targets) * reads;
                float* out = logits + begin * row + j * reads;
                int t = 0;
                for (; t + 4 <= count; t += 4) products_with_all<4>(x + t * wide, w, reads, wide, out + t * row, row);
                for (; t < count; ++t) products_with_all<1>(x + t * wide, w, reads, wide, out + t * row, row);
                for (t = 0; t < count; ++t)
                    for (int r = 0; r < reads; ++r)
                        out[t * row + r] *= scale[(begin + t) * streams + key_streams[j]];
            }
        }
    }
}

template <class T>
void stream_write_backward(int64_t tokens, int width, int streams, int targets, int reads, const int* key_streams,
                           const int* value_streams, const Rows* written, const float* logits, const float* scale,
                           const Rows* gradients, int answers, const int* answer_read, const Rows* answer_gradient,
                           const float* const* answer_scalars, const Rows* carried, Rows output, const float* rho,
                           int64_t rho_row, const float* beta, int64_t beta_row, const float* queries,
                           const Rows* carried_gradients, Rows output_gradient, float* gates_gradient,
                           float* queries_gradient, int threads) {
    const int wide = padded(width);
    const int columns = targets * reads;
    const std::vector<float> query = padded_rows(queries, columns, width, wide);
    std::vector<std::vector<float>> dqueries_of_threads(threads);
    const int64_t stream = int64_t(TOKENS) * wide;
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> x(streams * stream, 0.0f), dx(streams * stream, 0.0f);  // [M, TOKENS, wide]
        std::vector<float> dlogits(static_cast<size_t>(TOKENS) * columns), pull(streams), through(streams);
        std::vector<float> dots(streams), share(targets), total(width);
        std::vector<float>& dqueries = dqueries_of_threads[thread_number()];
        dqueries.assign(static_cast<size_t>(columns) * wide, 0.0f);
#pragma omp for schedule(static)
        for (int64_t begin = 0; begin < tokens; begin += TOKENS) {
            const int count = static_cast<int>(std::min<int64_t>(TOKENS, tokens - begin));
            std::fill(dlogits.begin(), dlogits.end(), 0.0f);
            for (int t = 0; t < count; ++t) {
                const int64_t n = begin + t;
                float *x_t = &x[int64_t(t) * wide], *dx_t = &dx[int64_t(t) * wide];
                for (int m = 0; m < streams; ++m) {
                    const T* row = written[m].template row<T>(n);
                    float *copy = x_t + m * stream, *gradient = dx_t + m * stream;
#pragma omp simd
                    for (int d = 0; d < width; ++d) copy[d] = float(row[d]);
                    if (gradients && gradients[m]) {
                        const T* from = gradients[m].template row<T>(n);
#pragma omp simd
                        for (int d = 0; d < width; ++d) gradient[d] = float(from[d]);
                    } else {
                        std::fill(gradient, gradient + width, 0.0f);
                    }
                }
                // What each read sends back: its output's gradient, log-sum-exp, shares and <gradient, h_j>.
                for (int a = 0; a < answers; ++a) {
                    const float *lse = answer_scalars[a] + n * 3 * targets, *shares = lse + targets, *delta = shares + targets;
                    std::fill(pull.begin(), pull.end(), 0.0f);
                    for (int j = 0; j < targets; ++j) {
                        share[j] = shares[j] * std::exp(logits[(n * targets + j) * reads + answer_read[a]] - lse[j]);
                        pull[value_streams[j]] += share[j];
                    }
                    const T* g = answer_gradient[a].template row<T>(n);
                    prefetch(answer_gradient[a].template row<T>(std::min(n + 1, tokens - 1)), width);
                    if (streams == 2)
                        dot_and_add<T, 2>(g, x_t, dx_t, stream, pull.data(), dots.data(), width);
                    else
                        dot_and_add<T, 1>(g, x_t, dx_t, stream, pull.data(), dots.data(), width);
                    for (int j = 0; j < targets; ++j)
                        dlogits[t * columns + j * reads + answer_read[a]] = share[j] * (dots[value_streams[j]] - delta[j]);
                }
                // logit = <w, x> scale(x): first the part through the scale, then dlogits become d<w, x>.
                std::fill(through.begin(), through.end(), 0.0f);
                for (int j = 0; j < targets; ++j) {
                    const float key_scale = scale[n * streams + key_streams[j]];
                    float weighted = 0;
                    for (int r = 0; r < reads; ++r) {
                        weighted += dlogits[t * columns + j * reads + r] * logits[(n * targets + j) * reads + r];
                        dlogits[t * columns + j * reads + r] *= key_scale;
                    }
                    through[key_streams[j]] += weighted * key_scale * key_scale / width;
                }
                for (int m = 0; m < streams; ++m) {
                    float *copy = x_t + m * stream, *gradient = dx_t + m * stream;
                    const float back = through[m];
                    if (back != 0)
#pragma omp simd
                        for (int d = 0; d < width; ++d) gradient[d] -= back * copy[d];
                }
            }
            for (int j = 0; answers && j < targets; ++j) {
                const float* coefficient = &dlogits[j * reads];
                const int64_t key = key_streams[j] * stream, first = int64_t(j) * reads * wide;
                add_product(count, reads, coefficient, columns, 1, query.data() + first, &dx[key], wide);
                add_product(reads, count, coefficient, 1, columns, &x[key], dqueries.data() + first, wide);
            }
            for (int t = 0; t < count; ++t) {
                const int64_t n = begin + t;
                const float* dx_t = &dx[int64_t(t) * wide];
                if (output) {
                    const T* y = output.row<T>(n);
                    T* dy = output_gradient.row<T>(n);
                    std::fill(total.begin(), total.end(), 0.0f);
                    for (int m = 0; m < streams; ++m) {
                        const float added = beta ? beta[n * beta_row + m] : 1.0f;
                        const float* gradient = dx_t + m * stream;
                        float dbeta = 0;
#pragma omp simd reduction(+ : dbeta)
                        for (int d = 0; d < width; ++d) {
                            dbeta += gradient[d] * float(y[d]);
                            total[d] += added * gradient[d];
                        }
                        gates_gradient[n * (streams + 1) + m] = dbeta;
                    }
#pragma omp simd
                    for (int d = 0; d < width; ++d) dy[d] = narrow<T>(total[d]);
                }
                float drho = 0;
                if (carried) {
                    const float step = rho ? 1 - rho[n * rho_row] : 0.0f;
                    const float *dx0 = dx_t, *dx1 = dx_t + (streams - 1) * stream;
                    for (int m = 0; m < streams; ++m) {
                        const float *own = dx_t + m * stream, *other = dx_t + (streams - 1 - m) * stream;
                        T* row = carried_gradients[m].template row<T>(n);
#pragma omp simd
                        for (int d = 0; d < width; ++d) row[d] = narrow<T>(own[d] + step * (other[d] - own[d]));
                    }
                    if (rho) {
                        const T *c0 = carried[0].template row<T>(n), *c1 = carried[streams - 1].template row<T>(n);
#pragma omp simd reduction(+ : drho)
                        for (int d = 0; d < width; ++d) drho += (dx0[d] - dx1[d]) * (float(c0[d]) - float(c1[d]));
                    }
                }
                if (output) gates_gradient[n * (streams + 1) + streams] = drho;
            }
        }
    }
    for (const std::vector<float>& dqueries : dqueries_of_threads)  // in order, so that a run repeats to the last bit
        for (int i = 0; i < columns && !dqueries.empty(); ++i)
            for (int d = 0; d < width; ++d) queries_gradient[int64_t(i) * width + d] += dqueries[int64_t(i) * wide + d];
}

}  // namespace

#define DARLIT_FOR_TYPE(function, ...)                                \
    switch (type) {                                                   \
        case 0: return function<float>(__VA_ARGS__);                  \
        case 1: return function<Brain>(__VA_ARGS__);                  \
        case 2: return function<Half>(__VA_ARGS__);                   \
    }

extern "C" {

void darlit_depth_read(int type, int64_t tokens, int width, int sources, int streams, int targets,
                       const int* value_streams, const Rows* source, const float* const* logits,
                       const int64_t* logits_row, const int64_t* logits_target, const float* shares,
                       int64_t shares_row, const Rows* out, const Rows* spreads, float* lse, int threads) {
    DARLIT_FOR_TYPE(depth_read, tokens, width, sources, streams, targets, value_streams, source, logits, logits_row,
                    logits_target, shares, shares_row, *out, spreads, lse, threads)
}

void darlit_depth_read_backward(int type, int64_t tokens, int width, int targets, const Rows* gradient,
                                const Rows* out, const Rows* spreads, const float* lse, const float* shares,
                                int64_t shares_row, float* scalars, int threads) {
    DARLIT_FOR_TYPE(depth_read_backward, tokens, width, targets, *gradient, *out, spreads, lse, shares, shares_row,
                    scalars, threads)
}

void darlit_stream_write(int type, int64_t tokens, int width, int streams, int targets, int reads,
                         const int* key_streams, const Rows* carried, const Rows* output, const float* rho,
                         int64_t rho_row, const float* beta, int64_t beta_row, const float* queries, float eps,
                         const Rows* written, float* logits, float* scale, int threads) {
    DARLIT_FOR_TYPE(stream_write, tokens, width, streams, targets, reads, key_streams, carried, *output, rho, rho_row,
                    beta, beta_row, queries, eps, written, logits, scale, threads)
}

void darlit_stream_write_backward(int type, int64_t tokens, int width, int streams, int targets, int reads,
                                  const int* key_streams, const int* value_streams, const Rows* written,
                                  const float* logits, const float* scale, const Rows* gradients, int answers,
                                  const int* answer_read, const Rows* answer_gradient,
                                  const float* const* answer_scalars, const Rows* carried, const Rows* output,
                                  const float* rho, int64_t rho_row, const float* beta, int64_t beta_row,
                                  const float* queries, const Rows* carried_gradients, const Rows* output_gradient,
                                  float* gates_gradient, float* queries_gradient, int threads) {
    DARLIT_FOR_TYPE(stream_write_backward, tokens, width, streams, targets, reads, key_streams, value_streams, written,
                    logits, scale, gradients, answers, answer_read, answer_gradient, answer_scalars, carried, *output,
                    rho, rho_row, beta, beta_row, queries, carried_gradients, *output_gradient, gates_gradient,
                    queries_gradient, threads)
}
}
