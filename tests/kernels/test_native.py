"""Where the compiled kernel is used, what it reads, and what happens without it."""

import mlx.core as mx
import numpy as np
import pytest

from veloxquant.cache import attend as attend_module
from veloxquant.cache.attend import Fresh, attend
from veloxquant.cache.store import Store
from veloxquant.kernels import dispatch, native
from veloxquant.quantizers.codecs import codec_for
from veloxquant.quantizers.specs.affine import AffineChannelSpec, AffineTokenSpec
from veloxquant.quantizers.specs.codebook import CodebookSpec

pytestmark = pytest.mark.skipif(
    native.library() is None, reason="the optional compiled kernel was not built"
)
BITS = (1, 2, 3, 4, 5, 6, 8)


@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 1000])
def test_runs_that_start_and_stop_anywhere_agree(tokens):
    rows = mx.random.normal((1, 2, tokens + 40, 64))
    outs = []
    for where in ("native", "reference"):
        keys = Store(codec_for(AffineTokenSpec(4, 32), 64), 64)
        values = Store(codec_for(CodebookSpec(3, 1, unbiased=False), 64), 64)
        for store in (keys, values):
            store.append(rows)
            store.drop_front(25)
            store.trim(15)
            assert store.length == tokens
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dispatch, "route", lambda where=where, **_: where)
            outs.append(
                attend(rows[:, :, :1], [keys], [values], n_kv=2, v_dim=64, scale=0.2, mask=None)
            )
    np.testing.assert_allclose(outs[0], outs[1], atol=1e-5)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("tokens", [32, 96, 160])
def test_a_buffer_without_room_to_spare_is_not_read_past_its_end(bits, tokens):
    rows = mx.random.normal((1, 2, tokens, 64))
    grown = Store(codec_for(AffineChannelSpec(bits, 32), 64), 128)
    grown.append(rows)
    tight = Store(codec_for(AffineChannelSpec(bits, 32), 64), 128)
    tight.adopt(grown.compact())
    assert tight.capacity == tokens
    q = rows[:, :, :1]
    outs = [
        attend(q, [keys], [Fresh(rows)], n_kv=2, v_dim=64, scale=0.2, mask=None)
        for keys in (grown, tight)
    ]
    np.testing.assert_allclose(outs[0], outs[1], atol=1e-6)
    np.testing.assert_allclose(
        tight.decode(0, tokens, mx.float32), grown.decode(0, tokens, mx.float32), atol=1e-6
    )


def test_shapes_it_cannot_take_go_to_the_reference():
    assert dispatch.route(rows=dispatch.NATIVE_ROWS + 1, dim=64, mask=None) == "reference"
    assert dispatch.route(rows=1, dim=4096, mask=None) == "reference"
    assert dispatch.route(rows=1, dim=64, mask=mx.zeros((1, 2, 1, 4))) == "reference"
    assert dispatch.route(rows=1, dim=64, mask=None, use_kernels=False) == "reference"
    assert dispatch.route(rows=1, dim=64, mask="causal") == "native"


def test_without_the_library_attention_still_works(monkeypatch):
    monkeypatch.setattr(native, "library", lambda: None)
    x = Fresh(mx.ones((1, 1, 4, 32)))
    out = attend_module.attend(
        mx.ones((1, 1, 1, 32)), [x], [x], n_kv=1, v_dim=32, scale=1.0, mask=None
    )
    np.testing.assert_allclose(out, 1.0)
