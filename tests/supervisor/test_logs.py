import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veloxquant.supervisor.logs import BoundedQueue, FileSink, LineSplitter, format_line, harmless
from veloxquant.supervisor.messages import MAX_LOG_CHARS, Log

HOSTILE = [
    "\x1b]0;title\x07",
    "\x1b]52;c;aGk=\x1b\\",
    "\x1b[2J\x1b[31mred",
    "a\rb\nc\x00d\x7fe\x9b31m",
    "right\u202eto left\u2066",
    "line\u2028separator\u2029",
    "\ud83d lonely",
]


@given(text=st.text(), cuts=st.lists(st.integers(0, 200), max_size=5))
def test_lines_do_not_depend_on_how_the_bytes_arrive(text, cuts):
    raw = text.encode()
    splitter = LineSplitter()
    at, out = 0, []
    for cut in sorted(min(c, len(raw)) for c in cuts):
        out += splitter.feed(raw[at:cut])
        at = cut
    out += splitter.feed(raw[at:]) + splitter.end()
    expected = [line.removesuffix("\r") for line in text.split("\n")]
    assert out == (expected if expected[-1] or text.endswith("\r") else expected[:-1])


def test_huge_line_is_cut_with_a_mark_and_the_next_one_is_whole():
    splitter = LineSplitter()
    lines = []
    for _ in range(100):
        lines += splitter.feed(b"y" * 10_000)
    lines += splitter.feed(b"\nafter\n")
    assert [len(lines[0]), lines[1]] == [MAX_LOG_CHARS, "after"]
    assert lines[0].endswith("[cut]")
    assert len(lines) == 2


def test_invalid_utf8_and_nul_pass_as_text():
    assert LineSplitter().feed(b"a\xff\x00b\n") == ["a\ufffd\x00b"]


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_a_terminal_acts_on_reaches_a_file(text):
    line = format_line(Log("info", "native", text, wall=1.0))
    assert line.count("\n") == 1
    assert not any(ord(c) < 32 or 0x7F <= ord(c) < 0xA0 for c in line[:-1])
    assert not any(c in line for c in "\u202e\u2066\u2028\u2029")


@given(text=st.text())
def test_harmless_text_is_one_line_without_controls(text):
    out = harmless(text)
    assert out.isprintable() or all(ord(c) >= 0xA0 or c.isprintable() for c in out)
    assert len(out.splitlines()) <= 1


def test_full_queue_drops_the_oldest_and_counts():
    queue = BoundedQueue(records=10, chars=1_000)
    for n in range(25):
        queue.put(Log("info", "a", f"{n}"))
    dropped, records = queue.take(100)
    assert dropped == 15
    assert [r.text for r in records] == [str(n) for n in range(15, 25)]
    for _ in range(3):
        queue.put(Log("info", "a", "x" * 400))
    dropped, records = queue.take(100)
    assert (dropped, len(records)) == (1, 2)


def test_files_rotate_and_keep_their_number(tmp_path):
    sink = FileSink(tmp_path, lambda _: None, file_bytes=2_000, count=3)
    for n in range(200):
        sink.put(Log("info", "native", f"line {n:04d} {'x' * 50}", wall=1.0))
        if n % 10 == 0:
            sink._wake.set()
    sink.close()
    files = sorted(p.name for p in tmp_path.iterdir())
    assert files[0] == "server.log"
    assert len(files) <= 3
    assert "line 0199" in (tmp_path / "server.log").read_text() or (
        "line 0199" in (tmp_path / "server.log.1").read_text()
    )
    assert all(p.stat().st_mode & 0o777 == 0o600 for p in tmp_path.iterdir())


def test_trouble_with_the_disk_is_told_once_and_nothing_blocks(tmp_path):
    told: list[str] = []
    heard = threading.Event()

    def on_trouble(text: str) -> None:
        told.append(text)
        heard.set()

    sink = FileSink(tmp_path / "missing", on_trouble, retry_seconds=60)
    sink.put(Log("info", "a", "one", wall=1.0))
    assert heard.wait(5)
    for _ in range(1_000):
        sink.put(Log("info", "a", "more", wall=1.0))
    sink.close()
    assert len(told) == 1
    assert "off for 60 s" in told[0]
