"""The steps of a2ats as functions of arrays: query moments, weighted codes, retrieval.

Source: A2ATS (arXiv 2502.12665); `a2ats_query_aware_assignment` and its `beta` are the documents'.
"""

import math

import mlx.core as mx
import numpy as np

from veloxquant.kernels.native import seen
from veloxquant.math.kmeans import Nearest, kmeans

_TINY = 1e-30


def a2ats_query_second_moment(queries: mx.array, ridge: float = 1e-4) -> mx.array:
    """`E[qᵀq] + ridge·I` of queries (M, d): (d, d) fp32."""
    q = queries.astype(mx.float32)
    return q.T @ q / max(1, q.shape[0]) + ridge * mx.eye(q.shape[1])


def shrunk_moment(moment: mx.array, beta: float, ridge: float = 1e-4) -> mx.array:
    """`(1 - beta) mean(diag) I + beta H`, with a ridge relative to the diagonal; (..., d, d).

    beta 0 is the geometry of plain distance, 1 the queries' own.
    """
    h = moment.astype(mx.float32)
    d = h.shape[-1]
    level = mx.diagonal(h, axis1=-2, axis2=-1).mean(axis=-1)[..., None, None]
    level = mx.maximum(level, _TINY)
    return (1 - beta + ridge) * level * mx.eye(d) + beta * h


def a2ats_cholesky_factor(h: mx.array) -> mx.array:
    """Lower L with `h = L Lᵀ`, (d, d) fp32.

    Raises:
        ValueError: when `h` is not positive definite.
    """
    try:
        lower = np.linalg.cholesky(seen(h.astype(mx.float32)).astype(np.float64))
    except np.linalg.LinAlgError as error:
        raise ValueError("the second moment is not positive definite; give it a ridge") from error
    return mx.array(lower.astype(np.float32))


def a2ats_h_weighted_assignment(
    x: mx.array, codebook: mx.array, cholesky_factor: mx.array
) -> mx.array:
    """`argmin (x - c) H (x - c)ᵀ` for rows (N, d): int32 (N,), ties to the lowest."""
    lower = cholesky_factor.astype(mx.float32)
    turned = [seen(mx.contiguous(a.astype(mx.float32) @ lower)) for a in (x, codebook)]
    return mx.array(Nearest(turned[1])(turned[0]).astype(np.int32))


def a2ats_query_aware_assignment(
    x: mx.array, codebook: mx.array, query: mx.array, beta: float = 0.5
) -> mx.array:
    """Centroid of least `(1 - beta) distance + beta (1 - cosine with the query)`, int32 (N,).

    Squared distances are taken relative to their mean, so that both terms are of order one.
    """
    x, c, q = (a.astype(mx.float32) for a in (x, codebook, query.reshape(-1)))
    distance = mx.square(x).sum(axis=1)[:, None] - 2 * x @ c.T + mx.square(c).sum(axis=1)[None]
    distance = distance / mx.maximum(distance.mean(), _TINY)
    norms = mx.maximum(mx.linalg.norm(c, axis=1) * mx.linalg.norm(q), _TINY)
    cost = (1 - beta) * distance + beta * (1 - (c @ q) / norms)[None]
    return cost.argmin(axis=1).astype(mx.int32)


def a2ats_select_retrieval_set(
    keys: mx.array, query: mx.array, retrieval_fraction: float = 0.2
) -> tuple[mx.array, mx.array]:
    """Ascending indices of the top ⌈f·N⌉ keys (N, d) by cosine with the query, and of the rest."""
    k, q = keys.astype(mx.float32), query.astype(mx.float32).reshape(-1)
    score = (k @ q) / mx.maximum(mx.linalg.norm(k, axis=1), _TINY)
    n = min(k.shape[0], math.ceil(retrieval_fraction * k.shape[0]))
    order = mx.argsort(-score)
    return mx.sort(order[:n]).astype(mx.int32), mx.sort(order[n:]).astype(mx.int32)


def fit_retrieval_codebook(
    keys: mx.array, sub: int, bits: int, moment: mx.array | None = None, seed: int = 42
) -> mx.array:
    """Codebook (n_sub, 2^bits, sub) fp32, one table a piece, of position-free keys (N, D).

    `moment` is the (shrunk) second moment of queries; the codebook is then in its geometry, in
    which `RetrievalCodec` codes.
    """
    k = keys.astype(mx.float32)
    if moment is not None:
        k = k @ a2ats_cholesky_factor(moment)
    rows = np.array(k).reshape(k.shape[0], -1, sub)
    books = [kmeans(rows[:, s], 1 << bits, seed=seed + s)[0] for s in range(rows.shape[1])]
    return mx.array(np.stack(books))
