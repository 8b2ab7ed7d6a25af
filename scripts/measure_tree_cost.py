"""What a tree costs beside the two models: time of its parts against the time of a served step.

The parts run alone, on the demo pair's shapes: candidates (without the product with the head, which
a chain has too), growing, mask, accept, and the moves of the commit. The step is a server's, at the
given concurrency.

Usage::

    python scripts/measure_tree_cost.py [--rows 32] [--concurrency 8]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from sglang_dflash.kernels.accept import accept
from sglang_dflash.kernels.merge_topk import merge_topk
from sglang_dflash.kernels.topk import topk

from sglang_dflash import assets
from sglang_dflash.bench.server import LocalServer
from sglang_dflash.commit import TargetCache, along_path
from sglang_dflash.config import TreeShape
from sglang_dflash.platforms.tiles import Queries, Sight, plan
from sglang_dflash.proposal import TreeProposer

BLOCK, VOCABULARY, CONTEXT, LAYERS, WIDTH, FEATURES = 8, 49152, 256, 30, (3, 64), 5 * 576


class Pool:
    """K/V buffers of the demo target's layout."""

    def __init__(self, slots: int):
        shape = (slots, *WIDTH)
        self.k_buffer = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(LAYERS)]
        self.v_buffer = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(LAYERS)]


def milliseconds(run: Callable[[], object], repeats: int = 30) -> float:
    """Median time of a call."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e3


def parts(bs: int, shape: TreeShape) -> dict[str, float]:
    """Milliseconds of every part of a step that only trees have, and of accept."""
    rows, drafted = shape.rows, bs * (BLOCK - 1)
    logits = (torch.randn(drafted, VOCABULARY) * 3).bfloat16()
    best = merge_topk(topk(logits, shape.candidates), shape.candidates)
    anchors = torch.zeros(bs, dtype=torch.int64)
    lengths = torch.full((bs,), CONTEXT)
    positions = lengths.unsqueeze(1) + torch.arange(rows)
    proposer = TreeProposer(shape)
    tree = proposer.propose(anchors, positions, best)
    table = torch.arange(bs * 2 * CONTEXT, dtype=torch.int32).view(bs, -1)
    queries = Queries(table, torch.arange(bs), lengths, [rows] * bs, tree.positions, tree.ancestors)
    chain = Queries(table, torch.arange(bs), lengths, [rows] * bs)
    sight = Sight(causal=True)
    choice = torch.zeros(bs, rows, dtype=torch.int64)
    # The worst commit: a path of whole depth, none of whose rows is in place.
    path = torch.arange(BLOCK, dtype=torch.int32).mul(3).clamp(max=rows - 1).repeat(bs, 1)
    slots = torch.arange(bs * rows).view(bs, rows)
    accept_lengths = torch.full((bs,), BLOCK, dtype=torch.int32)
    cache = TargetCache(Pool(bs * rows))
    features = torch.zeros(bs * rows, FEATURES, dtype=torch.bfloat16)
    links = tree.parents, tree.depths, tree.ancestors
    mask = milliseconds(lambda: plan(queries, sight, torch.bfloat16, group=3))
    return {
        "candidates": milliseconds(
            lambda: merge_topk(topk(logits, shape.candidates), shape.candidates)
        ),
        "grow": milliseconds(lambda: proposer.propose(anchors, positions, best)),
        "mask": mask - milliseconds(lambda: plan(chain, sight, torch.bfloat16, group=3)),
        "accept": milliseconds(
            lambda: accept(tree.tokens, *links, choice, lengths, output_width=BLOCK)
        ),
        "move": milliseconds(lambda: cache.keep(slots, path, accept_lengths)),
        "gather": milliseconds(lambda: along_path(features, path)),
    }


def step_milliseconds(bs: int, shape: TreeShape) -> float:
    """Time of a served step of ``bs`` requests."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "tree.yaml"
        config.write_text(f"tree_rows: {shape.rows}\n", encoding="utf-8")
        flags = ["--model-path", str(assets.demo_target()), "--speculative-algorithm", "DFLASH"]
        flags += ["--speculative-draft-model-path", str(assets.demo_drafter())]
        with LocalServer([*flags, "--speculative-dflash-config", str(config)]) as server:
            prompts = [[i + 100] * CONTEXT for i in range(bs)]
            options = {"concurrency": bs, "ignore_eos": True, "temperature": 1.0}
            server.generate(prompts, max_new_tokens=8, **options)
            started = time.perf_counter()
            server.generate(prompts, max_new_tokens=1, **options)
            prefill = time.perf_counter() - started
            started = time.perf_counter()
            answers = server.generate(prompts, max_new_tokens=100, **options)
            decode = time.perf_counter() - started - prefill
    return decode / max(a["meta_info"]["spec_verify_ct"] for a in answers) * 1e3


def main() -> int:
    """Measure and print a line per part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=8)
    options = parser.parse_args()
    shape = TreeShape(options.rows)
    with torch.inference_mode():
        times = parts(options.concurrency, shape)
    step = step_milliseconds(options.concurrency, shape)
    for name, value in {**times, "all of these": sum(times.values()), "step": step}.items():
        print(f"{name:<14}{value:8.2f} ms {value / step:7.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
