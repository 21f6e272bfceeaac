"""The held-out text of the quality benchmarks."""

from importlib.resources import files


def prose() -> str:
    """English prose in the public domain, one paragraph a line; see `data/SOURCES.md`."""
    return files("veloxquant").joinpath("data", "prose.txt").read_text(encoding="utf-8")
