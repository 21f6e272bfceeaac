import itertools
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from veloxquant.codebooks.base import CodebookFactory
from veloxquant.core.context import QuantizationContext
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.handlers import (
    BitPackingHandler,
    NormalizationHandler,
    OutlierSplitHandler,
    PolarTransformHandler,
    QJLResidualHandler,
    QuantizationHandler,
    RotationHandler,
    ScalarQuantizerHandler,
    ValueQuantizerHandler,
)
from veloxquant.preconditioners import PreconditionerFactory, QJLEncoder
from veloxquant.quantizers.turboquant_mse import TurboQuantMSE
from veloxquant.transforms import RecursivePolarTransform

D = 32
X = np.random.default_rng(0).standard_normal((6, D)).astype(np.float32)


def chain(*stages: QuantizationHandler) -> QuantizationHandler:
    for first, second in itertools.pairwise(stages):
        assert first.set_next(second) is second
    return stages[0]


def encode(stage: QuantizationHandler, x: Any) -> QuantizationContext:
    return stage.handle(QuantizationContext(x_original=x, mode="encode", x_current=x))


def decode(stage: QuantizationHandler, ctx: QuantizationContext) -> mx.array:
    ctx.mode = "decode"
    return stage.handle(ctx).x_current


def test_a_chain_is_the_quantizer() -> None:
    quantizer = TurboQuantMSE(D, 2)

    def stages() -> tuple[QuantizationHandler, ...]:
        return (
            NormalizationHandler(), RotationHandler(quantizer.rotation),
            ScalarQuantizerHandler(quantizer.codebook), BitPackingHandler(2, D),
        )  # fmt: skip

    ctx = encode(chain(*stages()), X)
    ev = quantizer.encode(X)
    assert mx.array_equal(ctx.indices, ev.indices)
    assert ctx.packed_bits.shape == (6, D // 4)
    ctx.indices = None
    back = decode(chain(*reversed(stages())), ctx)
    assert mx.allclose(back, quantizer.decode(ev), atol=1e-5)


@pytest.mark.parametrize("b", range(1, 9))
def test_packing_comes_back(b: int) -> None:
    codes = np.random.default_rng(b).integers(0, 1 << b, (3, 13)).astype(np.uint8)
    ctx = QuantizationContext(codes, "encode", codes, indices=mx.array(codes))
    BitPackingHandler(b, 13).handle(ctx)
    assert ctx.packed_bits.shape == (3, -(-13 * b // 8))
    ctx.indices = None
    decode(BitPackingHandler(b, 13), ctx)
    assert np.array_equal(np.array(ctx.indices), codes)


def test_packing_refuses_indices_that_do_not_fit() -> None:
    ctx = QuantizationContext(X, "encode", X, indices=np.full((1, 4), 4))
    with pytest.raises(ValueError, match="2 bits"):
        BitPackingHandler(2, 4).handle(ctx)


@pytest.mark.parametrize("as_mx", [True, False])
def test_outliers_are_set_aside_and_put_back(as_mx: bool) -> None:
    x = mx.array(X).astype(mx.bfloat16) if as_mx else X
    stage = OutlierSplitHandler(np.array([30, 2]))
    ctx = encode(stage, x)
    assert ctx.x_current.shape == (6, D - 2)
    assert ctx.outlier_idx.tolist() == [30, 2]
    assert ctx.metadata["x_outlier"].tolist() == x[:, [30, 2]].tolist()
    back = decode(stage, ctx)
    assert back.dtype == x.dtype
    assert back.tolist() == x.tolist()
    with pytest.raises(QuantizerConfigError):
        OutlierSplitHandler(np.array([1, 1]))
    with pytest.raises(ValueError, match="length"):
        encode(OutlierSplitHandler(np.array([D])), x)


def test_sketch_covers_what_the_codebook_left() -> None:
    encoder = QJLEncoder(PreconditionerFactory.create("jl", D, 16).matrix)
    stage = chain(ScalarQuantizerHandler(CodebookFactory.create("gaussian", 2, 1)),
                  QJLResidualHandler(encoder))  # fmt: skip
    ctx = encode(stage, X)
    signs, norm = encoder.encode_key(X - np.array(ctx.x_current))
    assert mx.array_equal(ctx.signs, signs)
    assert mx.allclose(ctx.residual_norm, norm)
    with pytest.raises(ValueError, match="QJLResidualHandler needs x_pre_quant"):
        encode(QJLResidualHandler(encoder), X)


def test_polar_stage_comes_back() -> None:
    stage = PolarTransformHandler(RecursivePolarTransform(3))
    ctx = encode(stage, X)
    assert len(ctx.angles) == 3
    ctx.x_current = None
    assert mx.allclose(decode(stage, ctx), mx.array(X), atol=1e-5)


def test_values_are_eight_bit() -> None:
    x = X.copy()
    x[0] = 0
    stage = ValueQuantizerHandler()
    ctx = encode(stage, x)
    assert ctx.x_current.dtype == mx.int8
    error = np.abs(np.array(decode(stage, ctx)) - x)
    assert np.all(error <= np.abs(x).max(1, keepdims=True) / 254 + 1e-7)
    assert stage.handler_name == "ValueQuantizerHandler"


def test_unknown_modes_are_refused() -> None:
    with pytest.raises(ValueError, match="mode"):
        NormalizationHandler().handle(QuantizationContext(X, "both", X))
