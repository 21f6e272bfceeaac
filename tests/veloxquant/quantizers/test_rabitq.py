import mlx.core as mx
import numpy as np
import pytest

from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.quantizers.rabitq import RaBitQQuantizer

D = 128


def gaussian(n: int, seed: int = 0, d: int = D) -> np.ndarray:
    return np.random.default_rng(1000 + seed).standard_normal((n, d)).astype(np.float32)


def test_correction_has_the_known_law() -> None:
    factor = np.array(RaBitQQuantizer(D).encode(gaussian(4000)).residual_norm, dtype=np.float64)
    assert factor.mean() == pytest.approx(0.7990, abs=0.003)
    assert factor.std() == pytest.approx(0.0188, abs=0.002)


def test_products_are_unbiased_with_the_known_spread() -> None:
    x, q = gaussian(100, 1), gaussian(100, 2)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    q /= np.linalg.norm(q, axis=1, keepdims=True)
    truth, found = [], []
    for seed in range(20):
        made = RaBitQQuantizer(D, seed=seed)
        back = np.array(made.decode(made.encode(x)))
        factor = np.array(made.encode(x).residual_norm, dtype=np.float64)[:, None] ** 2
        found.append(q @ (back / factor).T)
        truth.append(q @ x.T)
    row = q[0]
    assert np.allclose(made.estimate_inner_product(row, made.encode(x)), found[-1][0], atol=1e-3)
    truth, found = np.concatenate(truth), np.concatenate(found)
    assert D * np.square(found - truth).mean() == pytest.approx(0.581, rel=0.1)
    assert (found * truth).sum() / np.square(truth).sum() == pytest.approx(1, abs=0.03)


def test_bound_holds() -> None:
    made, q = RaBitQQuantizer(D), gaussian(30, 3)
    x = gaussian(300, 4)
    ev = made.encode(x)
    wrong = sum(
        (np.abs(np.array(made.estimate_inner_product(row, ev)) - x @ row)
         > np.array(made.error_bound(row, ev, eps=3.0))).sum()
        for row in q
    )  # fmt: skip
    assert wrong < 0.01 * 30 * 300


def test_decode_keeps_what_one_bit_can() -> None:
    x = gaussian(300)
    made = RaBitQQuantizer(D)
    back = np.array(made.decode(made.encode(x)))
    error = (np.square(back - x).sum(1) / np.square(x).sum(1)).mean()
    assert error == pytest.approx(0.36, rel=0.03)


def test_centres_carry_a_constant_shift() -> None:
    shift = 5 * gaussian(1, 9)
    x, q = gaussian(200), gaussian(1, 8)[0]
    plain = RaBitQQuantizer(D, nlist=1).fit(x)
    moved = RaBitQQuantizer(D, nlist=1).fit(x + shift)
    a = np.array(plain.estimate_inner_product(q, plain.encode(x)))
    b = np.array(moved.estimate_inner_product(q, moved.encode(x + shift)))
    assert np.allclose(b, a + float(shift[0] @ q), atol=2e-2)


def test_a_key_at_its_centre_is_exact() -> None:
    x = np.tile(gaussian(1), (4, 1))
    made = RaBitQQuantizer(D, nlist=1).fit(x)
    ev = made.encode(x)
    assert np.abs(np.array(ev.norm)).max() < 1e-4
    assert np.allclose(np.array(made.decode(ev)), x, atol=1e-4)
    q = gaussian(1, 2)[0]
    assert np.allclose(np.array(made.estimate_inner_product(q, ev)), x @ q, atol=1e-3)


def clustered(n: int = 2000, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    centres = 4 * rng.standard_normal((20, D))
    return (centres[rng.integers(0, 20, n)] + rng.standard_normal((n, D))).astype(np.float32)


def test_search_finds_the_best_keys() -> None:
    x = clustered()
    made = RaBitQQuantizer(D, nlist=20, nprobe=4, rerank=200).fit(x)
    assert made.trained
    ev = made.encode(x)
    hits = 0
    for q in clustered(10, 1):
        found = np.array(made.search(q, ev, top_k=10))
        assert len(np.unique(found)) == 10
        scores = np.array(made.estimate_inner_product(q, ev))[found]
        assert np.all(np.diff(scores) <= 1e-3)
        best = np.argsort(-(x @ q))[:100]
        hits += np.isin(found, best).sum()
    assert hits > 80


def test_search_gives_as_many_as_asked_for() -> None:
    x = clustered(100)
    made = RaBitQQuantizer(D, nlist=50, nprobe=1, rerank=1).fit(x)
    ev = made.encode(x)
    assert made.search(x[0], ev, top_k=30).shape == (30,)
    assert sorted(made.search(x[0], ev, top_k=500).tolist()) == list(range(100))
    assert RaBitQQuantizer(D).search(x[0], RaBitQQuantizer(D).encode(x), 3).shape == (3,)
    with pytest.raises(ValueError, match="top_k"):
        made.search(x[0], ev, top_k=0)


@pytest.mark.parametrize("d", [8, 20, 80, 128])
def test_ratio_counts_every_byte(d: int) -> None:
    x = mx.array(gaussian(64, d=d)).astype(mx.float16)
    made = RaBitQQuantizer(d, nlist=4)
    assert made.compression_ratio == pytest.approx(64 * 2 * d / made.encode(x).memory_bytes())
    made.fit(x)
    assert made.compression_ratio == pytest.approx(64 * 2 * d / made.encode(x).memory_bytes())


def test_wrong_use_is_refused() -> None:
    made = RaBitQQuantizer(D)
    with pytest.raises(ValueError, match="lists"):
        made.fit(gaussian(10))
    with pytest.raises(ValueError, match="finite"):
        made.fit(np.full((100, D), np.nan))
    with pytest.raises(QuantizerConfigError, match="nlist"):
        RaBitQQuantizer(D, nlist=0)
    fitted = RaBitQQuantizer(D, nlist=2).fit(gaussian(50))
    with pytest.raises(ValueError, match="has none"):
        made.decode(fitted.encode(gaussian(3)))
