"""Formats by name and parameters: one MLX-free file a family."""
