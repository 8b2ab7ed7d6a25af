"""Measure a drafter on questions: accept length, and speed against plain decoding.

A plain server and one with DFLASH answer the same questions, ``--concurrency`` at a time, taking
turns at going first; answers end by themselves, at temperature 0. Each ``--config`` adds a server
with that configuration (a tree, another block) to the same round. The accept length is also
measured with an untrained drafter of the same shape. Question files are JSONL with ``prompt``
(HumanEval), ``question`` (GSM8K) or ``turns`` (MT-Bench), as those sets are published.

Usage::

    python scripts/measure_drafter.py GSM8K.jsonl HumanEval.jsonl question.jsonl [--count 40] \\
        [--config tree16.yaml]
"""

from __future__ import annotations

import argparse
import contextlib
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


class Answers(NamedTuple):
    """Answers that were asked for together, and timed."""

    seconds: float
    responses: list[dict[str, Any]]

    @property
    def rate(self) -> float:
        """Tokens per second, prefill included."""
        return sum(r["meta_info"]["completion_tokens"] for r in self.responses) / self.seconds


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


def ask(server: LocalServer, prompts: list[list[int]], limit: int, temperature: float) -> Answers:
    """Answer some prompts at once."""
    started = time.perf_counter()
    responses = server.generate(
        prompts, concurrency=len(prompts), max_new_tokens=limit, temperature=temperature
    )
    return Answers(time.perf_counter() - started, responses)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", help="question files")
    parser.add_argument("--count", type=int, default=40, help="questions of each file")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--model", default=None, help="target (default: the demo target)")
    parser.add_argument("--drafter", default=None, help="drafter (default: the demo drafter)")
    parser.add_argument("--block-size", type=int, default=None, help="default: the drafter's")
    parser.add_argument("--config", type=Path, action="append", default=[])
    parser.add_argument("--concurrency", type=int, default=1, help="questions in flight")
    parser.add_argument("--temperature", type=float, default=0.0)
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
    ours = _flags(target, drafter, options)
    flags = {"plain": ["--model-path", target], "dflash": ours}
    for file in options.config:
        flags[file.stem] = [*ours, "--speculative-dflash-config", str(file)]
    with contextlib.ExitStack() as running:
        servers = {name: running.enter_context(LocalServer(f)) for name, f in flags.items()}
        report = {name: _compare(name, servers, p, options) for name, p in sets.items()}
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
    servers: dict[str, LocalServer],
    prompts: list[list[int]],
    options: argparse.Namespace,
) -> dict[str, Any]:
    order = list(servers)
    answers: dict[str, list[Answers]] = {key: [] for key in order}
    for start in range(0, len(prompts), options.concurrency):
        some = prompts[start : start + options.concurrency]
        for key in order:
            answers[key].append(ask(servers[key], some, options.max_tokens, options.temperature))
        order.append(order.pop(0))  # who goes first takes turns
        done = start + len(some)
        print(f"\r{name}: {done}/{len(prompts)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    rates = {k: statistics.median(answer.rate for answer in a) for k, a in answers.items()}
    report: dict[str, Any] = {
        "questions": len(prompts),
        "plain_tokens_per_second": round(rates["plain"], 2),
    }
    for key in order:
        if key != "plain":
            figures = _figures(answers["plain"], answers[key], rates["plain"], rates[key])
            report.update(figures if key == "dflash" else {key: figures})
    return report


def _figures(
    plain: list[Answers], answers: list[Answers], plain_rate: float, rate: float
) -> dict[str, Any]:
    wanted, responses = (
        [response for some in group for response in some.responses] for group in (plain, answers)
    )
    return {
        "accept_length": round(accept_length(responses), 3),
        "dflash_tokens_per_second": round(rate, 2),
        "ratio": round(rate / plain_rate, 3),
        "identical_answers": sum(
            a["output_ids"] == b["output_ids"] for a, b in zip(wanted, responses, strict=True)
        ),
        "ended_by_themselves": sum(
            response["meta_info"]["finish_reason"]["type"] == "stop" for response in responses
        ),
    }


if __name__ == "__main__":
    raise SystemExit(main())
