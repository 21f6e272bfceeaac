"""The conversation file: folding, half-written lines, locks, modes."""

import json

import pytest

from veloxquant.panel import transcript
from veloxquant.panel.transcript import Tail, Turn, Writer, fold, to_messages


def folded(*records):
    turns = ()
    for record in records:
        turns = fold(turns, record)
    return turns


def test_a_conversation_is_folded():
    turns = folded(
        {"kind": "user", "text": "hello"},
        {"kind": "answer", "model": "m"},
        {"kind": "think", "text": "hm"},
        {"kind": "delta", "text": "he"},
        {"kind": "delta", "text": "y"},
        {"kind": "end", "finish": "stop", "prompt_tokens": 5, "output_tokens": 11, "ttft": 0.5,
         "seconds": 2.5},
    )  # fmt: skip
    assert turns[0] == Turn("user", "hello")
    answer = turns[1]
    assert (answer.text, answer.thought, answer.status) == ("hey", "hm", "done")
    assert answer.speed == pytest.approx(5.0)
    assert to_messages(turns) == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hey"},
    ]


@pytest.mark.parametrize(
    "record",
    [{}, {"kind": "delta", "text": "x"}, {"kind": "end"}, {"kind": "new thing"}, {"kind": 7}],
)
def test_records_out_of_place_change_nothing(record):
    assert folded(record) == ()
    question = folded({"kind": "user", "text": "q"})
    assert fold(question, record) == question


def test_odd_figures_are_not_believed():
    turns = folded(
        {"kind": "answer"},
        {"kind": "end", "finish": None, "prompt_tokens": "many", "output_tokens": -3, "ttft": []},
    )
    assert (turns[0].prompt_tokens, turns[0].output_tokens, turns[0].ttft) == (0, 0, None)


def test_a_half_written_line_waits(tmp_path):
    path = transcript.create(tmp_path / "chats")
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    tail = Tail(path)
    line = json.dumps({"kind": "user", "text": "whole"}).encode()
    with path.open("ab") as out:
        out.write(line[:7])
        out.flush()
        assert not tail.read()
        out.write(line[7:] + b"\nnot json\n[1]\n" + b"[" * 2000 + b"\n")
    assert tail.read()
    assert tail.turns == (Turn("user", "whole"),)


def test_one_writer_at_a_time_and_a_lost_one_is_noticed(tmp_path):
    path = transcript.create(tmp_path)
    tail = Tail(path)
    with Writer(path) as writer:
        writer.write(kind="answer", model="m")
        writer.write(kind="delta", text="half an ans")
        with pytest.raises(BlockingIOError):
            Writer(path)
        tail.read()
        assert tail.is_open
        assert not tail.settle(), "its writer is at work"
    assert tail.settle()
    assert tail.turns[-1].status == "cut"
    assert tail.turns[-1].text == "half an ans"


def test_old_conversations_go_and_the_newest_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(transcript, "MAX_FILES", 3)
    made = [transcript.create(tmp_path) for _ in range(5)]
    assert len(list(tmp_path.iterdir())) == 3
    with Writer(made[-2]) as writer:
        writer.write(kind="user", text="newest")
    assert transcript.newest(tmp_path) == made[-2]
    assert transcript.newest(tmp_path / "nowhere") is None
