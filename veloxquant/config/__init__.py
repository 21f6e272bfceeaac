"""Configuration objects, free of MLX."""
