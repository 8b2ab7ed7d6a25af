"""Training text: JSONL in three forms, checked line by line.

* ``{"messages": [{"role": .., "content": ..}, ..]}``: a chat; a final assistant turn is dropped,
  since the drafter must learn what the target itself would say;
* ``{"prompt": "text"}``: one user turn;
* ``{"prompt_ids": [..]}``, and with ``output_ids`` an answer of the target's.

``source`` names where a line is from, for scores by source.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sglang_dflash.train.errors import TrainError


class Record(NamedTuple):
    """A prompt and, where there is one, the target's answer."""

    prompt_ids: list[int]
    output_ids: list[int]
    """Empty where the target has not answered yet."""
    source: str

    @property
    def key(self) -> str:
        """The prompt's identity."""
        return prompt_key(self.prompt_ids)

    @property
    def tokens(self) -> list[int]:
        """Prompt and answer."""
        return self.prompt_ids + self.output_ids


def prompt_key(prompt_ids: Sequence[int]) -> str:
    """A hash of a prompt's token ids."""
    return hashlib.sha256(repr(list(prompt_ids)).encode()).hexdigest()[:24]


def read(files: Sequence[str | Path], tokenizer: Any, vocab_size: int) -> list[Record]:
    """Every record of the files, in order.

    Args:
        files: JSONL files.
        tokenizer: of the target; its chat template frames prompts.
        vocab_size: rows of the target's embedding.

    Raises:
        TrainError: a file cannot be read or is empty, or a line is malformed; names the line.
    """
    records = [record for file in files for record in _read_file(Path(file), tokenizer, vocab_size)]
    if not records:
        raise TrainError(f"data.files: {', '.join(map(str, files)) or '[]'} hold no line.")
    return records


def _read_file(file: Path, tokenizer: Any, vocab_size: int) -> Iterator[Record]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise TrainError(
            f"data.files: cannot read {file} ({reason}). Name JSONL files in UTF-8."
        ) from error
    if not any(line.strip() for line in lines):
        raise TrainError(f"data.files: {file} is empty. Give it at least one prompt, or drop it.")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield parse(json.loads(line), tokenizer, vocab_size, source=file.stem)
        except (ValueError, TypeError, KeyError) as error:
            raise TrainError(
                f"{file}, line {number}: {error}. Each line is a JSON object with messages, "
                "prompt, or prompt_ids (and output_ids)."
            ) from error


def parse(line: Any, tokenizer: Any, vocab_size: int, *, source: str) -> Record:
    """One line's record.

    Raises:
        ValueError: the line is malformed.
    """
    if not isinstance(line, dict):
        raise ValueError(f"holds a {type(line).__name__}, not an object")
    given = [key for key in ("messages", "prompt", "prompt_ids") if key in line]
    if len(given) != 1:
        raise ValueError(f"needs exactly one of messages, prompt and prompt_ids, has {given}")
    source = str(line.get("source", source))
    if "prompt_ids" in line:
        prompt = _ids(line, "prompt_ids", vocab_size)
        if not prompt:
            raise ValueError("prompt_ids is empty")
        return Record(prompt, _ids(line, "output_ids", vocab_size), source)
    messages = line.get("messages")
    if messages is None:
        if not isinstance(line["prompt"], str) or not line["prompt"]:
            raise ValueError("prompt is not a text")
        messages = [{"role": "user", "content": line["prompt"]}]
    if not isinstance(messages, list) or not all(
        isinstance(turn, dict) and isinstance(turn.get("content"), str) and "role" in turn
        for turn in messages
    ):
        raise ValueError("messages is not a list of {role, content} objects")
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise ValueError("messages holds no user turn")
    return Record(frame(tokenizer, messages), [], source)


def frame(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """Token ids of a chat up to where the answer starts, as the server frames it.

    Raises:
        ValueError: the tokenizer has no chat template.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("the target's tokenizer has no chat template; give prompt_ids instead")
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def _ids(line: dict[str, Any], key: str, vocab_size: int) -> list[int]:
    ids = line.get(key, [])
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise ValueError(f"{key} is not a list of integers")
    if wrong := [token for token in ids if not 0 <= token < vocab_size]:
        raise ValueError(
            f"{key} holds {wrong[0]}, outside the target's vocabulary (0 to {vocab_size - 1}); "
            "tokenizer and target disagree"
        )
    return ids


def deduplicate(records: Sequence[Record], excluded: Sequence[Record] = ()) -> list[Record]:
    """Records whose prompt is new, in order; none whose prompt is excluded."""
    seen = {record.key for record in excluded}
    kept = []
    for record in records:
        if record.key not in seen:
            seen.add(record.key)
            kept.append(record)
    return kept


def split(
    records: Sequence[Record], held_out: float, seed: int
) -> tuple[list[Record], list[Record]]:
    """Training and held-out records, chosen by prompt, so that more data moves none across."""
    limit = int(held_out * 2**32)
    train: list[Record] = []
    held: list[Record] = []
    for record in records:
        digest = hashlib.sha256(f"{seed} {record.key}".encode()).digest()
        (held if int.from_bytes(digest[:4], "big") < limit else train).append(record)
    return train, held
