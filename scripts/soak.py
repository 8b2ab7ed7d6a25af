"""Keep a DFLASH server busy with mixed requests and see that nothing breaks or leaks.

Clients send requests of random lengths (greedy, sampled, constrained, with log-probabilities,
streamed) and hang up on some of them. Afterwards every K/V token must be free again, no response
may have been an error, and memory must be flat from the second quarter of the run on.

Usage::

    python scripts/soak.py [--minutes 10] [--clients 16]
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from collections import Counter
from statistics import median
from typing import Any

import httpx

from sglang_dflash import assets
from sglang_dflash.bench.server import LocalServer
from sglang_dflash.invariants import ENVIRONMENT

GROWTH = 0.05
"""Share by which the last quarter's median may exceed the second quarter's."""
SAMPLES = 20
"""Readings of the resident memory."""


def request(rng: random.Random) -> dict[str, Any]:
    """One random request body."""
    sampling: dict[str, Any] = {"max_new_tokens": rng.randrange(1, 60)}
    body: dict[str, Any] = {
        "input_ids": [rng.randrange(20, 40_000) for _ in range(rng.randrange(1, 200))],
        "sampling_params": sampling,
        "stream": rng.random() < 0.5,
    }
    if rng.random() < 0.5:
        sampling |= {"temperature": 0, "ignore_eos": rng.random() < 0.5}
    else:
        sampling |= {"temperature": rng.uniform(0.2, 1.5), "top_p": rng.uniform(0.5, 1.0)}
        sampling |= {"top_k": rng.choice([-1, 1, 20]), "min_p": rng.choice([0.0, 0.05])}
    if rng.random() < 0.15:
        sampling["regex"] = r"[a-z]{2,5}( [a-z]{2,5}){0,6}"
    if rng.random() < 0.2:
        body |= {"return_logprob": True, "top_logprobs_num": 2}
    return body


def client(url: str, seed: int, stop: threading.Event, counts: Counter[str]) -> None:
    """Send requests until told to stop; every fifth one is abandoned half-way."""
    rng = random.Random(seed)
    with httpx.Client(base_url=url, timeout=300.0) as connection:
        while not stop.is_set():
            body = request(rng)
            abandon = rng.random() < 0.2
            try:
                if body["stream"]:
                    with connection.stream("POST", "/generate", json=body) as response:
                        lines = response.iter_lines()
                        for number, line in enumerate(lines):
                            if '"error"' in line:
                                counts[f"error: {line[:200]}"] += 1
                            if abandon and number > 4:
                                break
                else:
                    response = connection.post(
                        "/generate", json=body, timeout=0.5 if abandon else 300.0
                    )
                    if response.status_code != 200:
                        counts[f"error: {response.status_code} {response.text[:200]}"] += 1
                counts["abandoned" if abandon else "finished"] += 1
            except httpx.ReadTimeout:
                counts["abandoned" if abandon else "error: time-out"] += 1


def main() -> int:
    """Run the soak; returns 1 where something broke or leaked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=16)
    options = parser.parse_args()
    flags = ["--model-path", str(assets.demo_target()), "--speculative-algorithm", "DFLASH"]
    flags += ["--speculative-draft-model-path", str(assets.demo_drafter())]
    counts: Counter[str] = Counter()
    stop = threading.Event()
    seconds = 60 * options.minutes
    with LocalServer(flags, environment={ENVIRONMENT: "1"}) as server:
        threads = [
            threading.Thread(target=client, args=(server.url, seed, stop, counts), daemon=True)
            for seed in range(options.clients)
        ]
        for thread in threads:
            thread.start()
        memory = []
        for _ in range(SAMPLES):
            time.sleep(seconds / SAMPLES)
            memory.append(server.memory_bytes())
        stop.set()
        for thread in threads:
            thread.join(300.0)
        alive, leaked = server.alive(), server.leaked_tokens()
        log = server.log.read_text(errors="replace")
    report = {
        "minutes": options.minutes,
        "clients": options.clients,
        "requests": dict(counts),
        "server_alive": alive,
        "leaked_kv_tokens": leaked,
        "memory_mib": [reading >> 20 for reading in memory],
        "tracebacks_in_log": log.count("Traceback"),
    }
    print(json.dumps(report, indent=1))
    broken = any(kind.startswith("error") for kind in counts) or report["tracebacks_in_log"]
    quarter = SAMPLES // 4
    before, after = median(memory[quarter : 2 * quarter]), median(memory[-quarter:])
    grown = after > before * (1 + GROWTH)
    return int(not alive or leaked != 0 or bool(broken) or grown)


if __name__ == "__main__":
    raise SystemExit(main())
