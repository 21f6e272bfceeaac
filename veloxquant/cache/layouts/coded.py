"""Layouts of the methods that transform, correct or entropy-code whole blocks."""

from dataclasses import dataclass

from veloxquant.cache.layouts.base import SizeOf, everything, sizes_of
from veloxquant.cache.plans import Absolute, After, LayerPlan, StreamPlan, WholeBlocks
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.sizes import BODY_STEP, WINDOW_STEP, store_bytes
from veloxquant.quantizers.specs.affine import AffineChannelSpec, AffineTokenSpec
from veloxquant.quantizers.specs.coded import (
    PROJECTED,
    ChunkSpec,
    CorrectedSpec,
    SymmetricSpec,
    TransformSpec,
)
from veloxquant.quantizers.specs.plain import PlainSpec

GEAR_GROUPS = 4
"""Groups of keys that share low-rank factors: more factors than that cost too much room."""
KVTC_SINKS = 4
"""First tokens, whose atypical rows would spoil the covariance."""
CACHEGEN_CHUNK = 256
CACHEGEN_BITS = (2, 3, 4, 5, 6, 8)
CACHEGEN_SINKS = 4
"""First tokens, whose extremes would widen the step of a whole chunk."""


@dataclass(frozen=True)
class Never:
    """Every token stays exact."""

    def frontier(self, tokens: int) -> int:
        """None."""
        del tokens
        return 0


@dataclass(frozen=True)
class OpenedPlan(StreamPlan):
    """Layout `[sinks][opening][body][window]`: the first block is short by the sinks.

    Blocks of the body then begin at multiples of their size, counted from the first token on.
    """

    def rows(self, tokens: int) -> tuple[int, ...]:
        """Tokens in sinks, opening, body and window once `tokens` were seen."""
        sinks, coded, window = super().rows(tokens)
        opening = min(coded, self.spec.block - self.n_sink)
        return sinks, opening, coded - opening, window

    def nbytes(self, tokens: int, dim: int, itemsize: int) -> int:
        """Bytes of one head, growth steps included."""
        plain = PlainSpec()
        sinks, opening, body, window = self.rows(tokens)
        return (
            store_bytes(plain, sinks, self.n_sink, dim, itemsize)
            + store_bytes(self.spec, opening, self.spec.block, dim, itemsize)
            + store_bytes(self.spec, body, BODY_STEP, dim, itemsize)
            + store_bytes(plain, window, WINDOW_STEP, dim, itemsize)
        )


def gear_plan(config: KVCacheConfig) -> LayerPlan:
    """Blocks of four groups of tokens: keys per channel, values per token, both corrected."""
    bits, group = config.gear_bits, config.gear_group_size
    block = GEAR_GROUPS * group

    def corrected(base: AffineChannelSpec | AffineTokenSpec) -> StreamPlan:
        spec = CorrectedSpec(
            base, block, config.gear_rank, config.gear_energy_threshold,
            config.gear_sparse_fraction,
        )  # fmt: skip
        return StreamPlan(spec, WholeBlocks(block))

    keys = corrected(AffineChannelSpec(bits, group))
    if not config.gear_quantize_values:
        return LayerPlan(keys, StreamPlan(PlainSpec(), Never()))
    return LayerPlan(keys, corrected(AffineTokenSpec(bits, group)))


def kvtc_plan(config: KVCacheConfig) -> LayerPlan:
    """Exact until the basis is fitted, then components of whole blocks behind exact sinks."""
    spec = TransformSpec(config.kvtc_bit_budget, tuple(config.kvtc_bit_choices), config.kvtc_beta)
    blocks = Absolute(KVTC_SINKS, WholeBlocks(PROJECTED))
    stream = StreamPlan(spec, After(spec.fit_tokens + PROJECTED, blocks), KVTC_SINKS)
    return LayerPlan(stream, stream)


def cachegen_bits(config: KVCacheConfig, layer: int = 0, n_layers: int = 1) -> int:
    """Bits of one layer: more in the first layers, as many fewer in the last.

    Steps up and down cancel over the layers, so a model takes what its mean width takes.
    """
    if config.cachegen_resolved_bits is not None:
        return _packed_width(config.cachegen_resolved_bits)
    base, groups = _packed_width(config.cachegen_bits), config.cachegen_layer_groups
    size = n_layers // groups
    if size == 0 or groups == 1:
        return base
    place = min(layer, n_layers - 1 - layer) // size
    offset = max(0, groups // 2 - place)
    while base + offset not in CACHEGEN_BITS or base - offset not in CACHEGEN_BITS:
        offset -= 1
    return base + offset if 2 * layer < n_layers else base - offset


def _packed_width(width: int) -> int:
    """The width that is stored: MLX's words have no seven bits."""
    return 8 if width == 7 else width


def cachegen_plan(config: KVCacheConfig, layer: int = 0, n_layers: int = 1) -> LayerPlan:
    """Chunks by channel that end at multiples of 256 tokens, or every token by itself.

    The first tokens are exact sinks, and the first chunk holds what is left of its 256 tokens.
    """
    width = cachegen_bits(config, layer, n_layers)
    if not config.cachegen_per_channel:
        return LayerPlan(everything(SymmetricSpec(width)), everything(SymmetricSpec(width)))
    spec = ChunkSpec(width, CACHEGEN_CHUNK)
    chunks = Absolute(CACHEGEN_SINKS, WholeBlocks(CACHEGEN_CHUNK))
    stream = OpenedPlan(spec, chunks, CACHEGEN_SINKS)
    return LayerPlan(stream, stream)


HELD: dict[str, SizeOf] = sizes_of(
    {"gear": gear_plan, "kvtc": kvtc_plan, "cachegen": cachegen_plan}
)
