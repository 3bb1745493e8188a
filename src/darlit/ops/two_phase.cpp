// The first phase of Block reads on a CPU: the completed sources read once for several reads to come.
//
// Legend: N tokens, D width, S completed sources, M streams, J targets of a read, P reads. `ops/cpu.py` describes the
// arguments.

#include "rows.h"

namespace darlit {

template <class T>
void depth_mixes(int64_t tokens, int width, int sources, int streams, int targets, int reads,
                 const int* value_streams, const Rows* source, const float* const* logits, const int64_t* logits_row,
                 const int64_t* logits_target, const Rows* mixes, float* lse, int threads) {
    const int wide = padded(width);
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> weights(static_cast<size_t>(reads) * sources), mixed(2 * static_cast<size_t>(wide));
        std::vector<const T*> rows(2 * sources);  // of one stream, once for each of two reads
#pragma omp for schedule(static)
        for (int64_t n = 0; n < tokens; ++n)
            for (int j = 0; j < targets; ++j) {
                for (int s = 0; s < sources; ++s)
                    rows[s] = rows[sources + s] = source[s * streams + value_streams[j]].template row<T>(n);
                for (int p = 0; p < reads; ++p) {
                    float *weight = &weights[p * sources], top = -INFINITY, total = 0;
                    for (int s = 0; s < sources; ++s) {
                        weight[s] = logits[s][n * logits_row[s] + j * logits_target[s] + p];
                        top = std::max(top, weight[s]);
                    }
                    for (int s = 0; s < sources; ++s) total += weight[s] = std::exp(weight[s] - top);
                    for (int s = 0; s < sources; ++s) weight[s] /= total;
                    lse[(n * targets + j) * reads + p] = top + std::log(total);
                }
                for (int p = 0; p < reads; p += 2) {  // the first two bring the rows into the caches
                    const int together = std::min(2, reads - p);
                    (together == 2 ? mix<T, 2> : mix<T, 1>)(sources, rows.data(), &weights[p * sources], mixed.data(),
                                                            width, wide);
                    for (int i = 0; i < together; ++i) {
                        const Output<T> out(mixes[(p + i) * targets + j], n, tokens, width);
                        over<4>(width, [&](auto vectors, int d, int count) DARLIT_INLINE {
                            for (int v = 0; v < vectors; ++v, d += LANES)
                                out.put(d, narrow<T>(load(&mixed[i * wide + d], LANES)), count);
                        });
                    }
                }
            }
        finish_streaming();
    }
}

}  // namespace darlit

extern "C" {

using darlit::Rows;

void darlit_depth_mixes(int type, int64_t tokens, int width, int sources, int streams, int targets, int reads,
                        const int* value_streams, const Rows* source, const float* const* logits,
                        const int64_t* logits_row, const int64_t* logits_target, const Rows* mixes, float* lse,
                        int threads) {
    DARLIT_FOR_TYPE(depth_mixes, tokens, width, sources, streams, targets, reads, value_streams, source, logits,
                    logits_row, logits_target, mixes, lse, threads)
}
}
