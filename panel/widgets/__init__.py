"""Widgets that draw values; none of them does I/O."""
