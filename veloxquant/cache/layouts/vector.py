"""Layouts of the methods that code vectors by codebooks of vectors."""

from veloxquant.cache.layouts.base import SizeOf, sizes_of
from veloxquant.cache.plans import (
    Absolute,
    AtOnce,
    LayerPlan,
    Schedule,
    StreamPlan,
    Trailing,
    WholeBlocks,
)
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import Unsaid
from veloxquant.quantizers.sizes import BODY_STEP, Held, LayerShape, store_bytes
from veloxquant.quantizers.specs.affine import AffineTokenSpec
from veloxquant.quantizers.specs.vector import NSNSpec, RetrievalSpec, VectorSpec


def vecinfer_window(config: KVCacheConfig) -> int:
    """Newest tokens kept exact: none unless somebody gave a `residual_length`, whatever number."""
    given = config.residual_length
    return 0 if isinstance(given, Unsaid) else given


def vecinfer_plan(
    config: KVCacheConfig, *, key_codebook: bool | None = None, value_codebook: bool | None = None
) -> LayerPlan:
    """Every token coded when it arrives, or when it leaves the window.

    A side without a trained codebook carries a scale a token; whether there is one is read from the
    configuration unless given.
    """
    window = vecinfer_window(config)
    schedule: Schedule = Trailing(window) if window else AtOnce()
    trained_keys = config.key_codebook is not None if key_codebook is None else key_codebook
    trained_values = config.value_codebook is not None if value_codebook is None else value_codebook
    keys = VectorSpec(
        config.key_sub_dim, config.key_codebook_bits, "hadamard", scaled=not trained_keys
    )
    values = VectorSpec(config.value_sub_dim, config.value_codebook_bits, scaled=not trained_values)
    return LayerPlan(StreamPlan(keys, schedule), StreamPlan(values, schedule))


def nsnquant_plan(config: KVCacheConfig) -> LayerPlan:
    """Keys and values alike in chunks at absolute positions; a rest of a chunk waits exact."""
    chunk = config.nsn_residual_length
    spec = NSNSpec(config.nsn_bits, chunk, config.nsn_subvector_dim, config.nsn_seed)
    stream = StreamPlan(spec, WholeBlocks(chunk))
    return LayerPlan(stream, stream)


A2ATS_SINKS = 4
"""First tokens that a2ats keeps exact."""
PAYLOAD_BITS, PAYLOAD_GROUP = 4, 32


def a2ats_plan(config: KVCacheConfig) -> LayerPlan:
    """Sinks and a window exact, tokens between in 4 bits; their codes stand beside."""
    stream = StreamPlan(
        AffineTokenSpec(PAYLOAD_BITS, PAYLOAD_GROUP),
        Absolute(A2ATS_SINKS, Trailing(config.a2ats_window)),
        A2ATS_SINKS,
    )
    return LayerPlan(stream, stream)


def a2ats_codes(config: KVCacheConfig, *, given: bool | None = None) -> RetrievalSpec:
    """The codes of far keys; whether their codebook is given is read from the configuration."""
    have = config.a2ats_codebook is not None if given is None else given
    return RetrievalSpec(config.a2ats_sub_dim, config.a2ats_codebook_bits, fitted=not have)


def coded_tokens(spec: RetrievalSpec, body: int) -> int:
    """Far tokens that have codes: all, or none before the codebook can be fitted."""
    return body if body >= spec.fit_tokens else 0


def a2ats_held(config: KVCacheConfig, shape: LayerShape, tokens: int, decoded: int = 0) -> Held:
    """The two streams and the codes."""
    del decoded
    plan, spec = a2ats_plan(config), a2ats_codes(config)
    base = plan.held(shape, tokens)
    coded = coded_tokens(spec, plan.keys.rows(tokens)[1])
    more = shape.n_kv_heads * store_bytes(spec, coded, BODY_STEP, shape.k_dim, shape.itemsize)
    return base.plus(more)


HELD: dict[str, SizeOf] = {
    **sizes_of({"vecinfer": vecinfer_plan, "nsnquant": nsnquant_plan}),
    "a2ats": a2ats_held,
}
