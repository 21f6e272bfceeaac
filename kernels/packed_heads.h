/* Attention of one (sequence, KV head) pair, and its rows unpacked.
 *
 * Included by one source file for each instruction set, which defines SUFFIX.
 */

#include <math.h>

#include "packed_planes.h"

#define JOIN(name, suffix) name##_##suffix
#define JOINED(name, suffix) JOIN(name, suffix)
#define VARIANT(name) JOINED(name, SUFFIX)

/* ---- keys: scores of one head --------------------------------------------------------- */

/* Slots of single channels: q at the slot's channel times its value; a channel past the end is no slot. */
INLINE void scores_by_slot(const vq_run *r, int b, int h, const float *restrict q, int rows,
                           float *restrict scores, int64_t stride) {
    for (int t = r->start; t < r->stop; t++) {
        int64_t data = b * r->data_batch + h * r->data_head + t * r->data_row;
        int64_t scale = b * r->scale_batch + h * r->scale_head + t * r->scale_row;
        for (int i = 0; i < rows; i++) {
            float sum = 0.0f, *score = scores + i * stride + (t - r->start);
            for (int j = 0; j < r->width; j++) {
                int d = slot_channel(r, data + j);
                if (d < r->dim) sum += q[i * r->dim + d] * load_one(r->scale, r->type, scale + j);
            }
            *score = r->add ? *score + sum : sum;
        }
    }
}

INLINE void mix_by_slot(const vq_run *r, int b, int h, const float *restrict w, int64_t stride,
                        int rows, float *restrict out) {
    for (int t = r->start; t < r->stop; t++) {
        int64_t data = b * r->data_batch + h * r->data_head + t * r->data_row;
        int64_t scale = b * r->scale_batch + h * r->scale_head + t * r->scale_row;
        for (int j = 0; j < r->width; j++) {
            int d = slot_channel(r, data + j);
            if (d >= r->dim) continue;
            float value = load_one(r->scale, r->type, scale + j);
            for (int i = 0; i < rows; i++)
                out[i * r->dim + d] += w[i * stride + (t - r->start)] * value;
        }
    }
}

/* Token-major formats: unpack sixteen tokens, products with each query row, one sum for all. */
INLINE void scores_by_token(const vq_run *r, int b, int h, const float *restrict q, int rows,
                            float *restrict scores, int64_t stride) {
    const int dim = r->dim, wide = (r->width + LANES - 1) / LANES * LANES;
    float row[MAX_DIM], query[MAX_ROWS][MAX_DIM], part[MAX_ROWS][LANES][LANES];
    float factor[LANES], sum[LANES];
    memset(row, 0, sizeof(row));
    for (int i = 0; i < rows; i++)
        for (int p = 0; p < wide; p++) {
            int d = p < r->width ? place_channel(r, p) : dim;
            query[i][p] = d < dim ? q[i * dim + d] : 0.0f;
        }
    for (int t = r->start; t < r->stop; t += LANES) {
        int n = r->stop - t < LANES ? r->stop - t : LANES;
        for (int k = 0; k < n; k++) {
            factor[k] = token_row(r, b, h, t + k, row);
            for (int i = 0; i < rows; i++) {
                lanes_f dot = {0};
                for (int p = 0; p < wide; p += LANES) dot += LOAD_F(query[i] + p) * LOAD_F(row + p);
                STORE_F(part[i][k], dot);
            }
        }
        for (int i = 0; i < rows; i++) {
            for (int k = n; k < LANES; k++) memset(part[i][k], 0, sizeof(part[i][k]));
            sum_lanes(part[i], sum);
            float *score = scores + i * stride + (t - r->start);
            for (int k = 0; k < n; k++)
                score[k] = r->add ? score[k] + sum[k] * factor[k] : sum[k] * factor[k];
        }
    }
}

/* Tokens from `t` on that may be unpacked together: a block, or what is left of the buffer. */
INLINE int block_size(const vq_run *r, int t) {
    return r->capacity - t < BLOCK ? r->capacity - t : BLOCK;
}

/* Channel-major format: a channel's codes of BLOCK tokens at a time, all query rows at once. */
INLINE void scores_by_channel(const vq_run *r, int b, int h, const float *restrict q, int rows,
                              float *restrict scores, int64_t stride) {
    float acc[MAX_ROWS][BLOCK], x[BLOCK];
    const int dim = r->dim;
    int64_t data = b * r->data_batch + h * r->data_head;
    int64_t scale = b * r->scale_batch + h * r->scale_head;
    for (int t = r->start; t < r->stop; t += BLOCK) {
        int size = block_size(r, t), words = size * r->bits / 32;
        int64_t at = data + (int64_t)t * r->bits / 32, sc = scale + t / r->group;
        memset(acc, 0, sizeof(acc[0]) * rows);
        for (int d = 0; d < dim; d++) {
            channel_row(r, at + d * r->data_row, sc + d * r->scale_row, size, x);
            for (int i = 0; i < rows; i++)
                for (int p = 0; p < size; p++) acc[i][p] += q[i * dim + d] * x[p];
        }
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
    float row[4][MAX_DIM], sum[MAX_ROWS][MAX_DIM], factor[4];
    for (int i = 0; i < rows; i++) memset(sum[i], 0, sizeof(float) * r->width);
    int t = r->start;
    for (; t + 4 <= r->stop; t += 4) { /* four tokens at a time: the sums are loaded once for all */
        for (int k = 0; k < 4; k++) factor[k] = token_row(r, b, h, t + k, row[k]);
        for (int i = 0; i < rows; i++) {
            float v[4];
            for (int k = 0; k < 4; k++) v[k] = w[i * stride + (t - r->start) + k] * factor[k];
            for (int p = 0; p < r->width; p++)
                sum[i][p] += v[0] * row[0][p] + v[1] * row[1][p] + v[2] * row[2][p] + v[3] * row[3][p];
        }
    }
    for (; t < r->stop; t++) {
        factor[0] = token_row(r, b, h, t, row[0]);
        for (int i = 0; i < rows; i++) {
            float weight = w[i * stride + (t - r->start)] * factor[0];
            for (int p = 0; p < r->width; p++) sum[i][p] += weight * row[0][p];
        }
    }
    for (int i = 0; i < rows; i++)
        for (int p = 0; p < r->width; p++) {
            int d = place_channel(r, p);
            if (d < dim) out[i * dim + d] += sum[i][p];
        }
}

/* Channel-major values: weights in unpacking order once a block, one product for each channel. */
INLINE void mix_by_channel(const vq_run *r, int b, int h, const float *restrict w, int64_t stride,
                           int rows, float *restrict out) {
    float turned[MAX_ROWS][BLOCK], x[BLOCK];
    int64_t data = b * r->data_batch + h * r->data_head;
    int64_t scale = b * r->scale_batch + h * r->scale_head;
    for (int t = r->start; t < r->stop; t += BLOCK) {
        int size = block_size(r, t), words = size * r->bits / 32;
        int n = r->stop - t < size ? r->stop - t : size;
        for (int p = 0; p < size; p++) {
            int token = channel_of(p, words, r->bits);
            for (int i = 0; i < rows; i++)
                turned[i][p] = token < n ? w[i * stride + (t - r->start) + token] : 0.0f;
        }
        for (int d = 0; d < r->dim; d++) {
            channel_row(r, data + d * r->data_row + (int64_t)t * r->bits / 32,
                        scale + d * r->scale_row + t / r->group, size, x);
            for (int i = 0; i < rows; i++) {
                float sum = 0.0f;
                for (int p = 0; p < size; p++) sum += turned[i][p] * x[p];
                out[i * r->dim + d] += sum;
            }
        }
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
    int bad = 0;
    for (int64_t t = 0; t < n; t++) {
        peak = scores[t] > peak ? scores[t] : peak;
        bad |= scores[t] != scores[t];
    }
    if (bad || peak == INFINITY) { /* a broken model must not look like a sound one */
        for (int64_t t = 0; t < n; t++) scores[t] = NAN;
        return;
    }
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

void VARIANT(attend_head)(const vq_call *c, int b, int h, float *restrict scores) {
    int64_t stride = c->tokens, head = (int64_t)b * c->heads + h;
    int64_t at = 0, next = 0;
    for (int k = 0; k < c->n_keys; k++) {
        const vq_run *r = &c->keys[k];
        const float *q = r->q + head * c->rows * r->dim;
        if (!r->add) at = next;
        vq_lanes lanes;
        if (r->kind == AFFINE_CHANNEL && has_planes(r))
            scores_by_channel_planes(r, b, h, q, c->rows, scores + at, stride);
        else if (r->kind == AFFINE_CHANNEL)
            scores_by_channel(r, b, h, q, c->rows, scores + at, stride);
        else if (r->kind == AFFINE_TOKEN && lanes_of(r, &lanes))
            scores_by_token_planes(r, &lanes, b, h, q, c->rows, scores + at, stride);
        else if (r->kind == SPARSE)
            scores_by_slot(r, b, h, q, c->rows, scores + at, stride);
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
        float *out = r->out + head * c->rows * r->dim;
        vq_lanes lanes;
        if (r->kind == AFFINE_TOKEN && lanes_of(r, &lanes))
            mix_by_token_planes(r, &lanes, b, h, scores + at, stride, c->rows, out);
        else if (r->kind == AFFINE_CHANNEL)
            mix_by_channel(r, b, h, scores + at, stride, c->rows, out);
        else if (r->kind == SPARSE)
            mix_by_slot(r, b, h, scores + at, stride, c->rows, out);
        else
            mix_by_token(r, b, h, scores + at, stride, c->rows, out);
        next = at + r->stop - r->start;
    }
}

/* ---- whole rows ------------------------------------------------------------------------ */

void VARIANT(decode_head)(const vq_rows *c, int b, int h) {
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
                channel_row(r, data + d * r->data_row + (int64_t)t * r->bits / 32,
                            scale + d * r->scale_row + t / r->group, size, x);
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
        float factor = token_row(r, b, h, t, row);
        for (int p = 0; p < r->width; p++)
            if (place[p] < c->dim) out[place[p]] = row[p] * factor;
    }
}
