"""Compiled kernels for the hot paths, and the one decision whether to use them."""
