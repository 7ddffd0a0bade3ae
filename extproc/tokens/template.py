"""Chat templates, rendered as the engine renders them.

Hugging Face templates are Jinja in a sandbox with a handful of extras: ``raise_exception``,
``strftime_now``, a ``tojson`` that keeps non-ASCII text, ``{% break %}`` and the
``{% generation %}`` mark. Whether a template wants message content as text or as a list
of parts is read from its syntax tree, as vLLM does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from extproc.errors import KvgateError

ContentFormat = Literal["string", "openai"]
Messages = list[dict[str, Any]]

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


class TemplateFailure(KvgateError):
    """The template refused or could not render these messages; the prompt is unknown."""


class _Generation(Extension):
    """``{% generation %}…{% endgeneration %}`` marks assistant text for training; plain here."""

    tags = {"generation"}  # noqa: RUF012  # jinja2's own declaration is an instance variable

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _no_clock(_format: str) -> str:
    raise TemplateError("this template needs the date, which kvgate cannot know exactly")


class ChatTemplate:
    """One model's chat template.

    Args:
        source: Jinja text.
        special_tokens: ``bos_token`` and the like, visible to the template by name.
        tool_source: template used instead when the request has tools.

    Raises:
        TemplateFailure: the source is not valid Jinja.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        tool_source: str | None = None,
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        self._special_tokens = dict(special_tokens or {})
        try:
            self.content_format = _content_format(environment.parse(source))
            self._plain = environment.from_string(source)
            self._with_tools = environment.from_string(tool_source) if tool_source else self._plain
        except TemplateError as error:
            raise TemplateFailure(f"chat template does not parse: {error}") from error

    @classmethod
    def load(cls, directory: Path, override: Path | None = None) -> ChatTemplate | None:
        """The template of a tokenizer directory; None when it has none.

        ``override`` wins, then ``chat_template.jinja``, then ``tokenizer_config.json``.

        Raises:
            TemplateFailure: a file is unreadable or not valid Jinja.
        """
        try:
            config = _read_config(directory)
            specials = _special_tokens(config)
            file = override or directory / "chat_template.jinja"
            if override or file.is_file():
                return cls(file.read_text(encoding="utf-8"), specials)
        except (OSError, ValueError) as error:
            raise TemplateFailure(f"{directory}: {error}") from error
        declared = config.get("chat_template")
        if isinstance(declared, list):
            named = {item["name"]: item["template"] for item in declared}
            if "default" not in named:
                return None
            return cls(named["default"], specials, named.get("tool_use"))
        return cls(declared, specials) if isinstance(declared, str) else None

    def render(
        self,
        messages: Messages,
        *,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: Mapping[str, Any] | None = None,
        now: Callable[[str], str] | None = None,
    ) -> str:
        """The prompt text of messages already normalised to ``content_format``.

        Args:
            extra: the request's ``chat_template_kwargs``.
            now: ``strftime`` at the engine's idea of today; without it a template that
                asks for the date cannot be rendered.

        Raises:
            TemplateFailure: the template raised, or used something forbidden or missing.
        """
        template = self._with_tools if tools else self._plain
        variables: dict[str, Any] = {
            **self._special_tokens,
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
            "strftime_now": now or _no_clock,
            **(extra or {}),
        }
        try:
            text = template.render(variables)
        except Exception as error:  # a template can raise anything, and its text may hold prompt
            raise TemplateFailure(f"chat template failed: {type(error).__name__}") from None
        return _cut_after_final_message(text, messages) if continue_final_message else text


def _cut_after_final_message(text: str, messages: Messages) -> str:
    # Hugging Face's rule: the prompt ends where the last message's own text ends.
    content = messages[-1].get("content") if messages else None
    if isinstance(content, list):
        content = next((p.get("text") for p in reversed(content) if p.get("type") == "text"), None)
    final = content.strip() if isinstance(content, str) else ""
    end = text.rfind(final)
    if not final or end < 0:
        raise TemplateFailure("the final message to continue is not in the rendered prompt")
    return text[: end + len(final)]


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / "tokenizer_config.json"
    if not path.is_file():
        return {}
    config = json.loads(path.read_text(encoding="utf-8"))
    return config if isinstance(config, dict) else {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in SPECIAL_TOKEN_NAMES:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _content_format(tree: nodes.Template) -> ContentFormat:
    """``openai`` when the template loops over a message's content, else ``string``."""
    aliases = {"content"}
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _reads_content(assign.node, set()):
            aliases.add(assign.target.name)
    loops = tree.find_all(nodes.For)
    return "openai" if any(_reads_content(loop.iter, aliases) for loop in loops) else "string"


def _reads_content(node: nodes.Node, aliases: set[str]) -> bool:
    if isinstance(node, nodes.Filter) and node.node is not None:
        return _reads_content(node.node, aliases)
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name in aliases
