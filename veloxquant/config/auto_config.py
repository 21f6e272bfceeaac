"""A configuration for a workload and a machine, by documented rules of thumb.

The rules look at memory and length only; `vq fit` weighs methods by what they really hold.
"""

from dataclasses import dataclass

import psutil

from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import GEAROptions, KIVIOptions, KVQuantOptions

SHORT_CONTEXT_TOKENS = 2048
LONG_CONTEXT_TOKENS = 16384
LARGE_HEAD_DIM = 256
MEMORY_PRESSURE_FRACTION = 0.75
_GROUP, _LARGE_GROUP = 32, 64


@dataclass(frozen=True)
class WorkloadSpec:
    """What a cache has to serve: sizes of the model, tokens, and sequences at once."""

    head_dim: int = 128
    seq_len: int = 4096
    n_layers: int = 1
    batch_size: int = 1
    n_kv_heads: int = 1

    def fp16_kv_bytes(self) -> int:
        """Bytes of all keys and values in 16 bits."""
        rows = self.n_layers * self.batch_size * self.n_kv_heads * self.seq_len
        return 2 * 2 * rows * self.head_dim


@dataclass(frozen=True)
class HardwareInfo:
    """Memory of the device in bytes: all of it, None where unknown, and what is in use."""

    total_memory_bytes: int | None = None
    active_memory_bytes: int = 0

    def pressure_fraction(self, additional_bytes: int) -> float | None:
        """Share of the memory in use with so many bytes more; None where the total is unknown."""
        if not self.total_memory_bytes:
            return None
        return (self.active_memory_bytes + additional_bytes) / self.total_memory_bytes


@dataclass(frozen=True)
class AutoConfigResult:
    """The configuration, and why it is that one."""

    config: KVCacheConfig
    reason: str


def detect_hardware_info() -> HardwareInfo:
    """Memory of this machine, at most what Metal recommends, and what MLX has in use.

    Without MLX nothing is known.
    """
    try:
        import mlx.core as mx  # only here: a configuration needs no MLX
    except ImportError:
        return HardwareInfo()
    recommended = mx.device_info().get("max_recommended_working_set_size")
    total = psutil.virtual_memory().total
    if recommended:
        total = min(total, int(recommended))
    return HardwareInfo(total, mx.get_active_memory())


def select_kv_cache_config(
    workload: WorkloadSpec, hardware: HardwareInfo | None = None
) -> AutoConfigResult:
    """Pick method and widths: first by memory, then by length.

    Args:
        workload: what the cache has to serve.
        hardware: the machine, this one if None.

    Returns:
        gear at 2 bits when the cache in 16 bits would take the memory in use to
        `MEMORY_PRESSURE_FRACTION` of all; else turboquant_rvq at 4 bits for short contexts, kvquant
        at 3 for long ones, kivi at 2 between. Groups are 64 wide for large heads, 32 for others.
    """
    machine = hardware if hardware is not None else detect_hardware_info()
    group = _LARGE_GROUP if workload.head_dim >= LARGE_HEAD_DIM else _GROUP
    tokens = workload.seq_len
    pressure = machine.pressure_fraction(workload.fp16_kv_bytes())
    if pressure is not None and pressure >= MEMORY_PRESSURE_FRACTION:
        options = GEAROptions(gear_bits=2, gear_group_size=group)
        config = KVCacheConfig(method="gear", head_dim=workload.head_dim, options=options)
        why = f"in 16 bits this cache would bring memory to {pressure:.0%}: gear at 2 bits"
    elif tokens < SHORT_CONTEXT_TOKENS:
        config = KVCacheConfig(
            method="turboquant_rvq", head_dim=workload.head_dim, bit_width_inlier=4
        )
        why = f"{tokens} tokens are few: turboquant_rvq at 4 bits"
    elif tokens >= LONG_CONTEXT_TOKENS:
        options = KVQuantOptions(kvquant_bits=3, kvquant_group_size=group)
        config = KVCacheConfig(method="kvquant", head_dim=workload.head_dim, options=options)
        why = f"{tokens} tokens are many: kvquant at 3 bits, outliers exact"
    else:
        options = KIVIOptions(kivi_group_size=group)
        config = KVCacheConfig(
            method="kivi", head_dim=workload.head_dim, bit_width_inlier=2, options=options
        )
        why = f"{tokens} tokens: kivi at 2 bits"
    return AutoConfigResult(config, why)
