/* One token of a packed format as floats.
 *
 * Codes of 1 and 2 bits are unpacked word by word: 16 or 32 shifts of one word fill a vector. Wider
 * ones are unpacked plane by plane: plane i holds the i-th code of every word, one shift and one
 * mask over neighbouring words. Queries are permuted into that order once and sums of values back
 * once; no code is shuffled.
 */

#ifndef PACKED_ROWS_H
#define PACKED_ROWS_H

#include <math.h>

#include "packed_formats.h"

/* Floats of one register: what is wider lies in memory and costs a load and a store each time. */
#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif

typedef float lanes_f __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t lanes_i __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t lanes_u __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#define LOAD_F(p) (*(const lanes_f *)(p))
#define LOAD_U(p) (*(const lanes_u *)(p))
#define STORE_F(p, v) (*(lanes_f *)(p) = (v))

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
    if (type == I8) return ((const int8_t *)p)[i];
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

/* A channel's codes of one block of tokens, scaled, in unpacking order. */
ONCE void channel_row(const vq_run *r, int64_t data, int64_t scale, int size, float *restrict out) {
    const uint32_t *w = (const uint32_t *)r->data + data;
    int words = size * r->bits / 32;
#define CALL(n) unpack_row(w, words, n, out), scale_row(r, scale, size, words, n, out)
    FOR_BITS(r->bits, CALL)
#undef CALL
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

#if defined(__AVX2__) && !defined(__clang__)
#define HAS_PERMUTE 1
/* Registers look their own number of floats up in one instruction: all 16 levels with AVX-512; with
 * AVX2 the 8 of a 3-bit table, or the upper half of a symmetric 4-bit one and the sign. */
INLINE void permute_levels(const int32_t *code, int n, const float *levels, int bits, float *out) {
    float table[LANES];
    const int all = 1 << bits, half = LANES < all ? all - LANES : 0;
    for (int i = 0; i < LANES; i++) table[i] = levels[half + (i & (all - 1 - half))];
    const lanes_f entries = LOAD_F(table);
    for (int p = 0; p < n; p += LANES) {
        lanes_i c = *(const lanes_i *)(code + p);
        if (half) {
            lanes_i below = (c >> 3) - 1; /* all ones for the lower half */
            lanes_f x = __builtin_shuffle(entries, (c ^ below) & 7);
            STORE_F(out + p, (lanes_f)((lanes_i)x ^ (below & INT32_MIN)));
        } else {
            STORE_F(out + p, __builtin_shuffle(entries, c));
        }
    }
}
#endif

/* Levels of one token without its norm, in natural order. */
INLINE void codebook_row(const vq_run *r, int64_t data, int bits, float *restrict out) {
    const uint32_t *w = (const uint32_t *)r->data + data;
    int lanes = r->width / 32;
    const float *levels = r->levels;
    if (bits == 1) {
        float c = levels[1];
        for (int k = 0; k < lanes; k++)
            for (int i = 0; i < 32; i++)
                out[k * 32 + i] = (float)(int32_t)((w[k] >> i) & 1u) * (2.0f * c) - c;
        return;
    }
    if (bits == 2) { /* four symmetric levels are A*s + B*u with s, u = +-1 */
        const uint32_t *fine = w + lanes;
        float a = levels[3] + levels[2], b = levels[3] - levels[2];
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
        for (int p = 0; p < r->width; p++) out[p] = levels[code[p]];
        return;
    }
#ifdef HAS_PERMUTE
    permute_levels(code, r->width, levels, bits, out);
    return;
#endif
    /* 8 or 16 symmetric levels are an odd polynomial of the centred code, exactly at the codes:
     * a few multiplications instead of a gather. */
    const int terms = 1 << (bits - 1);
    const float scale = 2.0f / (float)((1 << bits) - 1);
    const float *c = levels + (1 << bits);
    for (int p = 0; p < r->width; p++) {
        float x = (float)code[p] * scale - 1.0f, square = x * x, sum = c[terms - 1];
        for (int k = terms - 2; k >= 0; k--) sum = sum * square + c[k];
        out[p] = sum * x;
    }
}

INLINE int place_channel(const vq_run *r, int p) {
    return r->kind == AFFINE_TOKEN ? channel_of(p, r->width * r->bits / 32, r->bits) : p;
}

/* Entries of vector codebooks, one for each `group` channels; codes are one bit stream a row. */
INLINE void vector_row(const vq_run *r, int b, int h, int t, float *restrict out) {
    const uint32_t *w = (const uint32_t *)r->data + b * r->data_batch + h * r->data_head +
                        t * r->data_row;
    const uint32_t mask = r->bits < 32 ? (1u << r->bits) - 1u : ~0u;
    const int sub = r->group, parts = r->width / sub;
    int64_t book = b * r->book_batch + h * r->book_head;
    for (int s = 0; s < parts; s++, book += r->book_part) {
        int place = s * r->bits, shift = place % 32;
        uint32_t code = w[place / 32] >> shift;
        if (shift + r->bits > 32) code |= w[place / 32 + 1] << (32 - shift);
        int64_t entry = book + (int64_t)(code & mask) * sub;
        if (r->book_type == F32 && sub == 4) {
            memcpy(out + s * 4, (const float *)r->book + entry, 16);
        } else if (r->book_type == F32 && sub == 8) {
            memcpy(out + s * 8, (const float *)r->book + entry, 32);
        } else {
            for (int j = 0; j < sub; j++) out[s * sub + j] = load_one(r->book, r->book_type, entry + j);
        }
    }
    if (r->signs) {
        const uint32_t *sign = r->signs + b * r->sign_batch + h * r->sign_head + t * r->sign_row;
        for (int p = 0; p < r->width; p++) {
            uint32_t bits, flip = ~(sign[p / 32] >> (p % 32)) << 31;
            memcpy(&bits, out + p, 4);
            bits ^= flip;
            memcpy(out + p, &bits, 4);
        }
    }
}

/* Unit vectors from the angles of a binary tree: the first half of a level is paired with the
 * second, an odd one out is carried up. Signs of the coordinates lie first, then all codes, leaves
 * first, one bit stream. */
INLINE void polar_row(const vq_run *r, int64_t data, int bits, float *restrict out) {
    const uint32_t *sign = (const uint32_t *)r->data + data, *w = sign + (r->width + 31) / 32;
    const uint32_t mask = (1u << bits) - 1u;
    const int nodes = r->width - 1, lanes = (nodes + 31) / 32 * 32;
    float sine[MAX_DIM + 32], cosine[MAX_DIM + 32], other[MAX_DIM];
    if (r->levels && 32 % bits == 0) {
        /* With p = sin(angle - pi/4) / sqrt(2), a polynomial of the code, sine and cosine are
         * sqrt(1/2 - p^2) + p and - p. */
        float x[MAX_DIM + 32];
        const float scale = 2.0f / (float)mask;
        for (int k = 0; k < lanes / 32 * bits; k++)
            for (int i = 0; i < 32 / bits; i++)
                x[k * (32 / bits) + i] =
                    (float)(int32_t)((w[k] >> (i * bits)) & mask) * scale - 1.0f;
        for (int i = 0; i < nodes; i++) {
            const float *c = r->levels + i;
            float sum = c[(int)mask * nodes];
            for (int power = (int)mask - 1; power >= 0; power--) sum = sum * x[i] + c[power * nodes];
            sine[i] = sum, cosine[i] = 0.5f - sum * sum;
        }
        for (int i = 0; i < nodes; i++) {
            float e = sqrtf(cosine[i] > 0.0f ? cosine[i] : 0.0f), p = sine[i];
            sine[i] = e + p, cosine[i] = e - p;
        }
    } else {
        const float *book = (const float *)r->book;
        for (int i = 0; i < nodes; i++, book += 2 << bits) {
            int place = i * bits, shift = place % 32;
            uint32_t code = w[place / 32] >> shift;
            if (32 % bits && shift + bits > 32) code |= w[place / 32 + 1] << (32 - shift);
            sine[i] = book[2 * (code & mask)], cosine[i] = book[2 * (code & mask) + 1];
        }
    }
    int counts[12], levels = 0, at = nodes;
    for (int count = r->width; count > 1; count = count / 2 + count % 2) counts[levels++] = count;
    float *from = levels % 2 ? other : out, *to = levels % 2 ? out : other;
    from[0] = 1.0f;
    while (levels--) {
        int n = counts[levels] / 2;
        at -= n;
        for (int i = 0; i < n; i++) to[i] = from[i] * cosine[at + i];
        for (int i = 0; i < n; i++) to[n + i] = from[i] * sine[at + i];
        if (counts[levels] % 2) to[2 * n] = from[n];
        float *swap = from;
        from = to, to = swap;
    }
    for (int k = 0; k < (r->width + 31) / 32; k++) { /* a set bit is a negative coordinate */
        int left = r->width - 32 * k < 32 ? r->width - 32 * k : 32;
        for (int i = 0; i < left; i++)
            out[32 * k + i] *= 1.0f - 2.0f * (float)(int32_t)((sign[k] >> i) & 1u);
    }
}

/* SPARSE: the channel of one slot. */
INLINE int slot_channel(const vq_run *r, int64_t at) {
    return r->bits == 8 ? ((const uint8_t *)r->data)[at] : ((const uint16_t *)r->data)[at];
}

/* One token in unpacking order; returns the factor that its products still take. */
ONCE float token_row(const vq_run *r, int b, int h, int t, float *restrict out) {
    int64_t data = b * r->data_batch + h * r->data_head + t * r->data_row;
    int64_t scale = b * r->scale_batch + h * r->scale_head + t * r->scale_row;
    if (r->kind == PLAIN) {
        if (r->type == F32) {
            memcpy(out, (const float *)r->data + data, sizeof(float) * r->width);
        } else {
            for (int d = 0; d < r->width; d++) out[d] = load_one(r->data, r->type, data + d);
        }
    } else if (r->kind == CODEBOOK) {
#define CALL(n) codebook_row(r, data, n, out)
        FOR_BITS(r->bits, CALL)
#undef CALL
        return r->scale ? load_one(r->scale, r->type, scale) : 1.0f;
    } else if (r->kind == POLAR) {
#define CALL(n) polar_row(r, data, n, out)
        FOR_BITS(r->bits, CALL)
#undef CALL
        return load_one(r->scale, r->type, scale);
    } else if (r->kind == VECTOR) {
        vector_row(r, b, h, t, out);
        return r->scale ? load_one(r->scale, r->type, scale) : 1.0f;
    } else {
#define CALL(n) dequantize_row(r, data, scale, n, out)
        FOR_BITS(r->bits, CALL)
#undef CALL
    }
    return 1.0f;
}

#endif
