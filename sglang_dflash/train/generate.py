"""Let the target answer the prompts, through the server that will serve it.

Answers are appended to ``responses.jsonl`` as they come, so a run that stops goes on where it was.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import httpx

from sglang_dflash.bench.server import LocalServer, ServerError
from sglang_dflash.train.config import Generate, TrainConfig
from sglang_dflash.train.errors import TrainError
from sglang_dflash.train.records import Record, deduplicate

FILE = "responses.jsonl"


def generate(
    config: TrainConfig, records: Sequence[Record], advance: Callable[[int, int], None]
) -> Path:
    """Answer every prompt that has no answer yet.

    Args:
        config: the training file.
        records: prompts; those with an answer are copied as they are.
        advance: told (answers so far, answers in all).

    Returns:
        The file of answers, one record a line.

    Raises:
        TrainError: the server did not start or failed for a prompt; what was answered is kept.
    """
    file = config.folder / FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    done = {record["key"] for record in _resume(file, config.generate)}
    prompts = deduplicate(records)
    waiting = [record for record in prompts if record.key not in done]
    answered = len(prompts) - len(waiting)
    advance(answered, len(prompts))
    failure: httpx.HTTPError | None = None
    with file.open("a", encoding="utf-8") as output:
        ready = [record for record in waiting if record.output_ids]
        for record in ready:
            _write(output, record, record.output_ids, config.generate)
        answered += len(ready)
        waiting = [record for record in waiting if not record.output_ids]
        if not waiting:
            advance(answered, len(prompts))
            return file
        with (
            _server(config) as url,
            httpx.Client(base_url=url, timeout=3600.0) as client,
            ThreadPoolExecutor(config.generate.concurrency) as pool,
        ):
            stop = threading.Event()
            futures = {pool.submit(_answer, client, r, config.generate, stop): r for r in waiting}
            try:
                for future in as_completed(futures):
                    try:
                        answer = future.result()
                    except httpx.HTTPError as error:
                        failure = failure or error
                        stop.set()
                        continue
                    if answer is None:
                        continue
                    _write(output, futures[future], answer, config.generate)
                    answered += 1
                    advance(answered, len(prompts))
            finally:
                stop.set()
    if failure is not None:
        reason = str(failure).partition("\n")[0]
        raise TrainError(
            f"generate: the server failed ({reason}). {answered} answers are kept in {file}; "
            "run the stage again to go on."
        ) from failure
    return file


def _resume(file: Path, settings: Generate) -> list[dict[str, Any]]:
    """Whole lines of an earlier run; a line cut short by a crash is dropped from the file."""
    if not file.exists():
        return []
    text = file.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        file.write_text(whole, encoding="utf-8")
    lines = [json.loads(line) for line in whole.splitlines()]
    mode = _mode(settings)
    for number, line in enumerate(lines, 1):
        if line.get("mode") not in (mode, "given"):
            raise TrainError(
                f"generate: {file}, line {number} was answered with {line.get('mode')}, but the "
                f"file now says {mode}. Set output to a new folder, or restore generate.*."
            )
    return lines


def _mode(settings: Generate) -> dict[str, Any]:
    return settings.model_dump(include={"temperature", "top_p", "max_new_tokens"})


def _write(output: Any, record: Record, answer: list[int], settings: Generate) -> None:
    line = {
        "key": record.key,
        "source": record.source,
        "mode": "given" if record.output_ids else _mode(settings),
        "prompt_ids": record.prompt_ids,
        "output_ids": answer,
    }
    output.write(json.dumps(line) + "\n")
    output.flush()


def _answer(
    client: httpx.Client, record: Record, settings: Generate, stop: threading.Event
) -> list[int] | None:
    """The answer's token ids, or None once the stage is to stop."""
    if stop.is_set():
        return None
    response = client.post(
        "/generate",
        json={"input_ids": record.prompt_ids, "sampling_params": _mode(settings)},
    )
    response.raise_for_status()
    return response.json()["output_ids"]


@contextlib.contextmanager
def _server(config: TrainConfig) -> Iterator[str]:
    if config.generate.server_url is not None:
        yield config.generate.server_url.rstrip("/")
        return
    flags = ["--model-path", config.target, *config.generate.server_arguments]
    if "--max-running-requests" not in flags:
        flags += ["--max-running-requests", str(config.generate.concurrency)]
    try:
        server = LocalServer(flags).start()
    except ServerError as error:
        raise TrainError(f"generate: {error}") from error
    try:
        yield server.url
    finally:
        server.stop()
