"""K-means and the search for the nearest of many short vectors, in numpy.

The search is a product of fixed shape followed by a maximum over rows: `argmin |x - c|²` is
`argmax x·c - |c|²/2`, and the last term rides along as one more coordinate. The product always has
the same number of rows, padded where they run out, so a vector's answer does not depend on how many
are searched at once. Sources: Lloyd 1982; Arthur and Vassilvitskii 2007 for the start.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

_ROWS = 64
"""Rows of one product at most."""
_ROWS_EACH = 16
"""The same where every group of vectors has a table of its own."""
_PRODUCT = 1 << 18
"""Multiplications up to which OpenBLAS does a product on the calling thread; waking others for
thousands of small products can cost a hundred times the work."""
_THREAD_SCORES = 1 << 23
"""Scores from which a second thread pays."""
_START_ROWS = 1 << 12
"""Rows that the start of k-means looks at."""
MOST_ROWS = 1 << 18
"""Rows that k-means looks at; more add nothing to a table of a few thousand centroids."""


class Nearest:
    """Search in one table of centroids (K, d), or in one a group of vectors, (G, K, d)."""

    def __init__(self, centroids: np.ndarray) -> None:
        c = np.asarray(centroids, dtype=np.float32)
        self.many = c.ndim == 3
        self.size, self.dim = c.shape[-2:]
        half = np.square(c).sum(axis=-1, keepdims=True) * np.float32(-0.5)
        most = _ROWS_EACH if self.many else _ROWS
        self._rows = max(4, min(most, _PRODUCT // (self.size * (self.dim + 1)) // 4 * 4))
        self._table = np.ascontiguousarray(np.concatenate([c, half], axis=-1).swapaxes(-1, -2))

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Index of the nearest centroid, ties to the lowest.

        Args:
            x: (N, d), or (G, N, d) for G tables, any float type.

        Returns:
            (N,) or (G, N) int64.
        """
        wide = np.ones((*x.shape[:-1], self.dim + 1), dtype=np.float32)
        wide[..., :-1] = x
        if self.many:
            return self._search_each(wide)
        out = np.empty(len(wide), dtype=np.int64)
        parts = 2 if len(wide) * self.size >= _THREAD_SCORES and (os.cpu_count() or 1) > 1 else 1
        step = -(-len(wide) // (parts * self._rows)) * self._rows
        cuts = [(wide[i : i + step], out[i : i + step]) for i in range(0, len(wide), step or 1)]
        if len(cuts) > 1:
            with ThreadPoolExecutor(len(cuts)) as pool:
                list(pool.map(self._search, *zip(*cuts, strict=True)))
        elif cuts:
            self._search(*cuts[0])
        return out

    def _search(self, wide: np.ndarray, out: np.ndarray) -> None:
        n = self._rows
        scores = np.empty((n, self.size), dtype=np.float32)
        for i in range(0, len(wide), n):
            np.matmul(_filled(wide[i : i + n], n), self._table, out=scores)
            out[i : i + n] = scores.argmax(axis=1)[: len(wide) - i]

    def _search_each(self, wide: np.ndarray) -> np.ndarray:
        out = np.empty(wide.shape[:-1], dtype=np.int64)
        n = self._rows
        for i in range(0, wide.shape[1], n):
            best = np.matmul(_filled(wide[:, i : i + n], n), self._table).argmax(axis=-1)
            out[:, i : i + n] = best[:, : wide.shape[1] - i]
        return out


def _filled(rows: np.ndarray, n: int) -> np.ndarray:
    """(..., m, d) with zero rows up to `n`."""
    if rows.shape[-2] == n:
        return rows
    out = np.zeros((*rows.shape[:-2], n, rows.shape[-1]), dtype=rows.dtype)
    out[..., : rows.shape[-2], :] = rows
    return out


def kmeans(
    x: np.ndarray, n_centroids: int, iters: int = 30, seed: int = 42
) -> tuple[np.ndarray, list[float]]:
    """Centroids of rows and the mean squared distance per row after every round.

    Starts by k-means++ on a sample; a centroid that lost all its rows moves to the row that is
    served worst. Stops early when a round gains less than 1 in 10,000.

    Args:
        x: (N, d), any float type, N at least 1; of more than `MOST_ROWS` rows a sample is used.
        n_centroids: K; with fewer distinct rows than that some centroids coincide.
        iters: rounds at most.
        seed: of the sample and the start.

    Returns:
        (K, d) float32, and the falling errors.
    """
    rng = np.random.default_rng(seed)
    x = np.ascontiguousarray(x, dtype=np.float32)
    if len(x) > MOST_ROWS:
        x = x[rng.choice(len(x), MOST_ROWS, replace=False)]
    c = _start(x, n_centroids, rng)
    errors: list[float] = []
    for _ in range(iters):
        index = Nearest(c)(x)
        lost = np.square(x - c[index]).sum(axis=1)
        errors.append(float(lost.mean()))
        count = np.bincount(index, minlength=n_centroids)
        sums = [
            np.bincount(index, weights=x[:, j], minlength=n_centroids) for j in range(x.shape[1])
        ]
        full = count > 0
        c[full] = (np.stack(sums, axis=1)[full] / count[full, None]).astype(np.float32)
        empty = np.flatnonzero(~full)
        if len(empty):
            worst = np.argsort(-lost, kind="stable")[: len(empty)]
            c[empty[: len(worst)]] = x[worst]
        if errors[-1] == 0 or (len(errors) > 1 and errors[-2] - errors[-1] < 1e-4 * errors[-2]):
            break
    return c, errors


def _start(x: np.ndarray, k: int, rng: np.random.Generator) -> np.ndarray:
    """Rows picked one after the other, each with odds by its distance to those picked before."""
    pool = x
    if len(x) > max(_START_ROWS, 2 * k):
        pool = x[rng.choice(len(x), max(_START_ROWS, 2 * k), replace=False)]
    if len(pool) <= k:
        return np.concatenate([pool, pool[rng.integers(len(pool), size=k - len(pool))]])
    out = np.empty((k, x.shape[1]), dtype=np.float32)
    squares = np.square(pool).sum(axis=1)
    away = np.full(len(pool), np.inf, dtype=np.float32)
    pick = int(rng.integers(len(pool)))
    for i in range(k):
        out[i] = pool[pick]
        distance = squares - 2 * (pool @ out[i]) + squares[pick]
        np.minimum(away, np.maximum(distance, 0), out=away)
        total = np.cumsum(away, dtype=np.float64)
        if total[-1] <= 0:
            out[i + 1 :] = pool[rng.integers(len(pool), size=k - i - 1)]
            break
        pick = int(np.searchsorted(total, rng.random() * total[-1], side="right"))
        pick = min(pick, len(pool) - 1)
    return out
