"""OpenAI's bodies: chat completions, completions, embeddings.

Only named fields are decoded; unknown ones are skipped without being built. Python's own
JSON reader gets a second try, because engines accept what it accepts (lone surrogates,
NaN) and kvgate must not refuse what the engine would serve.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from extproc.errors import InvalidJson, InvalidRequest
from extproc.request.profile import (
    ChatPrompt,
    Endpoint,
    Prompt,
    RequestProfile,
    TextPrompt,
    TokenPrompt,
    UnknownPrompt,
)
from extproc.tokens.messages import count_media_parts

PromptInput = str | list[str | int | list[int]] | None
Objects = list[dict[str, Any]]


class CommonBody(msgspec.Struct):
    """Fields that every generating endpoint has."""

    model: str | None = None
    stream: bool | None = False
    cache_salt: str | None = None


class ChatBody(CommonBody):
    """``/v1/chat/completions``."""

    messages: Objects = msgspec.field(default_factory=list)
    tools: Objects | None = None
    documents: Objects | None = None
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    reasoning_effort: Any = None

    def prompt(self) -> Prompt:
        """The prompt these messages make."""
        media = count_media_parts(self.messages)
        if self.chat_template is not None:
            return UnknownPrompt(sum(len(str(m.get("content") or "")) for m in self.messages))
        return ChatPrompt(
            messages=self.messages,
            tools=self.tools,
            documents=self.documents,
            add_generation_prompt=self.add_generation_prompt is not False,
            continue_final_message=bool(self.continue_final_message),
            template_kwargs=self._template_kwargs(),
            media_parts=media,
        )

    def _template_kwargs(self) -> dict[str, Any]:
        given = self.chat_template_kwargs or {}
        effort = self.reasoning_effort
        if effort is None:
            return given
        # vLLM opts in to thinking for templates that want to be asked.
        return {"enable_thinking": effort != "none", **given, "reasoning_effort": effort}


class CompletionBody(CommonBody):
    """``/v1/completions``."""

    prompt: PromptInput = None
    add_special_tokens: bool | None = True
    max_tokens: int | None = None


class EmbeddingBody(CommonBody):
    """``/v1/embeddings``: ``input``, or chat ``messages``."""

    input: PromptInput = None
    messages: Objects | None = None
    add_special_tokens: bool | None = True


class ModelOnly(msgspec.Struct):
    """Any JSON object: just its model, if it names one."""

    model: Any = None


T = TypeVar("T", bound=msgspec.Struct)


@lru_cache(maxsize=32)
def _decoder(body_type: type[T]) -> msgspec.json.Decoder[T]:
    return msgspec.json.Decoder(body_type)


def decode(body: bytes, body_type: type[T]) -> T:
    """Decode a JSON body into ``body_type``.

    Raises:
        InvalidJson: not JSON.
        InvalidRequest: JSON of the wrong shape; ``param`` names the field.
    """
    try:
        decoded: T = _decoder(body_type).decode(body)
        return decoded
    except msgspec.ValidationError as error:
        raise _wrong_shape(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        converted: T = msgspec.convert(json.loads(body), body_type)
        return converted
    except msgspec.ValidationError as error:
        raise _wrong_shape(error) from None
    except (ValueError, RecursionError):
        raise InvalidJson("The request body is not valid JSON.") from None


def _wrong_shape(error: msgspec.ValidationError) -> InvalidRequest:
    # msgspec names types and the path, never a value: safe to show.
    _, _, path = str(error).partition(" - at `$")
    param = path.rstrip("`").lstrip(".") or None
    return InvalidRequest(f"The request body has the wrong shape: {error}", param=param)


def chat_profile(body: bytes) -> RequestProfile:
    """Profile of a chat completion.

    Raises:
        InvalidJson, InvalidRequest: see :func:`decode`.
    """
    chat = decode(body, ChatBody)
    output = chat.max_completion_tokens
    return RequestProfile(
        endpoint=Endpoint.CHAT,
        model=chat.model,
        prompts=(chat.prompt(),),
        stream=bool(chat.stream),
        max_output_tokens=chat.max_tokens if output is None else output,
        cache_salt=chat.cache_salt or "",
        body_bytes=len(body),
    )


def completion_profile(body: bytes) -> RequestProfile:
    """Profile of a completion: text, texts, token ids or lists of token ids.

    Raises:
        InvalidJson, InvalidRequest: see :func:`decode`.
    """
    completion = decode(body, CompletionBody)
    return RequestProfile(
        endpoint=Endpoint.COMPLETIONS,
        model=completion.model,
        prompts=_prompts(completion.prompt, completion.add_special_tokens is not False, "prompt"),
        stream=bool(completion.stream),
        # The API's own default.
        max_output_tokens=16 if completion.max_tokens is None else completion.max_tokens,
        cache_salt=completion.cache_salt or "",
        body_bytes=len(body),
    )


def embedding_profile(body: bytes) -> RequestProfile:
    """Profile of an embedding request; it produces no output tokens.

    Raises:
        InvalidJson, InvalidRequest: see :func:`decode`.
    """
    embedding = decode(body, EmbeddingBody)
    if embedding.messages is not None:
        prompts: tuple[Prompt, ...] = (
            ChatPrompt(
                embedding.messages,
                add_generation_prompt=False,
                media_parts=count_media_parts(embedding.messages),
            ),
        )
    else:
        special = embedding.add_special_tokens is not False
        prompts = _prompts(embedding.input, special, "input")
    return RequestProfile(
        endpoint=Endpoint.EMBEDDINGS,
        model=embedding.model,
        prompts=prompts,
        max_output_tokens=0,
        cache_salt=embedding.cache_salt or "",
        body_bytes=len(body),
    )


def _prompts(given: PromptInput, special: bool, param: str) -> tuple[Prompt, ...]:
    if given is None:
        return ()
    if isinstance(given, str):
        return (TextPrompt(given, special),)
    if given and all(isinstance(item, int) for item in given):
        return (TokenPrompt(given),)  # type: ignore[arg-type]  # checked just above
    prompts: list[Prompt] = []
    for item in given:
        if isinstance(item, int):
            raise InvalidRequest(f"'{param}' mixes token ids with other items.", param=param)
        prompts.append(TextPrompt(item, special) if isinstance(item, str) else TokenPrompt(item))
    return tuple(prompts)
