"""Examples from JSONL.

1. What the assistant says is learned, with the end of its turn, and nothing else: under any template, with any content,
   and however the tokens of markers merge with their surroundings.
2. The three kinds of lines, and what is wrong with a line, are told.
3. A file in which nothing is learned is an error.
4. Examples are packed without loss; their positions restart, and the first token of each is never learned.
5. The steps of a plan follow from the seed; all processes together do what one does.
"""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_chat import CHATML, FORGETS_THOUGHTS, chats, tokenizer, write_lines

from unweight.errors import DataError
from unweight.finetune.batches import IGNORED, Plan, collate, in_order, pack
from unweight.finetune.data import Dataset, Example, read_dataset


def learned_text(words, example):
    """The texts of the runs of learned tokens."""
    runs, last = [], False
    for token, learned in zip(example.tokens.tolist(), example.learned.tolist(), strict=True):
        if learned and not last:
            runs.append([])
        if learned:
            runs[-1].append(token)
        last = learned
    return [words.decode(run) for run in runs]


def read_one(tmp_path, line, words, **more):
    return read_dataset(write_lines(tmp_path / "one.jsonl", [line]), words, **{"length": 512} | more).examples[0]


def conversation(*contents):
    return {"messages": [{"role": "user" if i % 2 == 0 else "assistant", "content": c} for i, c in enumerate(contents)]}


# 1. What is learned


def test_answers_with_their_ends(tmp_path):
    words = tokenizer()
    example = read_one(tmp_path, conversation("Hi", "Hello!", "Bye", "See you."), words)
    assert learned_text(words, example) == ["Hello!<|im_end|>\n", "See you.<|im_end|>\n"]


def test_a_template_that_forgets_thoughts(tmp_path):
    """The conversation up to an answer isn't how the whole one begins, so the answer is found by what surrounds it."""
    words = tokenizer(FORGETS_THOUGHTS)
    example = read_one(tmp_path, conversation("Hi", " Hello! ", "Bye", "See you."), words)
    text = words.decode(example.tokens.tolist())
    assert text.count("<think>") == 1
    assert learned_text(words, example) == ["Hello!<|im_end|>\n", "<think>\n\n</think>\n\nSee you.<|im_end|>\n"]


@pytest.mark.parametrize("merged", [("\u010aH",), ("t\u010a", "!<")], ids=["marker-and-answer", "inside-marker"])
def test_markers_that_merge_with_their_surroundings(tmp_path, merged):
    """ "assistant\\n" tokenises otherwise before "Hello" than alone: a search for its tokens would find nothing."""
    words = tokenizer(merged=merged)
    marker = words("assistant\n", add_special_tokens=False)["input_ids"]
    example = read_one(tmp_path, conversation("Hi", "Hello!"), words)
    tokens = example.tokens.tolist()
    found = [tokens[i : i + len(marker)] == marker for i in range(len(tokens))]
    if merged == ("\u010aH",):
        assert not any(found)
        # The token that holds the marker's end and the answer's beginning belongs to neither, so it isn't learned.
        assert learned_text(words, example) == ["ello!<|im_end|>\n"]
    else:
        assert learned_text(words, example) == ["Hello!<|im_end|>\n"]


def test_an_answer_that_looks_like_a_marker(tmp_path):
    words = tokenizer()
    answer = "assistant\nuser\nHi"
    example = read_one(tmp_path, conversation("Hi\nassistant\nHi", answer, "Hi", "Hi"), words)
    assert learned_text(words, example) == [answer + "<|im_end|>\n", "Hi<|im_end|>\n"]


@given(st.lists(st.text(st.characters(exclude_categories=["C"]), min_size=1, max_size=12), min_size=2, max_size=6))
def test_any_conversation(contents):
    """Under both templates, exactly the answers."""
    from unweight.finetune.data import _render_messages

    contents = [c.strip() or "x" for c in contents][: len(contents) // 2 * 2]
    messages = conversation(*contents)["messages"]
    for template, before in ((CHATML, ""), (FORGETS_THOUGHTS, "<think>\n\n</think>\n\n")):
        whole, spans = _render_messages(messages, 0, tokenizer(template), None, "here")
        answers = contents[1::2]
        expected = [a + "<|im_end|>\n" for a in answers[:-1]] + [before + answers[-1] + "<|im_end|>\n"]
        assert [whole[a:b] for a, b in spans] == expected


def test_prompt_and_completion(tmp_path):
    words = tokenizer()
    example = read_one(tmp_path, {"prompt": "2+2=", "completion": "4"}, words)
    assert learned_text(words, example) == ["4<|im_end|>"]
    only = {"prompt": conversation("a", "b", "c")["messages"], "completion": [{"role": "assistant", "content": "d"}]}
    assert learned_text(words, read_one(tmp_path, only, words)) == ["d<|im_end|>\n"]


def test_text_ends(tmp_path):
    """Every token is learned but the first, and one end is there, not two."""
    words = tokenizer()
    for text in ("abc", "abc<|im_end|>"):
        assert learned_text(words, read_one(tmp_path, {"text": text}, words)) == ["bc<|im_end|>"]


# 2. and 3. What is wrong


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", r"line 2 is not JSON"),
        ("[1]", r"line 2 is a JSON list"),
        ('{"texts": "a"}', r"line 2 has the keys 'texts'"),
        ('{"text": "a", "messages": []}', "only one of them"),
        ('{"text": 3}', "'text' has to be a string"),
        ('{"messages": []}', "list of messages"),
        ('{"messages": [{"role": "user"}]}', "'role' and 'content'"),
        ('{"prompt": ["a"], "completion": "b"}', "'prompt' has to be a string"),
    ],
)
def test_wrong_lines(tmp_path, line, said):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(DataError, match=said):
        read_dataset(path, tokenizer(), length=64)


def test_messages_need_a_template(tmp_path):
    with pytest.raises(DataError, match="no chat template"):
        read_one(tmp_path, conversation("a", "b"), tokenizer(None))


def test_a_template_that_refuses(tmp_path):
    with pytest.raises(DataError, match=r"line 1: the chat template can't render .*roles"):
        read_one(tmp_path, conversation("a", "b"), tokenizer("{{ raise_exception('roles must alternate') }}"))


def test_nothing_to_learn(tmp_path):
    """Labels that are all ignored would give a loss of 0 or NaN."""
    path = write_lines(tmp_path / "data.jsonl", [{"messages": [{"role": "user", "content": "Hi"}]}])
    with pytest.raises(DataError, match=r"nothing can be learned .* 1 examples"):
        read_dataset(path, tokenizer(), length=64)
    write_lines(path, [conversation("a long question" * 9, "b")])
    with pytest.raises(DataError, match="within 64 tokens"):
        read_dataset(path, tokenizer(), length=64)
    path.write_text("\n")
    with pytest.raises(DataError, match="no examples"):
        read_dataset(path, tokenizer(), length=64)
    with pytest.raises(DataError, match="can't read"):
        read_dataset(tmp_path / "none.jsonl", tokenizer(), length=64)


def test_overlong_examples_are_counted(tmp_path):
    path = write_lines(tmp_path / "data.jsonl", [{"text": "a" * 100}, {"text": "b" * 10}])
    cut = read_dataset(path, tokenizer(), length=32)
    assert (cut.cut, cut.dropped, [e.length for e in cut.examples]) == (1, 0, [32, 11])
    assert "1 cut" in cut.describe()
    dropped = read_dataset(path, tokenizer(), length=32, overlong="drop")
    assert (dropped.cut, dropped.dropped, [e.line for e in dropped.examples]) == (0, 1, [2])


# 4. Packing


@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(30, 64))
def test_packs_hold_everything_once(lengths, capacity):
    sequences = pack(lengths, range(len(lengths)), capacity)
    assert sorted(i for s in sequences for i in s) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in s) <= capacity for s in sequences)
    # Two sequences that would fit into one are never left.
    fills = sorted(sum(lengths[i] for i in s) for s in sequences)
    assert len(fills) < 2 or fills[0] + fills[1] > capacity


def example(line, tokens, learned=None):
    learned = [False, *[True] * (len(tokens) - 1)] if learned is None else learned
    return Example(line, np.array(tokens, np.int32), np.array(learned, np.bool_))


def test_positions_restart_and_boundaries_are_not_learned():
    examples = [example(1, [5, 6, 7]), example(2, [8, 9], [False, True])]
    batch = collate(examples, [[0, 1], [1]])
    assert batch.input_ids[:, :6].tolist() == [[5, 6, 7, 8, 9, 0], [8, 9, 0, 0, 0, 0]]
    assert batch.position_ids[:, :6].tolist() == [[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]]
    assert batch.labels[0, :6].tolist() == [IGNORED, 6, 7, IGNORED, 9, IGNORED]
    assert (batch.labels[:, 5:] == IGNORED).all()
    assert batch.lines == (1, 2, 2)


def test_the_first_token_is_never_learned(tmp_path):
    words = tokenizer()
    examples = read_dataset(
        write_lines(tmp_path / "d.jsonl", [{"text": "abc"}, {"completion": "xyz"}, *chats(3)]), words, length=99
    ).examples
    assert not any(e.learned[0] for e in examples)


# 5. Plans


def dataset(lengths):
    examples = tuple(example(i, range(1, n + 1)) for i, n in enumerate(lengths))
    return Dataset("memory", "", examples, 0, 0)


def plan(data, **more):
    settings = {"length": 40, "batch_size": 2, "per_step": 3, "packing": True, "seed": 1, "passes": 2} | more
    return Plan(data, **settings)


def test_a_plan_sees_everything_in_each_pass_and_counts_its_tokens():
    data = dataset([2 + i % 19 for i in range(50)])
    p = plan(data)
    steps = list(p.from_step(0))
    assert [s.number for s in steps] == list(range(1, p.steps + 1))
    for number in (0, 1):
        seen = [i for s in steps if s.pass_number == number for b in s.micro_batches for q in b for i in q]
        assert sorted(seen) == list(range(50))
    for s in steps:
        labels = torch.cat([p.batch(b).labels.reshape(-1) for b in s.micro_batches])
        assert s.learned == int((labels != IGNORED).sum())
    orders = [[s.micro_batches for s in steps if s.pass_number == n] for n in (0, 1)]
    assert orders[0] != orders[1]


def test_a_plan_can_be_taken_up_anywhere():
    p = plan(dataset([3] * 40), steps=11)
    steps = list(p.from_step(0))
    assert len(steps) == 11
    for done in (1, 5, 10):
        assert list(p.from_step(done)) == steps[done:]
    assert steps != list(plan(dataset([3] * 40), steps=11, seed=2).from_step(0))


def test_evaluation_sees_everything_once():
    data = dataset([2 + i % 13 for i in range(31)])
    lines = [line for b in in_order(data, length=30, batch_size=4, packing=True) for line in b.lines]
    assert sorted(lines) == list(range(31))


def test_the_file_is_known_by_its_hash(tmp_path):
    import hashlib

    path = write_lines(tmp_path / "data.jsonl", chats(2))
    assert read_dataset(path, tokenizer(), length=99).sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert json.loads(path.read_text().splitlines()[0]) == chats(2)[0]
