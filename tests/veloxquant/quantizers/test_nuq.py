"""Levels on normalised rows: exact outliers, what one large value does, blocks with own tables."""

import mlx.core as mx
import pytest

from veloxquant.quantizers.codecs import codec_for
from veloxquant.quantizers.specs.nuq import NuqChannelSpec, NuqTokenSpec

T, D = 256, 64


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def codec(side: str, fraction: float = 0.01, bits: int = 3, refit: int = 0, dim: int = D):
    common = (bits, 8, fraction, 64, refit)
    keys = side == "keys"
    return codec_for(NuqChannelSpec(*common) if keys else NuqTokenSpec(*common, 32), dim)


def packed(made, x: mx.array) -> dict[str, mx.array]:
    if made.spec.refit:
        return made.encode(x)
    fitted = made.fit(x[:, :, : made.spec.fit_tokens])
    return {**made.encode_fitted(x, fitted), **fitted}


sides = pytest.mark.parametrize("side", ["keys", "values"])
both = pytest.mark.parametrize("refit", [0, 64])


def test_a_token_beyond_the_ranges_loses_no_more_than_one_inside() -> None:
    """A distribution that moves: louder tokens are coded as well as those of the fit."""
    x = normal(1, 1, 128, D)
    loud = mx.concatenate([x[:, :, :64], 50 * x[:, :, 64:]], axis=2)
    made = codec("keys")
    lost = [
        (mx.square(made.decode(packed(made, rows), mx.float32) - rows)[:, :, 64:].mean(), rows)
        for rows in (x, loud)
    ]
    plain, far = (float((error / mx.square(rows[:, :, 64:]).mean()).item()) for error, rows in lost)
    assert far < 1.2 * plain


@sides
@both
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_entries_in_slots_come_back(side: str, refit: int, dtype: mx.Dtype) -> None:
    x = (normal(1, 2, T, D) * mx.where(mx.arange(D) == 3, 8.0, 1.0)).astype(dtype)
    made = codec(side, 0.05, refit=refit)
    arrays = packed(made, x)
    assert arrays["v"].dtype == dtype
    assert arrays["i"].shape == (1, 2, T, 4)
    true = mx.take_along_axis(x, arrays["i"], axis=-1).astype(mx.float32)
    got = mx.take_along_axis(made.decode(arrays, mx.float32), arrays["i"], axis=-1)
    room = {mx.float32: 1e-5, mx.float16: 2**-10, mx.bfloat16: 2**-7}[dtype]
    assert mx.abs(got - true).max().item() <= room * mx.abs(true).max().item()


@sides
def test_no_outliers_no_slots(side: str) -> None:
    made = codec(side, 0.0)
    assert packed(made, normal(1, 1, T, D)).keys() & {"v", "i"} == set()
    assert "v" not in made.axes


@sides
@pytest.mark.parametrize(("fraction", "factor"), [(0.01, 1.02), (0.0, None)])
def test_one_large_value(side: str, fraction: float, factor: float | None) -> None:
    """In a channel of keys, in a token of values: with a slot nobody else feels it."""
    x = normal(1, 16, T, D, seed=1)
    at = (mx.arange(T)[:, None] == 9) & (mx.arange(D)[None] == 5)
    loud = mx.where(at, 100 * mx.abs(x) + 100, x)
    made = codec(side, fraction)
    other = ~at
    if side == "values":
        other = other & (mx.arange(T)[:, None] == 9) & (mx.arange(D)[None] < 32)
    errors = []
    for rows in (x, loud):
        lost = mx.square(made.decode(packed(made, rows), mx.float32) - rows)
        errors.append((lost * other).sum().item())
    if factor is None:
        assert errors[1] > 3 * errors[0]
    elif side == "keys":
        assert errors[1] <= factor * errors[0]
    else:
        # Few entries, one of which lost its slot to the planted value.
        assert errors[1] <= 2 * errors[0]


@sides
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_error_falls_with_bits_and_with_slots(side: str, bits: int) -> None:
    x = normal(1, 2, T, D, seed=2)
    lost = [
        mx.square(codec(side, f, bits).decode(packed(codec(side, f, bits), x), mx.float32) - x)
        .mean()
        .item()
        for f in (0.0, 0.02, 0.1)
    ]
    assert lost == sorted(lost, reverse=True)
    assert lost[0] < {2: 0.17, 3: 0.055, 4: 0.02}[bits]


@sides
@both
@pytest.mark.parametrize("dim", [64, 80])
def test_products_are_those_of_the_unpacked_rows(side: str, refit: int, dim: int) -> None:
    x, q, w = normal(2, 2, 1_280, dim), normal(2, 2, 3, dim, seed=3), normal(2, 2, 3, 1_280, seed=4)
    made = codec(side, refit=refit, dim=dim)
    arrays = packed(made, x)
    rows = made.decode(arrays, mx.float32)
    assert rows.shape == x.shape
    assert mx.abs(made.scores(q, arrays) - q @ rows.swapaxes(-1, -2)).max().item() < 1e-3
    assert mx.abs(made.mix(w, arrays) - w @ rows).max().item() < 1e-3


def test_every_block_has_a_table_of_its_own() -> None:
    """Ranges that change with the text: one table loses them, new ones do not."""
    louder = 1 + 9 * (mx.arange(D) % 2)
    x = mx.concatenate([normal(1, 1, 64, D), louder * normal(1, 1, 64, D, seed=5)], axis=2)
    lost = []
    for refit in (0, 64):
        made = codec("keys", refit=refit)
        arrays = packed(made, x)
        assert arrays["levels"].shape[2] == (2 if refit else 1)
        quiet = mx.square(made.decode(arrays, mx.float32) - x)[:, :, 64:, ::2]
        lost.append(quiet.mean().item())
    assert lost[1] < 0.2 * lost[0]


@sides
def test_constant_and_zero_rows(side: str) -> None:
    for value in (0.0, 3.0):
        x = mx.full((1, 1, 128, D), value)
        made = codec(side)
        assert mx.array_equal(made.decode(packed(made, x), mx.float32), x).item()
