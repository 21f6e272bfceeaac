from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.generate import TextStateMachine

from veloxquant.worker.jobs import Piece
from veloxquant.worker.text import Answer, StopScanner


def drive(scanner: StopScanner, parts: list[str]) -> tuple[str, bool]:
    out = ""
    for part in parts:
        safe, stopped = scanner.feed(part)
        out += safe
        if stopped:
            return out, True
    return out + scanner.flush(), False


@given(
    st.lists(st.text("abc", max_size=4), max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_however_the_text_is_cut_it_ends_before_the_first_stop(
    parts: list[str], stops: list[str]
) -> None:
    text = "".join(parts)
    out, stopped = drive(StopScanner(stops), parts)
    assert stopped == any(stop in text for stop in stops)
    if not stopped:
        assert out == text
    else:
        assert text.startswith(out)
        assert not any(stop in out for stop in stops)
        assert any(stop in text[: len(out) + 4] for stop in stops)


@given(st.lists(st.text("abc", max_size=3), max_size=8))
def test_text_that_may_become_a_stop_is_held_back(parts: list[str]) -> None:
    scanner, text, shown = StopScanner(["abcab"]), "", ""
    for part in parts:
        safe, stopped = scanner.feed(part)
        text, shown = text + part, shown + safe
        if stopped:
            return
        longest = max(n for n in range(5) if text.endswith("abcab"[:n]))
        assert shown == text[: len(text) - longest]


class Letters:
    """A detokenizer whose tokens are byte strings."""

    def __init__(self, tokens: list[bytes]) -> None:
        self.table, self.raw, self.offset = tokens, b"", 0

    def add_token(self, token: int) -> None:
        self.raw += self.table[token]

    def finalize(self) -> None:
        self.final = True

    @property
    def last_segment(self) -> str:
        text = self.raw.decode("utf-8", "replace")
        if not hasattr(self, "final"):
            text = text.rstrip("\ufffd")
        segment = text[self.offset :]
        self.offset = len(text)
        return segment


def test_half_a_character_is_never_shown() -> None:
    euro = "€".encode()
    answer = Answer(Letters([euro[:1], euro[1:2], euro[2:], b"x"]))
    assert answer.feed(3)[0] == [Piece("normal", "x")]
    assert answer.feed(0)[0] == []
    assert answer.feed(1)[0] == []
    assert answer.feed(2)[0] == [Piece("normal", "€")]
    assert answer.feed(0)[0] == []
    assert answer.finish(stopped=False) == []


def test_a_detokenizer_that_fails_at_the_end_loses_only_the_end() -> None:
    class Broken(Letters):
        def finalize(self) -> None:
            raise KeyError("<")

    answer = Answer(Broken([b"whole", b"\xe2"]), stops=("ole!",))
    assert answer.feed(0)[0] == [Piece("normal", "wh")]
    answer.feed(1)
    assert answer.finish(stopped=False) == [Piece("normal", "ole")]


MACHINE: dict[str, Any] = {
    "normal": [("<think>", "reasoning"), ("<call>", "tool")],
    "reasoning": [("</think>", "normal")],
    "tool": [("</call>", "normal")],
}


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_thoughts_and_calls_go_to_their_channels(size: int) -> None:
    text = "<think>hm</think>Well: <call>{1}</call><call>{2}</call> done"
    parts = [text[i : i + size].encode() for i in range(0, len(text), size)]
    answer = Answer(Letters(parts), (), TextStateMachine(MACHINE))
    pieces = [piece for i in range(len(parts)) for piece in answer.feed(i)[0]]
    pieces += answer.finish(stopped=False)
    assert [p.text for p in pieces if p.channel == "tool"] == ["{1}", "{2}"]
    assert "".join(p.text for p in pieces if p.channel == "reasoning") == "hm"
    assert "".join(p.text for p in pieces if p.channel == "normal") == "Well:  done"
    assert answer.made_tool_call


def test_a_call_that_is_cut_short_still_comes_out() -> None:
    answer = Answer(Letters([b"<call>{1"]), (), TextStateMachine(MACHINE))
    assert answer.feed(0)[0] + answer.finish(stopped=False) == [Piece("tool", "{1")]


def test_a_prompt_that_opened_a_thought_starts_in_it() -> None:
    answer = Answer(Letters([b"so</think>yes"]), (), TextStateMachine(MACHINE), "reasoning")
    pieces = answer.feed(0)[0] + answer.finish(stopped=False)
    assert pieces == [Piece("reasoning", "so"), Piece("normal", "yes")]
