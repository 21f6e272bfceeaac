"""THE table of methods: 43 published ones and the fp16 baseline, without MLX.

Everything that lists, explains, checks or builds methods reads it. A method is added by a row
here, an options class in `config/options.py` and a module under `methods/`.
"""

import importlib
from dataclasses import dataclass
from typing import Any, Literal

from veloxquant.cache.layouts import HELD
from veloxquant.cache.layouts.base import SizeOf
from veloxquant.config import validate
from veloxquant.config.common_fields import READERS
from veloxquant.config.kv_cache import EVICTION_STORAGE, KVCacheConfig
from veloxquant.config.options import (
    A2ATSOptions,
    AdaKVOptions,
    AgeTieredKVOptions,
    AMCOptions,
    AnchorKVOptions,
    CacheGenOptions,
    CaMOptions,
    ChunkKVOptions,
    CurDKVOptions,
    GEAROptions,
    H2OOptions,
    KeyformerOptions,
    KittyOptions,
    KIVIOptions,
    KVQuantOptions,
    KVTCOptions,
    KVzipOptions,
    L2NormOptions,
    MiniCacheOptions,
    MorphKVOptions,
    NestedKVOptions,
    NSNQuantOptions,
    PALUOptions,
    PyramidKVOptions,
    QFiltersOptions,
    RocketKVOptions,
    SKVQOptions,
    SnapKVOptions,
    SpectralQuantOptions,
    SqueezeAttentionOptions,
    StreamingLLMOptions,
    SVDqOptions,
    TOVAOptions,
    VecInferOptions,
    XKVOptions,
    XQuantOptions,
    ZipCacheOptions,
)
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.quantizers.sizes import Held, LayerShape

Kind = Literal["baseline", "quantization", "eviction", "hybrid"]
Trim = Literal["exact", "lossy", "until_evicted"]


@dataclass
class NoOptions:
    """Methods that are set through common fields only."""


@dataclass(frozen=True, slots=True)
class MethodRow:
    """What is known about one method without loading it.

    `held` gives bytes, rows and prefill peak of one layer and one sequence; None while the method
    is planned. `queries` says which true queries its score reads, `trim` what rewinding keeps,
    `couples` how many layers share state.
    """

    name: str
    kind: Kind
    module: str
    options: type
    held: SizeOf | None
    queries: Literal["none", "last", "window", "all"]
    trim: Trim
    calibration: Literal["none", "optional", "required"]
    couples: int
    status: Literal["ready", "planned"]
    blurb: str
    source: str

    @property
    def is_ready(self) -> bool:
        """Whether caches of this method can be built."""
        return self.status == "ready"

    @property
    def row_forms(self) -> tuple[str, ...]:
        """Forms that kept rows may have (`eviction_storage`); none where every token is kept."""
        return EVICTION_STORAGE if self.name in READERS["eviction_storage"] else ()

    def check(self, config: KVCacheConfig) -> None:
        """Raise `QuantizerConfigError` when the configuration cannot work with this method."""
        validate.check(config, self.options)

    def load(self) -> Any:
        """The method's module.

        Raises:
            QuantizerConfigError: while the method is planned.
        """
        if not self.is_ready:
            ready = ", ".join(row.name for row in TABLE.values() if row.is_ready)
            raise QuantizerConfigError(
                f"method {self.name!r} is documented but not built yet; ready methods: {ready}"
            )
        return importlib.import_module(self.module)


def _row(
    name: str,
    kind: Kind,
    options: type,
    queries: Any,
    trim: Trim,
    calibration: Any,
    couples: int,
    status: Any,
    blurb: str,
    source: str,
) -> MethodRow:
    return MethodRow(
        name, kind, f"veloxquant.methods.{name}", options, HELD.get(name), queries, trim,
        calibration, couples, status, blurb, source,
    )  # fmt: skip


_ROWS = (
    _row("fp16", "baseline", NoOptions, "none", "exact", "none", 1, "ready",
         "Keys and values as the model made them", ""),
    _row("turboquant_prod", "quantization", NoOptions, "none", "exact", "none", 1, "ready",
         "Rotated codebook with a sign sketch of the residual", "TurboQuant, arXiv 2504.19874"),
    _row("turboquant_mse", "quantization", NoOptions, "none", "exact", "none", 1, "ready",
         "Rotated Lloyd–Max codebook", "TurboQuant, arXiv 2504.19874"),
    _row("turboquant_rvq", "quantization", NoOptions, "none", "exact", "none", 1, "ready",
         "Rotated two-stage codebook; no calibration, any bit width", "derived from TurboQuant, arXiv 2504.19874"),
    _row("polar", "quantization", NoOptions, "none", "exact", "none", 1, "ready",
         "Polar angles of rotated vectors", "PolarQuant, arXiv 2502.02617"),
    _row("qjl", "quantization", NoOptions, "none", "exact", "none", 1, "ready",
         "One-bit sign sketch of keys", "QJL, arXiv 2406.03482"),
    _row("vecinfer", "quantization", VecInferOptions, "none", "exact", "optional", 1, "ready",
         "Product quantization after a dual transform", "VecInfer, arXiv 2510.06175"),
    _row("spectral", "quantization", SpectralQuantOptions, "none", "exact", "optional", 1, "ready",
         "Eigenbasis with two bit regimes", "SpectralQuant"),
    _row("kivi", "quantization", KIVIOptions, "none", "lossy", "none", 1, "ready",
         "Keys per channel, values per token, newest tokens exact", "KIVI, arXiv 2402.02750"),
    _row("kivi_sink", "hybrid", KIVIOptions, "none", "lossy", "none", 1, "ready",
         "kivi with the first tokens exact", "KIVI, arXiv 2402.02750; KVSink, arXiv 2508.04257"),
    _row("svdq", "quantization", SVDqOptions, "none", "lossy", "none", 1, "ready",
         "Key latents in mixed bits", "SVDq, arXiv 2502.15304"),
    _row("kitty", "quantization", KittyOptions, "none", "lossy", "none", 1, "ready",
         "Two bits with boosted key channels", "Kitty, arXiv 2511.18643"),
    _row("adakv", "quantization", AdaKVOptions, "none", "lossy", "none", 1, "ready",
         "Bits by head importance", "name of Ada-KV, arXiv 2407.11550"),
    _row("xquant", "quantization", XQuantOptions, "none", "lossy", "none", 2, "ready",
         "Codes shared by neighbouring layers", "XQuant, arXiv 2510.11236"),
    _row("kvquant", "quantization", KVQuantOptions, "none", "lossy", "optional", 1, "ready",
         "Non-uniform levels with sparse outliers", "KVQuant, arXiv 2401.18079"),
    _row("palu", "quantization", PALUOptions, "none", "lossy", "none", 1, "ready",
         "Low-rank latents by head group", "Palu, arXiv 2407.21118"),
    _row("cachegen", "quantization", CacheGenOptions, "none", "lossy", "none", 1, "ready",
         "Codes of whole chunks; entropy-coded for transport", "CacheGen, arXiv 2310.07240"),
    _row("minicache", "hybrid", MiniCacheOptions, "none", "lossy", "none", 2, "ready",
         "Directions merged over layer pairs", "MiniCache, arXiv 2405.14366"),
    _row("gear", "quantization", GEAROptions, "none", "lossy", "none", 1, "ready",
         "kivi with low-rank and sparse correction", "GEAR, arXiv 2403.05527"),
    _row("zipcache", "hybrid", ZipCacheOptions, "none", "lossy", "none", 1, "ready",
         "Bits by token saliency", "ZipCache, arXiv 2405.14256"),
    _row("snapkv", "eviction", SnapKVOptions, "window", "until_evicted", "none", 1, "ready",
         "Prompt tokens kept by the attention of the last queries", "SnapKV, arXiv 2404.14469"),
    _row("streaming_llm", "eviction", StreamingLLMOptions, "none", "until_evicted", "none", 1, "ready",
         "First tokens and a recent window", "StreamingLLM, arXiv 2309.17453"),
    _row("h2o", "eviction", H2OOptions, "all", "until_evicted", "none", 1, "ready",
         "Heavy hitters by summed attention", "H2O, arXiv 2306.14048"),
    _row("tova", "eviction", TOVAOptions, "last", "until_evicted", "none", 1, "ready",
         "Drop what the last query attends to least", "TOVA, arXiv 2401.06104"),
    _row("pyramidkv", "eviction", PyramidKVOptions, "window", "until_evicted", "none", 1, "ready",
         "Budgets that shrink with depth", "PyramidKV, arXiv 2406.02069"),
    _row("squeeze", "eviction", SqueezeAttentionOptions, "window", "until_evicted", "none", 1, "ready",
         "Layers whose attention changes the stream least hold fewer rows", "SqueezeAttention, arXiv 2404.04793"),
    _row("chunkkv", "eviction", ChunkKVOptions, "window", "until_evicted", "none", 1, "ready",
         "Whole chunks kept or dropped", "ChunkKV, arXiv 2502.00299"),
    _row("cam", "eviction", CaMOptions, "all", "until_evicted", "none", 1, "ready",
         "Losers merged into survivors", "CaM, ICML 2024"),
    _row("xkv", "eviction", XKVOptions, "none", "lossy", "none", 2, "ready",
         "Token latents shared by layers", "xKV, arXiv 2503.18893"),
    _row("nsnquant", "quantization", NSNQuantOptions, "none", "lossy", "none", 1, "ready",
         "Normalise, shift, normalise, then a universal codebook", "NSNQuant, arXiv 2505.18231"),
    _row("knorm", "eviction", L2NormOptions, "none", "until_evicted", "none", 1, "ready",
         "Keep keys of small norm", "L2 norm, arXiv 2406.11430"),
    _row("skvq", "hybrid", SKVQOptions, "none", "lossy", "optional", 1, "ready",
         "Reordered channels, clipped groups", "SKVQ, arXiv 2405.06219"),
    _row("qfilters", "eviction", QFiltersOptions, "none", "until_evicted", "optional", 1, "ready",
         "Projection on the query direction", "Q-Filters, arXiv 2503.02812"),
    _row("keyformer", "eviction", KeyformerOptions, "all", "until_evicted", "none", 1, "ready",
         "Noise-regularised heavy hitters", "Keyformer, arXiv 2403.09054"),
    _row("morphkv", "eviction", MorphKVOptions, "window", "until_evicted", "none", 1, "ready",
         "Constant size by correlation with recent tokens", "MorphKV, arXiv 2503.00979"),
    _row("kvzip", "eviction", KVzipOptions, "all", "until_evicted", "none", 1, "ready",
         "Keep what the context needs to repeat itself", "KVzip, arXiv 2505.23416"),
    _row("kvtc", "quantization", KVTCOptions, "none", "lossy", "optional", 1, "ready",
         "Principal components with optimal bits", "KVTC, arXiv 2511.01815"),
    _row("curdkv", "eviction", CurDKVOptions, "none", "until_evicted", "none", 1, "ready",
         "Leverage scores of keys and values", "CurDKV, arXiv 2509.15038"),
    _row("nestedkv", "eviction", NestedKVOptions, "none", "until_evicted", "none", 1, "ready",
         "Anomaly at several scales, heads compete", "NestedKV, arXiv 2605.26678"),
    _row("amc", "hybrid", AMCOptions, "none", "lossy", "optional", 1, "ready",
         "Saliency tiers of rank and bits", "library design"),
    _row("a2ats", "hybrid", A2ATSOptions, "all", "lossy", "optional", 1, "ready",
         "Position-free vector codes with retrieval", "A2ATS, arXiv 2502.12665"),
    _row("anchorkv", "hybrid", AnchorKVOptions, "none", "lossy", "none", 1, "ready",
         "Anchor tokens and residual codes", "library design"),
    _row("rocketkv", "hybrid", RocketKVOptions, "window", "until_evicted", "none", 1, "ready",
         "Coarse eviction, then pages picked at read", "RocketKV, arXiv 2502.14051"),
    _row("age_tiered", "quantization", AgeTieredKVOptions, "none", "lossy", "none", 1, "ready",
         "Fewer bits for older tokens", "library design"),
)  # fmt: skip

TABLE: dict[str, MethodRow] = {row.name: row for row in _ROWS}


def row_of(method: str) -> MethodRow:
    """The row of one method.

    Raises:
        QuantizerConfigError: for an unknown name, with the nearest known ones.
    """
    if found := TABLE.get(method):
        return found
    import difflib

    near = difflib.get_close_matches(method, TABLE, n=3)
    hint = f"; did you mean {' or '.join(near)}?" if near else f"; known: {', '.join(TABLE)}"
    raise QuantizerConfigError(f"unknown method {method!r}{hint}")


def held(config: KVCacheConfig, shape: LayerShape, tokens: int, decoded: int = 0) -> Held:
    """Bytes, rows and prefill peak of one layer and one sequence under `config`.

    The last `decoded` of its `tokens` tokens came one by one, behind a prompt that was complete.

    Raises:
        QuantizerConfigError: for an unknown method, a setting out of range, or a planned method.
    """
    row = row_of(config.method)
    row.check(config)
    if row.held is None:
        row.load()
        raise QuantizerConfigError(f"method {row.name!r} gives no size")
    return row.held(config, shape, tokens, decoded)
