"""From a request to the tokens the model reads."""

import json
from typing import Any

from jinja2.exceptions import TemplateError

from veloxquant.worker.jobs import Channel
from veloxquant.worker.schemas import (
    BadRequestError,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
)

_FREE_KWARGS = frozenset({"enable_thinking", "thinking", "reasoning_effort", "documents"})


CHARS_A_TOKEN = 64
"""More characters than tokens of real text ever average; bounds what is tokenised at all."""


def require_short(request: ChatRequest | CompletionRequest, context: int) -> None:
    """Refuse text that cannot fit before tokenising it, which would hold up every other prompt.

    Raises:
        BadRequestError: with code `context_length_exceeded`.
    """
    if isinstance(request, ChatRequest):
        chars = sum(len(_text(message)) for message in request.messages)
        where = "messages"
    else:
        prompts = request.prompt if isinstance(request.prompt, list) else [request.prompt]
        chars = sum(len(item) if isinstance(item, str) else 1 for item in prompts)
        where = "prompt"
    if chars > context * CHARS_A_TOKEN:
        raise BadRequestError(
            f"The prompt has {chars:,} characters; this server's context is {context:,} tokens. "
            f"Shorten it, or start with a longer context.",
            where,
            "context_length_exceeded",
        )


def chat_tokens(tokenizer: Any, request: ChatRequest) -> list[int]:
    """The conversation through the model's own template, ready for the answer.

    Raises:
        BadRequestError: when a part is not text or the template refuses the messages.
    """
    messages = [_plain(message) for message in request.messages]
    if not tokenizer.has_chat_template:
        text = "".join(f"{m['role'].upper()}: {m['content']}\n" for m in messages)
        return tokenizer.encode(text + "ASSISTANT:")
    extras = {
        name: value
        for name, value in (request.chat_template_kwargs or {}).items()
        if name in _FREE_KWARGS
    }
    tools = None if request.tool_choice == "none" else request.tools or None
    try:
        tokens = tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, tokenize=True, **extras
        )
    except (TemplateError, TypeError, ValueError, KeyError, RecursionError) as error:
        raise BadRequestError(
            f"The model's chat template refuses these messages: {error}", "messages"
        ) from error
    return list(tokens)


def completion_tokens(tokenizer: Any, request: CompletionRequest, vocab: int) -> list[int]:
    """The prompt as it stands.

    Raises:
        BadRequestError: for several prompts, an empty one, or ids that are no tokens.
    """
    prompt: Any = request.prompt
    if isinstance(prompt, list) and not all(isinstance(item, int) for item in prompt):
        if len(prompt) != 1:
            raise BadRequestError("Send one prompt a request.", "prompt", "unsupported")
        prompt = prompt[0]
    tokens = tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
    if not tokens:
        raise BadRequestError("The prompt is empty.", "prompt")
    if any(not 0 <= token < vocab for token in tokens):
        raise BadRequestError(f"Token ids lie between 0 and {vocab - 1}.", "prompt")
    return tokens


def starting_channel(tokenizer: Any, tokens: list[int]) -> Channel:
    """Where the template left off: inside a thought it opened itself, or in the answer."""
    if not tokenizer.has_thinking:
        return "normal"
    opened = tokenizer.rfind_think_start(tokens)
    return "reasoning" if opened > tokenizer.rfind_think_end(tokens) else "normal"


def _plain(message: ChatMessage) -> dict[str, Any]:
    out: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _text(message),
    }
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            out[name] = value
    if message.tool_calls:
        out["tool_calls"] = [_parsed_call(call) for call in message.tool_calls]
    return out


def _text(message: ChatMessage) -> str:
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    for part in message.content:
        if part.type != "text":
            raise BadRequestError(
                f"Content of type {part.type!r} cannot be read; send text.", "messages"
            )
    return "".join(part.text for part in message.content)


def _parsed_call(call: dict[str, Any]) -> dict[str, Any]:
    """Templates want arguments as an object, clients send them as JSON text."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError) as error:
        raise BadRequestError("A tool call's arguments are not JSON.", "messages") from error
    return {**call, "function": {**function, "arguments": arguments}}
