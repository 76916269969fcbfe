"""Requests that are refused: (request, path of the bad field, part of what is said about it)."""

from __future__ import annotations

from pyruntime.v1 import common_pb2, embed_pb2, generate_pb2, score_pb2
from tests.fakes import EOS, VOCAB

Ids = common_pb2.TokenIds
Input = common_pb2.Input
A = Input(text="a")
TWO = Input(text="b")


def generate(**fields) -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(**{"text": "hi"} | fields)


def logprobs(**fields) -> generate_pb2.GenerateRequest:
    return generate(logprobs=generate_pb2.LogprobOptions(**fields))


def chat(*messages: dict, **fields) -> generate_pb2.GenerateRequest:
    return generate(chat=generate_pb2.Chat(messages=messages, **fields))


def sampling(**fields) -> generate_pb2.GenerateRequest:
    return generate(sampling=generate_pb2.Sampling(**fields))


def stop(**fields) -> generate_pb2.GenerateRequest:
    return generate(stop=generate_pb2.Stop(**fields))


def score(**fields) -> score_pb2.ScoreRequest:
    return score_pb2.ScoreRequest(**{"query": A, "items": [TWO], "labels": ["x"]} | fields)


def embed(**fields) -> embed_pb2.EmbedRequest:
    return embed_pb2.EmbedRequest(**{"model": "decoder", "inputs": [A]} | fields)


BAD_GENERATE = [
    (sampling(top_p=2), "sampling.top_p", "2 is out of range; allowed: above 0, at most 1"),
    (sampling(top_p=0), "sampling.top_p", "0 is out of range"),
    (sampling(top_p=float("nan")), "sampling.top_p", "nan"),
    (sampling(temperature=-1), "sampling.temperature", "-1 is out of range; allowed: 0 to 100"),
    (sampling(temperature=101), "sampling.temperature", "101"),
    (sampling(min_p=1.5), "sampling.min_p", "1.5"),
    (sampling(top_k=-2), "sampling.top_k", "-2"),
    (sampling(repetition_penalty=0), "sampling.repetition_penalty", "0 is out of range"),
    (sampling(frequency_penalty=3), "sampling.frequency_penalty", "3"),
    (sampling(presence_penalty=-3), "sampling.presence_penalty", "-3"),
    (sampling(logit_bias={VOCAB: 1.0}), f"sampling.logit_bias[{VOCAB}]", "vocabulary"),
    (sampling(logit_bias={1: float("inf")}), "sampling.logit_bias[1]", "inf"),
    (generate(n=0), "n", "0 is out of range; allowed: 1 to 128"),
    (generate(n=129), "n", "129"),
    (generate_pb2.GenerateRequest(), "prompt", "is not set"),
    (generate(text=""), "text", "is empty"),
    (generate(text=" \n\t"), "text", "is blank"),
    (generate(text="", token_ids=Ids()), "token_ids", "has no tokens"),
    (
        generate(token_ids=Ids(ids=[1, 300000])),
        "token_ids.ids[1]",
        f"300000 is outside the vocabulary; allowed: 0 to {VOCAB - 1}",
    ),
    (generate(text="a" * 70), "prompt", "has 71 tokens; allowed: at most 63, so that one more fits the context of 64"),
    (generate(text="a" * 1001), "text", "has 1001 bytes; allowed: at most 1000"),
    (generate(text="é" * 501), "text", "has 1002 bytes"),
    (generate(token_ids=Ids(ids=[1] * 1001)), "token_ids.ids", "has 1001 entries; allowed: at most 1000"),
    (chat({"role": "r" * 900, "content": "x" * 101}), "chat", "has 1001 bytes; allowed: at most 1000"),
    (chat(*[{"role": "u"}] * 9), "chat.messages", "has 9 entries; allowed: at most 8"),
    (chat({"role": "u"}, template_arguments={"mood": "x" * 1000}), "chat", "bytes; allowed: at most 1000"),
    (chat(*[{"role": "u", "content": "x" * 123}] * 8), "chat", "has 1044 bytes"),  # once it is rendered
    (generate(text="a <extra>"), "text", "<extra>"),
    (generate(chat=generate_pb2.Chat()), "chat.messages", "at least one"),
    (generate(chat=generate_pb2.Chat(messages=[{"content": "x"}])), "chat.messages[0].role", "empty"),
    (generate(chat=generate_pb2.Chat(messages=[{"role": "robot", "content": "x"}])), "chat", "no robots"),
    (
        generate(chat=generate_pb2.Chat(messages=[{"role": "user"}], template_arguments={"tokenize": True})),
        "chat.template_arguments",
        "tokenize",
    ),
    (stop(max_new_tokens=0), "stop.max_new_tokens", "0 is out of range"),
    (stop(max_new_tokens=62), "stop.max_new_tokens", "allowed: 1 to 61 behind a prompt of 3 tokens"),
    (stop(max_new_tokens=2, min_new_tokens=3), "stop.min_new_tokens", "3 is out of range; allowed: 0 to 2"),
    (stop(strings=["x"] * 33), "stop.strings", "33"),
    (stop(strings=["x", ""]), "stop.strings[1]", "0 bytes"),
    (stop(token_ids=[VOCAB]), "stop.token_ids[0]", "vocabulary"),
    (stop(token_ids=[1] * 1025), "stop.token_ids", "has 1025 entries; allowed: at most 1024"),
    (stop(token_ids=range(VOCAB), min_new_tokens=1), "stop.min_new_tokens", "every token of the vocabulary"),
    (stop(token_ids=set(range(VOCAB)) - {EOS}, min_new_tokens=1), "stop.min_new_tokens", "every token"),
    (sampling(logit_bias=dict.fromkeys(range(1025), 1.0)), "sampling.logit_bias", "has 1025 entries"),
    (
        generate(constraint=generate_pb2.Constraint(choice={"options": ["x"] * 1025})),
        "constraint.choice.options",
        "has 1025 entries",
    ),
    (generate(logprobs=generate_pb2.LogprobOptions(top=21)), "logprobs.top", "21"),
    (generate(logprobs=generate_pb2.LogprobOptions(top=2)), "logprobs.top", "2 is of no use"),
    (logprobs(prompt=True), "logprobs.prompt", "is of no use"),
    (logprobs(token_ids=[1]), "logprobs.token_ids", "are of no use"),
    (logprobs(enabled=True, token_ids=[1, VOCAB]), "logprobs.token_ids[1]", "vocabulary"),
    (logprobs(enabled=True, token_ids=[1] * 65), "logprobs.token_ids", "has 65 entries; allowed: at most 64"),
    (generate(chunk_tokens=0), "chunk_tokens", "0 is out of range; allowed: 1 to 1024"),
    (generate(chunk_tokens=1025), "chunk_tokens", "1025"),
    (chat({"role": "u"}, tools_json=["{}"] * 9), "chat.tools_json", "has 9 entries; allowed: at most 8"),
    (chat({"role": "u"}, tools_json=['{"a": 1}', "[1]"]), "chat.tools_json[1]", "is a JSON list"),
    (chat({"role": "u"}, tools_json=["{,}"]), "chat.tools_json[0]", "is not JSON"),
    (chat({"role": "u"}, tools_json=['{"a": NaN}']), "chat.tools_json[0]", "NaN"),
    (chat({"role": "u"}, tools_json=['{"a": 1e999}']), "chat.tools_json[0]", "is not JSON"),
    (chat({"role": "u"}, tools_json=[r'{"a": "\ud800"}']), "chat.tools_json[0]", "is not JSON"),
    (chat({"role": "u"}, tools_json=["x" * 1000]), "chat", "has 1001 bytes"),
    (chat({"role": "u", "fields_json": "7"}), "chat.messages[0].fields_json", "is a JSON int"),
    (chat({"role": "u", "fields_json": '{"role": "v"}'}), "chat.messages[0].fields_json", "holds 'role'"),
    (chat({"role": "u", "content": " "}, continue_final_message=True), "chat.messages[0].content", "is blank"),
    (
        chat({"role": "u", "content": "a"}, continue_final_message=True, add_generation_prompt=True),
        "chat.add_generation_prompt",
        "beside continue_final_message",
    ),
    (
        chat({"role": "u"}, template_arguments={"mood": float("inf")}),
        "chat.template_arguments",
        "allowed: what JSON can say",
    ),
    (generate(constraint=generate_pb2.Constraint()), "constraint", "names no kind"),
    (generate(constraint={"regex": "(a"}), "constraint.regex", "unclosed group"),
    (generate(constraint={"regex": "a" * 65537}), "constraint.regex", "has 65537 bytes; allowed: at most 65536"),
    (generate(constraint={"regex": "a{0}"}), "constraint.regex", "no text conforms to it but the empty one"),
    (generate(constraint={"regex": r"[^\s\S]"}), "constraint.regex", "no text conforms"),
    (generate(constraint={"json_schema": "{"}), "constraint.json_schema", "is no JSON schema"),
    (generate(constraint={"json_schema": "false"}), "constraint.json_schema", "no text conforms to it"),
    (generate(constraint={"json_schema": '{"not": {}}'}), "constraint.json_schema", "not"),
    (generate(constraint={"grammar": "start: other"}), "constraint.grammar", 'unknown name: "other"'),
    (generate(constraint={"choice": {"options": ["x" * 40000] * 2}}), "constraint.choice.options", "80000 bytes"),
    (generate(request_id="x" * 257), "request_id", "257"),
]


BAD_EMBED = [
    (embed(inputs=[]), "inputs", "has 0 entries; allowed: 1 to 8"),
    (embed(inputs=[A] * 9), "inputs", "has 9 entries"),
    (embed(dimensions=0), "dimensions", "0 is out of range; allowed: 1 to 12"),
    (embed(dimensions=13), "dimensions", "13"),
    (embed(max_tokens=1), "max_tokens", "1 is out of range; allowed: 2 to 64"),
    (embed(max_tokens=65), "max_tokens", "65"),
    (embed(pooling=9), "pooling", "9 is not a Pooling"),
    (embed(encoding=9), "encoding", "9"),
    (embed(truncation=9), "truncation", "9"),
    (embed(kind=9), "kind", "9"),
    (embed(prompt="p", prompt_name="query"), "prompt", "prompt_name"),
    (embed(inputs=[Input(text="")]), "inputs[0].text", "is empty"),
    (embed(inputs=[Input(text=" \n\t")]), "inputs[0].text", "blank"),
    (embed(inputs=[Input()]), "inputs[0]", "neither"),
    (embed(inputs=[Input(token_ids=Ids())]), "inputs[0].token_ids", "is empty"),
    (embed(inputs=[Input(token_ids=Ids(ids=[VOCAB]))]), "inputs[0].token_ids.ids[0]", "vocabulary"),
    (embed(inputs=[Input(token_ids=Ids(ids=[5]))], prompt="p"), "inputs[0].token_ids", "unset prompt"),
    (embed(inputs=[Input(token_ids=Ids(ids=[5]))], prompt_name="query"), "inputs[0].token_ids", "unset prompt_name"),
    (embed(inputs=[Input(text="a" * 64)]), "inputs[0]", "has 65 tokens; allowed: at most 64"),
    (embed(inputs=[Input(text="a" * 1001)]), "inputs[0].text", "1001 bytes"),
    (embed(inputs=[Input(token_ids=Ids(ids=[5] * 1001))]), "inputs[0].token_ids.ids", "1001 entries"),
    (embed(inputs=[Input(text="a" * 1000)] * 4), "inputs", "has 4000 bytes of text in all; allowed: at most 3000"),
    (embed(inputs=[A] * 8, prompt="p" * 500), "inputs", "has 4008 bytes"),
    (embed(inputs=[Input(token_ids=Ids(ids=[5] * 1000))] * 3 + [A]), "inputs", "has 3001 bytes"),
]


def packed(*ids: int) -> Input:
    return Input(token_ids=Ids(ids=ids))


PACKED = {"items": [], "delimiter_token_id": 9}
BAD_SCORE = [
    (score(items=[]), "items", "has 0 entries"),
    (score(items=[A] * 9), "items", "has 9 entries"),
    (score(labels=[]), "labels", "exactly one of"),
    (score(label_token_ids=[1]), "labels", "exactly one of"),
    (score(labels=["x", "xy"]), "labels[1]", "'xy' is 2 tokens; allowed: exactly one"),
    (score(labels=[""]), "labels[0]", "0 tokens"),
    (score(labels=["<extra>"]), "labels[0]", "<extra>"),
    (score(labels=[], label_token_ids=[3, VOCAB]), "label_token_ids[1]", "vocabulary"),
    (score(temperature=0, apply_softmax=True), "temperature", "0 is out of range; allowed: above 0"),
    (score(temperature=2), "temperature", "apply_softmax"),
    (score(query=Input(text=" ")), "query.text", "blank"),
    (score(query=Input()), "query", "neither"),
    (score(query=Input(text="a" * 63)), "query", "has 64 tokens; allowed: at most 63"),
    (score(items=[Input(text="a" * 63)]), "items[0]", "has 63 tokens; allowed: at most 62 beside the query"),
    (score(truncation=7), "truncation", "7"),
    (score(labels=["x"] * 11), "labels", "has 11 entries; allowed: at most 10"),
    (score(labels=[], label_token_ids=[1] * 11), "label_token_ids", "has 11 entries; allowed: at most 10"),
    (score(items=[A] * 7, labels=["x"] * 3), "items", "7 items x 3 labels are 21 scores; allowed: at most 20"),
    (score(labels=["x" * 1001]), "labels[0]", "has 1001 bytes"),
    (score(query=Input(text="a" * 1000), items=[Input(text="a" * 1000)] * 2, labels=["x"]), "items", "3001 bytes"),
    (score(labels=["x" * 1000] * 3), "items", "has 3002 bytes"),
    (score(delimiter_token_id=9), "items", "absent"),
    (score(**PACKED), "query", "token_ids"),
    (score(**PACKED, item_first=True), "item_first", "not allowed"),
    (score(**PACKED, query=Input(token_ids=Ids(ids=[1, 9, 2]))), "query.token_ids", "ends in 2"),
    (score(**PACKED, query=Input(token_ids=Ids(ids=[9, 1, 9]))), "query.token_ids", "begins with"),
    (score(**PACKED, query=Input(token_ids=Ids(ids=[1, 9]))), "query.token_ids", "one delimiter"),
    (score(**PACKED, query=packed(1, *[9, 2] * 7, 9), labels=["x"] * 3), "query.token_ids", "7 items x 3 labels"),
    (score(**PACKED, query=packed(1, *[9, 2] * 9, 9)), "query.token_ids", "has 9 entries; allowed: 1 to 8"),
    (
        score(**PACKED, query=packed(*[1] * 63, 9, 2, 2, 9)),
        "query.token_ids",
        "item 0 has 2 tokens; allowed: at most 1",
    ),
    (score(**PACKED, query=packed(*[1] * 64, 9, 2, 9)), "query.token_ids", "has 64 tokens; allowed: at most 63"),
    (score(**PACKED, query=packed(*[1] * 1000, 9)), "query.token_ids.ids", "has 1001 entries"),
    (score(items=[], delimiter_token_id=VOCAB, query=Input(token_ids=Ids(ids=[1]))), "delimiter_token_id", "vocab"),
]
