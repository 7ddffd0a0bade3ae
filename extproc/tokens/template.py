"""Chat templates, rendered as the engine renders them.

Hugging Face templates are Jinja in a sandbox with a handful of extras: ``raise_exception``,
``strftime_now``, a ``tojson`` that keeps non-ASCII text, ``{% break %}`` and the
``{% generation %}`` mark. Whether a template wants message content as text or as a list
of parts is read from its syntax tree, as vLLM does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from jinja2 import TemplateError, Undefined, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from extproc.errors import KvgateError

ContentFormat = Literal["string", "openai"]
Messages = list[dict[str, Any]]

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


_CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
"""Hugging Face's way to find where a final message ends; its last space shows trimming."""


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


_DICT_ATTRIBUTES = frozenset(dir(dict))


@lru_cache(maxsize=256)
def _absent(attribute: str) -> Undefined:
    """A dict entry that is not there: most messages lack what templates ask for."""
    return Undefined(name=attribute)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with a short way for ``message.role``: a plain dict's own entries."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As the sandbox answers, without the exceptions that its way there costs."""
        if type(obj) is dict and attribute not in _DICT_ATTRIBUTES:
            if attribute in obj:
                return obj[attribute]
            return _absent(attribute)
        return super().getattr(obj, attribute)


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
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        self._special_tokens = dict(special_tokens or {})
        # vLLM looks for the quoted word too.
        texts = source + (tool_source or "")
        self.takes_developer = '"developer"' in texts or "'developer'" in texts
        try:
            self.content_format = _content_format(environment.parse(source))
            self._plain = environment.from_string(source)
            self._with_tools = environment.from_string(tool_source) if tool_source else self._plain
            for template in (self._plain, self._with_tools):
                # Jinja's own is a chain of mappings, which every rendering would copy: 35 us.
                template.globals = dict(template.globals)
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
        named = _declared_templates(config)
        if "default" not in named:
            return None
        return cls(named["default"], specials, named.get("tool_use"))

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
            "documents": documents,
            "strftime_now": now or _no_clock,
            **(extra or {}),
            # The request's own fields win over its template arguments.
            "messages": _with_mark(messages) if continue_final_message else messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        if documents is not None:
            variables["documents"] = documents
        try:
            text = template.render(variables)
        except Exception as error:  # a template can raise anything, and its text may hold prompt
            raise TemplateFailure(f"chat template failed: {type(error).__name__}") from None
        return _cut_at_mark(text) if continue_final_message else text


def _with_mark(messages: Messages) -> Messages:
    """The messages with :data:`_CONTINUE_MARK` behind the final one's own text."""
    content = messages[-1].get("content") if messages else None
    if isinstance(content, str):
        marked: str | list[dict[str, Any]] = content + _CONTINUE_MARK
    elif isinstance(content, list) and content:
        last = content[-1]
        marked = [*content[:-1], {**last, "text": last["text"] + _CONTINUE_MARK}]
    else:
        raise TemplateFailure("the final message has no text to continue")
    return [*messages[:-1], {**messages[-1], "content": marked}]


def _cut_at_mark(text: str) -> str:
    end = text.rfind(_CONTINUE_MARK.strip())
    if end < 0:
        raise TemplateFailure("the final message to continue is not in the rendered prompt")
    # Without its last space the mark tells that the template trims: so is what is before it.
    return text[:end] if text.startswith(_CONTINUE_MARK, end) else text[:end].rstrip()


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / "tokenizer_config.json"
    if not path.is_file():
        return {}
    config = json.loads(path.read_text(encoding="utf-8"))
    return config if isinstance(config, dict) else {}


def _declared_templates(config: Mapping[str, Any]) -> dict[str, str]:
    """``chat_template`` of a configuration, by name: one text, or a list of named ones."""
    declared = config.get("chat_template")
    if isinstance(declared, str):
        return {"default": declared}
    try:
        return {item["name"]: item["template"] for item in declared or ()}
    except (TypeError, KeyError):
        raise TemplateFailure("chat_template is neither text nor a list of named ones") from None


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
