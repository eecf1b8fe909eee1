"""Examples from a JSONL file: tokens, and which of them are learned.

A line is an object with one of

    {"text": "..."}                              every token is learned
    {"prompt": "...", "completion": "..."}       the completion is learned; both may be lists of messages
    {"messages": [{"role": ..., "content": ...}]}  what the assistant says is learned, with the end of its turn

What the assistant says is found in the *text* that the model's chat template makes: a conversation is rendered up to
each of its answers and once more with it, and the answer is what was added (or, with templates that change earlier
turns, what changes when the answer does).  The whole text is then tokenised once, and a token is learned if it begins
inside an answer.  No marker is searched for among tokens, so that nothing depends on how a marker is tokenised in its
surroundings.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from unweight.errors import DataError

Overlong = Literal["cut", "drop"]
Spans = list[tuple[int, int]]
# Of Unicode's private use area, so that neither templates nor contents have them.
MARKS = ("\ue000", "\ue001")


class Render(Protocol):
    """Makes text of messages; with ``prompt``, up to where an answer begins."""

    def __call__(self, part: list[dict[str, Any]], prompt: bool = False) -> str: ...


@dataclass(frozen=True, slots=True)
class Example:
    """A sequence of ``[length]`` tokens.  ``learned`` says which of them the model is to predict; never the first."""

    line: int
    tokens: npt.NDArray[np.int32]
    learned: npt.NDArray[np.bool_]

    @property
    def length(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Dataset:
    """The examples of a file, and what became of the others."""

    path: str
    sha256: str
    examples: tuple[Example, ...]
    cut: int
    dropped: int

    @property
    def learned(self) -> int:
        """Tokens that are learned in one pass."""
        return sum(int(e.learned.sum()) for e in self.examples)

    def describe(self) -> str:
        tokens = sum(e.length for e in self.examples)
        text = f"{self.path}: {len(self.examples)} examples, {tokens} tokens, {self.learned} of them learned"
        if self.cut:
            text += f"; {self.cut} cut to the length"
        if self.dropped:
            text += f"; {self.dropped} left out, since nothing of them is learned within the length"
        return text


def read_dataset(path: str | os.PathLike[str], tokenizer: Any, *, length: int, overlong: Overlong = "cut") -> Dataset:
    """Read and tokenise a JSONL file.

    Args:
        path: the file; empty lines are skipped.
        tokenizer: a fast tokenizer of transformers, with a chat template if there are messages.
        length: the most tokens that an example may have.
        overlong: ``cut`` longer ones behind ``length`` tokens, or ``drop`` them.

    Raises:
        DataError: a line isn't one of the three kinds, the template can't render it, or nothing at all is learned.
    """
    if overlong not in ("cut", "drop"):
        raise ValueError(f"overlong has to be 'cut' or 'drop', not {overlong!r}")
    if length < 2:
        raise ValueError(f"length has to be at least 2, not {length}: the first token of an example is never learned")
    if not getattr(tokenizer, "is_fast", False):
        raise DataError(
            f"{type(tokenizer).__name__} doesn't tell where in the text its tokens are; finetuning needs a fast "
            "tokenizer: a model with tokenizer.json."
        )
    examples: list[Example] = []
    cut = dropped = 0
    digest = hashlib.sha256()
    for number, line in _lines(path, digest):
        text, spans, is_template = _render(line, tokenizer, f"{os.fspath(path)}, line {number}")
        tokens, learned = _tokenise(text, spans, tokenizer, is_template)
        if len(tokens) > length:
            if overlong == "drop":
                dropped += 1
                continue
            cut += 1
            tokens, learned = tokens[:length], learned[:length]
        if not learned.any():
            dropped += 1
            continue
        examples.append(Example(number, tokens, learned))
    if not examples:
        raise DataError(
            f"nothing can be learned from {os.fspath(path)!r}: of its {dropped} examples none has a token to learn "
            f"within {length} tokens. Raise the length, or check that there are assistant's messages or completions."
            if dropped
            else f"{os.fspath(path)!r} has no examples: each line has to be a JSON object."
        )
    return Dataset(os.fspath(path), digest.hexdigest(), tuple(examples), cut, dropped)


def _lines(path: str | os.PathLike[str], digest: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with Path(path).open("rb") as file:
            for number, raw in enumerate(file, 1):
                digest.update(raw)
                if not raw.strip():
                    continue
                try:
                    value = json.loads(raw)
                except ValueError as error:  # wrong UTF-8 as well
                    raise DataError(f"{os.fspath(path)}, line {number} is not JSON: {error}.") from None
                if not isinstance(value, dict):
                    raise DataError(
                        f"{os.fspath(path)}, line {number} is a JSON {type(value).__name__}, not an object with "
                        "'text', 'prompt' and 'completion', or 'messages'."
                    )
                yield number, value
    except OSError as error:
        raise DataError(f"can't read {os.fspath(path)!r}: {error.strerror}.") from None


def _render(line: dict[str, Any], tokenizer: Any, where: str) -> tuple[str, Spans, bool]:
    """The text of an example, the spans of characters to learn, and whether a template made it."""
    kinds = [kind for kind in ("text", "messages", "completion") if kind in line]
    if len(kinds) != 1:
        raise DataError(
            f"{where} has the keys {', '.join(map(repr, line)) or 'none'}; expected 'text', or 'prompt' and "
            "'completion', or 'messages', and only one of them."
        )
    if kinds == ["text"]:
        text = _string(line["text"], "text", where)
        return text, [(0, len(text))], False
    if kinds == ["messages"]:
        messages = _messages(line["messages"], "messages", where)
        return *_render_messages(messages, 0, tokenizer, line.get("tools"), where), True
    prompt, completion = line.get("prompt", ""), line["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        before = _messages(prompt, "prompt", where)
        after = _messages(completion, "completion", where)
        return *_render_messages([*before, *after], len(before), tokenizer, line.get("tools"), where), True
    prompt, completion = _string(prompt, "prompt", where), _string(completion, "completion", where)
    return prompt + completion, [(len(prompt), len(prompt) + len(completion))], False


def _render_messages(
    messages: list[dict[str, Any]], first: int, tokenizer: Any, tools: Any, where: str
) -> tuple[str, Spans]:
    """The conversation as text, and where the assistant speaks in it, from message ``first`` on."""

    def render(part: list[dict[str, Any]], prompt: bool = False) -> str:
        try:
            return str(tokenizer.apply_chat_template(part, tools=tools, tokenize=False, add_generation_prompt=prompt))
        except Exception as error:  # Jinja's errors, and whatever a template raises
            raise DataError(f"{where}: the chat template can't render {len(part)} messages: {error}") from None

    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            f"{where} has messages, but the model's tokenizer has no chat template. Use the instruction-tuned model's "
            "tokenizer (--tokenizer), or 'prompt' and 'completion'."
        )
    whole = render(messages)
    spans = []
    for i, message in enumerate(messages):
        if i < first or message["role"] != "assistant":
            continue
        span = _added(messages, i, whole, render) or _between(messages, i, whole, render)
        if span is None:
            raise DataError(
                f"{where}: what the assistant says in message {i + 1} can't be found in what the chat template makes "
                "of the conversation. Give that answer a line of its own."
            )
        spans.append(span)
    return whole, spans


def _added(messages: list[dict[str, Any]], i: int, whole: str, render: Render) -> tuple[int, int] | None:
    """The span that message ``i`` adds to the conversation before it; None if later messages change it."""
    before, upto = render(messages[:i], prompt=True) if i else "", render(messages[: i + 1])
    # Templates may begin an answer differently when it is to be generated (an open thought, for example).
    start = len(_common(before, upto))
    # The end of the conversation's last turn may differ from that of the same turn in the middle.
    stop = len(_common(upto, whole))
    floor = len(render(messages[:i])) if i else 0
    content = messages[i]["content"]
    is_whole = stop == len(upto) or (isinstance(content, str) and content.strip() in whole[start:stop])
    return (start, stop) if floor <= start < stop and is_whole else None


def _between(messages: list[dict[str, Any]], i: int, whole: str, render: Render) -> tuple[int, int] | None:
    """The span of message ``i`` by what stays when its content is replaced; None if that can't be told.

    Some templates leave thoughts out of all answers but the last, so conversations begin otherwise than shorter ones.
    """

    def around(part: list[dict[str, Any]], text: str) -> tuple[int, int] | None:
        one, other = (render([*part[:i], messages[i] | {"content": mark * 8}, *part[i + 1 :]]) for mark in MARKS)
        head = _common(one, other)
        tail = _common(one[::-1], other[::-1])[::-1]
        fits = text.startswith(head) and text.endswith(tail) and len(head) + len(tail) < len(text)
        return (len(head), len(text) - len(tail)) if fits and one != other else None

    upto = render(messages[: i + 1])
    here, alone = around(messages, whole), around(messages[: i + 1], upto)
    if here is None or alone is None:
        return None
    end = _common(upto[alone[1] :], whole[here[1] :])
    return here[0], here[1] + len(end)


def _common(a: str, b: str) -> str:
    """What both begin with."""
    return a[: next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))]


def _tokenise(
    text: str, spans: Spans, tokenizer: Any, is_template: bool
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """Tokens of the text, and which begin in one of the spans.

    Templates write special tokens themselves.  Other texts get those that the tokenizer adds, and an end that is
    learned, so that the model stops.
    """
    encoded = tokenizer(text, add_special_tokens=not is_template, return_offsets_mapping=True, verbose=False)
    tokens, offsets = list(encoded["input_ids"]), list(encoded["offset_mapping"])
    # Tokens that the tokenizer has added have no place in the text.
    learned = [any(start <= a < stop for start, stop in spans) and b > a for a, b in offsets]
    end = tokenizer.eos_token_id
    if not is_template and end is not None and spans:
        if tokens and tokens[-1] == end:
            learned[-1] = True
        else:
            tokens.append(end)
            learned.append(True)
    mask = np.array(learned, np.bool_)
    mask[:1] = False  # nothing comes before it that could predict it
    return np.array(tokens, np.int32), mask


def _string(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: {name!r} has to be a string, not {type(value).__name__}.")
    return value


def _messages(value: Any, name: str, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: {name!r} has to be a list of messages, each with 'role' and 'content'.")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise DataError(f"{where}: a message has to have 'role' and 'content', not {json.dumps(message)[:80]}.")
    return value
