from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from extproc.tokens.template import ChatTemplate, TemplateFailure

PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
USER = {"role": "user", "content": "Hi"}


def render(source: str, *messages: dict[str, Any], **options: Any) -> str:
    return ChatTemplate(source).render(list(messages or (USER,)), **options)


def files(folder: Path, config: Any = None, jinja: str | None = None) -> Path:
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if jinja is not None:
        (folder / "chat_template.jinja").write_text(jinja)
    return folder


def loaded(folder: Path, override: Path | None = None) -> ChatTemplate:
    template = ChatTemplate.load(folder, override)
    assert template is not None
    return template


class TestLoading:
    def test_the_override_wins_then_the_file_then_the_config(self, tmp_path: Path) -> None:
        override = tmp_path / "mine.jinja"
        override.write_text("override")
        folder = files(tmp_path, {"chat_template": "config"})
        assert loaded(folder).render([USER]) == "config"
        files(tmp_path, jinja="file")
        assert loaded(folder).render([USER]) == "file"
        assert loaded(folder, override).render([USER]) == "override"

    def test_a_list_of_named_templates_has_a_default_and_one_for_tools(
        self, tmp_path: Path
    ) -> None:
        named = [
            {"name": "default", "template": "plain"},
            {"name": "tool_use", "template": "tools"},
            {"name": "rag", "template": "rag"},
        ]
        template = loaded(files(tmp_path, {"chat_template": named}))
        assert template.render([USER]) == "plain"
        assert template.render([USER], tools=[{"type": "function"}]) == "tools"
        template = loaded(files(tmp_path, {"chat_template": named[:1]}))
        assert template.render([USER], tools=[{"type": "function"}]) == "plain"

    @pytest.mark.parametrize(
        "config",
        [None, {}, [], {"chat_template": None}, {"chat_template": []},
         {"chat_template": [{"name": "rag", "template": "x"}]}],
    )  # fmt: skip
    def test_a_model_without_a_template_has_none(self, tmp_path: Path, config: Any) -> None:
        assert ChatTemplate.load(files(tmp_path, config)) is None

    @pytest.mark.parametrize(
        "declared",
        [5, [5], [{"name": "default"}], ["default"], "{% for %}", "{{", [{"template": "x"}],
         [{"name": "default", "template": "ok"}, {"name": "tool_use", "template": "{{"}]],
    )  # fmt: skip
    def test_a_broken_declaration_is_a_template_failure(
        self, tmp_path: Path, declared: Any
    ) -> None:
        with pytest.raises(TemplateFailure):
            ChatTemplate.load(files(tmp_path, {"chat_template": declared}))

    def test_unreadable_files_are_template_failures(self, tmp_path: Path) -> None:
        with pytest.raises(TemplateFailure, match="No such file"):
            ChatTemplate.load(tmp_path, tmp_path / "missing.jinja")
        (tmp_path / "tokenizer_config.json").write_text("{")
        with pytest.raises(TemplateFailure, match=str(tmp_path)):
            ChatTemplate.load(tmp_path)

    def test_special_tokens_are_known_by_name(self, tmp_path: Path) -> None:
        config = {
            "chat_template": "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token }}",
            "bos_token": "<s>",
            "eos_token": {"content": "</s>"},
            "pad_token": None,
            "unk_token": {"odd": 1},
        }
        assert loaded(files(tmp_path, config)).render([USER]) == "<s>|</s>||"


class TestRendering:
    def test_the_request_decides_what_the_template_sees(self) -> None:
        source = "{{ tools }}|{{ documents }}|{{ add_generation_prompt }}|{{ thinking }}"
        assert render(source) == "None|None|True|"
        said = render(
            source, tools=[{"a": 1}], documents=[{"b": 2}], add_generation_prompt=False,
            extra={"thinking": "on"},
        )  # fmt: skip
        assert said == "[{'a': 1}]|[{'b': 2}]|False|on"

    def test_the_requests_own_fields_win_over_its_template_arguments(self) -> None:
        source = "{{ documents }}|{{ add_generation_prompt }}|{{ bos_token }}"
        extra = {"documents": [1], "add_generation_prompt": False, "bos_token": "b"}
        assert render(source, extra=extra) == "[1]|True|b"
        assert render(source, documents=[{"b": 2}], extra=extra) == "[{'b': 2}]|True|b"

    @pytest.mark.parametrize(
        ("source", "takes"),
        [
            ("x", False),
            ("{{ 'developer' }}", True),
            ('{{ "developer" }}', True),
            ("developer", False),
        ],
    )
    def test_a_template_takes_developers_if_it_names_them(self, source: str, takes: bool) -> None:
        assert ChatTemplate(source).takes_developer is takes
        assert ChatTemplate("x", tool_source=source).takes_developer is takes

    def test_tojson_keeps_letters_and_takes_its_options(self) -> None:
        assert render("{{ messages[0] | tojson }}", {"b": "é<", "a": 1}) == '{"b": "é<", "a": 1}'
        wanted = '{"a":1,"b":"\\u00e9"}'
        options = "ensure_ascii=true, sort_keys=true, separators=(',', ':')"
        assert render(f"{{{{ messages[0] | tojson({options}) }}}}", {"b": "é", "a": 1}) == wanted
        assert render("{{ [1] | tojson(indent=1) }}") == "[\n 1\n]"

    def test_loop_controls_work(self) -> None:
        source = "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}"
        source += "{% if loop.index == 4 %}{% break %}{% endif %}{{ loop.index }}{% endfor %}"
        assert render(source, *[USER] * 5) == "13"

    def test_the_generation_tag_leaves_its_text(self) -> None:
        source = "a{% generation %}{{ messages[0].content }}{% endgeneration %}b"
        assert render(source) == "aHib"

    def test_blocks_are_trimmed_as_hugging_face_does(self) -> None:
        assert render("  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"

    def test_the_date_comes_from_the_caller(self) -> None:
        source = "{{ strftime_now('%d %b %Y') }}"
        assert render(source, now=lambda form: f"<{form}>") == "<%d %b %Y>"

    def test_without_a_date_a_template_that_asks_for_it_fails(self) -> None:
        with pytest.raises(TemplateFailure):
            render("{{ strftime_now('%Y') }}")
        assert render("{% if strftime_now is defined %}x{% endif %}") == "x"

    @pytest.mark.parametrize(
        "source",
        [
            "{{ raise_exception('no ' + messages[0].content) }}",
            "{{ messages[0].content.absent.deeper }}",
            "{{ messages[9].content }}",
            "{{ 1 / 0 }}",
            "{{ messages.append(1) }}",
            "{{ messages.__class__.__mro__[1].__subclasses__() }}",
            "{{ messages[0].content + 1 }}",
        ],
    )
    def test_whatever_a_template_raises_is_one_failure_without_the_prompt(
        self, source: str
    ) -> None:
        """SE3: a template's own message may quote the messages; the failure does not."""
        with pytest.raises(TemplateFailure) as caught:
            render(source, {"role": "user", "content": "SECRET-CANARY-123"})
        assert "CANARY" not in str(caught.value)
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__


class TestContinuing:
    """TK1: the prompt ends where the final message's own text ends."""

    CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>\n{% endfor %}"
    TRIMMED = CHATML.replace("m.content", "m.content | trim")

    def prompt(self, source: str, final: Any) -> str:
        messages = [USER, {"role": "assistant", "content": final}]
        return render(source, *messages, continue_final_message=True)

    @pytest.mark.parametrize("final", ["Hello", " Hello ", "end", "e", "", "assistant", "a\n\n"])
    def test_text_is_kept_to_its_last_character(self, final: str) -> None:
        assert self.prompt(self.CHATML, final) == f"<user>Hi<end>\n<assistant>{final}"

    def test_where_the_template_trims_trailing_space_goes(self) -> None:
        assert self.prompt(self.TRIMMED, " Hello \n") == "<user>Hi<end>\n<assistant>Hello"

    def test_the_last_text_part_is_continued(self) -> None:
        source = (
            "{% for m in messages %}{% for p in m.content %}({{ p.text }}){% endfor %}{% endfor %}"
        )
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        messages = [{"role": "assistant", "content": parts}]
        template = ChatTemplate(source)
        assert template.render(messages, continue_final_message=True) == "(a)(b"
        assert parts == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]

    @pytest.mark.parametrize("final", [None, [], 5])
    def test_a_final_message_without_text_cannot_be_continued(self, final: Any) -> None:
        with pytest.raises(TemplateFailure):
            self.prompt(self.CHATML, final)

    def test_no_message_cannot_be_continued(self) -> None:
        with pytest.raises(TemplateFailure):
            ChatTemplate(self.CHATML).render([], continue_final_message=True)

    def test_a_template_that_drops_the_final_message_fails(self) -> None:
        with pytest.raises(TemplateFailure, match="final message"):
            self.prompt("{{ messages[0].content }}", "Hello")


class TestContentFormat:
    @pytest.mark.parametrize(
        "source",
        [
            "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}",
            "{% for m in messages %}{% for p in m['content'] %}{{ p }}{% endfor %}{% endfor %}",
            "{% set c = message.content %}{% for p in c %}{{ p }}{% endfor %}",
            "{% set c = m['content'] | list %}{% for p in c | list %}{{ p }}{% endfor %}",
            "{% macro show(content) %}{% for p in content %}{{ p }}{% endfor %}{% endmacro %}",
        ],
    )
    def test_a_template_that_loops_over_content_wants_parts(self, source: str) -> None:
        assert ChatTemplate(source).content_format == "openai"

    @pytest.mark.parametrize(
        "source",
        [
            PLAIN,
            "{% for m in messages %}{{ m['content'] }}{% endfor %}",
            "{% set a, b = 1, 2 %}{% for t in tools %}{{ t.content }}{% endfor %}",
            "{% set c = message.role %}{% for p in c %}{{ p }}{% endfor %}",
            "{% for m in messages[key] %}{{ m.content }}{% endfor %}",
            "{% filter upper %}{% for i in [1] %}{{ i }}{% endfor %}{% endfilter %}",
        ],
    )
    def test_any_other_template_wants_text(self, source: str) -> None:
        assert ChatTemplate(source).content_format == "string"
