"""Pages of keys: bounds hold, appending is building, the best pages are picked."""

import mlx.core as mx
import numpy as np
import pytest

from veloxquant.quantizers.rocketkv import (
    append_paged_summary,
    build_paged_summary,
    gather_page_tokens,
    head_dim_topk_mask,
    hsa_approx_scores,
    hsa_fp32_bytes,
    select_topk_pages,
    split_compression_ratio,
    split_hsa_dims,
)


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


@pytest.mark.parametrize("page", [1, 3, 8, 100])
def test_a_page_promises_at_least_what_its_rows_hold(page: int) -> None:
    keys, q = normal(50, 16), normal(16, seed=1)
    summary = build_paged_summary(keys, page)
    bounds = np.repeat(np.array(hsa_approx_scores(q, summary, 16)), page)[:50]
    true = np.array(keys @ q)
    assert (bounds >= true - 1e-3).all()
    if page == 1:
        assert bounds == pytest.approx(true, abs=1e-5)


def test_few_channels_are_the_largest() -> None:
    q = mx.array([1.0, -5.0, 3.0, 0.0])
    assert head_dim_topk_mask(q, 2).tolist() == [False, True, True, False]
    assert head_dim_topk_mask(q, 9).all().item()
    summary = build_paged_summary(mx.eye(4), 1)
    assert hsa_approx_scores(q, summary, 2).tolist() == [0, -5, 3, 0]


@pytest.mark.parametrize("cuts", [(7,), (1, 1, 1, 30), (3, 14, 20)])
def test_appending_rows_is_building_anew(cuts: tuple[int, ...]) -> None:
    keys = normal(sum(cuts) + 5, 8)
    summary, at = build_paged_summary(keys[:5], 4), 5
    for n in cuts:
        summary = append_paged_summary(summary, keys[at : at + n])
        at += n
    whole = build_paged_summary(keys, 4)
    assert mx.array_equal(summary.page_max, whole.page_max)
    assert mx.array_equal(summary.page_min, whole.page_min)
    assert summary[2:] == whole[2:] == (4, len(keys))
    assert hsa_fp32_bytes(*whole[:2]) == 2 * 2 * 8 * whole.page_max.shape[0]


def test_pages_and_their_rows() -> None:
    scores = mx.array([0.0, 3.0, 1.0, 2.0])
    assert select_topk_pages(scores, 2).tolist() == [1, 3]
    assert select_topk_pages(scores, 9).tolist() == [0, 1, 2, 3]
    assert gather_page_tokens(mx.array([1, 3]), 3, 11).tolist() == [3, 4, 5, 9, 10]


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        split_compression_ratio(0.5)
    with pytest.raises(ValueError, match="at least 1"):
        build_paged_summary(normal(4, 4), 0)


def test_a_page_is_never_more_than_the_ratio() -> None:
    assert split_hsa_dims(1.0) == (1, 1.0)
    assert split_hsa_dims(1.5) == (1, 1.5)
    assert split_hsa_dims(9.0) == (3, 3.0)
