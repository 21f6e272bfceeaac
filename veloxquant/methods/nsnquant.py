"""nsnquant: normalise, shift, normalise, rotate; then one codebook for everything.

Each chunk of `nsn_residual_length` tokens is normalised so far that it looks like independent
normal numbers; a codebook of 8 channels, trained once on such numbers, codes it, at 1 bit with
signed entries, at 2 bits with magnitudes and a plane of signs. The rest of a chunk waits exact.
No calibration.
Source: Son, Choi and Yoo, NSNQuant, 2025, arXiv 2505.18231. Differs: scales in the input's type,
where the paper quantises them once more; the codebook's size follows from the bits; the buffers
grow past `nsn_max_ctx`, which is only checked.
"""

from veloxquant.cache.composed import ComposedCache
from veloxquant.cache.context import LayerContext
from veloxquant.cache.layouts.vector import nsnquant_plan
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.quantizers.sizes import LayerShape


class NSNQuantKVCache(ComposedCache):
    """Codes, signs, two scales a token and a mean a chunk, behind the rest of a chunk."""

    @property
    def quantized_tokens(self) -> int:
        """Tokens in whole chunks."""
        return self.keys_stream.body.length


def build(config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> NSNQuantKVCache:
    """The cache of one layer."""
    sub = config.nsn_subvector_dim
    for dim in (shape.k_dim, shape.v_dim):
        if dim % sub:
            raise QuantizerConfigError(
                f"codes of {sub} channels do not divide heads of {dim}; set nsn_subvector_dim to "
                f"a divisor of {dim} and nsn_codebook_size to 2 to the power of it"
            )
    return NSNQuantKVCache(nsnquant_plan(config), shape, config.method)
