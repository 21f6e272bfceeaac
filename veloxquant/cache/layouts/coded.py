"""Layouts of the methods that transform, correct or entropy-code whole blocks."""

from veloxquant.cache.layouts.base import SizeOf

HELD: dict[str, SizeOf] = {}
