"""Scalar codebooks: documented classes over the tables of `veloxquant.math`."""
