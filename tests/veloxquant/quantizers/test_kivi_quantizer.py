import mlx.core as mx
import numpy as np
import pytest

from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.quantizers.factory import QuantizerFactory
from veloxquant.quantizers.kivi import KIVIQuantizer

X = np.random.default_rng(0).standard_normal((70, 48)).astype(np.float32)


@pytest.mark.parametrize("axis", ["channel", "token"])
@pytest.mark.parametrize("b", [1, 2, 4, 8])
def test_error_is_at_most_half_a_step(axis: str, b: int) -> None:
    made = KIVIQuantizer(48, b, axis=axis)  # pyright: ignore[reportArgumentType]
    ev = made.encode(X)
    back = np.array(made.decode(ev))
    lines, error = (X, back - X) if axis == "channel" else (X.T, (back - X).T)
    for start in range(0, len(lines), 32):
        group = lines[start : start + 32]
        step = (group.max(0) - group.min(0)) / ((1 << b) - 1)
        assert np.all(np.abs(error[start : start + 32]) <= step / 2 + 1e-5)
    groups = {"channel": (3, 48), "token": (2, 70)}[axis]
    assert ev.norm.shape == ev.residual_norm.shape == groups
    assert ev.memory_bytes() == X.size + 8 * groups[0] * groups[1]
    q = X[3]
    assert np.allclose(made.estimate_inner_product(q, ev), back @ q, atol=1e-4)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_type_stays_and_flat_groups_come_back(dtype: mx.Dtype) -> None:
    made = KIVIQuantizer(8, 2)
    x = mx.full((40, 8), 3.5).astype(dtype)
    back = made.decode(made.encode(x))
    assert back.dtype == dtype
    assert mx.array_equal(back, x)
    wide = mx.array([[-6e4] * 8, [6e4] * 8]).astype(dtype)
    assert mx.isfinite(made.decode(made.encode(wide))).all()


@pytest.mark.parametrize("axis", ["channel", "token"])
def test_an_empty_batch_gives_nothing(axis: str) -> None:
    made = QuantizerFactory.create("kivi", 40, axis=axis)
    assert made.decode(made.encode(np.zeros((0, 40)))).shape == (0, 40)


def test_what_is_not_finite_or_not_possible_is_refused() -> None:
    bad = X.copy()
    bad[3, 4] = np.inf
    with pytest.raises(ValueError, match="finite"):
        KIVIQuantizer(48).encode(bad)
    for given in ({"b": 0}, {"b": 9}, {"group_size": 0}, {"axis": "row"}):
        with pytest.raises(QuantizerConfigError):
            KIVIQuantizer(48, **given)
