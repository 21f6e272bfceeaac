"""The shapes of answers: whole objects, chunks, log probabilities, server-sent events."""

import json
import logging
import time
import uuid
from typing import Any

import msgspec

from veloxquant.worker.jobs import Delta, Job, Piece, TokenLogprob

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": waiting\n\n"


def event(data: dict[str, Any], name: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


class Shape:
    """Makes the JSON of one answer; keeps what several chunks of it have in common."""

    def __init__(self, job: Job, model_id: str, tokenizer: Any, tools: Any = None) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._tools = tools
        self._calls = 0
        self._text_length = 0
        kind = "chat.completion" if job.is_chat else "text_completion"
        self._object = kind
        self._base = {"id": job.id, "created": int(time.time()), "model": model_id}

    # ---- streams ----------------------------------------------------------------------------

    def opening(self) -> dict[str, Any] | None:
        """The first chunk of a chat names the role."""
        if not self._job.is_chat:
            return None
        return self._chunk({"index": 0, "delta": {"role": "assistant", "content": ""}})

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """What came new; the last one carries the finish reason."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": delta.finish}
        if self._job.is_chat:
            choice["delta"] = self._fields(delta.pieces, streaming=True)
            choice["logprobs"] = self._chat_logprobs(delta.logprobs)
        else:
            choice["text"] = "".join(piece.text for piece in delta.pieces)
            choice["logprobs"] = self._text_logprobs(delta.logprobs)
        return self._chunk(choice)

    def usage_chunk(self) -> dict[str, Any]:
        """The chunk with token counts that ends a stream on request."""
        return {**self._chunk({}), "choices": [], "usage": self.usage()}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._job.is_chat else self._object
        choice.setdefault("finish_reason", None)
        return {**self._base, "object": kind, "choices": [choice]}

    # ---- whole answers ----------------------------------------------------------------------

    def whole(self, deltas: list[Delta]) -> dict[str, Any]:
        """The answer in one object."""
        pieces = [piece for delta in deltas for piece in delta.pieces]
        logprobs = [entry for delta in deltas for entry in delta.logprobs]
        choice: dict[str, Any] = {"index": 0, "finish_reason": deltas[-1].finish}
        if self._job.is_chat:
            fields = self._fields(pieces, streaming=False)
            fields.setdefault("content", None if "tool_calls" in fields else "")
            choice["message"] = {"role": "assistant", **fields}
            choice["logprobs"] = self._chat_logprobs(logprobs)
        else:
            choice["text"] = "".join(piece.text for piece in pieces)
            choice["logprobs"] = self._text_logprobs(logprobs)
        return {**self._base, "object": self._object, "choices": [choice], "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Token counts."""
        read, made = len(self._job.prompt), self._job.output_tokens
        return {
            "prompt_tokens": read,
            "completion_tokens": made,
            "total_tokens": read + made,
            "prompt_tokens_details": {"cached_tokens": 0},
        }

    # ---- parts ------------------------------------------------------------------------------

    def _fields(self, pieces: list[Piece], *, streaming: bool) -> dict[str, Any]:
        out: dict[str, Any] = {}
        content = "".join(piece.text for piece in pieces if piece.channel == "normal")
        thought = "".join(piece.text for piece in pieces if piece.channel == "reasoning")
        if content:
            out["content"] = content
        if thought:
            out["reasoning_content"] = thought
        calls = [
            call
            for piece in pieces
            if piece.channel == "tool"
            for call in self._parse_call(piece.text, streaming=streaming)
        ]
        if calls:
            out["tool_calls"] = calls
        return out

    def _parse_call(self, text: str, *, streaming: bool) -> list[dict[str, Any]]:
        try:
            parsed = self._tokenizer.tool_parser(text, self._tools)
        except (ValueError, KeyError, TypeError, SyntaxError):
            logger.warning("A tool call could not be parsed", extra={"request": self._job.id})
            return []
        out = []
        for call in parsed if isinstance(parsed, list) else [parsed]:
            entry: dict[str, Any] = {
                "id": call.get("id") or f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": {
                    "name": call.get("name", ""),
                    "arguments": json.dumps(call.get("arguments", {}), ensure_ascii=False),
                },
            }
            if streaming:
                entry["index"] = self._calls
            self._calls += 1
            out.append(entry)
        return out

    def _token_text(self, token: int) -> str:
        return self._tokenizer.decode([token])

    def _chat_logprobs(self, entries: list[TokenLogprob]) -> dict[str, Any] | None:
        if self._job.top_logprobs is None:
            return None

        def one(token: int, value: float) -> dict[str, Any]:
            text = self._token_text(token)
            return {"token": text, "logprob": max(value, -9999.0), "bytes": list(text.encode())}

        return {
            "content": [
                {
                    **one(entry.token, entry.logprob),
                    "top_logprobs": [one(token, value) for token, value in entry.top],
                }
                for entry in entries
            ]
        }

    def _text_logprobs(self, entries: list[TokenLogprob]) -> dict[str, Any] | None:
        if self._job.top_logprobs is None:
            return None
        tokens = [self._token_text(entry.token) for entry in entries]
        offsets = []
        for text in tokens:
            offsets.append(self._text_length)
            self._text_length += len(text)
        return {
            "tokens": tokens,
            "token_logprobs": [max(entry.logprob, -9999.0) for entry in entries],
            "top_logprobs": [
                {self._token_text(token): max(value, -9999.0) for token, value in entry.top}
                for entry in entries
            ],
            "text_offset": offsets,
        }
