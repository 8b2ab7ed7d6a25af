"""Measure a drafter on questions: accept length, and speed against plain decoding.

A plain server and one with DFLASH answer the same questions one at a time, taking turns at going
first; answers end by themselves, at temperature 0. The accept length is also measured with an
untrained drafter of the same shape. Question files are JSONL with ``prompt`` (HumanEval),
``question`` (GSM8K) or ``turns`` (MT-Bench), as those sets are published.

Usage::

    python scripts/measure_drafter.py GSM8K.jsonl HumanEval.jsonl question.jsonl [--count 40]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoTokenizer

from sglang_dflash import assets
from sglang_dflash.assets import drafter as untrained
from sglang_dflash.bench.server import LocalServer, accept_length
from sglang_dflash.train.records import frame


class Answer(NamedTuple):
    """One timed answer."""

    seconds: float
    response: dict[str, Any]

    @property
    def rate(self) -> float:
        """Tokens per second, prefill included."""
        return self.response["meta_info"]["completion_tokens"] / self.seconds


def questions(file: Path, count: int) -> list[str]:
    """The first questions of a published set, spread over it.

    Raises:
        ValueError: a line holds none of the known keys.
    """
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]
    found = []
    for number, line in enumerate(lines[:: max(1, len(lines) // count)][:count], 1):
        for key in ("prompt", "question", "turns"):
            if key in line:
                found.append(line[key][0] if key == "turns" else line[key])
                break
        else:
            raise ValueError(f"{file}, question {number}: no prompt, question or turns.")
    return found


def ask(server: LocalServer, prompt: list[int], limit: int) -> Answer:
    """Answer one prompt."""
    started = time.perf_counter()
    (response,) = server.generate([prompt], max_new_tokens=limit)
    return Answer(time.perf_counter() - started, response)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", help="question files")
    parser.add_argument("--count", type=int, default=40, help="questions of each file")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--model", default=None, help="target (default: the demo target)")
    parser.add_argument("--drafter", default=None, help="drafter (default: the demo drafter)")
    parser.add_argument("--block-size", type=int, default=None, help="default: the drafter's")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--no-untrained", action="store_true")
    options = parser.parse_args(arguments)

    target = options.model or str(assets.demo_target())
    tokenizer = AutoTokenizer.from_pretrained(target)
    sets = {
        file.stem: [
            frame(tokenizer, [{"role": "user", "content": question}])
            for question in questions(file, options.count)
        ]
        for file in options.files
    }
    drafter = options.drafter or str(assets.demo_drafter())
    plain = LocalServer(["--model-path", target])
    with plain, LocalServer(_flags(target, drafter, options)) as dflash:
        report = {name: _compare(name, plain, dflash, p, options) for name, p in sets.items()}
    if not options.no_untrained:
        with LocalServer(_flags(target, str(untrained.prepare()), options)) as server:
            for name, prompts in sets.items():
                responses = server.generate(prompts, concurrency=8, max_new_tokens=64)
                report[name]["untrained_accept_length"] = round(accept_length(responses), 3)
    print(json.dumps(report, indent=1))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def _flags(target: str, drafter: str, options: argparse.Namespace) -> list[str]:
    flags = ["--model-path", target, "--speculative-algorithm", "DFLASH"]
    flags += ["--speculative-draft-model-path", drafter]
    if options.block_size:
        flags += ["--speculative-dflash-block-size", str(options.block_size)]
    return flags


def _compare(
    name: str,
    plain: LocalServer,
    dflash: LocalServer,
    prompts: list[list[int]],
    options: argparse.Namespace,
) -> dict[str, Any]:
    servers = {"plain": plain, "dflash": dflash}
    answers: dict[str, list[Answer]] = {key: [] for key in servers}
    for index, prompt in enumerate(prompts):
        for key in sorted(servers, reverse=bool(index % 2)):
            answers[key].append(ask(servers[key], prompt, options.max_tokens))
        print(f"\r{name}: {index + 1}/{len(prompts)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    responses = [answer.response for answer in answers["dflash"]]
    same = sum(
        a.response["output_ids"] == b.response["output_ids"]
        for a, b in zip(answers["plain"], answers["dflash"], strict=True)
    )
    medians = {
        key: statistics.median(answer.rate for answer in found) for key, found in answers.items()
    }
    return {
        "questions": len(prompts),
        "accept_length": round(accept_length(responses), 3),
        "plain_tokens_per_second": round(medians["plain"], 2),
        "dflash_tokens_per_second": round(medians["dflash"], 2),
        "ratio": round(medians["dflash"] / medians["plain"], 3),
        "identical_answers": same,
        "ended_by_themselves": sum(
            response["meta_info"]["finish_reason"]["type"] == "stop" for response in responses
        ),
    }


if __name__ == "__main__":
    raise SystemExit(main())
