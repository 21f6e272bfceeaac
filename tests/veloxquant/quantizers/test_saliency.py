"""Ranks without chance; attention that does not favour early tokens."""

import mlx.core as mx

from veloxquant.quantizers.saliency import (
    attention_saliency,
    cosine_saliency,
    rank,
    small_norm_saliency,
)


def test_ranks_are_a_permutation_and_the_older_of_equals_comes_first() -> None:
    scores = mx.array([[1.0, 5.0, 5.0, -mx.inf, 1.0], [0.0] * 5])
    assert rank(scores).tolist() == [[2, 0, 1, 4, 3], [0, 1, 2, 3, 4]]


def test_the_worked_example() -> None:
    weights = mx.array(
        [[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0.2, 0.2, 0.6, 0], [0.25, 0.25, 0.25, 0.25]]
    )
    assert mx.allclose(attention_saliency(weights), mx.array([0.4875, 0.95 / 3, 0.425, 0.25]))


def test_uniform_attention_favours_nobody() -> None:
    seen = mx.tril(mx.ones((60, 60)))
    plain = seen / seen.sum(axis=-1, keepdims=True)
    uniform = mx.tril(mx.full((60, 60), 1 / 60))
    assert mx.abs(attention_saliency(uniform) - 1 / 60).max().item() < 1e-6
    assert plain.sum(axis=0)[0].item() > 4 * plain.sum(axis=0)[40].item()
    tail = attention_saliency(uniform[-20:])
    assert mx.abs(tail - 1 / 60).max().item() < 1e-6


def test_a_heavy_hitter_is_found() -> None:
    logits = mx.random.normal((100, 100), key=mx.random.key(1))
    logits[:, 37] += 6.0
    hidden = mx.triu(mx.full((100, 100), -mx.inf), k=1)
    saliency = attention_saliency(mx.softmax(logits + hidden, axis=-1)[-10:])
    assert rank(saliency)[37].item() < 5


def test_small_norms_are_salient() -> None:
    keys = mx.ones((2, 3, 4, 8)) * mx.array([3.0, 1.0, 2.0, 0.0])[:, None]
    assert rank(small_norm_saliency(keys))[0, 0].tolist() == [3, 1, 2, 0]


def test_cosine_with_the_queries_of_a_group() -> None:
    keys = mx.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0], [3.0, 4.0]])[None, None]
    queries = mx.array([[[2.0, 0.0]], [[0.0, 0.0]]])[None]
    assert mx.allclose(cosine_saliency(queries, keys), mx.array([0.5, 0, 0, 0.3])).item()
    assert cosine_saliency(mx.ones((2, 6, 3, 8)), mx.ones((2, 2, 5, 8))).shape == (2, 2, 5)
