"""Compare our worker's step with SGLang's own, alternating in one run.

Both servers run at once and idle without spinning; requests go to one, then to the other. A
round's step time is its wall time over the number of verify steps of its longest request, with
short prompts, so that prefill hardly counts. Printed: the median of each, and their ratio.

Usage::

    python scripts/compare_workers.py [--concurrency 1 8] [--rounds 41] [--dtype float32]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from sglang_dflash import assets
from sglang_dflash.bench.server import LocalServer, accept_length

PROMPTS = (
    "The capital of France is",
    "def add(a, b):",
    "Once upon a time there was",
    "Water boils at",
    "The three primary colours are",
    "import numpy as np\n",
    "To make bread you need",
    "In 1969 the first human",
)


class Round(NamedTuple):
    """One round of one server."""

    step_seconds: float
    accept_length: float
    outputs: list[list[int]]


def measure(server: LocalServer, concurrency: int, tokens: int) -> Round:
    """Complete one prompt per request in flight."""
    prompts = list(PROMPTS[:concurrency])
    started = time.perf_counter()
    responses = server.generate(
        prompts, concurrency=concurrency, max_new_tokens=tokens, ignore_eos=True
    )
    seconds = time.perf_counter() - started
    steps = max(response["meta_info"]["spec_verify_ct"] for response in responses)
    outputs = [response["output_ids"] for response in responses]
    return Round(seconds / steps, accept_length(responses), outputs)


def main() -> int:
    """Run the comparison; fails where accept lengths or outputs differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    flags = ["--model-path", str(assets.demo_target()), "--dtype", options.dtype]
    flags += ["--speculative-algorithm", "DFLASH", "--sleep-on-idle"]
    flags += ["--speculative-draft-model-path", str(assets.demo_drafter())]
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as config:
        config.write("worker: builtin\n")
        config.flush()
        builtin = LocalServer([*flags, "--speculative-dflash-config", config.name])
        with LocalServer(flags) as ours, builtin:
            report = [_compare(ours, builtin, n, options) for n in options.concurrency]
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    return 0 if all(row["same_accept_length"] for row in report) else 1


def _compare(
    ours: LocalServer, builtin: LocalServer, concurrency: int, options: argparse.Namespace
) -> dict[str, object]:
    servers = {"ours": ours, "sglang": builtin}
    rounds: dict[str, list[Round]] = {name: [] for name in servers}
    for index in range(options.rounds + 1):
        # The order alternates too, so that neither always goes first.
        for name in sorted(servers, reverse=bool(index % 2)):
            rounds[name].append(measure(servers[name], concurrency, options.tokens))
    median = {
        name: statistics.median(r.step_seconds for r in found[1:]) for name, found in rounds.items()
    }
    lengths = {name: statistics.mean(r.accept_length for r in rounds[name]) for name in servers}
    row = {
        "concurrency": concurrency,
        "rounds": options.rounds,
        "ours_ms": round(1000 * median["ours"], 2),
        "sglang_ms": round(1000 * median["sglang"], 2),
        "ratio": round(median["ours"] / median["sglang"], 3),
        "accept_length": {name: round(length, 3) for name, length in lengths.items()},
        "same_accept_length": round(lengths["ours"], 3) == round(lengths["sglang"], 3),
    }
    print(json.dumps(row), flush=True)
    return row


if __name__ == "__main__":
    raise SystemExit(main())
