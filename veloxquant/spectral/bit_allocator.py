"""Bits by eigenvalue, under its documented name."""

from veloxquant.allocators.water_filling import water_fill_bits

__all__ = ["water_fill_bits"]
