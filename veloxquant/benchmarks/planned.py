"""What was planned for each quantising method: its ratio, its widths, and where it must lose.

The rows themselves come from the method table; only figures and names of settings stand here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from veloxquant.cache.table import TABLE, MethodRow
from veloxquant.config.kv_cache import KVCacheConfig

PUBLISHED: Mapping[str, float] = {
    "turboquant_mse": 7.53,
    "turboquant_prod": 7.31,
    "turboquant_rvq": 7.53,
    "polar": 5.12,
    "qjl": 7.76,
    "vecinfer": 8.00,
    "spectral": 6.24,
    "kivi": 5.00,
    "kivi_sink": 4.69,
    "kitty": 4.59,
    "adakv": 4.57,
    "kvquant": 4.13,
    "skvq": 4.68,
    "nsnquant": 6.40,
    "zipcache": 5.1,
    "gear": 4.11,
    "cachegen": 3.9,
    "kvtc": 3.55,
    "age_tiered": 4.41,
    "amc": 3.80,
    "a2ats": 2.75,
    "anchorkv": 8.43,
    "svdq": 1.69,
}
"""Compression ratio by design at the defaults, D=128, 4,096 tokens, metadata included.

Without constants that layers or sequences share; cachegen with codes of fixed width, a2ats in
retrieval mode.
"""

PLAIN = frozenset(
    {"turboquant_mse", "turboquant_rvq", "kivi", "kivi_sink", "kitty", "adakv", "skvq",
     "age_tiered"}
)  # fmt: skip
"""Methods that are nothing but affine groups or one codebook: no slower than a dense cache."""

SLOW_ENCODERS = frozenset({"vecinfer"})
"""Methods that look every piece of a row up among thousands of vectors when they encode."""


@dataclass(frozen=True)
class Widths:
    """How a method is asked for `bits` bits a value.

    Attributes:
        fields: the settings that get `bits`, times `times` or, with `per_row`, times the head size.
        bits: what it is asked for.
        times: channels that share a code.
        per_row: whether the setting is a budget of a whole row.
        also: settings that must change with a width.
    """

    fields: tuple[str, ...]
    bits: tuple[int, ...] = (2, 3, 4)
    times: int = 1
    per_row: bool = False
    also: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)

    def settings(self, bits: int, dim: int) -> dict[str, Any]:
        """The fields of a configuration with `bits` bits for a head of `dim` channels."""
        value = bits * (dim if self.per_row else self.times)
        return dict.fromkeys(self.fields, value) | dict(self.also.get(bits, {}))


_INLIER = Widths(("bit_width_inlier",))
_PAIRS: Mapping[str, Any] = {"key_sub_dim": 2, "value_sub_dim": 2}

WIDTHS: Mapping[str, Widths] = {
    "turboquant_prod": _INLIER,
    "turboquant_mse": _INLIER,
    "turboquant_rvq": _INLIER,
    "polar": _INLIER,
    "qjl": _INLIER,
    "spectral": _INLIER,
    "kivi": Widths(("bit_width_inlier",), (2, 3, 4, 8)),
    "kivi_sink": _INLIER,
    "vecinfer": Widths(
        ("key_codebook_bits", "value_codebook_bits"), times=2, also=dict.fromkeys((2, 3, 4), _PAIRS)
    ),
    "kitty": Widths(("kitty_lo_bit",), (2, 4), also={4: {"kitty_hi_bit": 8}}),
    "adakv": Widths(("adakv_target_avg_bits",)),
    "kvquant": Widths(("kvquant_bits",)),
    "skvq": Widths(("skvq_bits_key", "skvq_bits_value")),
    "nsnquant": Widths(("nsn_bits",), (1, 2)),
    "zipcache": Widths(("zipcache_lo_bits",), also={4: {"zipcache_hi_bits": 8}}),
    "gear": Widths(("gear_bits",)),
    "cachegen": Widths(("cachegen_bits",)),
    "kvtc": Widths(("kvtc_bit_budget",), per_row=True),
    "palu": Widths(("palu_lo_bit",), also={4: {"palu_hi_bit": 8}}),
    "xquant": Widths(("xquant_base_bits",)),
    "xkv": Widths(("xkv_latent_bits",)),
    "age_tiered": Widths(("age_bits_old",)),
    "anchorkv": Widths(("anchorkv_residual_bits",)),
}
"""Methods with a setting of bits. qjl's are those of the values; its keys are signs always."""

EXPECTED_WORSE: Mapping[str, str] = {
    "qjl": "one sign a channel is too noisy for keys: a logit's variance is 1.57/m of the norms",
    "turboquant_prod": "the sign sketch has 3 to 5 times the variance of turboquant_mse",
    "anchorkv": "values are not explained by an anchor; turboquant_mse is better at 2 bits",
    "amc": "older tokens lose a quarter or half of their channels, which isotropic heads need",
    "vecinfer": "values get one bit a channel, which loses a third of their energy",
    "svdq": "values stay exact, and its schedule drops a tenth of the energy of the keys",
    "palu": "a tenth of the energy goes whatever the bits; values have flat spectra",
    "xquant": "with its default residual a layer that follows costs more than one of its own",
    "minicache": "merges layers and quantises nothing: a quarter less bytes at most",
    "xkv": "the bases that layers share weigh more than the tokens of a short context",
    "kvtc": "a budget of 512 bits a row is made for 128 channels; with 64 it is 8 bits and more",
    "a2ats": "saves reads, not bytes: one token in five is read exactly, the others by code",
}
"""Why a method may be worse than mlx-lm's cache at equal bytes, from what it was designed for."""

NO_LADDER: Mapping[str, str] = {
    "qjl": "the bits are those of the values, and the signs of the keys make nearly all the error",
}
"""Why more bits need not make a method's error smaller."""


def quantising() -> Iterator[MethodRow]:
    """Every ready row that keeps all tokens in fewer bits."""
    for row in TABLE.values():
        if row.is_ready and row.kind != "baseline" and row.trim != "until_evicted":
            yield row


def chosen(methods: tuple[str, ...]) -> list[MethodRow]:
    """The rows of some methods, all when none is named.

    Raises:
        ValueError: for a name that is no ready quantising method.
    """
    rows = {row.name: row for row in quantising()}
    if unknown := [name for name in methods if name not in rows]:
        raise ValueError(
            f"no quantising method is called {', '.join(unknown)}; ready: {', '.join(rows)}"
        )
    return [rows[name] for name in methods] if methods else list(rows.values())


def settings_of(
    name: str, dim: int, *, quick: bool
) -> list[tuple[int | None, bool, KVCacheConfig]]:
    """Width, whether these are the defaults, and configuration, for a head of `dim` channels.

    A width that the defaults have is listed once; None is the width of defaults that have none of
    those asked for. `quick` leaves the defaults and 4 bits.
    """
    base = KVCacheConfig(method=name).with_fields(head_dim=dim)
    out: list[tuple[int | None, bool, KVCacheConfig]] = []
    asked = WIDTHS.get(name)
    if asked is None:
        return [(None, True, base)]
    for bits in asked.bits:
        config = base.with_fields(**asked.settings(bits, dim))
        default = config == base
        if default or not quick or bits == 4:
            out.append((bits, default, config))
    if not any(default for _, default, _ in out):
        out.insert(0, (None, True, base))
    return out
