"""chunkkv on the rows of one head: what its chunks are, how they score, which rows stay."""

import mlx.core as mx
import numpy as np

from veloxquant.methods.functional.rows import check_budget, full_bytes

Chunk = tuple[int, int]


def chunk_partition(seq_len: int, chunk_size: int, n_sink: int) -> tuple[list[int], list[Chunk]]:
    """Positions of the sinks, and (start, stop) of the chunks after them; the last may be short."""
    sinks = min(n_sink, seq_len)
    starts = range(sinks, seq_len, chunk_size)
    return list(range(sinks)), [(i, min(i + chunk_size, seq_len)) for i in starts]


def chunk_scores(token_scores: mx.array, body_chunks: list[Chunk]) -> mx.array:
    """Mean score of each chunk, fp32 (n_chunks,)."""
    scores = token_scores.astype(mx.float32)
    means = [scores[start:stop].mean() for start, stop in body_chunks]
    return mx.stack(means) if means else mx.zeros(0)


def chunkkv_keep_mask(
    token_scores: mx.array, seq_len: int, chunk_size: int, n_sink: int, budget: int
) -> mx.array:
    """Which rows stay, bool (seq_len,): sinks, then whole chunks by score while they fit.

    Raises:
        QuantizerConfigError: unless n_sink < budget.
    """
    check_budget(n_sink, budget)
    keep = np.zeros(seq_len, dtype=bool)
    sinks, chunks = chunk_partition(seq_len, chunk_size, n_sink)
    keep[sinks] = True
    room = budget - len(sinks)
    for i in np.argsort(-np.array(chunk_scores(token_scores, chunks)), kind="stable"):
        start, stop = chunks[i]
        if stop - start <= room:
            keep[start:stop] = True
            room -= stop - start
    return mx.array(keep)


full_chunkkv_fp16_bytes = full_bytes
