"""Pages of keys: bounds of what a query can find in each, and the pages with most of it.

A page is some consecutive rows, known by the least and the largest number of each channel. With
the bound that each channel's sign asks for, the product of a query and a page is at least that of
the query and any of its rows.
Source: RocketKV (arXiv 2502.14051), section 3.3.
"""

from typing import Any, NamedTuple

import mlx.core as mx

from veloxquant.quantizers.specs.pages import split_compression_ratio, split_hsa_dims

__all__ = [
    "PagedKeySummary",
    "append_paged_summary",
    "append_paged_summary_batched",
    "build_paged_summary",
    "build_paged_summary_batched",
    "gather_page_tokens",
    "head_dim_topk_mask",
    "hsa_approx_scores",
    "hsa_fp32_bytes",
    "page_estimates",
    "page_numbers",
    "select_topk_pages",
    "split_compression_ratio",
    "split_hsa_dims",
]


class PagedKeySummary(NamedTuple):
    """Bounds (n_pages, D) fp32 of the pages of one head; the last page may be short."""

    page_max: mx.array
    page_min: mx.array
    page_size: int
    n_tokens: int


def build_paged_summary_batched(keys: mx.array, page_size: int) -> tuple[mx.array, mx.array]:
    """Largest and least numbers (..., n_pages, D) of the pages of rows (..., n, D), in their type.

    Raises:
        ValueError: for pages of no rows.
    """
    if page_size < 1:
        raise ValueError(f"pages of {page_size!r} rows are not possible; give at least 1")
    lead, (n, dim) = keys.shape[:-2], keys.shape[-2:]
    pages, short = -(-n // page_size), -n % page_size
    sides = []
    for edge in (-mx.inf, mx.inf):
        rows = keys
        if short:
            rows = mx.pad(rows, [(0, 0)] * len(lead) + [(0, short), (0, 0)], constant_values=edge)
        rows = rows.reshape(*lead, pages, page_size, dim)
        sides.append(rows.max(axis=-2) if edge < 0 else rows.min(axis=-2))
    return sides[0], sides[1]


def append_paged_summary_batched(
    page_max: mx.array, page_min: mx.array, n_tokens: int, page_size: int, new_keys: mx.array
) -> tuple[mx.array, mx.array, int]:
    """Bounds with new rows (..., n, D): the last page is filled up, then come new ones."""
    room = min(-n_tokens % page_size, new_keys.shape[-2])
    if room:
        first = new_keys[..., :room, :]
        top = mx.maximum(page_max[..., -1:, :], first.max(axis=-2, keepdims=True))
        low = mx.minimum(page_min[..., -1:, :], first.min(axis=-2, keepdims=True))
        page_max = mx.concatenate([page_max[..., :-1, :], top], axis=-2)
        page_min = mx.concatenate([page_min[..., :-1, :], low], axis=-2)
    if new_keys.shape[-2] > room:
        more = build_paged_summary_batched(new_keys[..., room:, :], page_size)
        page_max = mx.concatenate([page_max, more[0]], axis=-2)
        page_min = mx.concatenate([page_min, more[1]], axis=-2)
    return page_max, page_min, n_tokens + new_keys.shape[-2]


def build_paged_summary(keys: mx.array, page_size: int) -> PagedKeySummary:
    """Pages of the rows (n, D) of one head."""
    sides = build_paged_summary_batched(keys.astype(mx.float32), page_size)
    return PagedKeySummary(*sides, page_size, keys.shape[0])


def append_paged_summary(summary: PagedKeySummary, new_keys: mx.array) -> PagedKeySummary:
    """The pages with new rows (n, D) behind the others."""
    page_max, page_min, size, n = summary
    sides = append_paged_summary_batched(page_max, page_min, n, size, new_keys.astype(mx.float32))
    return PagedKeySummary(sides[0], sides[1], size, sides[2])


def head_dim_topk_mask(query: mx.array, k1: int) -> mx.array:
    """Whether each channel is one of the `k1` largest by size, of (..., D)."""
    dim = query.shape[-1]
    if k1 >= dim:
        return mx.ones(query.shape, dtype=mx.bool_)
    top = mx.argpartition(mx.abs(query), dim - k1, axis=-1)[..., dim - k1 :]
    none = mx.zeros(query.shape, dtype=mx.bool_)
    return mx.put_along_axis(none, top, mx.array(True), axis=-1)


def page_estimates(
    queries: mx.array, page_max: mx.array, page_min: mx.array, k1: int
) -> tuple[mx.array, mx.array]:
    """What the queries of a KV head may find in each page.

    The query heads share their `k1` channels, those of the largest summed size, and the bound of
    each, that of the summed sign: with several heads it is an estimate.

    Args:
        queries: (..., G, D) fp32.
        page_max: (..., n_pages, D).
        page_min: as `page_max`.
        k1: channels.

    Returns:
        Products (..., G, n_pages) fp32, and the share (..., G, 1) of each query in these channels.
    """
    size = mx.abs(queries)
    inside = head_dim_topk_mask(size.sum(axis=-2, keepdims=True), k1)
    chosen = mx.where(inside, queries, 0.0)
    above = queries.sum(axis=-2, keepdims=True) > 0
    upper, lower = mx.where(above, chosen, 0.0), mx.where(above, 0.0, chosen)
    products = upper @ page_max.astype(mx.float32).swapaxes(-1, -2)
    products = products + lower @ page_min.astype(mx.float32).swapaxes(-1, -2)
    total = mx.maximum(size.sum(axis=-1, keepdims=True), 1e-30)
    return products, mx.abs(chosen).sum(axis=-1, keepdims=True) / total


def hsa_approx_scores(query: mx.array, summary: PagedKeySummary, k1: int) -> mx.array:
    """Upper bounds (n_pages,) of a query (D,) with the rows of each page, on `k1` channels."""
    q = query.astype(mx.float32)[None]
    return page_estimates(q, summary.page_max, summary.page_min, k1)[0][0]


def select_topk_pages(scores: mx.array, k2: int) -> mx.array:
    """Ascending indices (..., min(k2, n)) int32 of the best of (..., n) pages."""
    n = scores.shape[-1]
    k2 = min(k2, n)
    top = mx.argpartition(scores, n - k2, axis=-1)[..., n - k2 :] if k2 < n else None
    if top is None:
        return mx.broadcast_to(mx.arange(n, dtype=mx.int32), scores.shape)
    return mx.sort(top, axis=-1).astype(mx.int32)


def page_numbers(pages: mx.array, page_size: int) -> mx.array:
    """Rows (..., n * page_size) int32 of whole pages (..., n)."""
    rows = pages[..., None] * page_size + mx.arange(page_size, dtype=mx.int32)
    return rows.reshape(*pages.shape[:-1], -1)


def gather_page_tokens(page_indices: mx.array, page_size: int, n_tokens: int) -> mx.array:
    """Rows int32 of pages (n,); those past the end of a short last page are left out."""
    rows = page_numbers(page_indices.astype(mx.int32), page_size)
    held: Any = (rows < n_tokens).sum().item()
    return mx.sort(rows)[:held]


def hsa_fp32_bytes(page_max: mx.array, page_min: mx.array) -> int:
    """Bytes of the bounds in 16 bits."""
    return 2 * (page_max.size + page_min.size)
