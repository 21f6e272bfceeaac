/* The packed formats: what a run of tokens looks like, and what one call works on.
 *
 * Codes lie in MLX's order, one little-endian bit stream a row.
 */

#ifndef PACKED_FORMATS_H
#define PACKED_FORMATS_H

#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define ONCE static __attribute__((noinline)) /* what would be compiled at every call otherwise */

enum { PLAIN = 0, AFFINE_TOKEN = 1, AFFINE_CHANNEL = 2, CODEBOOK = 3, VECTOR = 4, SPARSE = 5, POLAR = 6 };
#define VQ_FORMS 4 /* goes up when a run may look otherwise than before */
enum { F32 = 0, F16 = 1, BF16 = 2, I8 = 3 }; /* I8: values of SPARSE only */
enum { BLOCK = 128, MAX_DIM = 512, MAX_ROWS = 64, POLYNOMIAL_BITS = 4 };

/* One run of tokens. Strides are in elements of the array they belong to. */
typedef struct {
    int32_t kind, bits, group, type; /* type: of rows, scales and norms */
    int32_t start, stop;             /* tokens of the buffer that count */
    int32_t width;                   /* channels stored, padding included */
    int32_t capacity;                /* tokens that the buffer has room for */
    int32_t dim;                     /* channels of this run's queries or sums */
    int32_t add;                     /* the same tokens as the run before: a part that adds up */
    const void *data;                /* rows, or packed words */
    const void *scale, *bias;        /* scales or norms, biases */
    const float *levels;             /* CODEBOOK: 2^bits levels, then POLYNOMIAL_BITS' coefficients */
    const void *book;                /* VECTOR: (batch, head, part, code, group) of book_type;
                                        POLAR: fp32 (angle, code, sine and cosine),
                                        and in levels coefficients (power, angle) or NULL */
    const uint32_t *signs;           /* VECTOR: one bit a channel, 1 for +; or NULL */
    int32_t book_type;
    int64_t data_batch, data_head, data_row;
    int64_t scale_batch, scale_head, scale_row;
    int64_t book_batch, book_head, book_part;
    int64_t sign_batch, sign_head, sign_row;
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

/* Whole rows of one run, for prompts that read packed history. */
typedef struct {
    const vq_run *run;
    int32_t batch, heads, dim;
    float *out; /* (batch, heads, stop - start, dim), in the run's basis */
    int32_t part, parts;
} vq_rows;

/* The work of one (sequence, KV head) pair, compiled once for each instruction set. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(VQ_ONE_VARIANT)
#define HAS_VARIANTS 1
#endif
#define DECLARE(variant)                                                             \
    void attend_head_##variant(const vq_call *c, int b, int h, float *scores);       \
    void decode_head_##variant(const vq_rows *c, int b, int h)
DECLARE(base);
#ifdef HAS_VARIANTS
DECLARE(v3);
DECLARE(v4);
#endif

#endif
