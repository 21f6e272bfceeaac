"""The held-out text and where it is from."""

from importlib.resources import files

from veloxquant.benchmarks.text import prose


def test_the_text_is_prose_in_whole_paragraphs() -> None:
    text = prose()
    assert 32_000 < len(text.encode()) < 80_000
    paragraphs = text.strip().split("\n\n")
    assert all("\n" not in p for p in paragraphs)
    words = text.split()
    assert sum(len(p.split()) > 40 for p in paragraphs) > 50
    assert len(set(words)) > 2_000
    assert "{" not in text


def test_every_data_file_states_its_source() -> None:
    folder = files("veloxquant").joinpath("data")
    sources = folder.joinpath("SOURCES.md").read_text(encoding="utf-8")
    for item in folder.iterdir():
        if item.is_file() and item.name != "SOURCES.md":
            assert f"`{item.name}`" in sources
