"""Regenerating answers: resumable, once each, in the mode the file says."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.train import stages
from sglang_dflash.train.errors import TrainError
from tests.support.training import random_llama, training_config


class Server(ThreadingHTTPServer):
    """Answers a prompt with its ids reversed, and fails once ``fails_after`` were answered."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[dict[str, Any]] = []
        self.fails_after = 10**6

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append(body)
        failed = len(self.server.asked) > self.server.fails_after
        answer = json.dumps({"output_ids": body["input_ids"][::-1]}).encode()
        self.send_response(500 if failed else 200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def run_of(tmp_path: Path, server: Server, prompts: list[dict[str, Any]], **keys: Any) -> Any:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    generate = {"server_url": server.url, "concurrency": 1, **keys}
    target = random_llama(tmp_path / "target", layers=1)
    return stages.Run(training_config(tmp_path, target, data, generate=generate))


def generate(run: Any) -> list[dict[str, Any]]:
    file = stages.generate(run, lambda done, total: None)
    return [json.loads(line) for line in file.read_text().splitlines()]


PROMPTS = [{"prompt_ids": [i, i + 1]} for i in range(6)]


def test_every_prompt_is_answered_once_in_the_files_mode(tmp_path: Path, server: Server) -> None:
    given = {"prompt_ids": [9], "output_ids": [8, 7]}
    run = run_of(tmp_path, server, [*PROMPTS, PROMPTS[0], given], temperature=0.5, top_p=0.9)
    lines = {tuple(line["prompt_ids"]): line["output_ids"] for line in generate(run)}
    assert lines == {(9,): [8, 7]} | {(i, i + 1): [i + 1, i] for i in range(6)}
    assert len(server.asked) == 6
    sampling = {"temperature": 0.5, "top_p": 0.9, "max_new_tokens": 1024}
    assert all(body["sampling_params"] == sampling for body in server.asked)


def test_a_failed_run_keeps_its_answers_and_goes_on(tmp_path: Path, server: Server) -> None:
    run = run_of(tmp_path, server, PROMPTS)
    server.fails_after = 3
    with pytest.raises(TrainError, match=r"the server failed .* 3 answers are kept"):
        generate(run)
    server.fails_after = 10**6
    asked = len(server.asked)
    # A crash may have cut the last line.
    file = run.config.folder / "responses.jsonl"
    file.write_text(file.read_text() + '{"key": "cut')
    assert len(generate(run)) == 6
    assert len(server.asked) - asked == 3


def test_answers_of_another_mode_are_not_mixed(tmp_path: Path, server: Server) -> None:
    generate(run_of(tmp_path, server, PROMPTS))
    with pytest.raises(TrainError, match=r"line 1 was answered with .*'temperature': 0\.0"):
        generate(run_of(tmp_path, server, PROMPTS, temperature=1.0))


def test_excluded_prompts_are_neither_asked_nor_trained_on(tmp_path: Path, server: Server) -> None:
    excluded = tmp_path / "evaluation.jsonl"
    excluded.write_text(json.dumps(PROMPTS[2]) + "\n")
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    target = random_llama(tmp_path / "target", layers=1)
    sections = {"data": {"files": [str(data)], "exclude": [str(excluded)]}}
    config = training_config(
        tmp_path, target, data, generate={"server_url": server.url}, **sections
    )
    assert [2, 3] not in [line["prompt_ids"] for line in generate(stages.Run(config))]
