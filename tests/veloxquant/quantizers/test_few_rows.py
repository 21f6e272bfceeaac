"""How many rows are different, however loud their channels are and whatever turned them."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from veloxquant.quantizers.few_rows import (
    common_square,
    different_rows,
    unseen_share,
    with_unlike_rows,
)


def rows(seed: int = 0, dim: int = 64) -> mx.array:
    return mx.random.normal((1, 3, 256, dim), key=mx.random.key(seed))


@pytest.mark.parametrize("loud", [0.0, 500.0])
@pytest.mark.parametrize("turned", [None, True, False])
def test_rows_of_their_own_are_all_counted(loud: float, turned: bool | None) -> None:
    """Also where one channel is always far from zero, or all rows are equally long."""
    x = rows() + loud * (mx.arange(64) == 5)
    for one in (x, x / mx.linalg.norm(x, axis=-1, keepdims=True)):
        seen = one if turned is None else nn.RoPE(64, traditional=turned)(one)
        assert (different_rows(seen.astype(mx.bfloat16)) >= 250).all()


@pytest.mark.parametrize("words", [1, 7, 100])
@pytest.mark.parametrize("turned", [None, True, False])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
def test_repeated_rows_count_once(words: int, turned: bool | None, dtype: mx.Dtype) -> None:
    x = mx.take(rows(1), mx.arange(256) % words, axis=2)
    if turned is not None:
        x = nn.RoPE(64, traditional=turned)(x)
    found = different_rows(x.astype(dtype))
    # The last two rows have no next ones by which they would be known.
    assert (found >= words).all()
    assert (found <= 1.3 * words + 6).all()


def test_rows_of_zeros_are_one() -> None:
    assert different_rows(mx.zeros((1, 1, 256, 63))).tolist() == [[1]]


def test_what_a_sample_leaves_open() -> None:
    share = unseen_share(np.array([1, 33, 65, 128, 256]), 256, 64)
    assert share.tolist() == [1.0, 0.5, 0.0, 0.0, 0.0]
    assert unseen_share(np.array([256]), 256, 512) == 0.0


def test_one_row_tells_how_long_the_others_are() -> None:
    x = np.asarray(rows(2))[0, :, :1]
    assert common_square(np.square(x[:, 0])) == pytest.approx(1, rel=0.4)
    assert common_square(np.zeros((2, 4))).tolist() == [[1.0], [1.0]]


def test_rows_are_drawn_only_where_few_are_different() -> None:
    x = rows(3)
    nearly = x[:, :, :1] * (1 + 1e-3 * x)
    few = mx.where(mx.arange(3)[:, None, None] == 1, nearly, x)
    out = with_unlike_rows(few)
    assert mx.array_equal(out[:, ::2], x[:, ::2]).item()
    drawn = np.asarray(out[0, 1])
    assert (drawn != np.asarray(few[0, 1])).any(axis=-1).mean() == 0.75
    assert np.square(drawn).mean() == pytest.approx(1.5, rel=0.5)
    assert with_unlike_rows(x) is x
    equal = mx.broadcast_to(x[:, :, :1], x.shape)
    assert mx.array_equal(with_unlike_rows(equal), equal).item()
