"""Replay draft trees along recorded answers: the accept length of every tree shape.

A plain server answers the questions at temperature 0, and the drafter's blocks at every position
of the answers are followed through the trees of all shapes (``sglang_dflash.train.score``): seconds
for a shape that would take a server minutes. Question files are those of
``scripts/measure_drafter.py``, which measures chosen shapes in servers.

Usage::

    python scripts/measure_trees.py GSM8K.jsonl HumanEval.jsonl question.jsonl [--count 40] \\
        [--answers answers.jsonl]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from measure_drafter import questions
from transformers import AutoTokenizer

from sglang_dflash import assets
from sglang_dflash.bench.server import LocalServer
from sglang_dflash.config import TreeShape
from sglang_dflash.train.features import FrozenTarget
from sglang_dflash.train.initialise import start_from
from sglang_dflash.train.model import DraftModel
from sglang_dflash.train.records import Record, frame, read
from sglang_dflash.train.score import replay

ROWS = (8, 16, 32, 64)
CANDIDATES = (2, 4, 8, 16)
DISCOUNTS = (0.0, 0.25, 0.5, 1.0)


def grid(block_size: int) -> list[TreeShape]:
    """Every number of rows and way with the spine; candidates and discounts around the default."""
    shapes = []
    for rows, keep in itertools.product(ROWS, (False, True)):
        if keep and rows <= block_size:
            continue  # the chain
        shapes += [TreeShape(rows, count, keep) for count in CANDIDATES]
        shapes += [TreeShape(rows, 8, keep, discount) for discount in DISCOUNTS[1:]]
    return [shape for shape in shapes if shape.rows >= block_size]


def record(
    target: str, files: Sequence[Path], count: int, limit: int, log: Path | None = None
) -> list[Record]:
    """The plain server's answers to the questions, by question file."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    found = []
    with LocalServer(["--model-path", target], log=log) as server:
        for file in files:
            prompts = [
                frame(tokenizer, [{"role": "user", "content": question}])
                for question in questions(file, count)
            ]
            answers = server.generate(prompts, concurrency=8, max_new_tokens=limit)
            found += [
                Record(prompt, answer["output_ids"], file.stem)
                for prompt, answer in zip(prompts, answers, strict=True)
            ]
            print(f"{file.stem}: {len(prompts)} answers", file=sys.stderr)
    return found


def recorded(options: argparse.Namespace, target: str) -> list[Record]:
    """The answers of ``--answers`` where that file exists, else new ones, kept there."""
    file: Path | None = options.answers
    if file is not None and file.exists():
        tokenizer = AutoTokenizer.from_pretrained(target)
        return read([file], tokenizer, len(tokenizer))
    records = record(target, options.files, options.count, options.max_tokens)
    if file is not None:
        lines = [json.dumps(record._asdict()) + "\n" for record in records]
        file.write_text("".join(lines), encoding="utf-8")
    return records


def row(name: Sequence[Any], scores: dict[str, Any], chain: dict[str, Any]) -> dict[str, Any]:
    """One line of the table: accept lengths by set, and their mean gain over the chain's."""
    sets = [key for key in scores if key != "all"]
    lengths = {key: round(scores[key].accept_length, 3) for key in sets}
    gain = statistics.mean(scores[key].accept_length / chain[key].accept_length for key in sets)
    return {
        **dict(zip(("rows", "candidates", "keep_spine", "spine_discount"), name, strict=True)),
        **lengths,
        "gain": round(gain, 3),
    }


def main() -> int:
    """Run the replay and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", help="question files")
    parser.add_argument("--count", type=int, default=40, help="questions of each file")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--model", default=None, help="target (default: the demo target)")
    parser.add_argument("--drafter", default=None, help="drafter (default: the demo drafter)")
    parser.add_argument("--answers", type=Path, help="keep the answers here, or read them again")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()

    target = options.model or str(assets.demo_target())
    folder = Path(options.drafter or assets.demo_drafter())
    records = recorded(options, target)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = DraftModel(config).eval()
    start_from(model, folder)
    taps = config["dflash_config"]["target_layer_ids"]
    frozen = FrozenTarget(target, taps, torch.bfloat16, torch.device("cpu"))

    def advance(done: int) -> None:
        print(f"\rreplayed {done}/{len(records)}", end="", file=sys.stderr, flush=True)

    shapes = grid(model.block_size)
    chain, *trees = replay(model, frozen, records, [None, *shapes], advance=advance)
    print(file=sys.stderr)
    table = [row((model.block_size, 1, True, 0.0), chain, chain)]
    table += [row(shape, scores, chain) for shape, scores in zip(shapes, trees, strict=True)]
    print("| " + " | ".join(table[0]) + " |")
    print("|" + "---|" * len(table[0]))
    for line in table:
        print("| " + " | ".join(str(value) for value in line.values()) + " |")
    if options.json:
        options.json.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
