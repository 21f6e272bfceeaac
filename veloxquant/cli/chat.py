"""`vq chat`: talk to the running server over its own HTTP interface, streamed."""

import argparse
import http.client
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from veloxquant.cli import exit_codes
from veloxquant.cli.control import running_server
from veloxquant.cli.output import CliError, clean, envelope, result, talk

MAX_LINE = 1 << 20
TIMEOUT_S = 600.0


def run(args: argparse.Namespace) -> int:
    """Ask one question, or hold a conversation."""
    question = _question(args.prompt)
    server = _Server(running_server())
    messages: list[dict[str, str]] = []
    if args.system:
        messages.append({"role": "system", "content": args.system})
    if question is not None:
        answer, facts = _turn(server, args, messages, question)
        if args.json:
            result(envelope({"answer": answer, **facts}))
        return exit_codes.OK
    talk("Type a message; ctrl+d ends the conversation.")
    while True:
        try:
            question = input("> ")
        except EOFError:
            return exit_codes.OK
        if question and question.strip():
            _turn(server, args, messages, question)


def _question(prompt: str | None) -> str | None:
    """The single question, or None for a conversation."""
    if prompt == "-" or (prompt is None and not sys.stdin.isatty()):
        prompt = sys.stdin.read()
    if prompt is not None and not prompt.strip():
        raise CliError("The question is empty.", "", exit_codes.USAGE, "usage")
    return prompt


def _turn(
    server: "_Server", args: argparse.Namespace, messages: list[dict[str, str]], question: str
) -> tuple[str, dict[str, Any]]:
    """Ask, print the answer as it comes, remember both."""
    messages.append({"role": "user", "content": question})
    body: dict[str, Any] = {"messages": messages, "temperature": args.temperature}
    if args.max_tokens:
        body["max_tokens"] = args.max_tokens
    parts: list[str] = []
    facts: dict[str, Any] = {}
    for event in server.stream(body):
        for choice in event.get("choices") or []:
            text = (choice.get("delta") or {}).get("content")
            if text:
                parts.append(text)
                if not args.json:
                    sys.stdout.write(clean(text))
                    sys.stdout.flush()
            if choice.get("finish_reason"):
                facts["finish"] = choice["finish_reason"]
        if event.get("usage"):
            facts["usage"] = event["usage"]
    if not args.json:
        result("")
    answer = "".join(parts)
    if not answer:
        talk("The model ended at once, without a word; more bits or another method may help.")
    messages.append({"role": "assistant", "content": answer})
    return answer, facts


class _Server:
    """The HTTP side of the running server."""

    def __init__(self, status: dict[str, Any]) -> None:
        url = urlsplit(str(status["base_url"]))
        self.host, self.port, self.path = url.hostname or "127.0.0.1", url.port, url.path
        spec = status["state"].get("spec") or {}
        self.model = spec.get("name") or str(spec.get("model", "")).rpartition("/")[2]
        self.headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if spec.get("api_key") and (file := status.get("token_file")):
            try:
                token = Path(file).read_text(encoding="utf-8").strip()
            except OSError as error:
                raise CliError(
                    f"The API key cannot be read: {error.strerror}.", "", exit_codes.NETWORK
                ) from error
            self.headers["Authorization"] = f"Bearer {token}"

    def stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Events of one streamed completion.

        Raises:
            CliError: when the server refuses, fails in the middle or goes away.
        """
        body |= {
            "model": self.model, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        connection = http.client.HTTPConnection(self.host, self.port, timeout=TIMEOUT_S)
        try:
            path = f"{self.path.rstrip('/')}/chat/completions"
            connection.request("POST", path, json.dumps(body).encode(), self.headers)
            response = connection.getresponse()
            if response.status != 200:
                raise _refusal(response.status, response.read(MAX_LINE))
            yield from _events(response)
        except (OSError, http.client.HTTPException) as error:
            raise CliError(
                f"The server went away: {error or type(error).__name__}.", "`vq status` says why.",
                exit_codes.NETWORK, "network",
            ) from error  # fmt: skip
        finally:
            connection.close()


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    ended = False
    while line := response.readline(MAX_LINE):
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError:
            continue
        if isinstance(event, dict) and event.get("error"):
            raise _refusal(0, data)
        if isinstance(event, dict):
            ended = ended or any(c.get("finish_reason") for c in event.get("choices") or [])
            yield event
    if not ended:
        raise CliError(
            "The answer broke off: the server closed the connection.", "`vq status` says why.",
            exit_codes.NETWORK, "network",
        )  # fmt: skip


def _refusal(status: int, raw: bytes) -> CliError:
    """The server's error object for people."""
    try:
        error = json.loads(raw)["error"]
        message, code = str(error["message"]), str(error.get("code") or error.get("type") or "")
    except (ValueError, KeyError, TypeError, AttributeError):
        message, code = raw.decode("utf-8", "replace")[:300] or f"HTTP {status}", ""
    exit_code = {400: exit_codes.USAGE, 404: exit_codes.NOT_FOUND, 413: exit_codes.USAGE,
                 429: exit_codes.BUSY, 503: exit_codes.BUSY, 401: exit_codes.NETWORK,
                 403: exit_codes.NETWORK}.get(status, exit_codes.FAILED)  # fmt: skip
    return CliError(message, "", exit_code, code)
