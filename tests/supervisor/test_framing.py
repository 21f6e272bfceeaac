import asyncio
import contextlib
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from veloxquant.supervisor.framing import (
    HEADER,
    FrameDecoder,
    TruncatedError,
    pack,
    read_frame,
    recv_frame,
    send_frame,
)
from veloxquant.supervisor.messages import (
    MAX_MESSAGE_BYTES,
    Beat,
    Command,
    Done,
    Hello,
    Log,
    ProtocolError,
    Stats,
)

MESSAGES = st.one_of(
    st.builds(Beat, t=st.floats(0, 1e9), engine_step=st.integers(0, 1 << 40)),
    st.builds(Log, level=st.just("info"), source=st.just("a"), text=st.text(max_size=50)),
    st.builds(Stats, footprint=st.integers(0, 1 << 50)),
    st.builds(Command, id=st.text(max_size=8), op=st.just("audit")),
    st.builds(Done, id=st.text(max_size=8)),
)


@settings(max_examples=50)
@given(batches=st.lists(st.lists(MESSAGES, min_size=1, max_size=4), max_size=6), data=st.data())
def test_messages_survive_any_cut_of_the_stream(batches, data):
    stream = b"".join(pack(batch) for batch in batches)
    decoder = FrameDecoder()
    out, at = [], 0
    while at < len(stream):
        step = data.draw(st.integers(1, len(stream) - at))
        out += decoder.feed(stream[at : at + step])
        at += step
    assert out == [message for batch in batches for message in batch]
    assert decoder.pending_bytes == 0


@given(noise=st.binary(max_size=400))
def test_any_bytes_are_messages_or_a_protocol_error(noise):
    with contextlib.suppress(ProtocolError):
        FrameDecoder().feed(noise)


@given(body=st.binary(min_size=1, max_size=400))
def test_any_body_is_messages_or_a_protocol_error(body):
    with contextlib.suppress(ProtocolError):
        FrameDecoder().feed(HEADER.pack(len(body)) + body)


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 200_000,
        b"9" * 5_000,
        b'{"type":"beat","t":' + b"1" * 6_000 + b"}",
        b"\xff\xfe",
        b'{"type":"nobody"}',
        b'{"type":"log","level":"loud","source":"","text":""}',
        b"null",
    ],
)
def test_hostile_bodies_are_protocol_errors(body):
    with pytest.raises(ProtocolError):
        FrameDecoder().feed(HEADER.pack(len(body)) + body)


@pytest.mark.parametrize("length", [0, MAX_MESSAGE_BYTES + 1, 0xFFFFFFFF])
def test_announced_length_is_checked_before_anything_is_read(length):
    decoder = FrameDecoder()
    with pytest.raises(ProtocolError, match="announced"):
        decoder.feed(HEADER.pack(length))
    assert decoder.pending_bytes <= HEADER.size


def test_unknown_fields_are_ignored():
    body = b'{"type":"beat","t":1.5,"added_later":[1,2]}'
    assert FrameDecoder().feed(HEADER.pack(len(body)) + body) == [Beat(1.5)]


def test_message_that_is_too_large_is_not_sent():
    with pytest.raises(ProtocolError, match="limit"):
        pack(Log("info", "a", "x" * MAX_MESSAGE_BYTES))


def test_blocking_reader_gives_messages_then_the_end():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(5)
        send_frame(theirs, [Beat(1.0), Beat(2.0)])
        send_frame(theirs, Hello("worker", "w", 1))
        assert recv_frame(ours) == [Beat(1.0), Beat(2.0)]
        assert recv_frame(ours) == [Hello("worker", "w", 1)]
        theirs.close()
        assert recv_frame(ours) == []


@pytest.mark.parametrize("cut", [2, 6])
async def test_stream_that_ends_inside_a_frame_is_told_from_one_that_lies(cut):
    reader = asyncio.StreamReader()
    reader.feed_data(pack(Beat(1.0)) + pack(Beat(2.0))[:cut])
    reader.feed_eof()
    assert await read_frame(reader) == [Beat(1.0)]
    with pytest.raises(TruncatedError):
        await read_frame(reader)
