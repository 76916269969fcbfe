"""Text to token ids and back, over the fast tokenizers of transformers.

All methods may be called from several threads at once: truncation and padding, the only state that a
fast tokenizer changes while it encodes, are switched off at construction and done here instead.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from pyruntime.control_tokens import ControlTokens, MarkedText
from pyruntime.detokenization import IncrementalDetokenizer, StopMatcher, decoder_steps
from pyruntime.errors import CapabilityMissing, InvalidField, ModelLoadError

# Characters of a template's own error, which may repeat the whole conversation.
MOST_ERROR = 300

__all__ = ["IncrementalDetokenizer", "PairFrame", "StopMatcher", "Tokenizer"]


@dataclass(frozen=True, slots=True)
class PairFrame:
    """What a tokenizer's post-processor makes of two texts: ``before`` first ``between`` second ``after``.

    Each of the five parts has its token types; those of a text are one number, ``first_type`` and ``second_type``.
    ``num_special``: how many tokens are added to the two texts'.
    """

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]
    before_types: tuple[int, ...]
    between_types: tuple[int, ...]
    after_types: tuple[int, ...]
    first_type: int
    second_type: int

    @property
    def num_special(self) -> int:
        return len(self.before) + len(self.between) + len(self.after)

    def join(self, first: list[int], second: list[int]) -> list[int]:
        """The pair's ids, from each text's own without special tokens."""
        return [*self.before, *first, *self.between, *second, *self.after]

    def types(self, num_first: int, num_second: int) -> list[int]:
        """The token types of a joined pair of so many tokens each."""
        own = [self.first_type] * num_first, [self.second_type] * num_second
        return [*self.before_types, *own[0], *self.between_types, *own[1], *self.after_types]


class Tokenizer:
    """One model's tokenizer.

    vocab_size         ids are below this; counts added tokens, so it may differ from the model's rows
    eos_token_ids      the tokenizer's own end-of-sequence ids (generation_config.json may know more)
    special_token_ids  ids that decoding with ``skip_special_tokens`` leaves out
    num_special        how many tokens encoding adds around one text
    pair_frame         how two texts are put together; None where nothing would stand between them
    reads_token_types  whether models of this tokenizer are given token types
    """

    def __init__(self, hf_tokenizer: Any) -> None:
        backend = getattr(hf_tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ModelLoadError(f"{type(hf_tokenizer).__name__} has no fast implementation (tokenizer.json)")
        backend.no_truncation()
        backend.no_padding()
        self._hf = hf_tokenizer
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self.vocab_size: int = max(backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        eos = hf_tokenizer.eos_token_id
        self.eos_token_ids: frozenset[int] = frozenset() if eos is None else frozenset([eos])
        self.special_token_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        self._head, self._tail = _added_around(backend)
        self.num_special: int = len(self._head) + len(self._tail)
        self.pair_frame: PairFrame | None = _pair_frame(backend)
        self.reads_token_types: bool = "token_type_ids" in hf_tokenizer.model_input_names
        self._control: dict[str, ControlTokens] = {}  # by template, made when one is first used

    @classmethod
    def from_pretrained(cls, path: str | Path) -> Tokenizer:
        """The tokenizer of a Hugging Face folder or hub name; raises ``ModelLoadError`` if there is none."""
        from transformers import AutoTokenizer

        try:
            return cls(AutoTokenizer.from_pretrained(str(path)))
        except (ImportError, KeyError, OSError, ValueError) as error:
            raise ModelLoadError(f"no tokenizer can be read from {path}: {error}") from error

    @property
    def leading_special_ids(self) -> list[int]:
        """What is put before a text: the beginning-of-sequence token, where there is one."""
        return list(self._head)

    @property
    def trailing_special_ids(self) -> list[int]:
        """What is put behind a text: an end-of-sequence or separator token, where there is one."""
        return list(self._tail)

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Ids of ``text``, of any length; special tokens around it where the model has them."""
        return self.encode_batch([text], special_tokens=special_tokens)[0]

    def encode_batch(self, texts: list[str], *, special_tokens: bool = True) -> list[list[int]]:
        """Ids of each text, in order; parallel over texts, without the interpreter lock."""
        # The fast form leaves out character offsets, which nothing here reads.
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=special_tokens)
        return [encoding.ids for encoding in encodings]

    def truncate(self, ids: list[int], limit: int, keep: Literal["head", "tail"]) -> list[int]:
        """At most ``limit`` of ``ids``, which were encoded with special tokens; those stay at both ends.

        Raises ``InvalidField`` when the limit leaves no room for text beside the special tokens.
        """
        if len(ids) <= limit:
            return ids
        head = len(self._head) if ids[: len(self._head)] == self._head else 0
        tail = len(self._tail) if ids[len(ids) - len(self._tail) :] == self._tail else 0
        room = limit - head - tail
        if room < 1:
            problem = f"{limit} leaves no room beside {head + tail} special tokens; at least {head + tail + 1}"
            raise InvalidField("max_tokens", problem)
        end = len(ids) - tail
        kept = ids[head : head + room] if keep == "head" else ids[end - room : end]
        return ids[:head] + kept + ids[end:]

    def render_chat(self, messages: list[dict[str, Any]], **kw: Any) -> str:
        """The conversation as the model's own template writes it, ready for the assistant's next turn.

        The text holds the special tokens the model expects: encode it with ``special_tokens=False``.
        ``kw`` goes to the template, ``tools`` and ``continue_final_message`` as transformers has them. Templates run
        in transformers' sandbox, where what messages and tools say is data. Raises ``CapabilityMissing`` without a
        template or with tools that it does not know, and ``InvalidField`` when it refuses the messages.
        """
        if not self._hf.chat_template:
            raise CapabilityMissing("this model has no chat template; send text or token ids")
        if kw.get("tools") and not self._template_knows_tools():
            raise CapabilityMissing("this model's chat template knows no tools; unset chat.tools_json")
        options = {"add_generation_prompt": True, **kw}
        try:
            return str(self._hf.apply_chat_template(messages, tokenize=False, **options))
        # A template is a program of the model's author: what it raises on odd messages is not limited.
        except Exception as error:
            problem = f"the model's chat template refused the messages: {str(error)[:MOST_ERROR]}"
            raise InvalidField("chat", problem) from error

    def render_data(self, messages: list[dict[str, Any]], **kw: Any) -> MarkedText:
        """As ``render_chat``, with names of control tokens in messages, tools and variables kept apart as text."""
        try:
            messages, kw, marks = self.control_tokens(self._chat_template()).mark(messages, kw)
        except RecursionError as error:
            raise InvalidField("chat", "holds JSON that is nested too deeply") from error
        return MarkedText(self.render_chat(messages, **kw), marks)

    def encode_chat(self, chat: MarkedText, *, special_tokens: bool = False) -> list[int]:
        """Ids of a rendered chat. Raises ``InvalidField`` where a control token's name cannot be spelled as text."""
        if not chat.marks:
            return self.encode(chat.text, special_tokens=special_tokens)
        allowed = "such names with allow_control_tokens alone"
        ids = self.control_tokens(self._chat_template()).ids(chat, allowed)
        return [*self._head, *ids, *self._tail] if special_tokens else ids

    def control_tokens(self, template: str) -> ControlTokens:
        """The control tokens of a text that frames others, one of the model's own: those made are kept."""
        if template not in self._control:
            self._control[template] = ControlTokens(self._backend, template)
        return self._control[template]

    def _chat_template(self) -> str:
        return "\n".join(self._templates())

    def _template_knows_tools(self) -> bool:
        """Whether the template, or one of several, has such a variable; others would leave the tools out unsaid."""
        return any(re.search(r"\btools\b", text) for text in self._templates())

    def _templates(self) -> list[str]:
        template = self._hf.chat_template
        return list(template.values()) if isinstance(template, dict) else [template or ""]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``ids``; bytes that are no UTF-8 become U+FFFD, ids outside the vocabulary nothing."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def definition(self) -> str:
        """The whole tokenizer as JSON, as in a ``tokenizer.json``."""
        return str(self._backend.to_str())

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Each id's entry in the vocabulary, as it stands there; empty for an id outside of it."""
        return [self._backend.id_to_token(i) or "" for i in ids]

    def decode_batch(self, lists: list[list[int]]) -> list[str]:
        """The texts of many lists, special tokens included; parallel over lists, without the interpreter lock."""
        return [str(text) for text in self._backend.decode_batch(lists, skip_special_tokens=False)]

    def decoder_steps(self) -> list[dict[str, Any]]:
        """As ``detokenization.decoder_steps``."""
        return decoder_steps(self._backend)

    def detokenizer(self, skip_special_tokens: bool = True) -> IncrementalDetokenizer:
        """A fresh detokenizer for one stream of ids; for use by one thread at a time."""
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        return IncrementalDetokenizer(self._backend, skipped)


def _added_around(backend: Any) -> tuple[list[int], list[int]]:
    """The ids that encoding puts before and after a text."""
    probe = backend.encode("a")
    mask = probe.special_tokens_mask
    if all(mask):
        raise ModelLoadError("the tokenizer encodes the letter a as nothing but special tokens")
    first = mask.index(0)
    after = len(mask) - mask[::-1].index(0)
    return probe.ids[:first], probe.ids[after:]


def _pair_frame(backend: Any) -> PairFrame | None:
    """Learnt from one pair: special tokens have no sequence of their own. Every text is put in the same frame."""
    (probe,) = backend.encode_batch_fast([("a", "a")])
    inside = [place for place, special in enumerate(probe.special_tokens_mask) if not special]
    gaps = [place for place, following in pairwise(inside) if following > place + 1]
    if len(gaps) != 1:
        return None
    first, second = slice(inside[0], gaps[0] + 1), slice(inside[inside.index(gaps[0]) + 1], inside[-1] + 1)
    ids, types = probe.ids, probe.type_ids
    return PairFrame(
        before=tuple(ids[: first.start]),
        between=tuple(ids[first.stop : second.start]),
        after=tuple(ids[second.stop :]),
        before_types=tuple(types[: first.start]),
        between_types=tuple(types[first.stop : second.start]),
        after_types=tuple(types[second.stop :]),
        first_type=types[first.start],
        second_type=types[second.start],
    )
