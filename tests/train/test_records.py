"""Training text: its three forms, and every way a line can be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.train import records
from sglang_dflash.train.errors import TrainError


class Tokenizer:
    """One id a character; a chat is its contents in brackets."""

    chat_template = "chat"

    def apply_chat_template(
        self, messages: Any, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert add_generation_prompt
        assert not tokenize
        return "".join(f"[{turn['content']}]" for turn in messages) + ">"

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(character) for character in text]


def read(tmp_path: Path, *lines: Any) -> list[records.Record]:
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    return records.read([file], Tokenizer(), 256)


def ids(text: str) -> list[int]:
    return [ord(character) for character in text]


def test_prompts_and_chats_are_framed_as_the_server_does(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    found = read(
        tmp_path,
        {"prompt": "hi"},
        {"messages": chat, "source": "chats"},
        "",
        {"prompt_ids": [1, 2], "output_ids": [3]},
    )
    # The assistant's words are not the target's own.
    assert [r.prompt_ids for r in found] == [ids("[hi]>"), ids("[a]>"), [1, 2]]
    assert [r.output_ids for r in found] == [[], [], [3]]
    assert [r.source for r in found] == ["data", "chats", "data"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: Expecting property name"),
        ("[1]", "line 2: holds a list, not an object"),
        ({}, "needs exactly one of messages, prompt and prompt_ids, has []"),
        ({"prompt": "a", "prompt_ids": [1]}, "has ['prompt', 'prompt_ids']"),
        ({"prompt": ""}, "prompt is not a text"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "messages holds no user turn"),
        ({"messages": ["a"]}, "messages is not a list of {role, content} objects"),
        ({"prompt_ids": []}, "prompt_ids is empty"),
        ({"prompt_ids": [1.5]}, "prompt_ids is not a list of integers"),
        ({"prompt_ids": [256]}, "holds 256, outside the target's vocabulary (0 to 255)"),
        ({"prompt_ids": [1], "output_ids": [-1]}, "output_ids holds -1"),
    ],
)
def test_a_malformed_line_is_named_with_its_number(tmp_path: Path, line: Any, message: str) -> None:
    with pytest.raises(TrainError) as caught:
        read(tmp_path, {"prompt": "fine"}, line)
    assert message in str(caught.value)
    assert "data.jsonl, line 2" in str(caught.value)


def test_files_that_hold_nothing_are_named(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r"data\.jsonl is empty"):
        read(tmp_path, "", "  ")
    with pytest.raises(TrainError, match=r"cannot read .*absent\.jsonl"):
        records.read([tmp_path / "absent.jsonl"], Tokenizer(), 256)


def test_prompts_are_kept_once_and_never_if_excluded(tmp_path: Path) -> None:
    found = read(tmp_path, {"prompt": "a"}, {"prompt": "b"}, {"prompt": "a"})
    kept = records.deduplicate(found, excluded=found[1:2])
    assert [r.prompt_ids for r in kept] == [ids("[a]>")]


def test_more_data_moves_no_record_between_training_and_scoring() -> None:
    many = [records.Record([i], [1, 2], "s") for i in range(400)]
    train, held = records.split(many[:200], 0.25, seed=0)
    more_train, more_held = records.split(many, 0.25, seed=0)
    assert 25 < len(held) < 75
    assert set(map(str, held)) <= set(map(str, more_held))
    assert set(map(str, train)) <= set(map(str, more_train))
