"""Differences between tokens: lossless, chosen by entropy, as small as estimated."""

import numpy as np
import pytest

from veloxquant.core.exceptions import CacheStateError
from veloxquant.quantizers import delta

BITS, TOP = 4, 15


def correlated(rho: float, tokens: int = 256, channels: int = 64, seed: int = 0) -> np.ndarray:
    """4-bit codes of AR(1) channels on one grid for all tokens of a chunk."""
    draw = np.random.default_rng(seed)
    x = np.empty((tokens, channels))
    x[0] = draw.standard_normal(channels)
    for t in range(1, tokens):
        x[t] = rho * x[t - 1] + np.sqrt(1 - rho**2) * draw.standard_normal(channels)
    low, high = x.min(axis=0), x.max(axis=0)
    return np.round((x - low) / (high - low) * TOP).astype(np.int32)


@pytest.mark.parametrize("mode", [delta.PLAIN, delta.ANCHOR, delta.CONSECUTIVE])
@pytest.mark.parametrize("group", [1, 8, 32, 256])
def test_differences_are_undone(mode: int, group: int) -> None:
    codes = correlated(0.5)
    symbols = delta.differences(codes, group, mode)
    np.testing.assert_array_equal(delta.restored(symbols, group, mode), codes)
    np.testing.assert_array_equal(symbols[::group], codes[::group])


@pytest.mark.parametrize(
    ("rho", "plain", "anchor", "consecutive"),
    [(0.0, 3.51, 4.09, 4.10), (0.5, 3.52, 4.09, 3.64), (0.9, 3.65, 4.07, 2.77),
     (0.97, 3.78, 3.90, 2.32)],
)  # fmt: skip
def test_published_entropies(rho: float, plain: float, anchor: float, consecutive: float) -> None:
    columns = correlated(rho, channels=512).T.reshape(-1, 1)
    bits = delta.mode_bits(columns, BITS, 32)[:, 0]
    assert bits == pytest.approx([plain, anchor, consecutive], abs=0.1)


def test_each_channel_picks_what_suits_it() -> None:
    codes = np.concatenate([correlated(0.0, channels=5), correlated(0.95, channels=5)], axis=1)
    modes = delta.choose_modes(codes, BITS, 32, use_delta=True)
    assert modes.tolist() == [delta.PLAIN] * 5 + [delta.CONSECUTIVE] * 5
    assert not delta.choose_modes(codes, BITS, 32, use_delta=False).any()


@pytest.mark.parametrize("channels", [1, 6, 64])
@pytest.mark.parametrize("rho", [0.0, 0.97])
@pytest.mark.parametrize("use_delta", [True, False])
def test_a_chunk_comes_back(channels: int, rho: float, use_delta: bool) -> None:
    codes = correlated(rho, channels=channels)
    data = delta.pack_chunk(codes, BITS, 32, use_delta=use_delta)
    np.testing.assert_array_equal(delta.unpack_chunk(data), codes)
    guess = delta.coded_bytes(codes, BITS, 32, use_delta=use_delta)
    assert len(data) == pytest.approx(guess, rel=0.02, abs=8)


@pytest.mark.parametrize("tokens", [31, 33, 252])
def test_a_last_short_group_comes_back(tokens: int) -> None:
    codes = correlated(0.9, tokens=tokens)
    data = delta.pack_chunk(codes, BITS, 32)
    np.testing.assert_array_equal(delta.unpack_chunk(data), codes)
    assert len(data) == pytest.approx(delta.coded_bytes(codes, BITS, 32), rel=0.02, abs=8)


def test_what_is_correlated_takes_less_room() -> None:
    plain, close = (len(delta.pack_chunk(correlated(r), BITS, 32)) for r in (0.0, 0.97))
    assert close < 0.75 * plain < correlated(0.0).size * BITS / 8


def test_damaged_chunks_are_refused() -> None:
    data = delta.pack_chunk(correlated(0.9), BITS, 32)
    for damaged in (data[:5], data[:-2], data[:40] + b"\xff" + data[41:], b""):
        with pytest.raises(CacheStateError):
            delta.unpack_chunk(damaged)
