// Rows of float32, bfloat16 or float16 in vectors of float32: what the kernels are made of.
//
// Legend: N tokens, D width. A tensor [N, D] comes as the address of its first row and the distance between rows, in
// elements. A row buffer holds float32 and is padded to a multiple of two vectors with zeros.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __x86_64__
#include <immintrin.h>
#endif

#define DARLIT_INLINE __attribute__((always_inline))

namespace darlit {

inline int thread_number() {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
typedef float Lanes __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(LANES * sizeof(uint32_t)), aligned(4), may_alias));
typedef uint16_t Shorts __attribute__((vector_size(LANES * sizeof(uint16_t)), aligned(2), may_alias));

inline float sum(Lanes x) {
    float total = 0;
    for (int lane = 0; lane < LANES; ++lane) total += x[lane];
    return total;
}

// The element types. `widen` is exact; `narrow` rounds to nearest even and keeps NaN.
struct Brain { uint16_t bits; };
struct Half { _Float16 value; };
template <class T> struct Vector { typedef Shorts type; };
template <> struct Vector<float> { typedef Lanes type; };

template <class T> inline Lanes widen(typename Vector<T>::type x);
template <> inline Lanes widen<float>(Lanes x) { return x; }
template <> inline Lanes widen<Brain>(Shorts x) { return (Lanes)(__builtin_convertvector(x, Words) << 16); }
template <> inline Lanes widen<Half>(Shorts x) {
#if defined(__AVX512F__)
    return (Lanes)_mm512_cvtph_ps((__m256i)x);
#elif defined(__F16C__)
    return (Lanes)_mm256_cvtph_ps((__m128i)x);
#endif
    _Float16 halves[LANES];
    std::memcpy(halves, &x, sizeof halves);
    Lanes wide;
    for (int lane = 0; lane < LANES; ++lane) wide[lane] = static_cast<float>(halves[lane]);
    return wide;
}

template <class T> inline typename Vector<T>::type narrow(Lanes x);
template <> inline Lanes narrow<float>(Lanes x) { return x; }
template <> inline Shorts narrow<Brain>(Lanes x) {
    const Words bits = (Words)x;
    const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Words number = (Words)(x == x);
    return __builtin_convertvector((rounded & number) | (0x7fc0 & ~number), Shorts);
}
template <> inline Shorts narrow<Half>(Lanes x) {
#if defined(__AVX512F__)
    return (Shorts)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__F16C__)
    return (Shorts)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
#endif
    _Float16 halves[LANES];
    for (int lane = 0; lane < LANES; ++lane) halves[lane] = static_cast<_Float16>(x[lane]);
    Shorts bits;
    std::memcpy(&bits, halves, sizeof bits);
    return bits;
}

// `count` elements; missing ones are zero.
template <class T>
DARLIT_INLINE inline Lanes load(const T* x, int count) {
    typedef typename Vector<T>::type Native;
    if (count == LANES) return widen<T>(*reinterpret_cast<const Native*>(x));
    Native part{};
    std::memcpy(&part, x, count * sizeof(T));
    return widen<T>(part);
}
template <class T>
DARLIT_INLINE inline void store(T* x, typename Vector<T>::type value, int count) {
    if (count == LANES) *reinterpret_cast<typename Vector<T>::type*>(x) = value;
    else std::memcpy(x, &value, count * sizeof(T));
}

// Past the caches: memory that is read again much later is not worth a cache line's read before it is written.
inline void stream(float* x, Lanes value) {
#if defined(__AVX512F__)
    _mm512_stream_ps(x, (__m512)value);
#elif defined(__AVX__)
    _mm256_stream_ps(x, (__m256)value);
#else
    std::memcpy(x, &value, sizeof value);
#endif
}
template <class T>
inline void stream(T* x, Shorts value) {
#if defined(__AVX512F__)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(x), (__m256i)value);
#elif defined(__AVX__)
    _mm_stream_si128(reinterpret_cast<__m128i*>(x), (__m128i)value);
#else
    std::memcpy(x, &value, sizeof value);
#endif
}
// Each thread, when it has written its rows.
inline void finish_streaming() {
#ifdef __x86_64__
    _mm_sfence();
#endif
}

struct Rows {
    void* base;
    int64_t stride;
    template <class T> T* row(int64_t n) const { return base ? static_cast<T*>(base) + n * stride : nullptr; }
    explicit operator bool() const { return base != nullptr; }
};

constexpr int64_t LARGE = 1 << 20;

// A row to write: streamed where the whole tensor is large and every vector of it aligned.
template <class T>
struct Output {
    T* row = nullptr;
    bool streamed = false;
    Output() = default;
    Output(const Rows& rows, int64_t n, int64_t tokens, int width) : row(rows.row<T>(n)) {
        constexpr int64_t bytes = sizeof(typename Vector<T>::type), element = sizeof(T);
        streamed = tokens * width * element >= LARGE && reinterpret_cast<uintptr_t>(rows.base) % bytes == 0 &&
                   rows.stride * element % bytes == 0;
    }
    DARLIT_INLINE void put(int d, typename Vector<T>::type value, int count) const {
        if (streamed && count == LANES) stream(row + d, value);
        else store(row + d, value, count);
    }
};

// body(vectors, d, count) for all of a row: VECTORS whole ones at a time, then one by one, the last of `count` lanes.
template <int VECTORS, class Body>
DARLIT_INLINE inline void over(int width, Body body) {
    int d = 0;
    for (; d + VECTORS * LANES <= width; d += VECTORS * LANES) body(std::integral_constant<int, VECTORS>(), d, LANES);
    for (; d + LANES <= width; d += LANES) body(std::integral_constant<int, 1>(), d, LANES);
    if (d < width) body(std::integral_constant<int, 1>(), d, width - d);
}

inline int padded(int width) { return (width + 2 * LANES - 1) / (2 * LANES) * (2 * LANES); }

inline std::vector<float> padded_rows(const float* rows, int count, int width, int wide) {
    std::vector<float> copy(static_cast<size_t>(count) * wide, 0.0f);
    for (int i = 0; i < count; ++i) std::memcpy(&copy[int64_t(i) * wide], rows + int64_t(i) * width, width * sizeof(float));
    return copy;
}

constexpr int TOKENS = 8;    // a block of tokens shares one load of queries or weights
constexpr int TOGETHER = 8;  // rows followed at once: a processor prefetches so many streams and hardly more

// mixed[j] = sum_s weight[j * sources + s] row[j * sources + s], TARGETS at a time in registers.
template <class T, int TARGETS>
void mix(int sources, const T* const* row, const float* weight, float* mixed, int width, int wide) {
    for (int first = 0; first < sources; first += TOGETHER) {
        const int last = std::min(sources, first + TOGETHER);
        over<4>(width, [&](auto vectors, int d, int count) DARLIT_INLINE {
            constexpr int V = decltype(vectors)::value;
            Lanes total[TARGETS][V];
            for (int j = 0; j < TARGETS; ++j)
                for (int v = 0; v < V; ++v) total[j][v] = first ? load(mixed + j * wide + d + v * LANES, LANES) : Lanes{};
            for (int s = first; s < last; ++s)
                for (int j = 0; j < TARGETS; ++j) {
                    const T* x = row[j * sources + s] + d;
                    const float scale = weight[j * sources + s];
                    for (int v = 0; v < V; ++v) total[j][v] += scale * load(x + v * LANES, count);
                }
            for (int j = 0; j < TARGETS; ++j)
                for (int v = 0; v < V; ++v) store(mixed + j * wide + d + v * LANES, total[j][v], LANES);
        });
    }
}

// products[i] = <g, row_i> for ROWS rows with one load of g.
template <class T, int ROWS>
void dots_with(const T* g, const T* const* row, float* products, int width) {
    Lanes total[ROWS] = {};
    over<2>(width, [&](auto vectors, int d, int count) DARLIT_INLINE {
        for (int v = 0; v < vectors; ++v, d += LANES) {
            const Lanes value = load(g + d, count);
            for (int i = 0; i < ROWS; ++i) total[i] += value * load(row[i] + d, count);
        }
    });
    for (int i = 0; i < ROWS; ++i) products[i] = sum(total[i]);
}

template <class T>
void dots(const T* g, int rows, const T* const* row, float* products, int width) {
    int i = 0;
    for (; i + 4 <= rows; i += 4) dots_with<T, 4>(g, row + i, products + i, width);
    if (rows - i == 3) dots_with<T, 3>(g, row + i, products + i, width);
    if (rows - i == 2) dots_with<T, 2>(g, row + i, products + i, width);
    if (rows - i == 1) dots_with<T, 1>(g, row + i, products + i, width);
}

// C[i] += sum_k A[i, k] B[k] for rows of a padded width; A is small and strided.
template <int HEIGHT>
void add_product_rows(int depth, int d, const float* a, int64_t a_row, int64_t a_column, const float* b, float* c,
                      int wide) {
    Lanes left[HEIGHT], right[HEIGHT];
    for (int i = 0; i < HEIGHT; ++i) {
        left[i] = load(c + i * wide + d, LANES);
        right[i] = load(c + i * wide + d + LANES, LANES);
    }
    for (int k = 0; k < depth; ++k) {
        const float* row = b + int64_t(k) * wide + d;
        const Lanes b_left = load(row, LANES), b_right = load(row + LANES, LANES);
        for (int i = 0; i < HEIGHT; ++i) {
            const float scale = a[i * a_row + k * a_column];
            left[i] += scale * b_left, right[i] += scale * b_right;
        }
    }
    for (int i = 0; i < HEIGHT; ++i) {
        store(c + i * wide + d, left[i], LANES);
        store(c + i * wide + d + LANES, right[i], LANES);
    }
}

inline void add_product(int height, int depth, const float* a, int64_t a_row, int64_t a_column, const float* b,
                        float* c, int wide) {
    for (int d = 0; d < wide; d += 2 * LANES) {
        int i = 0;
        for (; i + 4 <= height; i += 4)
            add_product_rows<4>(depth, d, a + i * a_row, a_row, a_column, b, c + i * wide, wide);
        for (; i < height; ++i)
            add_product_rows<1>(depth, d, a + i * a_row, a_row, a_column, b, c + i * wide, wide);
    }
}

// out[t * out_row + r] (+)= <x[t], w[r]> for COUNT tokens and PAIR rows of w at once.
template <int COUNT, int PAIR>
void products(const float* x, const float* w, int wide, float* out, int64_t out_row) {
    Lanes total[COUNT][PAIR] = {};
    for (int d = 0; d < wide; d += LANES)
        for (int t = 0; t < COUNT; ++t)
            for (int r = 0; r < PAIR; ++r) total[t][r] += load(x + t * wide + d, LANES) * load(w + r * wide + d, LANES);
    for (int t = 0; t < COUNT; ++t)
        for (int r = 0; r < PAIR; ++r) out[t * out_row + r] = sum(total[t][r]);
}

template <int COUNT>
void products_with_all(const float* x, const float* w, int reads, int wide, float* out, int64_t out_row) {
    int r = 0;
    for (; r + 2 <= reads; r += 2) products<COUNT, 2>(x, w + int64_t(r) * wide, wide, out + r, out_row);
    for (; r < reads; ++r) products<COUNT, 1>(x, w + int64_t(r) * wide, wide, out + r, out_row);
}

}  // namespace darlit

// Calls the function for the element type that a caller outside C++ names by number.
#define DARLIT_FOR_TYPE(function, ...)                                \
    switch (type) {                                                   \
        case 0: return darlit::function<float>(__VA_ARGS__);          \
        case 1: return darlit::function<darlit::Brain>(__VA_ARGS__);  \
        case 2: return darlit::function<darlit::Half>(__VA_ARGS__);   \
    }
