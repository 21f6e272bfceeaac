"""Layouts of the methods that code vectors by codebooks of vectors."""

from veloxquant.cache.layouts.base import SizeOf

HELD: dict[str, SizeOf] = {}
