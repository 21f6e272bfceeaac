"""The sanitiser: nothing that moves a terminal or breaks a layout comes through."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veloxquant.panel import text

HOSTILE = (
    "\x1b[31mred\x1b[0m",
    "\x1b]0;owned\x07",
    "\x1b]52;c;aGk=\x1b\\",
    "\x9b31m",
    "nul\x00byte",
    "del\x7f",
    "rtl\u202eevil\u2066x",
    "line\u2028sep\u2029par",
    "[red]x[/blue]",
    "[@click=app.quit]here[/]",
    "lone\ud800surrogate",
    "tag\U000e0041",
    "cr\roverwrite",
    "bell\x07",
)


@pytest.mark.parametrize("hostile", HOSTILE)
def test_clean_leaves_only_printable_text(hostile):
    for out in (text.clean(hostile), text.clean_block(hostile).replace("\n", "")):
        assert all(unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in out)
        out.encode()


@given(st.text(st.characters(), max_size=200))
def test_any_text_is_cleaned_and_encodable(given_text):
    out = text.clean(given_text)
    assert "\n" not in out
    assert not any(ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0 for c in out)
    out.encode()


@given(st.text(max_size=60), st.integers(0, 30), st.booleans())
def test_fit_never_takes_more_cells_than_given(given_text, cells, tail):
    assert text.width(text.fit(given_text, cells, tail=tail)) <= cells


def test_clean_text_is_returned_as_it_is():
    line = "plain ascii and ünïcödé 漢字"
    assert text.clean(line) == line


def test_symbols_say_what_was_there():
    assert text.clean("\x1b[2J") == "␛[2J"
    assert text.clean("a\x7fb") == "a␡b"
    assert text.clean("a\u202eb") == "a‹202e›b"
    assert text.clean("a\nb\tc\rd") == "a⏎b  cd"


def test_blocks_keep_their_lines():
    assert text.clean_block("a\r\nb\tc\x00") == "a\nb    c␀"


def test_length_is_capped():
    assert len(text.clean("x" * 100_000)) == text.MAX_LINE + 1
    assert text.clean_block("y" * 500_000).endswith("cut after 400,000 characters")


def test_markup_is_not_parsed():
    assert text.content("[red]x[/blue]").plain == "[red]x[/blue]"
    assert not text.content("[red]x[/red]").spans


def test_wide_characters_are_measured_in_cells():
    assert text.width("漢字") == 4
    assert text.fit("漢字漢字", 5) == "漢字…"
    assert text.fit("abcdef", 4) == "abc…"
    assert text.fit("abcdef", 4, tail=True) == "…def"
    assert text.pad("漢", 4) == "漢  "
    assert text.pad("ab", 4, right=True) == "  ab"
