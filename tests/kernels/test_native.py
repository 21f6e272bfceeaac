"""The compiled kernel agrees with the array operations for every format, shape and mask."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from veloxquant.cache import attend as attend_module
from veloxquant.cache.attend import Fresh, attend
from veloxquant.cache.store import Store
from veloxquant.kernels import dispatch, native
from veloxquant.quantizers.codecs import codec_for
from veloxquant.quantizers.sizes import (
    AffineChannelSpec,
    AffineTokenSpec,
    CodebookSpec,
    PlainSpec,
)

pytestmark = pytest.mark.skipif(
    native.library() is None, reason="the optional compiled kernel was not built"
)
BITS = (1, 2, 3, 4, 5, 6, 8)
BY_TOKEN = [
    PlainSpec(),
    *(AffineTokenSpec(b, g) for b in BITS for g in (32, 64)),
    *(CodebookSpec(b, 42, unbiased=True) for b in BITS[:-1]),
]
KEYS = [*BY_TOKEN, *(AffineChannelSpec(b, g) for b in BITS for g in (32, 64, 128))]


def largest_difference(key_spec, value_spec, *, batch, repeat, length, dim, v_dim, tokens, dtype,
                       sinks, mask="causal", seed=0):  # fmt: skip
    """Largest difference between both routes on random rows."""
    key = mx.random.split(mx.random.key(seed), 6)
    heads = 2
    held_k, held_v = Store(codec_for(key_spec, dim), 128), Store(codec_for(value_spec, v_dim), 128)
    held_k.append(mx.random.normal((batch, heads, tokens, dim), key=key[0]).astype(dtype))
    held_v.append(mx.random.normal((batch, heads, tokens, v_dim), key=key[1]).astype(dtype))
    fresh_k = Fresh(mx.random.normal((batch, heads, length, dim), key=key[2]).astype(dtype))
    fresh_v = Fresh(mx.random.normal((batch, heads, length, v_dim), key=key[3]).astype(dtype))
    q = mx.random.normal((batch, heads * repeat, length, dim), key=key[4])
    edge = mx.random.normal((heads * repeat,), key=key[5]) if sinks else None
    total = tokens + length
    if mask == "bool":
        mask = mx.random.uniform(shape=(batch, 1, length, total), key=key[5]) > 0.3
        mask[..., -1:] = True
    elif mask == "additive":
        mask = mx.random.normal((length, total), key=key[5])
    elif length == 1:
        mask = None
    outs = []
    for where in ("native", "reference"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dispatch, "route", lambda where=where, **_: where)
            outs.append(
                attend(
                    q, [held_k, fresh_k], [held_v, fresh_v], n_kv=heads, v_dim=v_dim,
                    scale=dim**-0.5, mask=mask, sinks=edge,
                )
            )  # fmt: skip
    return mx.abs(outs[0] - outs[1]).max().item()


@pytest.mark.parametrize("spec", KEYS, ids=lambda s: s.describe())
def test_keys_of_every_format_agree(spec):
    assert largest_difference(
        spec, PlainSpec(), batch=1, repeat=3, length=1, dim=64, v_dim=64, tokens=384,
        dtype=mx.float32, sinks=False,
    ) < 1e-5  # fmt: skip


@pytest.mark.parametrize("spec", BY_TOKEN, ids=lambda s: s.describe())
def test_values_of_every_format_agree(spec):
    assert largest_difference(
        PlainSpec(), spec, batch=3, repeat=4, length=1, dim=64, v_dim=64, tokens=256,
        dtype=mx.float32, sinks=True,
    ) < 1e-5  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    key_spec=st.sampled_from(KEYS),
    value_spec=st.sampled_from(BY_TOKEN),
    batch=st.sampled_from([1, 3]),
    repeat=st.sampled_from([1, 3, 4, 8]),
    length=st.sampled_from([1, 1, 2, 3]),
    dim=st.sampled_from([64, 80, 96, 128, 256]),
    v_dim=st.sampled_from([64, 80, 128]),
    tokens=st.sampled_from([128, 256, 1024, 4096]),
    mask=st.sampled_from(["causal", "causal", "bool", "additive"]),
    dtype=st.sampled_from([mx.float32, mx.bfloat16, mx.float16]),
    sinks=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
def test_any_mix_of_formats_and_shapes_agrees(**case):
    assert largest_difference(**case) < 1e-5


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
