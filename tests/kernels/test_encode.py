"""The compiled encoders write what the array operations write."""

import mlx.core as mx
import numpy as np
import pytest

from veloxquant.kernels import encode, native
from veloxquant.quantizers.codecs import codec_for
from veloxquant.quantizers.specs.affine import AffineChannelSpec, AffineTokenSpec
from veloxquant.quantizers.specs.codebook import CodebookSpec

pytestmark = pytest.mark.skipif(
    native.library() is None, reason="the optional compiled kernel was not built"
)
BITS = (1, 3, 4, 5, 6, 8)
SPECS = [
    *(AffineTokenSpec(b, 32) for b in BITS),
    *(AffineChannelSpec(b, 64) for b in BITS),
    *(CodebookSpec(b, 42, unbiased=u) for b in range(1, 7) for u in (True, False)),
]


def both(spec, x):
    """Packed arrays of the compiled encoder and of the array operations."""
    codec = codec_for(spec, x.shape[-1])
    compiled = codec.encode(x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode, "affine", lambda *_, **__: None)
        patch.setattr(encode, "rotated", lambda *_, **__: None)
        reference = codec.encode(x)
    return codec, compiled, reference


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize(
    "spec", SPECS, ids=lambda s: f"{s.describe()} {getattr(s, 'unbiased', '')}"
)
def test_encoders_agree(spec, dtype):
    x = (3 * mx.random.normal((2, 3, 128, 64), key=mx.random.key(5))).astype(dtype)
    codec, compiled, reference = both(spec, x)
    assert {n: (a.shape, a.dtype) for n, a in compiled.items()} == {
        n: (a.shape, a.dtype) for n, a in reference.items()
    }
    # Rounding of the rotation may move a coordinate across a threshold, never more than rarely.
    same = mx.mean((compiled["w"] == reference["w"]).astype(mx.float32)).item()
    assert same > 0.995
    errors = [
        mx.square(codec.decode(p, mx.float32) - x.astype(mx.float32)).mean().item()
        for p in (compiled, reference)
    ]
    assert errors[0] == pytest.approx(errors[1], rel=2e-3, abs=1e-9)


@pytest.mark.parametrize(
    "spec", SPECS, ids=lambda s: f"{s.describe()} {getattr(s, 'unbiased', '')}"
)
def test_encoders_take_zeros_constants_and_large_rows(spec):
    rows = np.zeros((1, 1, 128, 64), dtype=np.float32)
    rows[0, 0, 1] = 7.5
    rows[0, 0, 2] = 1e6
    rows[0, 0, 3, 5] = -1e-38
    codec, compiled, _ = both(spec, mx.array(rows))
    out = np.array(codec.decode(compiled, mx.float32))
    assert np.isfinite(out).all()
    if codec.spec.token_local:
        assert np.abs(out[0, 0, 0]).max() == 0


@pytest.mark.parametrize(
    "spec", SPECS, ids=lambda s: f"{s.describe()} {getattr(s, 'unbiased', '')}"
)
def test_encoders_code_a_token_alike_alone_and_in_company(spec):
    if not spec.token_local:
        pytest.skip("tokens of this format share a scale")
    x = mx.random.normal((2, 2, 33, 128), key=mx.random.key(1))
    codec = codec_for(spec, 128)
    whole = codec.encode(x)
    for i in (0, 31, 32):
        alone = codec.encode(x[:, :, i : i + 1])
        for name, a in alone.items():
            assert mx.array_equal(a, whole[name][:, :, i : i + 1])
