/* Affine codes read a register of words at a time, one plane after the other.
 *
 * Plane i of a word is its i-th code. All codes of a word belong to one group, so its scale and
 * bias are the same for every plane: scales are multiplied into weights (values) or applied once a
 * word (keys), and biases add up beside the codes. An inner step is then one load, one shift, one
 * mask, one conversion, and one multiply-add for each query row.
 *
 * For widths that divide a word (1, 2, 4, 8 bits); the others are unpacked token by token.
 */

#ifndef PACKED_PLANES_H
#define PACKED_PLANES_H

#include "packed_rows.h"

enum { AT_ONCE = 4, SPAN = 16, REGISTERS = SPAN / LANES, TILE_WORDS = 512, MOST_SUMS = 128 };

#define PLANE(words, shift, mask) \
    __builtin_convertvector((lanes_i)(((words) >> (shift)) & (mask)), lanes_f)

/* Each of `n` values `times` times in a row. */
INLINE void repeat_each(const float *restrict x, int n, int times, float *restrict out) {
#define REPEAT(k)                                                \
    for (int i = 0; i < n; i++)                                  \
        for (int j = 0; j < (k); j++) out[i * (k) + j] = x[i]
    switch (times) {
    case 1: REPEAT(1); break;
    case 2: REPEAT(2); break;
    case 4: REPEAT(4); break;
    case 8: REPEAT(8); break;
    case 16: REPEAT(16); break;
    default: REPEAT(times); break;
    }
#undef REPEAT
}

INLINE void load_many(const void *p, int type, int64_t at, int n, float *restrict out) {
    if (type == F32) {
        memcpy(out, (const float *)p + at, sizeof(float) * n);
    } else if (type == F16) {
        for (int i = 0; i < n; i++) out[i] = half_to_float(((const uint16_t *)p)[at + i]);
    } else {
        for (int i = 0; i < n; i++) out[i] = load_one(p, BF16, at + i);
    }
}

/* Sums of as many vectors as there are lanes: halves are added pairwise, one level a step. */
#if defined(__clang__) || __GNUC__ >= 12
#define PAIR(a, b, low, high) \
    (__builtin_shufflevector(a, b, UNPACK low) + __builtin_shufflevector(a, b, UNPACK high))
#define UNPACK(...) __VA_ARGS__
INLINE void sum_lanes(float (*restrict x)[LANES], float *restrict out) {
    lanes_f v[LANES];
    for (int i = 0; i < LANES; i++) v[i] = LOAD_F(x[i]);
#if defined(__AVX512F__)
    for (int i = 0; i < 8; i++)
        v[i] = PAIR(v[i], v[i + 8], (0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
                    (8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31));
    for (int i = 0; i < 4; i++)
        v[i] = PAIR(v[i], v[i + 4], (0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
                    (4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31));
    for (int i = 0; i < 2; i++)
        v[i] = PAIR(v[i], v[i + 2], (0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
                    (2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31));
    v[0] = PAIR(v[0], v[1], (0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
                (1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31));
#elif defined(__AVX__)
    for (int i = 0; i < 4; i++)
        v[i] = PAIR(v[i], v[i + 4], (0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15));
    for (int i = 0; i < 2; i++)
        v[i] = PAIR(v[i], v[i + 2], (0, 1, 8, 9, 4, 5, 12, 13), (2, 3, 10, 11, 6, 7, 14, 15));
    v[0] = PAIR(v[0], v[1], (0, 8, 2, 10, 4, 12, 6, 14), (1, 9, 3, 11, 5, 13, 7, 15));
#else
    for (int i = 0; i < 2; i++) v[i] = PAIR(v[i], v[i + 2], (0, 1, 4, 5), (2, 3, 6, 7));
    v[0] = PAIR(v[0], v[1], (0, 4, 2, 6), (1, 5, 3, 7));
#endif
    STORE_F(out, v[0]);
}
#else
INLINE void sum_lanes(float (*restrict x)[LANES], float *restrict out) {
    for (int i = 0; i < LANES; i++) {
        out[i] = 0.0f;
        for (int j = 0; j < LANES; j++) out[i] += x[i][j];
    }
}
#endif

INLINE int has_planes(const vq_run *r) {
    return (r->bits == 1 || r->bits == 2 || r->bits == 4 || r->bits == 8);
}

/* ---- keys per channel ----------------------------------------------------------------- */

/* One plane of a span of every channel for `count` query rows. */
INLINE void channel_plane(const uint32_t (*restrict words)[SPAN], const float (*restrict s)[SPAN],
                          const float *restrict q, int dim, int shift, uint32_t mask, int count,
                          float (*restrict acc)[SPAN]) {
    lanes_f sum[AT_ONCE][REGISTERS];
    for (int k = 0; k < count; k++)
        for (int v = 0; v < REGISTERS; v++) sum[k][v] = LOAD_F(acc[k] + v * LANES);
    for (int d = 0; d < dim; d++)
        for (int v = 0; v < REGISTERS; v++) {
            lanes_f x = PLANE(LOAD_U(words[d] + v * LANES), shift, mask) * LOAD_F(s[d] + v * LANES);
            for (int k = 0; k < count; k++) sum[k][v] += x * q[k * dim + d];
        }
    for (int k = 0; k < count; k++)
        for (int v = 0; v < REGISTERS; v++) STORE_F(acc[k] + v * LANES, sum[k][v]);
}

/* A span of every channel: its words, its scales word by word, and q times its biases by group.
 * `times`, words of one group, and `type` are constants after inlining. */
INLINE void open_span(const vq_run *r, int64_t data, int64_t scale, const float *restrict q,
                      int rows, int have, int known, int times, int type,
                      uint32_t (*restrict words)[SPAN], float (*restrict s)[SPAN],
                      float (*restrict base)[SPAN]) {
    const int groups = SPAN / times, dim = r->dim;
    float one[SPAN] = {0}, low[SPAN] = {0};
    for (int d = 0; d < dim; d++, data += r->data_row, scale += r->scale_row) {
        const uint32_t *w = (const uint32_t *)r->data + data;
        if (have == SPAN && known == groups) {
            memcpy(words[d], w, sizeof(words[d]));
            for (int g = 0; g < groups; g++) one[g] = load_one(r->scale, type, scale + g);
            for (int g = 0; g < groups; g++) low[g] = load_one(r->bias, type, scale + g);
        } else { /* the end of the buffer */
            for (int l = 0; l < SPAN; l++) words[d][l] = l < have ? w[l] : 0;
            for (int g = 0; g < known; g++) one[g] = load_one(r->scale, type, scale + g);
            for (int g = 0; g < known; g++) low[g] = load_one(r->bias, type, scale + g);
        }
        for (int g = 0; g < groups; g++)
            for (int j = 0; j < times; j++) s[d][g * times + j] = one[g];
        for (int i = 0; i < rows; i++)
            for (int g = 0; g < groups; g++) base[i][g] += q[i * dim + d] * low[g];
    }
}

/* Scores from channel-major codes: a span of a channel's words is 512 / bits tokens. */
ONCE void scores_by_channel_planes(const vq_run *r, int b, int h, const float *restrict q,
                                     int rows, float *restrict scores, int64_t stride) {
    uint32_t words[MAX_DIM][SPAN];
    float s[MAX_DIM][SPAN], base[MAX_ROWS][SPAN], acc[AT_ONCE][SPAN];
    const int per = 32 / r->bits, dim = r->dim, span = SPAN * per;
    const int groups = r->group >= span ? 1 : span / r->group, times = SPAN / groups;
    const uint32_t mask = (1u << r->bits) - 1u;
    int64_t data = b * r->data_batch + h * r->data_head, last = r->capacity / per;
    int64_t scale = b * r->scale_batch + h * r->scale_head;
    for (int t = r->start / span * span; t < r->stop; t += span) {
        int have = last - t / per < SPAN ? (int)(last - t / per) : SPAN;
        int known = (r->capacity - t + r->group - 1) / r->group;
        known = known < groups ? known : groups;
        memset(base, 0, sizeof(base[0]) * rows);
#define OPEN(times, type)                                                                       \
    open_span(r, data + t / per, scale + t / r->group, q, rows, have, known, times, type, words, \
              s, base)
#define OPEN_TYPE(type)                  \
    switch (times) {                     \
    case 1: OPEN(1, type); break;        \
    case 2: OPEN(2, type); break;        \
    case 4: OPEN(4, type); break;        \
    case 8: OPEN(8, type); break;        \
    default: OPEN(16, type); break;      \
    }
        if (r->type == F32) {
            OPEN_TYPE(F32)
        } else if (r->type == F16) {
            OPEN_TYPE(F16)
        } else {
            OPEN_TYPE(BF16)
        }
#undef OPEN_TYPE
#undef OPEN
        int whole_span = t >= r->start && t + span <= r->stop && !r->add;
        for (int i = 0; i < rows; i += AT_ONCE) {
            int count = rows - i < AT_ONCE ? rows - i : AT_ONCE;
            const float *qi = q + i * dim;
            for (int plane = 0; plane < per; plane++) {
                for (int k = 0; k < count; k++)
                    for (int l = 0; l < SPAN; l++) acc[k][l] = base[i + k][l / times];
                int shift = plane * r->bits;
                switch (count) {
                case 1: channel_plane(words, s, qi, dim, shift, mask, 1, acc); break;
                case 2: channel_plane(words, s, qi, dim, shift, mask, 2, acc); break;
                case 3: channel_plane(words, s, qi, dim, shift, mask, 3, acc); break;
                default: channel_plane(words, s, qi, dim, shift, mask, 4, acc); break;
                }
                for (int k = 0; k < count; k++) {
                    float *score = scores + (i + k) * stride + (t - r->start) + plane;
                    if (whole_span) {
                        for (int l = 0; l < SPAN; l++) score[l * per] = acc[k][l];
                        continue;
                    }
                    for (int l = 0; l < SPAN; l++) {
                        int token = t + l * per + plane;
                        if (token >= r->start && token < r->stop)
                            score[l * per] = r->add ? score[l * per] + acc[k][l] : acc[k][l];
                    }
                }
            }
        }
    }
}

/* ---- rows per token ------------------------------------------------------------------- */

/* How tokens' words fall on sixteen lanes: after `tokens` tokens the pattern starts anew. */
typedef struct {
    int words, per, tokens, vectors, tile; /* tile: tokens taken at a time */
} vq_lanes;

INLINE int lanes_of(const vq_run *r, vq_lanes *out) {
    int words = r->width * r->bits / 32, a = words, b = LANES;
    while (b) {
        int c = a % b;
        a = b, b = c;
    }
    out->words = words, out->per = 32 / r->bits, out->tokens = LANES / a, out->vectors = words / a;
    int step = out->tokens * words; /* of whole registers, so that a tile is too */
    out->tile = step > TILE_WORDS ? 0 : TILE_WORDS / step * out->tokens;
    return has_planes(r) && r->group % out->per == 0 && r->data_row == words && out->tile > 0 &&
           r->scale_row == r->width / r->group && r->capacity % out->tokens == 0 &&
           out->vectors * out->per <= MOST_SUMS;
}

INLINE void scales_of(const vq_run *r, int64_t at, int n, int times, float *restrict s,
                      float *restrict low) {
    float one[TILE_WORDS];
    load_many(r->scale, r->type, at, n, one);
    repeat_each(one, n, times, s);
    load_many(r->bias, r->type, at, n, one);
    repeat_each(one, n, times, low);
}

INLINE void mix_plane(const uint32_t *restrict w, const float (*restrict c)[TILE_WORDS], int from,
                      int step, int n, int shift, uint32_t mask, int count,
                      float (*restrict acc)[LANES]) {
    lanes_f sum[AT_ONCE];
    for (int k = 0; k < count; k++) sum[k] = LOAD_F(acc[k]);
    for (int at = from * LANES; at < n; at += step * LANES) {
        lanes_f x = PLANE(LOAD_U(w + at), shift, mask);
        for (int k = 0; k < count; k++) sum[k] += x * LOAD_F(c[k] + at);
    }
    for (int k = 0; k < count; k++) STORE_F(acc[k], sum[k]);
}

/* Weighted sums of affine rows, weights and scales multiplied first. */
ONCE void mix_by_token_planes(const vq_run *r, const vq_lanes *l, int b, int h,
                                const float *restrict weights, int64_t stride, int rows,
                                float *restrict out) {
    float s[TILE_WORDS], low[TILE_WORDS], c[AT_ONCE][TILE_WORDS], wide[TILE_WORDS];
    float acc[MOST_SUMS][AT_ONCE][LANES], base[MOST_SUMS][AT_ONCE][LANES], tile_w[TILE_WORDS];
    const uint32_t mask = (1u << r->bits) - 1u;
    const int sums = l->vectors * l->per, groups = r->width / r->group;
    int64_t data = b * r->data_batch + h * r->data_head;
    int64_t scale = b * r->scale_batch + h * r->scale_head;
    for (int i = 0; i < rows; i += AT_ONCE) {
        int count = rows - i < AT_ONCE ? rows - i : AT_ONCE;
        memset(acc, 0, sizeof(acc[0]) * sums);
        memset(base, 0, sizeof(base[0]) * l->vectors);
        for (int t = r->start / l->tokens * l->tokens; t < r->stop; t += l->tile) {
            int n = r->capacity - t < l->tile ? r->capacity - t : l->tile, flat = n * l->words;
            const uint32_t *w = (const uint32_t *)r->data + data + (int64_t)t * r->data_row;
            scales_of(r, scale + (int64_t)t * groups, n * groups, l->words / groups, s, low);
            for (int k = 0; k < count; k++) {
                const float *row = weights + (i + k) * stride - r->start;
                if (t >= r->start && t + n <= r->stop) {
                    repeat_each(row + t, n, l->words, wide);
                } else {
                    for (int j = 0; j < n; j++)
                        tile_w[j] = t + j >= r->start && t + j < r->stop ? row[t + j] : 0.0f;
                    repeat_each(tile_w, n, l->words, wide);
                }
                for (int j = 0; j < flat; j++) c[k][j] = wide[j] * s[j];
                for (int v = 0; v < l->vectors; v++)
                    for (int at = v * LANES; at < flat; at += l->vectors * LANES)
                        for (int j = 0; j < LANES; j++) base[v][k][j] += wide[at + j] * low[at + j];
            }
            for (int v = 0; v < l->vectors; v++)
                for (int p = 0; p < l->per; p++) {
                    float(*a)[LANES] = acc[v * l->per + p];
                    int shift = p * r->bits;
                    switch (count) {
                    case 1: mix_plane(w, c, v, l->vectors, flat, shift, mask, 1, a); break;
                    case 2: mix_plane(w, c, v, l->vectors, flat, shift, mask, 2, a); break;
                    case 3: mix_plane(w, c, v, l->vectors, flat, shift, mask, 3, a); break;
                    default: mix_plane(w, c, v, l->vectors, flat, shift, mask, 4, a); break;
                    }
                }
        }
        for (int v = 0; v < l->vectors; v++)
            for (int j = 0; j < LANES; j++) {
                int word = (v * LANES + j) % l->words;
                for (int p = 0; p < l->per; p++) {
                    int channel = word * l->per + p;
                    if (channel < r->dim)
                        for (int k = 0; k < count; k++)
                            out[(i + k) * r->dim + channel] +=
                                acc[v * l->per + p][k][j] + base[v][k][j];
                }
            }
    }
}

INLINE void score_words(const uint32_t *restrict w, const float (*restrict q)[AT_ONCE][LANES],
                        int per, int bits, uint32_t mask, int count,
                        float (*restrict dots)[LANES]) {
    lanes_f sum[AT_ONCE];
    lanes_u word = LOAD_U(w);
    for (int k = 0; k < count; k++) sum[k] = (lanes_f){0};
    for (int p = 0; p < per; p++) {
        lanes_f x = PLANE(word, p * bits, mask);
        for (int k = 0; k < count; k++) sum[k] += x * LOAD_F(q[p][k]);
    }
    for (int k = 0; k < count; k++) STORE_F(dots[k], sum[k]);
}

/* Scores from affine rows: products word by word, scaled, then added up over a token's words. */
ONCE void scores_by_token_planes(const vq_run *r, const vq_lanes *l, int b, int h,
                                   const float *restrict q, int rows, float *restrict scores,
                                   int64_t stride) {
    float s[TILE_WORDS], low[TILE_WORDS], dots[AT_ONCE][LANES], part[AT_ONCE][TILE_WORDS];
    float turned[MOST_SUMS][AT_ONCE][LANES], whole[MOST_SUMS][AT_ONCE][LANES];
    const uint32_t mask = (1u << r->bits) - 1u;
    const int groups = r->width / r->group;
    int64_t data = b * r->data_batch + h * r->data_head;
    int64_t scale = b * r->scale_batch + h * r->scale_head;
    for (int i = 0; i < rows; i += AT_ONCE) {
        int count = rows - i < AT_ONCE ? rows - i : AT_ONCE;
        memset(turned, 0, sizeof(turned[0]) * l->vectors * l->per);
        memset(whole, 0, sizeof(whole[0]) * l->vectors);
        for (int v = 0; v < l->vectors; v++)
            for (int p = 0; p < l->per; p++)
                for (int j = 0; j < LANES; j++) {
                    int channel = (v * LANES + j) % l->words * l->per + p;
                    for (int k = 0; k < count && channel < r->dim; k++) {
                        float x = q[(i + k) * r->dim + channel];
                        turned[v * l->per + p][k][j] = x;
                        whole[v][k][j] += x;
                    }
                }
        for (int t = r->start / l->tokens * l->tokens; t < r->stop; t += l->tile) {
            int n = r->capacity - t < l->tile ? r->capacity - t : l->tile, flat = n * l->words;
            const uint32_t *w = (const uint32_t *)r->data + data + (int64_t)t * r->data_row;
            scales_of(r, scale + (int64_t)t * groups, n * groups, l->words / groups, s, low);
            for (int at = 0, v = 0; at < flat; at += LANES, v = v + 1 < l->vectors ? v + 1 : 0) {
                const float(*qv)[AT_ONCE][LANES] = (const float(*)[AT_ONCE][LANES])turned + v * l->per;
                switch (count) {
                case 1: score_words(w + at, qv, l->per, r->bits, mask, 1, dots); break;
                case 2: score_words(w + at, qv, l->per, r->bits, mask, 2, dots); break;
                case 3: score_words(w + at, qv, l->per, r->bits, mask, 3, dots); break;
                default: score_words(w + at, qv, l->per, r->bits, mask, 4, dots); break;
                }
                for (int k = 0; k < count; k++)
                    STORE_F(part[k] + at, LOAD_F(dots[k]) * LOAD_F(s + at) +
                                              LOAD_F(whole[v][k]) * LOAD_F(low + at));
            }
            for (int k = 0; k < count; k++) {
                float sum[TILE_WORDS];
#define ADD_UP(W)                                                     \
    for (int j = 0; j < n; j++) {                                     \
        float x = 0.0f;                                               \
        for (int m = 0; m < (W); m++) x += part[k][j * (W) + m];      \
        sum[j] = x;                                                   \
    }
                switch (l->words) {
                case 4: ADD_UP(4) break;
                case 8: ADD_UP(8) break;
                case 16: ADD_UP(16) break;
                default: ADD_UP(l->words) break;
                }
#undef ADD_UP
                int from = t < r->start ? r->start - t : 0, to = r->stop - t < n ? r->stop - t : n;
                float *score = scores + (i + k) * stride + (t - r->start);
                for (int j = from; j < to; j++) score[j] = r->add ? score[j] + sum[j] : sum[j];
            }
        }
    }
}

#endif
