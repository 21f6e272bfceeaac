"""From tokens to the text a client may see: whole characters, no stop string, no control marks."""

from collections.abc import Sequence
from typing import Any

from mlx_lm.generate import TextStateMachine

from veloxquant.worker.jobs import Channel, Piece

_HALF = "\N{REPLACEMENT CHARACTER}"


class StopScanner:
    """Finds the first stop string; holds back text that may be the start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Text that is safe to show, and whether a stop string ended the answer."""
        if not self._stops:
            return text, False
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            safe, self._held = self._held[: min(found)], ""
            return safe, True
        keep = self._partial_length()
        cut = len(self._held) - keep
        safe, self._held = self._held[:cut], self._held[cut:]
        return safe, False

    def flush(self) -> str:
        """What was held back, now that nothing follows."""
        held, self._held = self._held, ""
        return held

    def _partial_length(self) -> int:
        longest = max(map(len, self._stops)) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0


class Answer:
    """The text of one answer, token by token.

    Args:
        detokenizer: a fresh streaming detokenizer.
        stops: strings that end the answer and are not part of it.
        machine: splits reasoning and tool calls from the answer; None leaves the text as it is.
        starts_in: the channel in which the prompt ended.
    """

    def __init__(
        self,
        detokenizer: Any,
        stops: Sequence[str] = (),
        machine: TextStateMachine | None = None,
        starts_in: Channel = "normal",
    ) -> None:
        self._detokenizer = detokenizer
        self._scanner = StopScanner(stops)
        self._state = machine.make_state(starts_in) if machine else None
        self._tool_text = ""
        self._in_tool = False
        self.made_tool_call = False

    def feed(self, token: int) -> tuple[list[Piece], bool]:
        """Pieces that became certain with one more token, and whether a stop string was met."""
        self._detokenizer.add_token(token)
        safe, stopped = self._scanner.feed(self._detokenizer.last_segment)
        return self._split(safe), stopped

    def finish(self, *, stopped: bool) -> list[Piece]:
        """Last pieces; after a stop string only what stood before it was ever given out."""
        tail = ""
        if not stopped:
            tail = self._last_text()
        pieces = self._split(tail)
        if self._state is not None:
            self._state, rest, channel = TextStateMachine.flush(self._state)
            pieces += self._sort([(channel, rest)])
        if self._in_tool:
            pieces += self._end_of_tool()
        return pieces

    def _last_text(self) -> str:
        try:
            self._detokenizer.finalize()
        except KeyError:
            # mlx-lm's byte decoder does not know the marks of a special token that follows half
            # a character; the text before it was given out already
            return self._scanner.flush()
        rest, stopped = self._scanner.feed(self._detokenizer.last_segment.rstrip(_HALF))
        return rest if stopped else rest + self._scanner.flush()

    def _split(self, text: str) -> list[Piece]:
        if self._state is None:
            return [Piece("normal", text)] if text else []
        self._state, segments = TextStateMachine.split(self._state, text)
        return self._sort(segments)

    def _sort(self, segments: Sequence[tuple[str | None, str]]) -> list[Piece]:
        out: list[Piece] = []
        for channel, text in segments:
            if channel == "tool":
                self._in_tool = True
                self._tool_text += text
                continue
            if self._in_tool:
                out += self._end_of_tool()
            if text:
                out.append(Piece("reasoning" if channel == "reasoning" else "normal", text))
        return out

    def _end_of_tool(self) -> list[Piece]:
        self._in_tool = False
        text, self._tool_text = self._tool_text, ""
        if not text.strip():
            return []
        self.made_tool_call = True
        return [Piece("tool", text)]
