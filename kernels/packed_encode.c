/* Encoders of the packed formats, for the CPU backend: quantise and pack rows of fp32.
 *
 * Affine groups of a row (1 to 8 bits, scale and minimum rounded to the stored type first, so that
 * codes are chosen for the grid that is stored), rows read with a stride so that groups may run
 * along tokens; and rotated codebooks: two Hadamard rounds with random signs, codes by thresholds,
 * bit planes, and the corrected norm. The array operations in quantizers/ are the reference.
 */

#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(VQ_NO_CLONES)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif
#define INLINE static inline __attribute__((always_inline))

enum { F32 = 0, F16 = 1, BF16 = 2, MAX_DIM = 512 };

/* Round to the nearest value of the stored type, ties to even. */
INLINE float round_to(float x, int type) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (type == BF16) {
        if ((bits & 0x7fffffffu) > 0x7f800000u) return x;
        bits = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
        memcpy(&x, &bits, 4);
        return x;
    }
    if (type == F16) {
        float a = fabsf(x);
        if (a > 65504.0f) return x;
        int e;
        frexpf(a, &e);
        float step = ldexpf(1.0f, (e < -13 ? -13 : e) - 11);
        return rintf(x / step) * step;
    }
    return x;
}

INLINE void put_bits(uint32_t *restrict words, int index, int bits, uint32_t code) {
    int at = index * bits, word = at / 32, shift = at % 32;
    words[word] |= code << shift;
    if (shift + bits > 32) words[word + 1] |= code >> (32 - shift);
}

/* ---- affine groups -------------------------------------------------------------------- */

typedef struct {
    const float *x;      /* first element */
    int64_t outer;       /* rows of groups: every row is `n` elements long */
    int64_t outer_batch; /* rows that share one base, see strides */
    int64_t base_stride, row_stride, step; /* elements between bases, rows, neighbours */
    int32_t n, bits, group, type;
    uint32_t *words;     /* (outer, n * bits / 32) */
    float *scale, *bias; /* (outer, n / group), already rounded to the stored type */
    int32_t part, parts;
} vq_affine;

CLONES static void affine_rows(const vq_affine *c, int64_t from, int64_t to) {
    int words = c->n * c->bits / 32, groups = c->n / c->group;
    float top = (float)((1 << c->bits) - 1);
    float row[128];
    for (int64_t r = from; r < to; r++) {
        const float *x = c->x + (r / c->outer_batch) * c->base_stride +
                         (r % c->outer_batch) * c->row_stride;
        uint32_t *out = c->words + r * words;
        memset(out, 0, sizeof(uint32_t) * words);
        for (int g = 0; g < groups; g++) {
            float low = INFINITY, high = -INFINITY, sum = 0.0f;
            for (int i = 0; i < c->group; i++) {
                float v = x[(int64_t)(g * c->group + i) * c->step];
                row[i] = v;
                low = v < low ? v : low;
                high = v > high ? v : high;
                sum += v;
            }
            if (c->bits == 1) {
                float mean = sum / (float)c->group, spread = 0.0f;
                for (int i = 0; i < c->group; i++) spread += fabsf(row[i] - mean);
                spread /= (float)c->group;
                low = mean - spread;
                high = mean + spread;
            }
            float bias = round_to(low, c->type), scale = round_to((high - low) / top, c->type);
            float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
            c->scale[r * groups + g] = scale;
            c->bias[r * groups + g] = bias;
            uint32_t code[128];
            for (int i = 0; i < c->group; i++) {
                float v = rintf((row[i] - bias) * inverse);
                v = v < 0.0f ? 0.0f : v;
                v = v > top ? top : v;
                code[i] = (uint32_t)(int32_t)v;
            }
            for (int i = 0; i < c->group; i++) put_bits(out, g * c->group + i, c->bits, code[i]);
        }
    }
}

static void *affine_part(void *argument) {
    const vq_affine *c = (const vq_affine *)argument;
    affine_rows(c, c->outer * c->part / c->parts, c->outer * (c->part + 1) / c->parts);
    return NULL;
}

/* ---- rotated codebooks ---------------------------------------------------------------- */

typedef struct {
    const float *x; /* (rows, dim) */
    int64_t rows;
    int32_t dim, lanes, bits, unbiased; /* lanes: dim rounded up to 32, over 32 */
    const float *signs;      /* (2, dim) */
    const float *thresholds; /* 2^bits - 1, ascending */
    const float *levels;     /* 2^bits, unit variance */
    uint32_t *words;         /* (rows, lanes * bits) */
    float *norm;             /* (rows) */
    int32_t part, parts;
} vq_rotated;

/* Walsh-Hadamard transform of a power of two, orthonormal, in place. */
INLINE void hadamard(float *restrict y, int n) {
    for (int half = 1; half < n; half *= 2)
        for (int i = 0; i < n; i += 2 * half)
            for (int j = i; j < i + half; j++) {
                float a = y[j], b = y[j + half];
                y[j] = a + b;
                y[j + half] = a - b;
            }
}

INLINE void code_row(const vq_rotated *c, const float *restrict x, uint32_t *restrict words,
                     float *norm) {
    float y[MAX_DIM];
    int32_t code[MAX_DIM];
    int dim = c->dim, count = (1 << c->bits) - 1;
    float peak = 1e-30f, square = 0.0f, shrink = 1.0f / sqrtf((float)dim);
    for (int i = 0; i < dim; i++) peak = fabsf(x[i]) > peak ? fabsf(x[i]) : peak;
    float inverse = 1.0f / peak; /* squares of large rows stay finite */
    for (int i = 0; i < dim; i++) {
        y[i] = x[i] * inverse;
        square += y[i] * y[i];
    }
    float length = sqrtf(square);
    float unit = length > 1e-30f ? 1.0f / length : 0.0f;
    for (int i = 0; i < dim; i++) y[i] *= unit * c->signs[i];
    hadamard(y, dim);
    for (int i = 0; i < dim; i++) y[i] *= shrink * c->signs[dim + i];
    hadamard(y, dim); /* the second 1/sqrt(dim) and the sqrt(dim) of unit variance cancel */
    for (int i = 0; i < dim; i++) code[i] = 0;
    for (int k = 0; k < count; k++) {
        float t = c->thresholds[k];
        for (int i = 0; i < dim; i++) code[i] += y[i] > t;
    }
    float inner = 0.0f, energy = 0.0f;
    for (int i = 0; i < dim; i++) {
        float level = c->levels[code[i]];
        inner += y[i] * level;
        energy += level * level;
    }
    float floor = 1e-6f * (float)dim;
    float factor = c->unbiased ? (float)dim / (inner > floor ? inner : floor)
                               : inner / (energy > 1e-30f ? energy : 1e-30f);
    *norm = peak > 1e-30f ? peak * length * factor : 0.0f;
    int left = c->bits, at = 0;
    memset(words, 0, sizeof(uint32_t) * c->lanes * c->bits);
    while (left) {
        int width = left == 1 ? 1 : left >= 5 ? 4 : left == c->bits && left >= 3 ? 2 : 1;
        left -= width;
        uint32_t mask = (1u << width) - 1u;
        for (int i = 0; i < dim; i++)
            words[at + i * width / 32] |= (((uint32_t)code[i] >> left) & mask) << (i * width % 32);
        at += c->lanes * width;
    }
}

CLONES static void rotated_rows(const vq_rotated *c, int64_t from, int64_t to) {
    for (int64_t r = from; r < to; r++)
        code_row(c, c->x + r * c->dim, c->words + r * c->lanes * c->bits, c->norm + r);
}

static void *rotated_part(void *argument) {
    const vq_rotated *c = (const vq_rotated *)argument;
    rotated_rows(c, c->rows * c->part / c->parts, c->rows * (c->part + 1) / c->parts);
    return NULL;
}

/* ---- entry points --------------------------------------------------------------------- */

#define RUN_PARTS(TYPE, BODY, CALL, THREADS)                                         \
    TYPE parts[2] = {*(CALL), *(CALL)};                                              \
    pthread_t other;                                                                 \
    int two = (THREADS) > 1;                                                         \
    for (int i = 0; i < 2; i++) parts[i].part = i, parts[i].parts = two ? 2 : 1;     \
    int started = two && pthread_create(&other, NULL, BODY, &parts[1]) == 0;         \
    BODY(&parts[0]);                                                                 \
    if (started) pthread_join(other, NULL);                                          \
    else if (two) BODY(&parts[1]);

/* 0 when done, 1 for parameters it does not take. */
int vq_encode_affine(const vq_affine *call, int threads) {
    if (call->bits < 1 || call->bits > 8 || call->bits == 7 || call->group > 128 || call->n % call->group ||
        call->group % 32)
        return 1;
    RUN_PARTS(vq_affine, affine_part, call, threads)
    return 0;
}

int vq_encode_rotated(const vq_rotated *call, int threads) {
    if (call->bits < 1 || call->bits > 6 || call->dim > MAX_DIM || call->dim & (call->dim - 1))
        return 1;
    RUN_PARTS(vq_rotated, rotated_part, call, threads)
    return 0;
}

int vq_encode_abi(void) { return (int)(sizeof(vq_affine) * 1000 + sizeof(vq_rotated)); }
