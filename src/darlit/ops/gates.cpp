// Coefficients of widened streams from their logits, one vector lane a token, float32.
//
// Legend: N tokens, n streams, C logits of a token, P parameters: biases of pre (n), post (n) and res (n n), then scales.
// `ops/cpu.py` describes each function's arguments next to its call.

#include "rows.h"

namespace darlit {

inline Lanes select(Words where, Lanes yes, Lanes no) { return (Lanes)((where & (Words)yes) | (~where & (Words)no)); }
inline Lanes larger(Lanes x, Lanes y) { return select((Words)(x < y), y, x); }
inline Lanes constant(float x) { return Lanes{} + x; }

// Within an ulp or two; zero below exp(-87), exp(88) above it. NaN stays NaN.
inline Lanes exponential(Lanes x) {
    const Words zero = (Words)(x < constant(-87.0f));
    x = select((Words)(x > constant(88.0f)), constant(88.0f), x);
    const Lanes shifted = x * 1.44269504f + 12582912.0f, whole = shifted - 12582912.0f;  // to the nearest integer
    const Lanes r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    Lanes p = constant(1.0f / 5040);
    for (float term : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = p * r + term;
    return (Lanes)(((Words)p + ((Words)shifted << 23)) & ~zero);
}
inline Lanes sigmoid(Lanes x) { return 1.0f / (1.0f + exponential(-x)); }

inline Lanes gather(const float* x, int64_t step, int count) {
    Lanes value = {};
    for (int lane = 0; lane < count; ++lane) value[lane] = x[lane * step];
    return value;
}
inline void scatter(float* x, int64_t step, int count, Lanes value) {
    for (int lane = 0; lane < count; ++lane) x[lane * step] = value[lane];
}

// n x n entries divided by their sums along `step`.
inline void divide(int n, int step, int other, Lanes* x) {
    for (int i = 0; i < n; ++i) {
        Lanes total = {};
        for (int j = 0; j < n; ++j) total += x[i * other + j * step];
        const Lanes inverse = 1.0f / total;
        for (int j = 0; j < n; ++j) x[i * other + j * step] *= inverse;
    }
}

// The doubly stochastic matrix of exp(x), in place: in closed form for n = 2, else columns and rows are divided by their
// sums `iterations` times. `kept`, if any, takes the matrix after every such division. The first iteration takes the
// largest logits out before it exponentiates; after it every column and row has an entry of at least 1 / n^2.
inline void doubly_stochastic(int n, int iterations, Lanes* x, Lanes* kept) {
    if (n == 2) {
        const Lanes half = 0.5f * (x[0] + x[3] - x[1] - x[2]);
        x[0] = x[3] = sigmoid(half), x[1] = x[2] = sigmoid(-half);
        return;
    }
    const int size = n * n;
    auto keep = [&] { if (kept) kept = std::copy(x, x + size, kept); };
    std::vector<Lanes> total(n);
    for (int s = 0; s < n; ++s) {
        Lanes top = x[s];
        for (int o = 1; o < n; ++o) top = larger(top, x[o * n + s]);
        for (int o = 0; o < n; ++o) total[s] += exponential(x[o * n + s] -= top);
        if (kept)
            for (int o = 0; o < n; ++o) kept[o * n + s] = exponential(x[o * n + s]) / total[s];
    }
    if (kept) kept += size;
    for (int o = 0; o < n; ++o) {
        Lanes top = x[o * n];
        for (int s = 1; s < n; ++s) top = larger(top, x[o * n + s]);
        for (int s = 0; s < n; ++s) x[o * n + s] = exponential(x[o * n + s] - top) / total[s];
    }
    divide(n, 1, n, x), keep();
    for (int k = 1; k < iterations; ++k) {
        divide(n, n, 1, x), keep();
        divide(n, 1, n, x), keep();
    }
}

// In place, from the gradient of the matrix to that of the logits. Gradients with respect to logarithms in between.
inline void doubly_stochastic_backward(int n, int iterations, const Lanes* matrix, const Lanes* kept, Lanes* g) {
    if (n == 2) {
        const Lanes half = 0.5f * matrix[0] * matrix[1] * (g[0] + g[3] - g[1] - g[2]);
        g[0] = g[3] = half, g[1] = g[2] = -half;
        return;
    }
    for (int i = 0; i < n * n; ++i) g[i] *= matrix[i];
    for (int k = 2 * iterations - 1; k >= 0; --k) {
        const Lanes* divided = kept + k * n * n;
        const int step = k % 2 ? 1 : n, other = k % 2 ? n : 1;
        for (int i = 0; i < n; ++i) {
            Lanes total = {};
            for (int j = 0; j < n; ++j) total += g[i * other + j * step];
            for (int j = 0; j < n; ++j) g[i * other + j * step] -= divided[i * other + j * step] * total;
        }
    }
}

// Where a token's logits are: of stream s those of pre, of post, and the one of what stream o takes from it.
struct Places {
    int64_t row, stream;
    int post, res, to;
    Places(bool hc, int64_t tokens, int n, int count)
        : row(count), stream(hc ? tokens * count : 1), post(hc ? 1 : n), res(hc ? 2 : 2 * n), to(hc ? 1 : n) {}
};

struct Gate {
    Lanes value, slope;  // slope: of the value by `scale logit + bias` (mhc) or of tanh by its argument (hc)
    Gate(bool hc, Lanes logit, float bias, float scale, float factor) {
        if (hc) {
            const Lanes part = 2.0f * sigmoid(2.0f * logit) - 1.0f;
            value = bias + scale * part, slope = part;
        } else {
            value = sigmoid(scale * logit + bias), slope = factor * value * (1.0f - value), value *= factor;
        }
    }
};

}  // namespace darlit

extern "C" {

using namespace darlit;

void darlit_stream_gates(int64_t tokens, int n, int count, int hc, int iterations, const float* logits,
                         const float* parameters, float* pre, float* write, int threads) {
    const Places at(hc, tokens, n, count);
    const bool res = hc || count > 2 * n;
    const float* scale = parameters + 2 * n + (res ? n * n : 0);
#pragma omp parallel num_threads(threads)
    {
        std::vector<Lanes> matrix(n * n);
#pragma omp for schedule(static)
        for (int64_t begin = 0; begin < tokens; begin += LANES) {
            const int lanes = static_cast<int>(std::min<int64_t>(LANES, tokens - begin));
            const float* from = logits + begin * at.row;
            float* to = write + begin * n * (n + 1);
            for (int s = 0; s < n; ++s) {
                const float* l = from + s * at.stream;
                const Gate read(hc, gather(l, at.row, lanes), parameters[s], scale[0], 1);
                scatter(pre + begin * n + s, n, lanes, read.value);
                const Gate wrote(hc, gather(l + at.post, at.row, lanes), parameters[n + s], scale[1], 2);
                scatter(to + s * (n + 1) + n, n * (n + 1), lanes, wrote.value);
                for (int o = 0; o < n; ++o) {
                    Lanes& entry = matrix[o * n + s];
                    entry = constant(o == s);
                    if (!res) continue;
                    const Lanes logit = gather(l + at.res + o * at.to, at.row, lanes);
                    const float bias = parameters[2 * n + o * n + s];
                    entry = hc ? Gate(true, logit, bias, scale[0], 1).value : scale[2] * logit + bias;
                }
            }
            if (res && !hc) doubly_stochastic(n, iterations, matrix.data(), nullptr);
            for (int o = 0; o < n; ++o)
                for (int s = 0; s < n; ++s) scatter(to + o * (n + 1) + s, n * (n + 1), lanes, matrix[o * n + s]);
        }
    }
}

void darlit_stream_gates_backward(int64_t tokens, int n, int count, int hc, int iterations, const float* pre_gradient,
                                  const float* write_gradient, const float* logits, const float* parameters,
                                  float* logits_gradient, float* parameters_gradient, int threads) {
    const Places at(hc, tokens, n, count);
    const bool res = hc || count > 2 * n;
    const int biases = 2 * n + (res ? n * n : 0), total = biases + (res && !hc ? 3 : 2);
    const float* scale = parameters + biases;
    std::vector<std::vector<Lanes>> of_threads(threads);
#pragma omp parallel num_threads(threads)
    {
        std::vector<Lanes> matrix(n * n), g(n * n), kept(res && !hc ? 2 * iterations * n * n : 0);
        std::vector<Lanes>& sums = of_threads[thread_number()];
        sums.assign(total, Lanes{});
#pragma omp for schedule(static)
        for (int64_t begin = 0; begin < tokens; begin += LANES) {
            const int lanes = static_cast<int>(std::min<int64_t>(LANES, tokens - begin));
            const float* from = logits + begin * at.row;
            float* to = logits_gradient + begin * at.row;
            const float* written = write_gradient + begin * n * (n + 1);
            // One gate: its logit at `place`, its bias and scale by number.
            auto gate = [&](int64_t place, int bias, int by, float factor, Lanes gradient) {
                const Lanes logit = gather(from + place, at.row, lanes);
                const Gate value(hc, logit, parameters[bias], scale[by], factor);
                Lanes dlogit = gradient * scale[by];
                if (hc) {
                    dlogit *= 1.0f - value.slope * value.slope;
                    sums[biases + by] += gradient * value.slope;
                } else {
                    gradient *= value.slope, dlogit *= value.slope;
                    sums[biases + by] += gradient * logit;
                }
                sums[bias] += gradient;
                scatter(to + place, at.row, lanes, dlogit);
            };
            for (int s = 0; s < n; ++s) {
                gate(s * at.stream, s, 0, 1, gather(pre_gradient + begin * n + s, n, lanes));
                gate(s * at.stream + at.post, n + s, 1, 2, gather(written + s * (n + 1) + n, n * (n + 1), lanes));
            }
            if (!res) continue;
            for (int o = 0; o < n; ++o)
                for (int s = 0; s < n; ++s) {
                    const int i = o * n + s;
                    const int64_t place = s * at.stream + at.res + o * at.to;
                    g[i] = gather(written + o * (n + 1) + s, n * (n + 1), lanes);
                    if (hc) gate(place, 2 * n + i, 0, 1, g[i]);
                    else matrix[i] = scale[2] * gather(from + place, at.row, lanes) + parameters[2 * n + i];
                }
            if (hc) continue;
            doubly_stochastic(n, iterations, matrix.data(), kept.data());
            doubly_stochastic_backward(n, iterations, matrix.data(), kept.data(), g.data());
            for (int i = 0; i < n * n; ++i) {
                const int64_t place = at.res + i;
                sums[2 * n + i] += g[i];
                sums[biases + 2] += g[i] * gather(from + place, at.row, lanes);
                scatter(to + place, at.row, lanes, scale[2] * g[i]);
            }
        }
    }
    for (int i = 0; i < total; ++i) {  // threads in order, so that a run repeats bit-exactly
        parameters_gradient[i] = 0;
        for (const std::vector<Lanes>& sums : of_threads)
            if (!sums.empty()) parameters_gradient[i] += sum(sums[i]);
    }
}
}
