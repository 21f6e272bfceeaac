import json
from typing import Any

from veloxquant.worker.jobs import Delta, Job, Piece
from veloxquant.worker.stream import Shape, event


class Tokenizer:
    def tool_parser(self, text: str, tools: Any) -> Any:
        return json.loads(text)


def shape(*, is_chat: bool = True) -> Shape:
    job = Job("id-1", [1, 2], 9, lambda _: None, is_chat=is_chat)
    return Shape(job, "m", Tokenizer())


CALL = '{"name": "add", "arguments": {"a": 1}}'


def test_thoughts_and_calls_have_their_own_fields() -> None:
    pieces = [Piece("reasoning", "hm"), Piece("normal", "I add."), Piece("tool", CALL)]
    whole = shape().whole([Delta(pieces, finish="tool_calls")])
    message = whole["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("I add.", "hm")
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert message["tool_calls"][0]["id"]
    assert "index" not in message["tool_calls"][0]
    assert whole["choices"][0]["finish_reason"] == "tool_calls"


def test_calls_in_a_stream_are_numbered() -> None:
    made = shape()
    chunks = [made.chunk(Delta([Piece("tool", CALL)])) for _ in range(2)]
    calls = [chunk["choices"][0]["delta"]["tool_calls"][0] for chunk in chunks]
    assert [call["index"] for call in calls] == [0, 1]
    assert calls[0]["id"] != calls[1]["id"]


def test_a_message_of_calls_alone_has_no_content() -> None:
    whole = shape().whole([Delta([Piece("tool", CALL)], finish="tool_calls")])
    assert whole["choices"][0]["message"]["content"] is None
    assert shape().whole([Delta(finish="stop")])["choices"][0]["message"]["content"] == ""


def test_a_call_that_cannot_be_parsed_is_left_out() -> None:
    whole = shape().whole([Delta([Piece("tool", "{")], finish="stop")])
    assert "tool_calls" not in whole["choices"][0]["message"]


def test_an_event_is_one_line_of_json() -> None:
    assert event({"a": "x\ny"}, "error") == b'event: error\ndata: {"a":"x\\ny"}\n\n'
