import mlx.core as mx
import numpy as np
import pytest

from veloxquant.artifacts import InMemoryArtifactStore
from veloxquant.core.abstractions import Quantizer
from veloxquant.core.context import EncodedVector
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.quantizers.factory import QuantizerFactory

NAMES = (
    "qjl", "turboquant_mse", "turboquant_prod", "turboquant_prod_adaptive", "turboquant_rvq",
    "polar", "rabitq",
)  # fmt: skip
D = 64


def vectors(n: int = 40, d: int = D, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, d)).astype(np.float32)


@pytest.fixture(params=NAMES)
def quantizer(request: pytest.FixtureRequest) -> Quantizer:
    return QuantizerFactory.create(request.param, D)


def arrays(ev: EncodedVector) -> list[mx.array]:
    fields = (ev.indices, ev.norm, ev.signs, ev.residual_norm, ev.final_radius)
    return [a for a in (*fields, *(ev.angles or ())) if a is not None]


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_encoded_vectors_have_documented_shapes(quantizer: Quantizer, dtype: mx.Dtype) -> None:
    x = mx.array(vectors()).astype(dtype)
    ev = quantizer.encode(x)
    assert (ev.batch_size, ev.dim) == (40, D)
    assert ev.memory_bytes() == sum(a.nbytes for a in arrays(ev)) + 8 * hasattr(ev, "fitted")
    out = quantizer.decode(ev)
    assert (out.shape, out.dtype) == ((40, D), dtype)
    scores = quantizer.estimate_inner_product(x[:1], ev)
    assert (scores.shape, scores.dtype) == ((40,), dtype)
    assert mx.isfinite(out).all()
    assert mx.isfinite(scores).all()


def test_each_vector_is_coded_alone(quantizer: Quantizer) -> None:
    x = vectors()
    whole = quantizer.decode(quantizer.encode(x))
    for i in (0, 17):
        alone = quantizer.decode(quantizer.encode(x[i : i + 1]))
        assert mx.allclose(alone[0], whole[i], rtol=1e-4, atol=1e-4)


def test_zero_and_huge_vectors_are_safe(quantizer: Quantizer) -> None:
    x = mx.array(vectors(3)) * mx.array([[0.0], [1e6], [1e-8]])
    ev = quantizer.encode(x)
    out, scores = quantizer.decode(ev), quantizer.estimate_inner_product(x[1], ev)
    assert mx.isfinite(out).all()
    assert mx.isfinite(scores).all()
    assert mx.abs(out[0]).max() == 0
    assert scores[0] == 0
    huge = mx.full((1, D), 6e4, dtype=mx.float16)
    assert mx.isfinite(quantizer.decode(quantizer.encode(huge))).all()


def test_scale_passes_through(quantizer: Quantizer) -> None:
    x = vectors()
    one, big = (quantizer.decode(quantizer.encode(s * x)) for s in (1, 512))
    assert mx.allclose(512 * one, big, rtol=1e-3, atol=1e-2)


def test_an_empty_batch_gives_nothing(quantizer: Quantizer) -> None:
    ev = quantizer.encode(np.zeros((0, D), dtype=np.float32))
    assert quantizer.decode(ev).shape == (0, D)
    assert quantizer.estimate_inner_product(np.ones(D), ev).shape == (0,)


def test_other_shapes_are_refused(quantizer: Quantizer) -> None:
    with pytest.raises(ValueError, match=r"\(batch, 64\)"):
        quantizer.encode(np.zeros((2, D + 1)))
    with pytest.raises(ValueError, match="batch"):
        quantizer.encode(np.zeros(D))
    with pytest.raises(ValueError, match="query"):
        quantizer.estimate_inner_product(np.zeros((2, D)), quantizer.encode(np.zeros((2, D))))


def test_seed_decides(quantizer: Quantizer) -> None:
    x = vectors()
    kind = quantizer.encode(x).quantizer_type
    same, other = (QuantizerFactory.create(kind, D, seed=s) for s in (42, 43))
    decoded = quantizer.decode(quantizer.encode(x))
    assert mx.array_equal(decoded, same.decode(same.encode(x)))
    assert not mx.allclose(decoded, other.decode(other.encode(x)), atol=1e-3)


def test_another_quantizers_vectors_are_refused() -> None:
    ev = QuantizerFactory.create("qjl", D).encode(vectors())
    with pytest.raises(ValueError, match="'qjl' without 'indices'"):
        QuantizerFactory.create("turboquant_mse", D).decode(ev)


def test_documented_examples_work() -> None:
    for name, given in (
        ("qjl", {"m": 128}), ("turboquant_mse", {"b": 2}), ("turboquant_prod", {"b": 3, "m": 128}),
        ("polar", {"b": 2}),
    ):  # fmt: skip
        made = QuantizerFactory.create(name, d=128, seed=42, **given)
        assert made.decode(made.encode(vectors(d=128))).shape == (40, 128)


def test_factory_refuses_what_cannot_work() -> None:
    with pytest.raises(KeyError, match="turbo"):
        QuantizerFactory.create("turbo", D)
    for given in ({"d": 0}, {"d": 64, "b": 0}, {"d": 64, "b": 9}, {"d": 64, "store": object()}):
        with pytest.raises(QuantizerConfigError):
            QuantizerFactory.create("turboquant_mse", **given)  # pyright: ignore[reportArgumentType]
    with pytest.raises(QuantizerConfigError, match="2\\^n_levels"):
        QuantizerFactory.create("polar", 24)
    with pytest.raises(QuantizerConfigError, match="m="):
        QuantizerFactory.create("qjl", D, m=0)


def test_matrices_come_from_the_store() -> None:
    store = InMemoryArtifactStore()
    store.save_rotation_matrix(np.eye(D), D, 42)
    store.save_codebook([-1.0, 0.0, 1.0, 2.0], "gaussian", 2, D)
    made = QuantizerFactory.create("turboquant_mse", D, store=store)
    one_hot = np.eye(D, dtype=np.float32)[:1]
    assert made.decode(made.encode(one_hot)).tolist() == one_hot.tolist()
