"""Chats as tokens, with a flag for each token that the loss counts: rows of messages, or of a prompt and a completion.

The formats and the rules are those of TRL: https://huggingface.co/docs/trl/dataset_formats
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_posswap.errors import DataError
from hf_posswap.text.stdlib import Document
from hf_posswap.utils.format import said_by
from hf_posswap.utils.printable import brief_repr

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PAIR = ("prompt", "completion")
_OPTIONS = ("tools", "chat_template_kwargs")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ASSISTANT = "assistant"


@dataclass(frozen=True, repr=False)
class Chat(Document):
    """One row of a chat data set.

    Attributes:
        text: the row as JSON.
        row: `messages`, or `prompt` and `completion`, and `tools` and `chat_template_kwargs` if the row has them.
    """

    row: Mapping[str, Any] = field(default_factory=dict)

    @property
    def messages(self) -> list[dict[str, Any]] | None:
        """All messages of the row; None: prompt and completion are text."""
        messages = self.row["messages"] if "messages" in self.row else self.row["prompt"] + self.row["completion"]
        return None if isinstance(messages, str) else messages

    @property
    def is_pair(self) -> bool:
        """Whether the row has a prompt and a completion."""
        return "completion" in self.row


def row_document(row: object, name: str, column: str, *, chats: bool) -> Document | None:
    """Return one row, a string or a dict, as a document; None: it has no text.

    Args:
        row: its text under `column` is taken if it has one.
        name: of the row, for messages.
        column: that holds the text.
        chats: whether a row without text may be a chat.

    Raises:
        DataError: it is a chat whose messages cannot be read, or half a surrogate pair is in it.

    Example:
        >>> chat = row_document({"prompt": "1 + 1 = ", "completion": "2"}, "row 0", "text", chats=True)
        >>> chat.is_pair, chat.messages
        (True, None)
    """
    text = row.get(column) if isinstance(row, Mapping) else row
    if isinstance(text, str):
        return Document(name, _encodable(text, name))
    if not (chats and isinstance(row, Mapping)):
        return None
    given = {key: row[key] for key in ("messages", *_PAIR, *_OPTIONS) if row.get(key) is not None}
    kept = _PAIR if all(key in given for key in _PAIR) else ("messages",)
    if not all(key in given for key in kept):
        return None
    fields = {key: _checked(given[key], key, name, text=kept == _PAIR) for key in kept}
    if kept == _PAIR and isinstance(fields["prompt"], str) != isinstance(fields["completion"], str):
        raise DataError(f"{name}: prompt and completion are both text or both lists of messages, got one of each.")
    fields |= {key: given[key] for key in _OPTIONS if key in given}
    if isinstance(fields.get("tools"), str):
        try:
            fields["tools"] = json.loads(fields["tools"])
        except ValueError as error:
            raise DataError(f"{name}: tools is not valid JSON ({error}): give a list of JSON schemas.") from error
    return Chat(name, _encodable(json.dumps(fields, sort_keys=True, ensure_ascii=False, default=str), name), fields)


def _encodable(text: str, name: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{name} has half a surrogate pair, {text[error.start]!r}, which no tokenizer reads: replace it, as "
            "text.encode(errors='replace').decode() does."
        ) from error
    return text


def no_text(row: object, name: str, column: str, *, chats: bool) -> DataError:
    """Return the error for a row that has no text under `column` and, with `chats`, is not a chat."""
    content = f"columns {sorted(row)}" if isinstance(row, Mapping) else f"a {type(row).__name__}"
    elsewhere = "data.sources.0.column in a recipe" if chats else "column in Python"
    advice = f"name the column of text by --column, or by {elsewhere}"
    if chats:
        advice += "; or give messages, or prompt and completion"
    if chats and isinstance(row, Mapping) and "conversations" in row:
        advice += " (rename conversations, from and value to messages, role and content)"
    return DataError(f"{name} has no text under {column!r}, it has {content}: {advice}.")


def _checked(value: object, key: str, name: str, *, text: bool) -> Any:
    """Return text, or messages without the fields that a table fills with None."""
    if text and isinstance(value, str):
        return value
    expected = "a list of messages, each with a role and content"
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        alternative = "text, or " if text else ""
        raise DataError(f"{name}: {key} is {alternative}{expected}, got {brief_repr(value)}.")
    messages = []
    for number, message in enumerate(value):
        is_message = isinstance(message, Mapping) and isinstance(message.get("role"), str)
        if not is_message or not ("content" in message or message.get("tool_calls")):
            raise DataError(f"{name}: {key} is {expected}; {key}[{number}] is {brief_repr(message)}.")
        messages.append({field: item for field, item in message.items() if item is not None or field == "content"})
    return messages


@dataclass
class ChatEncoder:
    """Turns chats into tokens, and says which the loss counts.

    Args:
        tokenizer: of the model, with its chat template.
        assistant_only: count the assistant's tokens alone, TRL's `assistant_only_loss`.
        completion_only: count the completion's tokens alone, TRL's `completion_only_loss`; None: if a row has one.

    Attributes:
        diverging: prompts seen whose tokens are not the first ones of prompt and completion; as in TRL, the completion
            begins where they diverge.
        unstopped: chats seen whose template leaves the special token after the assistant's text out of its
            `{% generation %}` block, so that the model does not learn to stop.
    """

    tokenizer: PreTrainedTokenizerBase
    assistant_only: bool = False
    completion_only: bool | None = None
    diverging: int = 0
    unstopped: int = 0

    def encode(self, chat: Chat) -> tuple[np.ndarray, np.ndarray]:
        """Return the token ids of `chat`, int32 [n], and whether the loss counts each, bool [n].

        Raises:
            DataError: the tokenizer has no chat template, or it cannot render the chat or tell the assistant's tokens.
        """
        messages = chat.messages
        if self.completion_only and not chat.is_pair:
            raise DataError(
                f"{chat.name} has messages, and data.completion_only_loss=true needs prompt and completion: leave it "
                "out, or use data.assistant_only_loss=true."
            )
        if messages is None:
            return self._encode_text(chat)
        marks = self.assistant_only and _GENERATION.search(self._template(chat)) is not None
        ids, mask = self._render(chat, messages, mask=marks)
        counted = np.ones(len(ids), dtype=bool)
        if self.assistant_only:
            counted &= self._assistant_by_prefix(chat, messages, ids) if mask is None else np.array(mask, dtype=bool)
            self._check_mask(chat, messages, ids, counted)
        if chat.is_pair and self.completion_only is not False:
            counted[: self._prompt_length(self._render(chat, chat.row["prompt"], prompt=True)[0], ids)] = False
        return np.array(ids, dtype=np.int32), counted

    def _encode_text(self, chat: Chat) -> tuple[np.ndarray, np.ndarray]:
        if self.assistant_only:
            raise DataError(
                f"{chat.name} has prompt and completion as text, and data.assistant_only_loss=true needs messages: "
                "leave it out, and the loss counts the completion alone."
            )
        prompt, completion, end = chat.row["prompt"], chat.row["completion"], self.tokenizer.eos_token
        if isinstance(end, str) and not completion.endswith(end):
            completion += end
        ids = self.tokenizer(prompt + completion, verbose=False)["input_ids"]
        counted = np.ones(len(ids), dtype=bool)
        if self.completion_only is not False:
            counted[: self._prompt_length(self.tokenizer(prompt, verbose=False)["input_ids"], ids)] = False
        return np.array(ids, dtype=np.int32), counted

    def _prompt_length(self, prompt: list[int], ids: list[int]) -> int:
        """Return how many of `ids` belong to the prompt: those before it diverges from its own tokens."""
        length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, ids, strict=False)))
        self.diverging += length < len(prompt)
        return length

    def _template(self, chat: Chat) -> str:
        if self.tokenizer.chat_template is None:
            raise DataError(
                f"{chat.name} is a chat, and {type(self.tokenizer).__name__} has no chat template: put "
                "chat_template.jinja next to the tokenizer's files, or set model.tokenizer to a tokenizer with a "
                "template, such as the instruct version's. Prompt and completion as text need none."
            )
        return self.tokenizer.get_chat_template(tools=chat.row.get("tools"))

    def _render(
        self, chat: Chat, messages: list[dict[str, Any]], *, prompt: bool = False, mask: bool = False
    ) -> tuple[list[int], list[int] | None]:
        """Return the tokens of `messages`, for `prompt` with the beginning of the answer, and the assistant's mask."""
        self._template(chat)
        options = {"tools": chat.row.get("tools"), **chat.row.get("chat_template_kwargs", {})}
        options |= {"add_generation_prompt": prompt, "return_assistant_tokens_mask": mask}
        try:
            rendered: Any = self.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)
        except Exception as error:  # templates raise what they like
            reason = said_by(error).rstrip(".")
            raise DataError(
                f"{chat.name} cannot be rendered by the chat template ({reason}): change its messages, or leave the "
                "row out."
            ) from error
        return list(rendered["input_ids"]), rendered["assistant_masks"] if mask else None

    def _assistant_by_prefix(self, chat: Chat, messages: list[dict[str, object]], ids: list[int]) -> np.ndarray:
        """Return which of `ids` the assistant writes: those that its message adds to the messages before it."""
        counted = np.zeros(len(ids), dtype=bool)
        for number in (number for number, message in enumerate(messages) if message["role"] == _ASSISTANT):
            before = self._render(chat, messages[:number], prompt=True)[0] if number else None
            after = ids if number == len(messages) - 1 else self._render(chat, messages[: number + 1])[0]
            if before is None or after[: len(before)] != before or ids[: len(after)] != after:
                problem = (
                    "no message comes before it"
                    if before is None
                    else "the tokens of the messages before it, with the generation prompt, do not begin its own"
                    if after[: len(before)] != before
                    else "its tokens change with the messages after it"
                )
                raise DataError(
                    f"{chat.name}: data.assistant_only_loss=true cannot tell the tokens of message {number}: the chat "
                    f"template has no {{% generation %}} block, and {problem}. Mark the assistant's text in the "
                    "template by {% generation %}...{% endgeneration %}, or give a row per answer, with prompt and "
                    "completion, and leave assistant_only_loss out."
                )
            counted[len(before) : len(after)] = True
        return counted

    def _check_mask(self, chat: Chat, messages: list[dict[str, object]], ids: list[int], counted: np.ndarray) -> None:
        """Refuse an answer without a counted token, and note an end of turn that is not counted."""
        if counted.any():
            end = int(counted.nonzero()[0][-1]) + 1
            self.unstopped += end < len(ids) and ids[end] in self.tokenizer.all_special_ids
            return
        answers = [message for message in messages if message["role"] == _ASSISTANT]
        if any(message.get("content") or message.get("tool_calls") for message in answers):
            raise DataError(
                f"{chat.name}: the chat template marks no token of the assistant's messages, and "
                "data.assistant_only_loss=true counts only those: put their text, and the token that ends it, into "
                "{% generation %}...{% endgeneration %}."
            )
