"""Classes of tokens: order, products, empty room behind the tokens."""

import mlx.core as mx
import pytest

from veloxquant.cache.paired import ClassStore
from veloxquant.quantizers.classed import ClassedCodec
from veloxquant.quantizers.codecs import codec_for
from veloxquant.quantizers.specs.affine import AffineChannelSpec, AffineTokenSpec
from veloxquant.quantizers.specs.plain import PlainSpec
from veloxquant.quantizers.specs.tiered import ClassedSpec, PrefixTokenSpec, ScaledTokenSpec

DIM = 48
SPECS = [
    ClassedSpec(64, ((10, PlainSpec()), (54, PlainSpec()))),
    ClassedSpec(64, ((32, AffineChannelSpec(6, 32)), (32, AffineChannelSpec(2, 32)))),
    ClassedSpec(64, ((0, AffineTokenSpec(4, 32)), (64, AffineTokenSpec(3, 32)))),
    ClassedSpec(64, ((7, ScaledTokenSpec(8, 64)), (57, ScaledTokenSpec(4, 64)))),
    ClassedSpec(
        64,
        tuple(
            (n, PrefixTokenSpec(bits, 32, share, 64, pairs=True))
            for n, bits, share in ((13, 8, 1.0), (20, 4, 0.5), (31, 4, 0.5))
        ),
    ),
]


def filled(spec: ClassedSpec, x: mx.array, step: int = 64) -> ClassStore:
    codec = codec_for(spec, DIM)
    assert isinstance(codec, ClassedCodec)
    store = ClassStore(codec, step)
    store.marks = codec.classes(-mx.linalg.norm(x, axis=-1))
    store.append(x)
    return store


def rows(n: int, seed: int = 1) -> mx.array:
    return mx.random.normal((2, 3, n, DIM), key=mx.random.key(seed))


@pytest.mark.parametrize("factor", [1e-6, 2.0**-10, 200.0])
def test_classes_of_small_rows_in_16_bits_are_those_of_their_norms(factor: float) -> None:
    """Their squares fit no 16-bit number."""
    codec = codec_for(SPECS[0], DIM)
    assert isinstance(codec, ClassedCodec)
    x = (rows(64) * factor).astype(mx.float16)
    wanted = codec.classes(-mx.linalg.norm(x.astype(mx.float32), axis=-1))
    assert mx.array_equal(codec.encode(x)["m"], codec.encode_marked(x, wanted, {})["m"]).item()


def test_rows_come_back_in_their_own_order() -> None:
    x = rows(192)
    assert mx.array_equal(filled(SPECS[0], x).decode(0, 192, mx.float32), x).item()
    part = filled(SPECS[0], x).decode(70, 150, mx.float32)
    assert mx.array_equal(part, x[:, :, 70:150]).item()


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.classes[0][1].name)
@pytest.mark.parametrize("step", [64, 256], ids=["full", "room"])
def test_products_are_those_of_the_decoded_rows(spec: ClassedSpec, step: int) -> None:
    store = filled(spec, rows(128), step)
    back = store.decode(0, 128, mx.float32)
    q, w = (mx.random.normal((2, 3, 5, n), key=mx.random.key(2)) for n in (DIM, 128))
    assert mx.allclose(store.scores(q), q @ back.swapaxes(-1, -2), atol=1e-4).item()
    assert mx.allclose(store.mix(w), w @ back, atol=1e-4).item()
    assert store.nbytes == 6 * spec.nbytes(store.capacity, DIM, 4)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.classes[0][1].name)
def test_classes_as_they_lie_hold_every_token_once(spec: ClassedSpec) -> None:
    store = filled(spec, rows(128), 256)
    views = store.by_class()
    assert [v.length for v in views] == [2 * n for n, _ in spec.classes if n]
    ordered = store.decode(0, 128, mx.float32).sum(axis=2)
    by_class = sum(v.decode(0, v.length, mx.float32).sum(axis=2) for v in views)
    assert mx.allclose(ordered, by_class, atol=1e-3).item()


def test_bytes_of_constants_count_once() -> None:
    one = ScaledTokenSpec(4, 64)
    both = ClassedSpec(64, ((7, ScaledTokenSpec(8, 64)), (57, one)))
    assert one.constant_nbytes(DIM, 2) == 2 * DIM
    apart = ScaledTokenSpec(8, 64).nbytes(7, DIM, 2) + one.nbytes(57, DIM, 2)
    assert both.nbytes(64, DIM, 2) == apart - 2 * DIM + 8
