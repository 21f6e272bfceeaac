/* Decode attention straight from packed keys and values, for the CPU backend.
 *
 * One call serves one layer and one step: every (sequence, KV head) pair unpacks blocks of tokens
 * into L1 and uses them for all query rows of the head's group, in fp32. Scores of one head are
 * kept whole (rows x tokens), because keys and values may be cut into runs at different tokens.
 *
 * Codes lie in MLX's order, one little-endian bit stream a row. Codes of 1 and 2 bits are unpacked
 * word by word: 16 or 32 shifts of one word fill a vector. Wider ones are unpacked plane by plane:
 * plane i holds the i-th code of every word, one shift and one mask over neighbouring words.
 * Queries are permuted into that order once and sums of values back once; no code is shuffled.
 *
 * Plain C ABI, no allocation kept between calls, no global state. Built for AVX-512, AVX2 and the
 * baseline by function multiversioning where the compiler offers it; NEON needs no flag.
 */

#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(VQ_NO_CLONES)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif
#define INLINE static inline __attribute__((always_inline))

enum { PLAIN = 0, AFFINE_TOKEN = 1, AFFINE_CHANNEL = 2, CODEBOOK = 3 };
enum { F32 = 0, F16 = 1, BF16 = 2 };
enum { BLOCK = 128, MAX_DIM = 512, MAX_ROWS = 64, POLYNOMIAL_BITS = 4 };

/* One run of tokens. Strides are in elements of the array they belong to. */
typedef struct {
    int32_t kind, bits, group, type; /* type: of rows, scales and norms */
    int32_t start, stop;             /* tokens of the buffer that count */
    int32_t width;                   /* channels stored, padding included */
    int32_t capacity;                /* AFFINE_CHANNEL: tokens that the buffer has room for */
    int32_t dim;                     /* channels of this run's queries or sums */
    int32_t add;                     /* the same tokens as the run before: a part that adds up */
    const void *data;                /* rows, or packed words */
    const void *scale, *bias;        /* scales or norms, biases */
    const float *levels;             /* CODEBOOK: 2^bits levels, then POLYNOMIAL_BITS' coefficients */
    int64_t data_batch, data_head, data_row;
    int64_t scale_batch, scale_head, scale_row;
    const float *q; /* keys: (batch, heads, rows, dim) in this run's basis, scale applied */
    float *out;     /* values: (batch, heads, rows, dim) in this run's basis, added to */
} vq_run;

typedef struct {
    const vq_run *keys, *values;
    int32_t n_keys, n_values;
    int32_t batch, heads, rows; /* rows: query rows of one KV head, repeat * length */
    int32_t length;             /* queries of the step; causal among the newest tokens */
    int32_t tokens;             /* tokens in all runs */
    int32_t causal;
    const float *sinks;         /* (heads, rows) or NULL */
    const float *mask;          /* (batch or 1, length, tokens), added to scores, or NULL */
    int64_t mask_batch;         /* elements between sequences, 0 for one mask */
    int32_t part, parts;        /* this thread's share of the heads */
    int32_t failed;
} vq_call;

INLINE float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, e = (h >> 10) & 31u, m = h & 1023u, bits;
    if (e == 0) {
        float f = (float)m * 5.9604644775390625e-08f; /* 2^-24 */
        return sign ? -f : f;
    }
    bits = sign | ((e == 31 ? 255u : e + 112u) << 23) | (m << 13);
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

INLINE float load_one(const void *p, int type, int64_t i) {
    if (type == F32) return ((const float *)p)[i];
    if (type == F16) return half_to_float(((const uint16_t *)p)[i]);
    uint32_t bits = (uint32_t)((const uint16_t *)p)[i] << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

INLINE int is_natural(int bits) { return bits <= 2; }

/* Channel of place p in unpacking order, for rows of `words` words of `bits`-bit codes. */
INLINE int channel_of(int p, int words, int bits) {
    if (is_natural(bits)) return p;
    if (32 % bits == 0) {
        int plane = p / words, word = p % words;
        return word * (32 / bits) + plane;
    }
    int lanes = words / bits, j = p / lanes, g = p % lanes; /* 32 codes in `bits` words */
    return g * 32 + j;
}

/* Codes of one row, in unpacking order, as floats. `bits` is a constant after inlining. */
INLINE void unpack_row(const uint32_t *restrict w, int words, int bits, float *restrict out) {
    const uint32_t mask = (1u << bits) - 1u;
    if (is_natural(bits)) {
        for (int k = 0; k < words; k++)
            for (int i = 0; i < 32 / bits; i++)
                out[k * (32 / bits) + i] = (float)(int32_t)((w[k] >> (i * bits)) & mask);
    } else if (32 % bits == 0) {
        for (int i = 0; i < 32 / bits; i++)
            for (int k = 0; k < words; k++)
                out[i * words + k] = (float)(int32_t)((w[k] >> (i * bits)) & mask);
    } else {
        int lanes = words / bits;
        for (int j = 0; j < 32; j++) {
            int at = j * bits / 32, shift = j * bits % 32;
            for (int g = 0; g < lanes; g++) {
                uint32_t v = w[g * bits + at] >> shift;
                if (shift + bits > 32) v |= w[g * bits + at + 1] << (32 - shift);
                out[j * lanes + g] = (float)(int32_t)(v & mask);
            }
        }
    }
}

#define FOR_BITS(bits, CALL) \
    switch (bits) {          \
    case 1: CALL(1); break;  \
    case 2: CALL(2); break;  \
    case 3: CALL(3); break;  \
    case 4: CALL(4); break;  \
    case 5: CALL(5); break;  \
    case 6: CALL(6); break;  \
    default: CALL(8); break; \
    }

/* Apply scales and biases to `n` unpacked codes of groups of neighbours in memory order. */
INLINE void scale_row(const vq_run *r, int64_t scale, int n, int words, int bits,
                      float *restrict out) {
    if (is_natural(bits)) {
        for (int g = 0; g < n / 32; g++) {
            int64_t at = scale + g * 32 / r->group;
            float s = load_one(r->scale, r->type, at), b = load_one(r->bias, r->type, at);
            for (int j = 0; j < 32; j++) out[g * 32 + j] = out[g * 32 + j] * s + b;
        }
        return;
    }
    /* Every place of one plane belongs to another word, all planes of a word to one group. */
    float s[MAX_DIM], b[MAX_DIM];
    int span = 32 % bits == 0 ? words : words / bits, per = n / span;
    const int run = 32 % bits == 0 ? bits : 1; /* neighbouring places of one plane in 32 codes */
    for (int c = 0; c < n / 32; c++) {
        int64_t at = scale + c * 32 / r->group;
        float one = load_one(r->scale, r->type, at), low = load_one(r->bias, r->type, at);
        for (int j = 0; j < run; j++) s[c * run + j] = one, b[c * run + j] = low;
    }
    for (int i = 0; i < per; i++)
        for (int k = 0; k < span; k++) out[i * span + k] = out[i * span + k] * s[k] + b[k];
}

INLINE void dequantize_row(const vq_run *r, int64_t data, int64_t scale, int bits,
                           float *restrict out) {
    const uint32_t *w = (const uint32_t *)r->data + data;
    int words = r->width * bits / 32;
    unpack_row(w, words, bits, out);
    scale_row(r, scale, r->width, words, bits, out);
}

/* Codes lie in planes, the widest first: 3 bits are 2 + 1, 4 are 2 + 1 + 1, 6 are 4 + 1 + 1. */
INLINE const uint32_t *add_plane(const uint32_t *restrict w, int lanes, int width, int shift,
                                 int32_t *restrict code) {
    const uint32_t mask = (1u << width) - 1u;
    for (int k = 0; k < lanes * width; k++)
        for (int i = 0; i < 32 / width; i++)
            code[k * (32 / width) + i] += (int32_t)(((w[k] >> (i * width)) & mask) << shift);
    return w + lanes * width;
}

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define HAS_PERMUTE 1
typedef float float16 __attribute__((vector_size(64)));
typedef int32_t int16v __attribute__((vector_size(64)));

/* AVX-512 looks 16 floats up in one register: one instruction for 16 coordinates. */
__attribute__((target("avx512f"))) static void permute_levels(const int32_t *code, int n,
                                                              const float *levels, int mask,
                                                              float norm, float *out) {
    float16 table;
    for (int i = 0; i < 16; i++) table[i] = levels[i & mask] * norm;
    for (int p = 0; p < n; p += 16) {
        int16v index;
        memcpy(&index, code + p, sizeof(index));
        float16 values = __builtin_shuffle(table, index);
        memcpy(out + p, &values, sizeof(values));
    }
}
#endif

/* Levels of one token times its norm, in natural order. */
INLINE void codebook_row(const vq_run *r, int64_t data, float norm, int bits,
                         float *restrict out) {
    const uint32_t *w = (const uint32_t *)r->data + data;
    int lanes = r->width / 32;
    const float *levels = r->levels;
    if (bits == 1) {
        float c = levels[1] * norm;
        for (int k = 0; k < lanes; k++)
            for (int i = 0; i < 32; i++)
                out[k * 32 + i] = (float)(int32_t)((w[k] >> i) & 1u) * (2.0f * c) - c;
        return;
    }
    if (bits == 2) { /* four symmetric levels are A*s + B*u with s, u = +-1 */
        const uint32_t *fine = w + lanes;
        float a = (levels[3] + levels[2]) * norm, b = (levels[3] - levels[2]) * norm;
        float base = -0.5f * (a + b);
        for (int k = 0; k < lanes; k++)
            for (int i = 0; i < 32; i++)
                out[k * 32 + i] = base + a * (float)(int32_t)((w[k] >> i) & 1u) +
                                  b * (float)(int32_t)((fine[k] >> i) & 1u);
        return;
    }
    int32_t code[MAX_DIM];
    if (bits <= POLYNOMIAL_BITS) { /* planes of 2 + 1 or 2 + 1 + 1 bits, joined in one pass */
        const uint32_t *middle = w + 2 * lanes, *fine = middle + (bits == 4 ? lanes : 0);
        for (int k = 0; k < 2 * lanes; k++)
            for (int i = 0; i < 16; i++) {
                int at = k % 2 * 16 + i;
                uint32_t v = (w[k] >> (2 * i)) & 3u;
                if (bits == 4) v = (v << 1) | ((middle[k / 2] >> at) & 1u);
                code[k * 16 + i] = (int32_t)((v << 1) | ((fine[k / 2] >> at) & 1u));
            }
    } else {
        int left = bits - 4;
        memset(code, 0, sizeof(int32_t) * r->width);
        w = add_plane(w, lanes, 4, left, code);
        if (left == 2) w = add_plane(w, lanes, 1, 1, code);
        add_plane(w, lanes, 1, 0, code);
    }
    if (bits > POLYNOMIAL_BITS) {
        for (int p = 0; p < r->width; p++) out[p] = levels[code[p]] * norm;
        return;
    }
#ifdef HAS_PERMUTE
    if (__builtin_cpu_supports("avx512f")) {
        permute_levels(code, r->width, levels, (1 << bits) - 1, norm, out);
        return;
    }
#endif
    /* 8 or 16 symmetric levels are an odd polynomial of the centred code, exactly at the codes:
     * a few multiplications instead of a gather. */
    const int terms = 1 << (bits - 1);
    const float scale = 2.0f / (float)((1 << bits) - 1);
    const float *c = levels + (1 << bits);
    for (int p = 0; p < r->width; p++) {
        float x = (float)code[p] * scale - 1.0f, square = x * x, sum = c[terms - 1];
        for (int k = terms - 2; k >= 0; k--) sum = sum * square + c[k];
        out[p] = sum * x * norm;
    }
}

INLINE int place_channel(const vq_run *r, int p) {
    return r->kind == AFFINE_TOKEN ? channel_of(p, r->width * r->bits / 32, r->bits) : p;
}

INLINE void token_row(const vq_run *r, int b, int h, int t, float *restrict out) {
    int64_t data = b * r->data_batch + h * r->data_head + t * r->data_row;
    int64_t scale = b * r->scale_batch + h * r->scale_head + t * r->scale_row;
    if (r->kind == PLAIN) {
        if (r->type == F32) {
            memcpy(out, (const float *)r->data + data, sizeof(float) * r->width);
        } else {
            for (int d = 0; d < r->width; d++) out[d] = load_one(r->data, r->type, data + d);
        }
    } else if (r->kind == CODEBOOK) {
        float norm = load_one(r->scale, r->type, scale);
#define CALL(n) codebook_row(r, data, norm, n, out)
        FOR_BITS(r->bits, CALL)
#undef CALL
    } else {
#define CALL(n) dequantize_row(r, data, scale, n, out)
        FOR_BITS(r->bits, CALL)
#undef CALL
    }
}

/* ---- keys: scores of one head --------------------------------------------------------- */

/* Token-major formats: unpack a token, then one dot product for each query row. */
INLINE void scores_by_token(const vq_run *r, int b, int h, const float *restrict q, int rows,
                            float *restrict scores, int64_t stride) {
    const int dim = r->dim;
    float row[MAX_DIM], query[MAX_ROWS][MAX_DIM];
    for (int i = 0; i < rows; i++)
        for (int p = 0; p < r->width; p++) {
            int d = place_channel(r, p);
            query[i][p] = d < dim ? q[i * dim + d] : 0.0f;
        }
    for (int t = r->start; t < r->stop; t++) {
        token_row(r, b, h, t, row);
        for (int i = 0; i < rows; i++) {
            float sum = 0.0f, *score = scores + i * stride + (t - r->start);
            for (int p = 0; p < r->width; p++) sum += query[i][p] * row[p];
            *score = r->add ? *score + sum : sum;
        }
    }
}

/* Channel-major format: a channel's codes of BLOCK tokens at a time, all query rows at once. */
INLINE void channel_block(const vq_run *r, int64_t data, int64_t scale, const float *restrict q,
                          int rows, int dim, int size, int bits, float (*restrict acc)[BLOCK]) {
    int words = size * bits / 32;
    float x[BLOCK];
    for (int i = 0; i < rows; i++) memset(acc[i], 0, sizeof(float) * BLOCK);
    for (int d = 0; d < dim; d++) {
        const uint32_t *w = (const uint32_t *)r->data + data + d * r->data_row;
        unpack_row(w, words, bits, x);
        scale_row(r, scale + d * r->scale_row, size, words, bits, x);
        for (int i = 0; i < rows; i++) {
            float qd = q[i * dim + d];
            for (int p = 0; p < size; p++) acc[i][p] += qd * x[p];
        }
    }
}

/* Tokens from `t` on that may be unpacked together: a block, or what is left of the buffer. */
INLINE int block_size(const vq_run *r, int t) {
    return r->capacity - t < BLOCK ? r->capacity - t : BLOCK;
}

INLINE void scores_by_channel(const vq_run *r, int b, int h, const float *restrict q, int rows,
                              float *restrict scores, int64_t stride) {
    const int dim = r->dim;
    float acc[MAX_ROWS][BLOCK];
    int64_t data = b * r->data_batch + h * r->data_head;
    int64_t scale = b * r->scale_batch + h * r->scale_head;
    for (int t = r->start; t < r->stop; t += BLOCK) {
        int64_t at = data + (int64_t)t * r->bits / 32, sc = scale + t / r->group;
        int size = block_size(r, t), words = size * r->bits / 32;
#define CALL(n) channel_block(r, at, sc, q, rows, dim, size, n, acc)
        FOR_BITS(r->bits, CALL)
#undef CALL
        int n = r->stop - t < size ? r->stop - t : size;
        for (int p = 0; p < size; p++) {
            int token = channel_of(p, words, r->bits);
            if (token < n)
                for (int i = 0; i < rows; i++) {
                    float *score = scores + i * stride + (t - r->start) + token;
                    *score = r->add ? *score + acc[i][p] : acc[i][p];
                }
        }
    }
}

/* ---- values: weighted sums of one head ------------------------------------------------ */

INLINE void mix_by_token(const vq_run *r, int b, int h, const float *restrict w, int64_t stride,
                         int rows, float *restrict out) {
    const int dim = r->dim;
    float row[4][MAX_DIM], sum[MAX_ROWS][MAX_DIM];
    for (int i = 0; i < rows; i++) memset(sum[i], 0, sizeof(float) * r->width);
    int t = r->start;
    for (; t + 4 <= r->stop; t += 4) { /* four tokens at a time: the sums are loaded once for all */
        for (int k = 0; k < 4; k++) token_row(r, b, h, t + k, row[k]);
        for (int i = 0; i < rows; i++) {
            const float *restrict v = w + i * stride + (t - r->start);
            for (int p = 0; p < r->width; p++)
                sum[i][p] += v[0] * row[0][p] + v[1] * row[1][p] + v[2] * row[2][p] + v[3] * row[3][p];
        }
    }
    for (; t < r->stop; t++) {
        token_row(r, b, h, t, row[0]);
        for (int i = 0; i < rows; i++) {
            float weight = w[i * stride + (t - r->start)];
            for (int p = 0; p < r->width; p++) sum[i][p] += weight * row[0][p];
        }
    }
    for (int i = 0; i < rows; i++)
        for (int p = 0; p < r->width; p++) {
            int d = place_channel(r, p);
            if (d < dim) out[i * dim + d] += sum[i][p];
        }
}

/* exp for x <= 0 in fp32, 2 ulp; a loop over it becomes vector code, calls of expf do not. */
INLINE float exp_down(float x) {
    x = x < -87.0f ? -87.0f : x;
    int32_t whole = (int32_t)(x * 1.44269504088896341f - 0.5f); /* x <= 0: rounds to nearest */
    float n = (float)whole;
    float f = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * f * f + f + 1.0f;
    uint32_t bits = (uint32_t)(whole + 127) << 23;
    float scale;
    memcpy(&scale, &bits, 4);
    return p * scale;
}

/* ---- one head ------------------------------------------------------------------------- */

INLINE void soften(float *restrict scores, int64_t n, const float *sink) {
    float peak = sink ? *sink : -INFINITY;
    for (int64_t t = 0; t < n; t++) peak = scores[t] > peak ? scores[t] : peak;
    if (peak == -INFINITY) peak = 0.0f;
    float norm = sink ? exp_down(*sink - peak) : 0.0f;
    for (int64_t t = 0; t < n; t++) {
        float down = scores[t] - peak;
        float e = down > -87.0f ? exp_down(down) : 0.0f;
        scores[t] = e;
        norm += e;
    }
    float inverse = norm > 0.0f ? 1.0f / norm : 0.0f;
    for (int64_t t = 0; t < n; t++) scores[t] *= inverse;
}

CLONES static void attend_head(const vq_call *c, int b, int h, float *restrict scores) {
    int64_t stride = c->tokens, head = (int64_t)b * c->heads + h;
    int64_t at = 0, next = 0;
    for (int k = 0; k < c->n_keys; k++) {
        const vq_run *r = &c->keys[k];
        const float *q = r->q + head * c->rows * r->dim;
        if (!r->add) at = next;
        if (r->kind == AFFINE_CHANNEL)
            scores_by_channel(r, b, h, q, c->rows, scores + at, stride);
        else
            scores_by_token(r, b, h, q, c->rows, scores + at, stride);
        next = at + r->stop - r->start;
    }
    for (int i = 0; i < c->rows; i++) {
        float *row = scores + i * stride;
        if (c->causal) {
            int64_t seen = c->tokens - c->length + i % c->length + 1;
            for (int64_t t = seen; t < c->tokens; t++) row[t] = -INFINITY;
        }
        if (c->mask) {
            const float *m = c->mask + b * c->mask_batch + (int64_t)(i % c->length) * c->tokens;
            for (int64_t t = 0; t < c->tokens; t++) row[t] += m[t];
        }
        soften(row, c->tokens, c->sinks ? c->sinks + h * c->rows + i : NULL);
    }
    at = next = 0;
    for (int v = 0; v < c->n_values; v++) {
        const vq_run *r = &c->values[v];
        if (!r->add) at = next;
        mix_by_token(r, b, h, scores + at, stride, c->rows, r->out + head * c->rows * r->dim);
        next = at + r->stop - r->start;
    }
}

static int is_whole(const vq_run *r) {
    return r->start % BLOCK == 0 && r->capacity % 32 == 0 && r->stop <= r->capacity;
}

static void *attend_part(void *argument) {
    vq_call *c = (vq_call *)argument;
    float *scores = (float *)malloc(sizeof(float) * (size_t)c->rows * (size_t)c->tokens);
    if (!scores) {
        c->failed = 1;
        return NULL;
    }
    for (int i = c->part; i < c->batch * c->heads; i += c->parts)
        attend_head(c, i / c->heads, i % c->heads, scores);
    free(scores);
    return NULL;
}

/* 0 when done; 1 for a shape this file does not take; 2 when memory ran out. */
int vq_attend(const vq_call *call, int threads) {
    if (call->rows < 1 || call->rows > MAX_ROWS || call->tokens < 1 || call->length < 1) return 1;
    for (int k = 0; k < call->n_keys + call->n_values; k++) {
        const vq_run *r = k < call->n_keys ? &call->keys[k] : &call->values[k - call->n_keys];
        if (r->width < 1 || r->width > MAX_DIM || r->dim > MAX_DIM) return 1;
        if (r->add && (k == 0 || k == call->n_keys)) return 1;
        if (r->kind == AFFINE_CHANNEL && (k >= call->n_keys || !is_whole(r))) return 1;
        if (r->kind == CODEBOOK && (r->bits < 1 || r->bits > 6)) return 1;
    }
    int heads = call->batch * call->heads;
    if (threads > heads) threads = heads;
    if (threads < 2) {
        vq_call one = *call;
        one.part = 0, one.parts = 1, one.failed = 0;
        attend_part(&one);
        return one.failed ? 2 : 0;
    }
    if (threads > 8) threads = 8;
    vq_call parts[8];
    pthread_t ids[8];
    int started[8] = {0}, failed = 0;
    for (int i = 0; i < threads; i++) {
        parts[i] = *call;
        parts[i].part = i, parts[i].parts = threads, parts[i].failed = 0;
        if (i > 0) started[i] = pthread_create(&ids[i], NULL, attend_part, &parts[i]) == 0;
    }
    attend_part(&parts[0]);
    for (int i = 1; i < threads; i++) {
        if (started[i])
            pthread_join(ids[i], NULL);
        else
            attend_part(&parts[i]);
        failed |= parts[i].failed;
    }
    return failed || parts[0].failed ? 2 : 0;
}

/* ---- whole rows, for prompts that read packed history --------------------------------- */

typedef struct {
    const vq_run *run;
    int32_t batch, heads, dim;
    float *out; /* (batch, heads, stop - start, dim), in the run's basis */
    int32_t part, parts;
} vq_rows;

CLONES static void decode_head(const vq_rows *c, int b, int h) {
    const vq_run *r = c->run;
    int64_t tokens = r->stop - r->start;
    float *out = c->out + ((int64_t)b * c->heads + h) * tokens * c->dim;
    if (r->kind == AFFINE_CHANNEL) {
        int64_t data = b * r->data_batch + h * r->data_head;
        int64_t scale = b * r->scale_batch + h * r->scale_head;
        float x[BLOCK];
        for (int t = r->start; t < r->stop; t += BLOCK) {
            int size = block_size(r, t), words = size * r->bits / 32;
            int left = r->stop - t < size ? r->stop - t : size;
            for (int d = 0; d < c->dim; d++) {
                const uint32_t *w = (const uint32_t *)r->data + data + d * r->data_row +
                                    (int64_t)t * r->bits / 32;
                int64_t at = scale + d * r->scale_row + t / r->group;
#define CALL(n) unpack_row(w, words, n, x), scale_row(r, at, size, words, n, x)
                FOR_BITS(r->bits, CALL)
#undef CALL
                for (int p = 0; p < size; p++) {
                    int token = channel_of(p, words, r->bits);
                    if (token < left) out[(int64_t)(t - r->start + token) * c->dim + d] = x[p];
                }
            }
        }
        return;
    }
    float row[MAX_DIM];
    int place[MAX_DIM];
    for (int p = 0; p < r->width; p++) place[p] = place_channel(r, p);
    for (int t = r->start; t < r->stop; t++, out += c->dim) {
        token_row(r, b, h, t, row);
        for (int p = 0; p < r->width; p++)
            if (place[p] < c->dim) out[place[p]] = row[p];
    }
}

static void *decode_part(void *argument) {
    const vq_rows *c = (const vq_rows *)argument;
    for (int i = c->part; i < c->batch * c->heads; i += c->parts)
        decode_head(c, i / c->heads, i % c->heads);
    return NULL;
}

/* 0 when done, 1 for a run this file does not take. */
int vq_decode(const vq_rows *call, int threads) {
    const vq_run *r = call->run;
    if (r->width < 1 || r->width > MAX_DIM || call->dim > r->width) return 1;
    if (r->kind == AFFINE_CHANNEL && !is_whole(r)) return 1;
    if (r->kind == CODEBOOK && (r->bits < 1 || r->bits > 6)) return 1;
    vq_rows two[2] = {*call, *call};
    for (int i = 0; i < 2; i++) two[i].part = i, two[i].parts = threads > 1 ? 2 : 1;
    pthread_t other;
    int started = threads > 1 && pthread_create(&other, NULL, decode_part, &two[1]) == 0;
    decode_part(&two[0]);
    if (started)
        pthread_join(other, NULL);
    else if (threads > 1)
        decode_part(&two[1]);
    return 0;
}

/* Sizes of the structures, so that a caller built against another layout notices. */
int vq_abi(void) { return (int)(sizeof(vq_run) * 1000 + sizeof(vq_call)); }
