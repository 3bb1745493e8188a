// Mixtures of n widened streams and the logits that decide them: one pass over memory each, float32 arithmetic.
//
// Legend: N tokens, D width, S sources, O outputs, M streams, C rows of weights of M D channels each.
// `ops/cpu.py` describes each function's arguments next to its call.

#include "rows.h"

namespace darlit {

// out[o] = sum_s c[o, s] source[s] for OUTPUTS outputs; c has any strides.
template <class T, int OUTPUTS>
void mix_to(int sources, const T* const* source, const float* c, int o_step, int s_step, const Output<T>* out, int width) {
    over<2>(width, [&](auto vectors, int d, int count) DARLIT_INLINE {
        constexpr int V = decltype(vectors)::value;
        Lanes total[OUTPUTS][V] = {};
        for (int s = 0; s < sources; ++s)
            for (int v = 0; v < V; ++v) {
                const Lanes x = load(source[s] + d + v * LANES, count);
                for (int o = 0; o < OUTPUTS; ++o) total[o][v] += c[o * o_step + s * s_step] * x;
            }
        for (int o = 0; o < OUTPUTS; ++o)
            for (int v = 0; v < V; ++v) out[o].put(d + v * LANES, narrow<T>(total[o][v]), count);
    });
}

template <class T>
void mix_to_all(int outputs, int sources, const T* const* source, const float* c, int o_step, int s_step,
                const Output<T>* out, int width) {
    int o = 0;
    for (; o + 4 <= outputs; o += 4) mix_to<T, 4>(sources, source, c + o * o_step, o_step, s_step, out + o, width);
    for (; o + 2 <= outputs; o += 2) mix_to<T, 2>(sources, source, c + o * o_step, o_step, s_step, out + o, width);
    for (; o < outputs; ++o) mix_to<T, 1>(sources, source, c + o * o_step, o_step, s_step, out + o, width);
}

template <class T>
void stream_mix(int64_t tokens, int width, int outputs, int sources, const Rows* source, const float* c, int64_t c_row,
                const Rows* out, int threads) {
#pragma omp parallel num_threads(threads)
    {
        std::vector<const T*> rows(sources);
        std::vector<Output<T>> to(outputs);
#pragma omp for schedule(static)
        for (int64_t n = 0; n < tokens; ++n) {
            for (int s = 0; s < sources; ++s) rows[s] = source[s].row<T>(n);
            for (int o = 0; o < outputs; ++o) to[o] = Output<T>(out[o], n, tokens, width);
            mix_to_all(outputs, sources, rows.data(), c + n * c_row, sources, 1, to.data(), width);
        }
        finish_streaming();
    }
}

// dsource[s] = sum_o c[o, s] g[o], where wanted, and dc[o, s] = <g[o], source[s]>.
template <class T>
void stream_mix_backward(int64_t tokens, int width, int outputs, int sources, const Rows* gradient, const Rows* source,
                         const float* c, int64_t c_row, const Rows* source_gradient, float* dc, int threads) {
#pragma omp parallel num_threads(threads)
    {
        std::vector<const T*> g(outputs), rows(sources);
        std::vector<Output<T>> to(sources);
#pragma omp for schedule(static)
        for (int64_t n = 0; n < tokens; ++n) {
            for (int o = 0; o < outputs; ++o) g[o] = gradient[o].row<T>(n);
            for (int s = 0; s < sources; ++s) {
                rows[s] = source[s].row<T>(n);
                if (source_gradient) to[s] = Output<T>(source_gradient[s], n, tokens, width);
            }
            if (source_gradient) mix_to_all(sources, outputs, g.data(), c + n * c_row, 1, sources, to.data(), width);
            for (int o = 0; o < outputs; ++o)
                dots(g[o], sources, rows.data(), dc + (n * outputs + o) * sources, width);
        }
        finish_streaming();
    }
}

// logits[c] = scale sum_m <w[c, m], x_m>, scale = 1 / rms of all M D channels. A token's streams lie side by side.
template <class T>
void vector_logits(int64_t tokens, int width, int streams, int count_of_rows, const Rows* stream, const float* weights,
                   float eps, float* logits, float* scale, int threads) {
    const int wide = padded(width), length = streams * wide;
    const std::vector<float> w = padded_rows(weights, count_of_rows * streams, width, wide);
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> block(static_cast<size_t>(TOKENS) * length, 0.0f);
#pragma omp for schedule(static)
        for (int64_t begin = 0; begin < tokens; begin += TOKENS) {
            const int count = static_cast<int>(std::min<int64_t>(TOKENS, tokens - begin));
            for (int t = 0; t < count; ++t) {
                Lanes squares = {};
                for (int m = 0; m < streams; ++m) {
                    const T* from = stream[m].row<T>(begin + t);
                    float* x = &block[int64_t(t) * length + m * wide];
                    over<4>(width, [&](auto vectors, int d, int lanes) DARLIT_INLINE {
                        for (int v = 0; v < vectors; ++v, d += LANES) {
                            const Lanes value = load(from + d, lanes);
                            squares += value * value;
                            store(x + d, value, LANES);
                        }
                    });
                }
                scale[begin + t] = 1.0f / std::sqrt(sum(squares) / (streams * width) + eps);
            }
            const int row = count_of_rows;
            float* out = logits + begin * row;
            int t = 0;
            for (; t + 4 <= count; t += 4) products_with_all<4>(&block[t * length], w.data(), row, length, out + t * row, row);
            for (; t < count; ++t) products_with_all<1>(&block[t * length], w.data(), row, length, out + t * row, row);
            for (t = 0; t < count; ++t)
                for (int r = 0; r < row; ++r) out[t * row + r] *= scale[begin + t];
        }
    }
}

// dx_m = arrived_m + c_m g (where there are such) + what flows through the logits. Of several groups of streams this is
// one: `group` counts them, `c` is that of its first stream, and the weights' gradient is added to from the second on.
template <class T>
void vector_logits_backward(int64_t tokens, int width, int streams, int count_of_rows, const float* gradient,
                            const float* logits, const float* scale, const Rows* stream, const float* weights,
                            const Rows* stream_gradient, float* weights_gradient, const Rows* arrived, const float* c,
                            int64_t c_row, const Rows* mixed_gradient, int group, int threads) {
    const int wide = padded(width), length = streams * wide, rows = count_of_rows;
    const std::vector<float> w = padded_rows(weights, rows * streams, width, wide);
    std::vector<std::vector<float>> dw_of_threads(threads);
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> x(static_cast<size_t>(TOKENS) * length, 0.0f), dx(x.size()), products(TOKENS * rows);
        std::vector<float>& dw = dw_of_threads[thread_number()];
        dw.assign(static_cast<size_t>(rows) * length, 0.0f);
#pragma omp for schedule(static)
        for (int64_t begin = 0; begin < tokens; begin += TOKENS) {
            const int count = static_cast<int>(std::min<int64_t>(TOKENS, tokens - begin));
            for (int t = 0; t < count; ++t) {
                const int64_t n = begin + t;
                // logit = <w, x> scale(x): the part through the scale starts dx, then the gradients of <w, x>.
                float through = 0;
                for (int r = 0; r < rows; ++r) {
                    through += gradient[n * rows + r] * logits[n * rows + r];
                    products[t * rows + r] = gradient[n * rows + r] * scale[n];
                }
                const float back = through * scale[n] * scale[n] / (streams * width);
                for (int m = 0; m < streams; ++m) {
                    const T* from = stream[m].row<T>(n);
                    float *x_t = &x[int64_t(t) * length + m * wide], *dx_t = &dx[int64_t(t) * length + m * wide];
                    over<4>(width, [&](auto vectors, int d, int lanes) DARLIT_INLINE {
                        for (int v = 0; v < vectors; ++v, d += LANES) {
                            const Lanes value = load(from + d, lanes);
                            store(x_t + d, value, LANES);
                            Lanes start = -back * value;
                            if (arrived) start += load(arrived[m].row<T>(n) + d, lanes);
                            if (c) start += c[n * c_row + m] * load(mixed_gradient->row<T>(n) + d, lanes);
                            store(dx_t + d, start, LANES);
                        }
                    });
                }
            }
            add_product(count, rows, products.data(), rows, 1, w.data(), dx.data(), length);
            add_product(rows, count, products.data(), 1, rows, x.data(), dw.data(), length);
            for (int t = 0; t < count; ++t)
                for (int m = 0; m < streams; ++m) {
                    const float* from = &dx[int64_t(t) * length + m * wide];
                    const Output<T> to(stream_gradient[m], begin + t, tokens, width);
                    over<4>(width, [&](auto vectors, int d, int lanes) DARLIT_INLINE {
                        for (int v = 0; v < vectors; ++v, d += LANES) to.put(d, narrow<T>(load(from + d, LANES)), lanes);
                    });
                }
        }
        finish_streaming();
    }
    if (group == 0) std::fill(weights_gradient, weights_gradient + int64_t(rows) * streams * width, 0.0f);
    for (const std::vector<float>& dw : dw_of_threads)  // in order, so that a run repeats bit-exactly
        for (int i = 0; i < rows * streams && !dw.empty(); ++i)
            for (int d = 0; d < width; ++d) weights_gradient[int64_t(i) * width + d] += dw[int64_t(i) * wide + d];
}

}  // namespace darlit

extern "C" {

using darlit::Rows;

void darlit_stream_mix(int type, int64_t tokens, int width, int outputs, int sources, const Rows* source,
                       const float* coefficients, int64_t coefficients_row, const Rows* out, int threads) {
    DARLIT_FOR_TYPE(stream_mix, tokens, width, outputs, sources, source, coefficients, coefficients_row, out, threads)
}

void darlit_stream_mix_backward(int type, int64_t tokens, int width, int outputs, int sources, const Rows* gradient,
                                const Rows* source, const float* coefficients, int64_t coefficients_row,
                                const Rows* source_gradient, float* coefficients_gradient, int threads) {
    DARLIT_FOR_TYPE(stream_mix_backward, tokens, width, outputs, sources, gradient, source, coefficients,
                    coefficients_row, source_gradient, coefficients_gradient, threads)
}

void darlit_vector_logits(int type, int64_t tokens, int width, int streams, int rows, const Rows* stream,
                          const float* weights, float eps, float* logits, float* scale, int threads) {
    DARLIT_FOR_TYPE(vector_logits, tokens, width, streams, rows, stream, weights, eps, logits, scale, threads)
}

void darlit_vector_logits_backward(int type, int64_t tokens, int width, int streams, int rows, const float* gradient,
                                   const float* logits, const float* scale, const Rows* stream, const float* weights,
                                   const Rows* stream_gradient, float* weights_gradient, const Rows* arrived,
                                   const float* coefficients, int64_t coefficients_row, const Rows* mixed_gradient,
                                   int group, int threads) {
    DARLIT_FOR_TYPE(vector_logits_backward, tokens, width, streams, rows, gradient, logits, scale, stream, weights,
                    stream_gradient, weights_gradient, arrived, coefficients, coefficients_row, mixed_gradient, group,
                    threads)
}
}
