"""One real server for several clients: OpenAI's own library, and panels that come and go."""

import asyncio
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from terminal import Terminal

from veloxquant.panel.transcript import Tail, newest
from veloxquant.supervisor.client import run_command

pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(400),
]

QUESTION = "Describe a river in the mountains."
TOKENS = 40
ENTER, CTRL_N, CTRL_Q = "\r", "\x0e", "\x11"


async def stream(client: openai.AsyncOpenAI) -> tuple[str, int, list[str]]:
    """Text, output tokens and finish reasons of one greedy answer."""
    chunks = [
        chunk
        async for chunk in await client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": QUESTION}],
            max_tokens=TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    ]
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert len(choices) > TOKENS // 2, "streamed, not sent at once"
    assert chunks[-1].usage is not None
    text = "".join(choice.delta.content or "" for choice in choices)
    ends = [choice.finish_reason for choice in choices if choice.finish_reason]
    return text, chunks[-1].usage.completion_tokens, ends


@pytest.fixture(scope="module")
def alone(server: SimpleNamespace) -> str:
    """The greedy answer, asked by one client alone."""

    async def ask() -> tuple[str, int, list[str]]:
        async with openai.AsyncOpenAI(base_url=server.url, api_key="none") as client:
            return await stream(client)

    text, tokens, ends = asyncio.run(ask())
    assert (tokens, ends) == (TOKENS, ["length"])
    return text


async def test_four_clients_at_once_get_what_one_gets_alone(
    server: SimpleNamespace, alone: str
) -> None:
    async with openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        answers = await asyncio.gather(*(stream(client) for _ in range(4)))
    assert answers == [(alone, TOKENS, ["length"])] * 4


def ask_in(panel: Terminal, server: SimpleNamespace) -> Tail:
    """Ask the question in a new conversation; its transcript, once the answer has begun."""
    panel.until(f"127.0.0.1:{server.port}")
    panel.press("4")
    panel.until("enter sends")
    panel.press(CTRL_N)
    panel.until("Ask something.")
    panel.press(QUESTION)
    panel.until(QUESTION)
    before = newest(server.home / "state" / "chats")
    panel.press(ENTER)
    panel.when(
        lambda: (found := tail(server)) and found.path != before and answer_of(found),
        "the first words",
    )
    found = tail(server)
    assert found is not None
    return found


def tail(server: SimpleNamespace) -> Tail | None:
    path = newest(server.home / "state" / "chats")
    if path is None:
        return None
    found = Tail(path)
    found.read()
    return found


def answer_of(found: Tail) -> str:
    return found.turns[-1].text if found.turns and found.turns[-1].role == "model" else ""


def check_reopened(panel: Terminal, server: SimpleNamespace, alone: str) -> None:
    """The whole answer is in the file and on the screen of a panel opened later."""
    panel.until(f"127.0.0.1:{server.port}")
    panel.press("4")
    panel.until("enter sends")
    screen = panel.until(QUESTION, f"{TOKENS} tokens")
    found = tail(server)
    assert found is not None
    last = found.turns[-1]
    assert (last.text, last.status, last.output_tokens) == (alone, "done", TOKENS)
    shown = " ".join(screen.split())
    assert all(word in shown for word in alone.split())


def test_a_panel_killed_while_an_answer_streams_loses_no_token(
    server: SimpleNamespace, alone: str, open_panel: Callable[..., Terminal]
) -> None:
    panel = open_panel()
    found = ask_in(panel, server)
    panel.process.kill()
    assert panel.process.wait(10) == -signal.SIGKILL
    assert found.is_open
    assert len(answer_of(found)) < len(alone)
    check_reopened(open_panel(), server, alone)


def test_a_panel_closed_while_an_answer_streams_loses_no_token(
    server: SimpleNamespace, alone: str, open_panel: Callable[..., Terminal]
) -> None:
    panel = open_panel()
    found = ask_in(panel, server)
    panel.press(CTRL_Q)
    panel.until("keep the server running", "not a token is lost")
    panel.press("k")
    assert panel.wait() == 0
    assert found.is_open
    status: dict[str, Any] = run_command("status")
    assert status["state"]["phase"] in ("ready", "busy")
    check_reopened(open_panel(), server, alone)
