// Depth reads and stream writes on a CPU: one pass over memory each, float32 arithmetic, any width.
//
// N tokens, D width, M streams (one or two), J targets of a read, R reads that see a source, A incoming gradients.
// The sources of a read are `count` completed ones in tables and perhaps one more, the block that is being written.
// `ops/cpu.py` describes each function's arguments.

#include "rows.h"

namespace darlit {

// Logits of one source, [N, J, R], from the address of the column that read 0 would have.
struct Logits {
    const float* base;
    int64_t token, target;
    float at(int64_t n, int j, int read) const { return base[n * token + j * target + read]; }
};

// In place, and returns the log-sum-exp.
inline float softmax(float* weight, int count) {
    float top = -INFINITY, total = 0;
    for (int s = 0; s < count; ++s) top = std::max(top, weight[s]);
    for (int s = 0; s < count; ++s) total += weight[s] = std::exp(weight[s] - top);
    for (int s = 0; s < count; ++s) weight[s] /= total;
    return top + std::log(total);
}

template <class T>
void depth_read(int64_t tokens, int width, int count, int merged, int streams, int targets,
                const int* value_streams, const Rows* completed, const Logits* completed_logits, const Rows* partial,
                const Logits* partial_logits, int read, const float* shares, int64_t shares_row, Rows out,
                const Rows* spreads, float* lse, int threads) {
    const int wide = padded(width), sources = count + (partial != nullptr);
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> mixed(static_cast<size_t>(targets) * wide), weights(targets * sources), scale(targets);
        std::vector<const T*> rows(targets * sources);
#pragma omp for schedule(static)
        for (int64_t n = 0; n < tokens; ++n) {
            for (int j = 0; j < targets; ++j) {
                float* weight = &weights[j * sources];
                for (int s = 0; s < sources; ++s) {
                    rows[j * sources + s] =
                        (s >= count ? partial[value_streams[j]]
                         : merged   ? completed[s * targets + j]
                                    : completed[s * streams + value_streams[j]])
                            .template row<T>(n);
                    weight[s] = (s < count ? completed_logits[s] : *partial_logits).at(n, j, read);
                }
                lse[n * targets + j] = softmax(weight, sources);
                scale[j] = targets == 1 ? 1.0f : shares[n * shares_row + j];
            }
            int j = 0;
            for (; j + 2 <= targets; j += 2)
                mix<T, 2>(sources, &rows[j * sources], &weights[j * sources], &mixed[j * wide], width, wide);
            for (; j < targets; ++j)
                mix<T, 1>(sources, &rows[j * sources], &weights[j * sources], &mixed[j * wide], width, wide);

            const Output<T> x(out, n, tokens, width);
            over<2>(width, [&](auto vectors, int d, int lanes) DARLIT_INLINE {
                for (int v = 0; v < vectors; ++v, d += LANES) {
                    const Lanes first = load(&mixed[d], LANES);
                    Lanes total = scale[0] * first;
                    for (int j = 1; j < targets; ++j) {
                        const Lanes target = load(&mixed[j * wide + d], LANES);
                        total += scale[j] * target;
                        if (spreads)
                            Output<T>(spreads[j - 1], n, tokens, width).put(d, narrow<T>(target - first), lanes);
                    }
                    x.put(d, narrow<T>(total), lanes);
                }
            });
        }
        finish_streaming();
    }
}

// With the sources: <g, h_j> = sum_s weight_js <g, v^j_s>. Without (count 0): from x and the spreads,
// h_0 = x - sum_j share_j spread_j.
template <class T>
void depth_read_backward(int64_t tokens, int width, int count, int streams, int targets, const int* value_streams,
                         Rows gradient, const Rows* source, const Logits* logits, int read, Rows out,
                         const Rows* spreads, const float* lse, const float* shares, int64_t shares_row,
                         float* scalars, int threads) {
#pragma omp parallel num_threads(threads)
    {
        const int number = count ? count * streams : targets;
        std::vector<const T*> rows(number);
        std::vector<float> products(number);
#pragma omp for schedule(static)
        for (int64_t n = 0; n < tokens; ++n) {
            for (int i = 0; i < number; ++i)
                rows[i] = count ? source[i].row<T>(n) : i == 0 ? out.row<T>(n) : spreads[i - 1].row<T>(n);
            dots(gradient.row<T>(n), number, rows.data(), products.data(), width);

            float *lse_out = scalars + n * 3 * targets, *share_out = lse_out + targets, *delta = share_out + targets;
            for (int j = 0; j < targets; ++j) {
                lse_out[j] = lse[n * targets + j];
                share_out[j] = targets == 1 ? 1.0f : shares[n * shares_row + j];
            }
            if (count) {
                for (int j = 0; j < targets; ++j) {
                    delta[j] = 0;
                    for (int s = 0; s < count; ++s)
                        delta[j] += std::exp(logits[s].at(n, j, read) - lse_out[j]) *
                                    products[s * streams + value_streams[j]];
                }
            } else {
                float first = products[0];
                for (int j = 1; j < targets; ++j) first -= share_out[j] * products[j];
                for (int j = 0; j < targets; ++j) delta[j] = j == 0 ? first : first + products[j];
            }
        }
    }
}

// The completed sources read once for `reads` reads in a row; `lse` [N, J, P].
template <class T>
void depth_prefetch(int64_t tokens, int width, int count, int streams, int targets, int reads,
                    const int* value_streams, const Rows* source, const Logits* logits, int first_read,
                    const Rows* mixes, float* lse, int threads) {
    const int wide = padded(width);
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> weights(static_cast<size_t>(reads) * count), mixed(2 * static_cast<size_t>(wide));
        std::vector<const T*> rows(2 * count);  // of one stream, once for each of two reads
#pragma omp for schedule(static)
        for (int64_t n = 0; n < tokens; ++n)
            for (int j = 0; j < targets; ++j) {
                for (int s = 0; s < count; ++s)
                    rows[s] = rows[count + s] = source[s * streams + value_streams[j]].template row<T>(n);
                for (int p = 0; p < reads; ++p) {
                    for (int s = 0; s < count; ++s) weights[p * count + s] = logits[s].at(n, j, first_read + p);
                    lse[(n * targets + j) * reads + p] = softmax(&weights[p * count], count);
                }
                for (int p = 0; p < reads; p += 2) {  // the first two bring the rows into the caches
                    const int together = std::min(2, reads - p);
                    (together == 2 ? mix<T, 2> : mix<T, 1>)(count, rows.data(), &weights[p * count], mixed.data(),
                                                            width, wide);
                    for (int i = 0; i < together; ++i) {
                        const Output<T> out(mixes[(p + i) * targets + j], n, tokens, width);
                        over<4>(width, [&](auto vectors, int d, int lanes) DARLIT_INLINE {
                            for (int v = 0; v < vectors; ++v, d += LANES)
                                out.put(d, narrow<T>(load(&mixed[i * wide + d], LANES)), lanes);
                        });
                    }
                }
            }
        finish_streaming();
    }
}

// x [M, TOKENS, wide] of one token, as it is written; returns nothing that is not in it.
template <class T, int STREAMS>
void write_token(int64_t n, int64_t tokens, int width, const Rows* carried, Rows output, float step, const float* beta,
                 const Rows* written, float* x, int64_t stream, float* squares) {
    const T* y = output.row<T>(n);
    const T* own[STREAMS];
    Lanes square[STREAMS] = {};
    for (int m = 0; m < STREAMS; ++m) own[m] = carried ? carried[m].row<T>(n) : nullptr;
    const Output<T> first(written ? written[0] : Rows{}, n, tokens, width);
    const Output<T> second(written ? written[STREAMS - 1] : Rows{}, n, tokens, width);
    over<2>(width, [&](auto vectors, int d, int count) DARLIT_INLINE {
        for (int v = 0; v < vectors; ++v, d += LANES) {
            Lanes value[STREAMS] = {};
            if (carried) {
                for (int m = 0; m < STREAMS; ++m) value[m] = load(own[m] + d, count);
                const Lanes exchanged = step * (value[STREAMS - 1] - value[0]);
                if (STREAMS == 2) value[0] += exchanged, value[STREAMS - 1] -= exchanged;
            }
            if (y) {
                const Lanes added = load(y + d, count);
                for (int m = 0; m < STREAMS; ++m) {
                    value[m] += (beta ? beta[m] : 1.0f) * added;
                    const auto narrowed = narrow<T>(value[m]);
                    (m == 0 ? first : second).put(d, narrowed, count);
                    value[m] = widen<T>(narrowed);
                }
            }
            for (int m = 0; m < STREAMS; ++m) {
                square[m] += value[m] * value[m];
                store(x + m * stream + d, value[m], LANES);
            }
        }
    });
    for (int m = 0; m < STREAMS; ++m) squares[m] = sum(square[m]);
}

// Query rows of a padded width [J, R, wide]; those of one target lie `target` elements from the next target's.
struct Queries {
    const float* rows;
    int64_t target;
    std::vector<float> copy;
    Queries(const float* given, int64_t stride, int targets, int reads, int width, int wide)
        : rows(given), target(stride) {
        if (wide == width) return;
        for (int j = 0; j < targets; ++j) {
            const std::vector<float> part = padded_rows(given + j * stride, reads, width, wide);
            copy.insert(copy.end(), part.begin(), part.end());
        }
        rows = copy.data(), target = int64_t(reads) * wide;
    }
    const float* of(int j) const { return rows + j * target; }
};

template <class T>
void stream_write(int64_t tokens, int width, int streams, int targets, int reads, const int* key_streams,
                  const Rows* carried, Rows output, const float* rho, int64_t rho_row, const float* beta,
                  int64_t beta_row, const float* queries, int64_t queries_target, float eps, const Rows* written,
                  float* logits, float* scale, int threads) {
    const int wide = padded(width);
    const int64_t stream = int64_t(TOKENS) * wide;
    const Queries query(queries, queries_target, targets, reads, width, wide);
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> block(streams * stream, 0.0f), squares(streams);  // block [M, TOKENS, wide]
#pragma omp for schedule(static)
        for (int64_t begin = 0; begin < tokens; begin += TOKENS) {
            const int count = static_cast<int>(std::min<int64_t>(TOKENS, tokens - begin));
            for (int t = 0; t < count; ++t) {
                const int64_t n = begin + t;
                (streams == 2 ? write_token<T, 2> : write_token<T, 1>)(
                    n, tokens, width, carried, output, rho ? 1 - rho[n * rho_row] : 0.0f,
                    beta ? beta + n * beta_row : nullptr, written, &block[int64_t(t) * wide], stream, squares.data());
                for (int m = 0; m < streams; ++m)
                    scale[n * streams + m] = 1.0f / std::sqrt(squares[m] / width + eps);
            }
            for (int j = 0; j < targets; ++j) {
                const float *x = &block[key_streams[j] * stream], *w = query.of(j);
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
        finish_streaming();
    }
}

// One token: x [M, .] is copied and dx [M, .] = what arrived + sum_a pull[a, m] g_a; dots[a, m] = <g_a, x_m>.
template <class T, int STREAMS>
void take_incoming(int64_t n, int width, const Rows* written, const Rows* arrived, int number_of, const Rows* incoming,
                  const float* pull, float* x, float* dx, int64_t stream, float* dots) {
    for (int first = 0; first == 0 || first < number_of; first += TOGETHER) {
        const int number = std::min(TOGETHER, number_of - first);
        const T *own[STREAMS], *from[STREAMS], *g[TOGETHER];
        Lanes dot[TOGETHER][STREAMS] = {};
        for (int m = 0; m < STREAMS; ++m) {
            own[m] = written[m].row<T>(n);
            from[m] = arrived ? arrived[m].row<T>(n) : nullptr;
        }
        for (int a = 0; a < number; ++a) g[a] = incoming[first + a].row<T>(n);
        over<2>(width, [&](auto vectors, int d, int count) DARLIT_INLINE {
            constexpr int V = decltype(vectors)::value;
            Lanes value[STREAMS][V], gradient[STREAMS][V];
            for (int m = 0; m < STREAMS; ++m)
                for (int v = 0; v < V; ++v) {
                    const int at = d + v * LANES;
                    if (first) {
                        value[m][v] = load(x + m * stream + at, LANES);
                        gradient[m][v] = load(dx + m * stream + at, LANES);
                    } else {
                        value[m][v] = load(own[m] + at, count);
                        gradient[m][v] = from[m] ? load(from[m] + at, count) : Lanes{};
                        store(x + m * stream + at, value[m][v], LANES);
                    }
                }
            for (int a = 0; a < number; ++a) {
                Lanes product[STREAMS] = {};
                for (int v = 0; v < V; ++v) {
                    const Lanes back = load(g[a] + d + v * LANES, count);
                    for (int m = 0; m < STREAMS; ++m) {
                        product[m] += back * value[m][v];
                        gradient[m][v] += pull[(first + a) * STREAMS + m] * back;
                    }
                }
                for (int m = 0; m < STREAMS; ++m) dot[a][m] += product[m];
            }
            for (int m = 0; m < STREAMS; ++m)
                for (int v = 0; v < V; ++v) store(dx + m * stream + d + v * LANES, gradient[m][v], LANES);
        });
        for (int a = 0; a < number; ++a)
            for (int m = 0; m < STREAMS; ++m) dots[(first + a) * STREAMS + m] = sum(dot[a][m]);
    }
}

// One token's gradients of the carried streams and of the output, from dx; and of the gates, betas and then rho.
// Without the output: nothing was carried, x is beta times it.
template <class T, int STREAMS>
void give_gradients(int64_t n, int64_t tokens, int width, const float* x, const float* dx, int64_t stream,
                    const float* back, const Rows* carried, Rows output, float step, bool exchanged, const float* beta,
                    const Rows* carried_gradients, Rows output_gradient, float* gates) {
    const T* y = output.row<T>(n);
    const T* own[STREAMS];
    Lanes dbeta[STREAMS] = {}, drho = {};
    for (int m = 0; m < STREAMS; ++m) own[m] = carried ? carried[m].row<T>(n) : nullptr;
    const Output<T> dy(output_gradient, n, tokens, width);
    const Output<T> first(carried ? carried_gradients[0] : Rows{}, n, tokens, width);
    const Output<T> second(carried ? carried_gradients[STREAMS - 1] : Rows{}, n, tokens, width);
    over<2>(width, [&](auto vectors, int d, int count) DARLIT_INLINE {
        for (int v = 0; v < vectors; ++v, d += LANES) {
            Lanes gradient[STREAMS];
            for (int m = 0; m < STREAMS; ++m)
                gradient[m] = load(dx + m * stream + d, LANES) - back[m] * load(x + m * stream + d, LANES);
            if (output_gradient) {
                const Lanes added = y ? load(y + d, count) : Lanes{};
                Lanes total = {};
                for (int m = 0; m < STREAMS; ++m) {
                    dbeta[m] += gradient[m] * (y ? added : load(x + m * stream + d, LANES));
                    total += (beta ? beta[m] : 1.0f) * gradient[m];
                }
                dy.put(d, narrow<T>(total), count);
            }
            if (carried) {
                const Lanes apart = gradient[STREAMS - 1] - gradient[0];
                if (exchanged) drho += apart * (load(own[STREAMS - 1] + d, count) - load(own[0] + d, count));
                if (STREAMS == 2) gradient[0] += step * apart, gradient[STREAMS - 1] -= step * apart;
                first.put(d, narrow<T>(gradient[0]), count);
                if (STREAMS == 2) second.put(d, narrow<T>(gradient[STREAMS - 1]), count);
            }
        }
    });
    if (!output_gradient) return;
    for (int m = 0; m < STREAMS; ++m) {
        const float whole = y || !beta ? 1.0f : beta[m];
        gates[m] = whole == 0 ? 0.0f : sum(dbeta[m]) / whole;
    }
    gates[STREAMS] = sum(drho);
}

template <class T>
void stream_write_backward(int64_t tokens, int width, int streams, int targets, int reads, const int* key_streams,
                           const int* value_streams, const Rows* written, const float* logits, const float* scale,
                           const Rows* arrived, int incoming, const int* incoming_read, int first_read,
                           const Rows* incoming_gradient, const float* const* incoming_scalars, const Rows* carried,
                           Rows output, const float* rho, int64_t rho_row, const float* beta, int64_t beta_row,
                           const float* queries, int64_t queries_target, const Rows* carried_gradients,
                           Rows output_gradient, float* gates_gradient, float* queries_gradient, int threads) {
    const int wide = padded(width), columns = targets * reads;
    const int64_t stream = int64_t(TOKENS) * wide;
    const Queries query(queries, queries_target, targets, reads, width, wide);
    const bool direct = threads == 1 && wide == width;  // no buffer between a thread and the queries' gradient
    std::vector<std::vector<float>> dqueries_of_threads(threads);
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> x(streams * stream, 0.0f), dx(streams * stream, 0.0f);  // [M, TOKENS, wide]
        std::vector<float> dlogits(static_cast<size_t>(TOKENS) * columns), back(TOKENS * streams);
        std::vector<float> weight(incoming * targets), pull(incoming * streams), dots(incoming * streams);
        std::vector<float>& dqueries = dqueries_of_threads[thread_number()];
        if (queries_gradient && incoming && !direct) dqueries.assign(static_cast<size_t>(columns) * wide, 0.0f);
#pragma omp for schedule(static)
        for (int64_t begin = 0; begin < tokens; begin += TOKENS) {
            const int count = static_cast<int>(std::min<int64_t>(TOKENS, tokens - begin));
            std::fill(dlogits.begin(), dlogits.end(), 0.0f);
            for (int t = 0; t < count; ++t) {
                const int64_t n = begin + t;
                float *x_t = &x[int64_t(t) * wide], *dx_t = &dx[int64_t(t) * wide], *dlogits_t = &dlogits[t * columns];
                // What each read sent: its output's gradient, log-sum-exp, shares and <gradient, h_j>.
                std::fill(pull.begin(), pull.end(), 0.0f);
                for (int a = 0; a < incoming; ++a) {
                    const float *lse = incoming_scalars[a] + n * 3 * targets, *shares = lse + targets;
                    for (int j = 0; j < targets; ++j) {
                        const float logit = logits[(n * targets + j) * reads + incoming_read[a] - first_read];
                        weight[a * targets + j] = shares[j] * std::exp(logit - lse[j]);
                        pull[a * streams + value_streams[j]] += weight[a * targets + j];
                    }
                }
                (streams == 2 ? take_incoming<T, 2> : take_incoming<T, 1>)(n, width, written, arrived, incoming,
                                                                           incoming_gradient, pull.data(), x_t, dx_t,
                                                                           stream, dots.data());
                for (int a = 0; a < incoming; ++a) {  // two reads may have one index: a read that was called twice
                    const float* delta = incoming_scalars[a] + n * 3 * targets + 2 * targets;
                    for (int j = 0; j < targets; ++j)
                        dlogits_t[j * reads + incoming_read[a] - first_read] +=
                            weight[a * targets + j] * (dots[a * streams + value_streams[j]] - delta[j]);
                }
                // logit = <w, x> scale(x): first the part through the scale, then dlogits become d<w, x>.
                float* back_t = &back[t * streams];
                std::fill(back_t, back_t + streams, 0.0f);
                for (int j = 0; incoming && j < targets; ++j) {
                    const float key_scale = scale[n * streams + key_streams[j]];
                    float weighted = 0;
                    for (int r = 0; r < reads; ++r) {
                        weighted += dlogits_t[j * reads + r] * logits[(n * targets + j) * reads + r];
                        dlogits_t[j * reads + r] *= key_scale;
                    }
                    back_t[key_streams[j]] += weighted * key_scale * key_scale / width;
                }
            }
            for (int j = 0; incoming && j < targets; ++j) {
                const float* coefficient = &dlogits[j * reads];
                const int64_t key = key_streams[j] * stream;
                add_product(count, reads, coefficient, columns, 1, query.of(j), &dx[key], wide);
                if (!queries_gradient) continue;
                float* to = direct ? queries_gradient + j * queries_target : &dqueries[int64_t(j) * reads * wide];
                add_product(reads, count, coefficient, 1, columns, &x[key], to, wide);
            }
            for (int t = 0; t < count; ++t) {
                const int64_t n = begin + t;
                (streams == 2 ? give_gradients<T, 2> : give_gradients<T, 1>)(
                    n, tokens, width, &x[int64_t(t) * wide], &dx[int64_t(t) * wide], stream, &back[t * streams],
                    carried, output, rho ? 1 - rho[n * rho_row] : 0.0f, rho != nullptr,
                    beta ? beta + n * beta_row : nullptr, carried_gradients, output_gradient,
                    gates_gradient + n * (streams + 1));
            }
        }
        finish_streaming();
    }
    for (const std::vector<float>& dqueries : dqueries_of_threads)  // in order, so that a run repeats to the last bit
        for (int i = 0; i < columns && !dqueries.empty(); ++i) {
            float* to = queries_gradient + i / reads * queries_target + int64_t(i % reads) * width;
            for (int d = 0; d < width; ++d) to[d] += dqueries[int64_t(i) * wide + d];
        }
}

}  // namespace darlit

extern "C" {

using darlit::Logits;
using darlit::Rows;

void darlit_depth_read(int type, int64_t tokens, int width, int count, int merged, int streams, int targets,
                       const int* value_streams, const Rows* completed, const Logits* completed_logits,
                       const Rows* partial, const Logits* partial_logits, int read, const float* shares,
                       int64_t shares_row, const Rows* out, const Rows* spreads, float* lse, int threads) {
    DARLIT_FOR_TYPE(depth_read, tokens, width, count, merged, streams, targets, value_streams, completed, completed_logits,
                    partial, partial_logits, read, shares, shares_row, *out, spreads, lse, threads)
}

void darlit_depth_read_backward(int type, int64_t tokens, int width, int count, int streams, int targets,
                                const int* value_streams, const Rows* gradient, const Rows* source,
                                const Logits* logits, int read, const Rows* out, const Rows* spreads,
                                const float* lse, const float* shares, int64_t shares_row, float* scalars,
                                int threads) {
    DARLIT_FOR_TYPE(depth_read_backward, tokens, width, count, streams, targets, value_streams, *gradient, source,
                    logits, read, *out, spreads, lse, shares, shares_row, scalars, threads)
}

void darlit_depth_prefetch(int type, int64_t tokens, int width, int count, int streams, int targets, int reads,
                           const int* value_streams, const Rows* source, const Logits* logits, int first_read,
                           const Rows* mixes, float* lse, int threads) {
    DARLIT_FOR_TYPE(depth_prefetch, tokens, width, count, streams, targets, reads, value_streams, source, logits,
                    first_read, mixes, lse, threads)
}

void darlit_stream_write(int type, int64_t tokens, int width, int streams, int targets, int reads,
                         const int* key_streams, const Rows* carried, const Rows* output, const float* rho,
                         int64_t rho_row, const float* beta, int64_t beta_row, const float* queries,
                         int64_t queries_target, float eps, const Rows* written, float* logits, float* scale,
                         int threads) {
    DARLIT_FOR_TYPE(stream_write, tokens, width, streams, targets, reads, key_streams, carried, *output, rho, rho_row,
                    beta, beta_row, queries, queries_target, eps, written, logits, scale, threads)
}

void darlit_stream_write_backward(int type, int64_t tokens, int width, int streams, int targets, int reads,
                                  const int* key_streams, const int* value_streams, const Rows* written,
                                  const float* logits, const float* scale, const Rows* arrived, int incoming,
                                  const int* incoming_read, int first_read, const Rows* incoming_gradient,
                                  const float* const* incoming_scalars, const Rows* carried, const Rows* output,
                                  const float* rho, int64_t rho_row, const float* beta, int64_t beta_row,
                                  const float* queries, int64_t queries_target, const Rows* carried_gradients,
                                  const Rows* output_gradient, float* gates_gradient, float* queries_gradient,
                                  int threads) {
    DARLIT_FOR_TYPE(stream_write_backward, tokens, width, streams, targets, reads, key_streams, value_streams, written,
                    logits, scale, arrived, incoming, incoming_read, first_read, incoming_gradient, incoming_scalars,
                    carried, *output, rho, rho_row, beta, beta_row, queries, queries_target, carried_gradients,
                    *output_gradient, gates_gradient, queries_gradient, threads)
}
}
