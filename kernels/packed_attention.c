/* Decode attention straight from packed keys and values, for the CPU backend.
 *
 * One call serves one layer and one step: every (sequence, KV head) pair unpacks blocks of tokens
 * into L1 and uses them for all query rows of the head's group, in fp32. Scores of one head are
 * kept whole (rows x tokens), because keys and values may be cut into runs at different tokens.
 *
 * Plain C ABI, no allocation kept between calls. The heads are compiled for AVX-512, AVX2 and the
 * baseline where the compiler offers it, and chosen when the library is loaded; NEON needs no flag.
 */

#include <pthread.h>
#include <stdlib.h>

#include "packed_formats.h"

static struct {
    void (*attend)(const vq_call *, int, int, float *);
    void (*decode)(const vq_rows *, int, int);
} chosen = {attend_head_base, decode_head_base};

#ifdef HAS_VARIANTS
__attribute__((constructor)) static void choose(void) {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("x86-64-v4")) {
        chosen.attend = attend_head_v4, chosen.decode = decode_head_v4;
    } else if (__builtin_cpu_supports("x86-64-v3")) {
        chosen.attend = attend_head_v3, chosen.decode = decode_head_v3;
    }
}
#endif

static int is_whole(const vq_run *r) {
    return r->start % BLOCK == 0 && r->capacity % 32 == 0 && r->stop <= r->capacity;
}

static int refused(const vq_run *r) {
    if (r->kind == CODEBOOK) return r->bits < 1 || r->bits > 6 || r->width % 32;
    if (r->kind == VECTOR) return r->bits < 1 || r->bits > 16 || r->group < 1 || r->width % r->group;
    if (r->kind == POLAR) return r->bits < 1 || r->bits > 8 || r->bits == 7 || !r->scale;
    if (r->kind == SPARSE) return r->bits != 8 && r->bits != 16;
    return 0;
}

static void *attend_part(void *argument) {
    vq_call *c = (vq_call *)argument;
    float *scores = (float *)malloc(sizeof(float) * (size_t)c->rows * (size_t)c->tokens);
    if (!scores) {
        c->failed = 1;
        return NULL;
    }
    for (int i = c->part; i < c->batch * c->heads; i += c->parts)
        chosen.attend(c, i / c->heads, i % c->heads, scores);
    free(scores);
    return NULL;
}

/* Whether runs cover just the call's tokens, and parts the tokens of the run before them. */
static int covers(const vq_run *runs, int n, int32_t tokens) {
    int64_t sum = 0;
    for (int k = 0; k < n; k++) {
        int length = runs[k].stop - runs[k].start;
        if (runs[k].start < 0 || length < 0 || runs[k].stop > runs[k].capacity) return 0;
        if (runs[k].add && (k == 0 || length != runs[k - 1].stop - runs[k - 1].start)) return 0;
        if (!runs[k].add) sum += length;
    }
    return sum == tokens;
}

/* 0 when done; 1 for a shape this file does not take; 2 when memory ran out. */
int vq_attend(const vq_call *call, int threads) {
    if (call->rows < 1 || call->rows > MAX_ROWS || call->tokens < 1 || call->length < 1) return 1;
    if (!covers(call->keys, call->n_keys, call->tokens)) return 1;
    if (!covers(call->values, call->n_values, call->tokens)) return 1;
    for (int k = 0; k < call->n_keys + call->n_values; k++) {
        const vq_run *r = k < call->n_keys ? &call->keys[k] : &call->values[k - call->n_keys];
        if (r->width < 1 || r->width > MAX_DIM || r->dim > MAX_DIM) return 1;
        if (r->kind == AFFINE_CHANNEL && !is_whole(r)) return 1;
        if (refused(r) || (r->kind != SPARSE && r->dim > r->width)) return 1;
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

static void *decode_part(void *argument) {
    const vq_rows *c = (const vq_rows *)argument;
    for (int i = c->part; i < c->batch * c->heads; i += c->parts)
        chosen.decode(c, i / c->heads, i % c->heads);
    return NULL;
}

/* 0 when done, 1 for a run this file does not take. */
int vq_decode(const vq_rows *call, int threads) {
    const vq_run *r = call->run;
    if (r->width < 1 || r->width > MAX_DIM || call->dim > r->width) return 1;
    if (r->kind == AFFINE_CHANNEL && !is_whole(r)) return 1;
    if (refused(r) || r->kind == SPARSE) return 1;
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

/* Version of the forms and sizes of the structures, so that a caller built against another layout notices. */
int vq_abi(void) { return VQ_FORMS * 10000000 + (int)(sizeof(vq_run) * 1000 + sizeof(vq_call)); }
