"""Eigenbases of keys and values: finding them, keeping them, and what they tell."""
