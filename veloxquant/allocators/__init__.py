"""Who gets how many bits: components of a head, heads, layers."""
