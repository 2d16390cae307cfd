/* Loops of the codecs on a CPU that touch memory once. kernels.py declares and documents what Python calls.

Every function gives the bits of the numpy loops beside its caller: the same operations in the same order, each rounded
to float32 (-ffp-contract=off, no -ffast-math), and sums in numpy's pairwise order. Elements that are not finite are
looked for as integers: the bits of |x| order as |x| does, those of infinity and NaN come last. Little-endian. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define EXPORT __attribute__((visibility("default")))

enum { PIECE = 4096, GROUP = 32, DIGITS = 5, SPARE = 3 };
static const uint32_t INFINITE = 0x7f800000u;
static const float TINY = 1e-35f; /* blocks.py */

typedef float floats __attribute__((vector_size(32)));
typedef int32_t ints __attribute__((vector_size(32)));

static inline floats load(const float *x) {
    floats v;
    memcpy(&v, x, sizeof v);
    return v;
}

static inline void store(float *x, floats v) { memcpy(x, &v, sizeof v); }

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

static inline float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* The bits of max |x|. */
static uint32_t peak_bits(const float *x, int64_t n) {
    uint32_t peak = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        bits &= 0x7fffffffu;
        peak = bits > peak ? bits : peak;
    }
    return peak;
}

/* One bit for each of eight elements, the first one lowest: whether it is >= 0. */
static inline uint8_t nonnegative(const float *x) {
#if defined(__AVX2__)
    return (uint8_t)_mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(x), _mm256_setzero_ps(), _CMP_GE_OQ));
#else
    unsigned bits = 0;
    for (int i = 0; i < 8; i++) bits |= (unsigned)(x[i] >= 0) << i;
    return (uint8_t)bits;
#endif
}

/* One bit for each of 64 elements, the first one lowest: whether |x| > threshold. Raises the eight largest bits of |x|
that were seen so far. */
static inline uint64_t larger(const float *x, float threshold, uint32_t *peaks) {
    uint64_t mask = 0;
#if defined(__AVX2__)
    const __m256i magnitude = _mm256_set1_epi32(INT32_MAX);
    __m256i highest = _mm256_loadu_si256((const __m256i *)peaks);
    for (int i = 0; i < 64; i += 8) {
        const __m256i size = _mm256_and_si256(magnitude, _mm256_loadu_si256((const __m256i *)(x + i)));
        const __m256 is_larger = _mm256_cmp_ps(_mm256_castsi256_ps(size), _mm256_set1_ps(threshold), _CMP_GT_OQ);
        mask |= (uint64_t)_mm256_movemask_ps(is_larger) << i;
        highest = _mm256_max_epu32(highest, size);
    }
    _mm256_storeu_si256((__m256i *)peaks, highest);
#else
    const uint32_t highest = peak_bits(x, 64);
    peaks[0] = highest > peaks[0] ? highest : peaks[0];
    for (int i = 0; i < 64; i++) mask |= (uint64_t)(fabsf(x[i]) > threshold) << i;
#endif
    return mask;
}

/* Bit `bit` of each of 32 codes, the first one lowest. */
static inline uint32_t plane(const uint8_t *codes, int bit) {
#if defined(__AVX2__)
    const __m256i v = _mm256_loadu_si256((const __m256i *)codes);
    return (uint32_t)_mm256_movemask_epi8(_mm256_sll_epi16(v, _mm_cvtsi32_si128(7 - bit)));
#else
    uint32_t bits = 0;
    for (int i = 0; i < 4; i++) {
        uint64_t v;
        memcpy(&v, codes + 8 * i, sizeof v);
        v = ((v >> bit) & 0x0101010101010101u) * 0x0102040810204080u;
        bits |= (uint32_t)(v >> 56) << (8 * i);
    }
    return bits;
#endif
}

/* Eight bits as eight bytes of 0 or 1, the lowest first. */
static inline uint64_t spread(uint8_t bits) {
    const uint64_t lanes = (bits * 0x0101010101010101u) & 0x8040201008040201u;
    return ((lanes + 0x7f7f7f7f7f7f7f7fu) >> 7) & 0x0101010101010101u;
}

/* What is summed of an element: |x|, or (|x| / unit)^2. */
static inline floats term(const float *x, float unit) {
    const floats size = (floats)((ints)load(x) & 0x7fffffff);
    if (unit == 0) return size;
    const floats relative = size / unit;
    return relative * relative;
}

static inline float single(float x, float unit) {
    if (unit == 0) return fabsf(x);
    const float relative = fabsf(x) / unit;
    return relative * relative;
}

/* numpy's pairwise sum: eight running sums in up to 128 elements, halves of more. */
static inline float sum_of(const float *x, int64_t n, float unit) {
    if (n < 8) {
        float sum = 0;
        for (int64_t i = 0; i < n; i++) sum += single(x[i], unit);
        return sum;
    }
    floats r = term(x, unit);
    int64_t i = 8;
    for (; i < n - n % 8; i += 8) r += term(x + i, unit);
    float sum = ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]));
    for (; i < n; i++) sum += single(x[i], unit);
    return sum;
}

static float pairwise(const float *x, int64_t n, float unit) {
    if (n <= 128) return unit == 0 ? sum_of(x, n, 0) : sum_of(x, n, unit);
    const int64_t half = n / 2 - (n / 2) % 8;
    const float first = pairwise(x, half, unit);
    return first + pairwise(x + half, n - half, unit);
}

EXPORT uint32_t echelon_peak(const float *x, int64_t n) { return peak_bits(x, n); }

/* The index of the lowest bit that is set. */
static inline int lowest(uint64_t mask) { return mask ? __builtin_ctzll(mask) : 64; }

EXPORT int64_t echelon_above(const float *x, int64_t n, float threshold, int64_t *indices, uint32_t *peak) {
    int64_t count = 0, i = 0;
    uint32_t peaks[8] = {0};
    for (; i + 64 <= n; i += 64) {
        uint64_t mask = larger(x + i, threshold, peaks);
        int64_t *to = indices + count;
        count += __builtin_popcountll(mask);
        for (int j = 0; j < SPARE; j++, mask &= mask - 1) to[j] = i + lowest(mask); /* without a branch: most are few */
        for (to += SPARE; mask; mask &= mask - 1) *to++ = i + lowest(mask);
    }
    *peak = peak_bits(x + i, n - i);
    for (int j = 0; j < 8; j++) *peak = peaks[j] > *peak ? peaks[j] : *peak;
    for (; i < n; i++)
        if (fabsf(x[i]) > threshold) indices[count++] = i;
    return count;
}

/* Write the signs of a block, and return mean |p|. */
static float encode_block(const float *p, int64_t n, uint8_t *signs) {
    const float mean = pairwise(p, n, 0) / (float)n;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) signs[i / 8] = nonnegative(p + i);
    if (i < n) {
        float last[8] = {-1, -1, -1, -1, -1, -1, -1, -1};
        memcpy(last, p + i, (size_t)(n - i) * sizeof *p);
        signs[i / 8] = nonnegative(last);
    }
    return mean;
}

EXPORT void echelon_encode_signs(const float *x, int64_t n, int64_t block, float *scales, uint8_t *signs) {
    for (int64_t at = 0; at < n; at += block)
        scales[at / block] = encode_block(x + at, smaller(block, n - at), signs + at / 8);
}

EXPORT void echelon_encode_signs_with_memory(
    const float *added, float *memory, int64_t n, int64_t block, float *scales, uint8_t *signs) {
    for (int64_t at = 0; at < n; at += block) {
        const int64_t size = smaller(block, n - at);
        float *p = memory + at;
        if (added)
            for (int64_t i = 0; i < size; i++) p[i] += added[at + i];
        const float scale = encode_block(p, size, signs + at / 8);
        for (int64_t i = 0; i < size; i++) p[i] -= p[i] >= 0 ? scale : -scale;
        scales[at / block] = scale;
    }
}

/* Eight elements of that size, positive where bits are set. */
static inline floats signed_floats(uint8_t bits, float size) {
    const ints bit = {1, 2, 4, 8, 16, 32, 64, 128};
    const ints negative = (bit & (int32_t)bits) == 0;
    const floats all = {size, size, size, size, size, size, size, size};
    return (floats)((ints)all ^ (negative & INT32_MIN));
}

EXPORT void echelon_decode_signs(
    const uint8_t *signs, const float *scales, float unit, int64_t n, int64_t block, float alpha, float *out) {
    for (int64_t at = 0; at < n; at += block) {
        const float scale = scales ? scales[at / block] : unit;
        const float size = alpha == 0 ? scale : scale * alpha;
        const int64_t end = at + smaller(block, n - at), full = end - (end - at) % 8;
        if (alpha == 0)
            for (int64_t i = at; i < full; i += 8) store(out + i, signed_floats(signs[i / 8], size));
        else
            for (int64_t i = at; i < full; i += 8)
                store(out + i, load(out + i) + signed_floats(signs[i / 8], size));
        for (int64_t i = full; i < end; i++) {
            const float value = (signs[i / 8] >> (i % 8)) & 1 ? size : -size;
            out[i] = alpha == 0 ? value : out[i] + value;
        }
    }
}

/* Where codes go to or come from: `width` planes of bits, `stride` bytes each (8: bytes), or, of width 0, base-3
digits: byte i holds those of the elements i, i + stride, ..., i + 4 stride. */
typedef struct {
    uint8_t *bytes;
    int64_t stride;
    int width;
} Packing;

static const uint32_t POWER[DIGITS] = {1, 3, 9, 27, 81};

static void put_digits(Packing to, int64_t at, const uint8_t *codes, int64_t n) {
    while (n > 0) {
        const int64_t digit = at / to.stride, size = smaller(n, (digit + 1) * to.stride - at);
        uint8_t *bytes = to.bytes + at % to.stride;
        const uint8_t power = (uint8_t)POWER[digit];
        if (digit == 0)
            memcpy(bytes, codes, (size_t)size);
        else
            for (int64_t i = 0; i < size; i++) bytes[i] = (uint8_t)(bytes[i] + codes[i] * power);
        at += size, codes += size, n -= size;
    }
}

static void get_digits(Packing from, int64_t at, uint8_t *codes, int64_t n) {
    while (n > 0) {
        const int64_t digit = at / from.stride, size = smaller(n, (digit + 1) * from.stride - at);
        const uint8_t *bytes = from.bytes + at % from.stride;
        const uint32_t inverse = 65536 / POWER[digit] + 1; /* exact for bytes */
        for (int64_t i = 0; i < size; i++) {
            const uint32_t quotient = (bytes[i] * inverse) >> 16;
            codes[i] = (uint8_t)(quotient - 3 * ((quotient * 21846) >> 16));
        }
        at += size, codes += size, n -= size;
    }
}

/* Pack codes from a multiple of 8 on; what follows the last of `n` in their group must be zeros. */
static void put_planes(Packing to, int64_t at, const uint8_t *codes, int64_t n) {
    for (int bit = 0; bit < to.width; bit++) {
        uint8_t *bytes = to.bytes + bit * to.stride + at / 8;
        for (int64_t i = 0; i < n; i += GROUP) {
            const uint32_t bits = plane(codes + i, bit);
            memcpy(bytes + i / 8, &bits, (size_t)smaller(4, (n - i + 7) / 8));
        }
    }
}

/* Unpack codes from a multiple of 8 on, up to the end of the last one's byte. */
static void get_planes(Packing from, int64_t at, uint8_t *codes, int64_t n) {
    memset(codes, 0, (size_t)(n + 7));
    for (int bit = 0; bit < from.width; bit++) {
        const uint8_t *bytes = from.bytes + bit * from.stride + at / 8;
        for (int64_t i = 0; i < (n + 7) / 8; i++) {
            uint64_t eight;
            memcpy(&eight, codes + 8 * i, sizeof eight);
            eight |= spread(bytes[i]) << bit;
            memcpy(codes + 8 * i, &eight, sizeof eight);
        }
    }
}

static float scale_of(const float *x, int64_t n, float peak, float clip) {
    if (clip == 0) return peak;
    const float unit = peak > TINY ? peak : TINY;
    const float share = clip * sqrtf(pairwise(x, n, unit) / (float)n);
    return peak * (share < 1 ? share : 1);
}

static void round_piece(
    const float *x, int64_t n, float factor, float limit, int clips, const float *dither, float levels, uint8_t *codes) {
    if (clips)
        for (int64_t i = 0; i < n; i++) {
            float level = x[i] * factor;
            level = level < -limit ? -limit : level;
            level = level > limit ? limit : level;
            codes[i] = (uint8_t)(int32_t)(level + (dither[i] + levels));
        }
    else
        for (int64_t i = 0; i < n; i++) codes[i] = (uint8_t)(int32_t)(x[i] * factor + (dither[i] + levels));
}

/* Codes on their way into planes: whole groups leave, the others wait for the next piece. */
typedef struct {
    uint8_t codes[PIECE + 2 * GROUP];
    int64_t waiting, packed;
} Queue;

static void pack_groups(Packing to, Queue *queue, int is_last) {
    const int64_t full = queue->waiting - queue->waiting % GROUP, n = is_last ? queue->waiting : full;
    if (is_last) memset(queue->codes + queue->waiting, 0, GROUP);
    put_planes(to, queue->packed, queue->codes, n);
    queue->packed += n, queue->waiting -= n;
    memmove(queue->codes, queue->codes + n, (size_t)queue->waiting);
}

EXPORT int32_t echelon_quantise(
    const float *x, int64_t n, int64_t block, int32_t levels, float limit, float clip, const float *table,
    const int64_t *starts, int64_t stretch, int32_t width, int64_t stride, float *steps, uint8_t *packed) {
    const Packing to = {packed, stride, width};
    Queue queue = {.waiting = 0, .packed = 0};
    for (int64_t at = 0; at < n; at += block) {
        const int64_t end = at + smaller(block, n - at);
        const uint32_t peak = peak_bits(x + at, end - at);
        if (peak >= INFINITE) return 0;
        const float scale = scale_of(x + at, end - at, from_bits(peak), clip);
        const float factor = scale > TINY ? (1 / scale) * limit : 0;
        const float *dither = table + starts[at / stretch] + at % stretch;
        steps[at / block] = scale > TINY ? scale / limit : 0;
        for (int64_t i = at; i < end; i += PIECE) {
            const int64_t size = smaller(PIECE, end - i);
            uint8_t *codes = width == 8 ? packed + i : queue.codes + queue.waiting;
            round_piece(x + i, size, factor, limit, clip != 0, dither + (i - at), (float)levels, codes);
            if (width == 0) {
                put_digits(to, i, codes, size);
            } else if (width < 8) {
                queue.waiting += size;
                pack_groups(to, &queue, 0);
            }
        }
    }
    if (queue.waiting) pack_groups(to, &queue, 1);
    return 1;
}

EXPORT void echelon_dequantise(
    const float *steps, const uint8_t *packed, int64_t n, int64_t block, int32_t levels, int32_t width, int64_t stride,
    float alpha, float *out) {
    const Packing from = {(uint8_t *)packed, stride, width};
    uint8_t buffer[PIECE + 2 * GROUP];
    for (int64_t at = 0; at < n; at += block) {
        const int64_t end = at + smaller(block, n - at);
        const float step = steps[at / block];
        for (int64_t i = at; i < end; i += PIECE) {
            const int64_t size = smaller(PIECE, end - i), before = i % 8;
            const uint8_t *codes = buffer;
            if (width == 8)
                codes = packed + i;
            else if (width == 0)
                get_digits(from, i, buffer, size);
            else
                get_planes(from, i - before, buffer, size + before), codes = buffer + before;
            float *to = out + i;
            if (alpha == 0)
                for (int64_t j = 0; j < size; j++) to[j] = (float)(int8_t)(codes[j] - levels) * step;
            else
                for (int64_t j = 0; j < size; j++) to[j] += (float)(int8_t)(codes[j] - levels) * step * alpha;
        }
    }
}

EXPORT void echelon_move_velocity(float *velocity, const float *gradient, int64_t n, float momentum) {
    for (int64_t i = 0; i < n; i++) velocity[i] = velocity[i] * momentum + gradient[i];
}

EXPORT int64_t echelon_add_at(
    float *target, int64_t n, const int64_t *indices, const float *values, int64_t k, float alpha) {
    int64_t i = 0;
    for (; i < k && indices[i] >= 0 && indices[i] < n; i++) target[indices[i]] += values[i] * alpha;
    return i;
}

/* Planes that hold eight of the low bits of indices, from bit `first` on. */
static Packing low_planes(uint8_t *packed, int64_t k, int first, int width) {
    const int64_t stride = width == 8 ? k : (k + 7) / 8;
    const Packing planes = {packed + first * stride, stride, width - first < 8 ? width - first : 8};
    return planes;
}

/* Returns how many indices there was a place for. */
EXPORT int64_t echelon_pack_indices(
    const int64_t *indices, int64_t k, int32_t low, int32_t is_coded, uint8_t *lows, uint8_t *marks, int64_t n_marks) {
    uint8_t codes[PIECE + GROUP];
    for (int first = 0; first < low; first += 8) {
        const Packing to = low_planes(lows, k, first, low);
        for (int64_t at = 0; at < k; at += PIECE) {
            const int64_t size = smaller(PIECE, k - at);
            for (int64_t i = 0; i < size; i++) codes[i] = (uint8_t)(indices[at + i] >> first);
            memset(codes + size, 0, GROUP);
            if (low == 8)
                memcpy(to.bytes + at, codes, (size_t)size);
            else
                put_planes(to, at, codes, size);
        }
    }
    if (n_marks) memset(marks, 0, (size_t)((n_marks + 7) / 8));
    for (int64_t i = 0; i < k; i++) {
        const int64_t mark = (indices[i] >> low) + (is_coded ? i : 0);
        if (indices[i] < 0 || mark >= n_marks) return i;
        marks[mark / 8] = (uint8_t)(marks[mark / 8] | 1u << (mark % 8));
    }
    return k;
}

EXPORT int64_t echelon_unpack_indices(
    const uint8_t *lows, const uint8_t *marks, int64_t n_marks, int64_t k, int32_t low, int32_t is_coded,
    int64_t *indices) {
    int64_t count = 0;
    for (int64_t at = 0; at < n_marks; at += 64) {
        uint64_t mask = 0;
        const int64_t bits = smaller(64, n_marks - at);
        memcpy(&mask, marks + at / 8, (size_t)((bits + 7) / 8));
        if (bits < 64) mask &= ((uint64_t)1 << bits) - 1;
        for (; mask; mask &= mask - 1, count++)
            if (count < k) indices[count] = (at + lowest(mask) - (is_coded ? count : 0)) << low;
    }
    uint8_t codes[PIECE + GROUP];
    for (int first = 0; first < low; first += 8) {
        const Packing from = low_planes((uint8_t *)lows, k, first, low);
        for (int64_t at = 0; at < k; at += PIECE) {
            const int64_t size = smaller(PIECE, k - at);
            const uint8_t *bytes = low == 8 ? from.bytes + at : codes;
            if (low != 8) get_planes(from, at, codes, size);
            for (int64_t i = 0; i < size; i++) indices[at + i] |= (int64_t)bytes[i] << first;
        }
    }
    return count;
}
