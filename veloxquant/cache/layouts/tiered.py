"""Layouts of the methods that code tokens by class or by age."""

from veloxquant.cache.layouts.base import SizeOf

HELD: dict[str, SizeOf] = {}
