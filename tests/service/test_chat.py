"""Chats through templates: tools, messages with further fields, continued messages, and templates that misbehave."""

from __future__ import annotations

import json

import grpc
import pytest

from pyruntime.client import AsyncClient, Client
from pyruntime.v1 import generate_pb2, model_pb2
from tests.fakes import BOS
from tests.service.conftest import Stack, failure_of

TOOLS_TEMPLATE = (
    "{% for t in tools or [] %}[{{ t | tojson }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}!{{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}"
    "<end>{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "zeit", "description": "für dich", "parameters": {"z": 1, "a": 2.5}}}
CALL = {"function": {"name": "zeit", "arguments": {"z": 1, "a": [True, None]}}}
TURNS = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "12:00", "name": "zeit"},
]
RENDERED = (
    '[{"type": "function", "function": {"name": "zeit", "description": "für dich", "parameters": {"z": 1, "a": 2.5}}}]'
    '<system>s<end><user>u<end><assistant>!zeit({"z": 1, "a": [true, null]})<end><tool zeit>12:00<end><bot>'
)


@pytest.fixture
def tools(stack: Stack) -> Stack:
    use(stack, TOOLS_TEMPLATE)
    return stack


def use(stack: Stack, template: str) -> None:
    stack.decoder.tokenizer._hf.chat_template = template


async def shown(stack: Stack, *messages: dict, **fields) -> str:
    chat = generate_pb2.Chat(messages=messages, **fields)
    answer = await stack.models.Tokenize(model_pb2.TokenizeRequest(model="decoder", chat=chat))
    return bytes(answer.token_ids).decode()


async def refusal(stack: Stack, *messages: dict, **fields):
    chat = generate_pb2.Chat(messages=messages, **fields)
    return await failure_of(stack.generate.Generate(generate_pb2.GenerateRequest(model="decoder", chat=chat)))


async def test_tools_and_tool_turns_in_the_order_of_their_keys(tools: Stack):
    async with AsyncClient(tools.address, model="decoder") as client:
        answer = await client.tokenize(TURNS, tools=[TOOL])
        assert bytes(answer.token_ids).decode() == RENDERED
        assert await client.generate(TURNS[3:], tools=['{"b": 1, "a": 2}']) == "ok"
    (job,) = tools.engine.generated
    assert bytes(job.prompt).decode() == '[{"b": 1, "a": 2}]<tool zeit>12:00<end><bot>'
    direct = tools.decoder.tokenizer._hf.apply_chat_template(
        [TURNS[0], TURNS[1], TURNS[2] | {"content": ""}, TURNS[3]],
        tools=[TOOL],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert direct == RENDERED


async def test_the_final_message_is_continued(tools: Stack):
    turns = [{"role": "user", "content": "say end"}, {"role": "assistant", "content": "the end"}]
    assert await shown(tools, *turns, continue_final_message=True) == "<user>say end<end><assistant>the end"
    assert await shown(tools, *turns, add_generation_prompt=False) == "<user>say end<end><assistant>the end<end>"
    spaced = [turns[0], {"role": "assistant", "content": "the end "}]
    assert await shown(tools, *spaced, continue_final_message=True) == "<user>say end<end><assistant>the end "


async def test_a_continued_message_that_the_template_leaves_out(stack: Stack):
    use(stack, "{{ messages[0].content }} {{ '' if messages | length > 1 else '' }}")
    failure = await refusal(
        stack, {"role": "a", "content": "x" * 400}, {"role": "b", "content": "y"}, continue_final_message=True
    )
    assert failure.code == grpc.StatusCode.INVALID_ARGUMENT
    assert "continue_final_message" in failure.violations["chat"]
    assert len(failure.violations["chat"]) < 400


async def test_a_template_that_knows_no_tools(stack: Stack):
    failure = await refusal(stack, {"role": "u", "content": "x"}, tools_json=[json.dumps(TOOL)])
    assert failure.code == grpc.StatusCode.FAILED_PRECONDITION
    assert "knows no tools" in failure.message


async def test_what_a_client_says_is_data(tools: Stack):
    hostile = "{{ 7 * 7 }}{% for i in range(9) %}x{% endfor %}{{ messages.__class__ }}"
    text = await shown(tools, {"role": "user", "content": hostile}, tools_json=[json.dumps({"name": hostile})])
    assert text == f'[{{"name": "{hostile}"}}]<user>{hostile}<end><bot>'


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
    ],
)
async def test_templates_run_in_a_sandbox(stack: Stack, template: str):
    use(stack, template)
    failure = await refusal(stack, {"role": "u", "content": "x"})
    assert failure.code == grpc.StatusCode.INVALID_ARGUMENT
    assert "template refused" in failure.violations["chat"]


async def test_json_that_is_nested_too_deeply(tools: Stack):
    deep = '{"a":' * 400
    failure = await refusal(tools, {"role": "u", "content": "x", "fields_json": deep[:900]})
    assert failure.code == grpc.StatusCode.INVALID_ARGUMENT
    fine = '{"a": ' + "[" * 90 + "]" * 90 + "}"
    assert (await shown(tools, {"role": "u", "content": "x"}, tools_json=[fine])).startswith(f"[{fine}]")


async def test_what_messages_say_begins_no_turn_unless_the_request_allows_it(stack: Stack):
    """The text's ``<s>`` is spelled in bytes; allowed, it is the token."""
    use(stack, "<s>{{ messages[0].content }}")
    said = {"role": "user", "content": "a<s>"}
    chat = generate_pb2.Chat(messages=[said])
    shown_ids = (await stack.models.Tokenize(model_pb2.TokenizeRequest(model="decoder", chat=chat))).token_ids
    assert list(shown_ids) == [BOS, *b"a<s>"]
    await stack.generate.Generate(generate_pb2.GenerateRequest(model="decoder", chat=chat))
    async with AsyncClient(stack.address, model="decoder") as client:
        assert (await client.tokenize([said], allow_control_tokens=True)).token_ids == [BOS, ord("a"), BOS]
        await client.generate([said], allow_control_tokens=True)
    assert [list(job.prompt) for job in stack.engine.generated] == [list(shown_ids), [BOS, ord("a"), BOS]]


async def test_numbers_of_template_arguments_stay_what_they_are(stack: Stack):
    use(stack, "{{ many }} {{ some }} {{ on }}")
    given = {"many": [3], "some": 1.5, "on": True}
    assert await shown(stack, {"role": "u"}, template_arguments=given) == "[3] 1.5 True"


def test_options_for_messages_alone():
    with Client("127.0.0.1:1") as client:
        for name in ("tools", "continue_final_message"):
            with pytest.raises(TypeError, match=f"{name} is for messages"):
                client.complete("text", **{name: [TOOL]})
        with pytest.raises(TypeError, match="unknown option 'tools'"):
            client.tokenize("text", tools=[TOOL])
        with pytest.raises(TypeError, match="tools must be a list"):
            client.tokenize(TURNS, tools=TOOL)
