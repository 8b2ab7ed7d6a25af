"""Make the prompts whose answers the demo drafter is trained on.

Four kinds, interleaved by ``SHARES``, so that any first part of the file has all:

* ``chat``: what people ask for (explain, compare, write, plan, ..), of many subjects:
  ``scripts/chat_prompts.yaml``;
* ``gsm8k_train``: questions of GSM8K's train split (MIT), from the file named on the command line;
* ``python_docs``: signature and first paragraph of the docstring of functions installed here
  (standard library, numpy, scipy, networkx), as a function to complete or to write;
* ``self``: what the demo target itself writes where its template expects a user (the method of
  Magpie, arXiv 2406.08464), sampled.

Usage::

    python scripts/demo_prompts.py train.jsonl --output prompts.jsonl [--sampled 3000]
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import itertools
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml
from transformers import AutoTokenizer

from sglang_dflash import assets
from sglang_dflash.bench.server import LocalServer

LIBRARIES = ("numpy", "numpy.linalg", "networkx", "scipy.stats")
SKIPPED = {"antigravity", "this", "idlelib", "test", "lib2to3", "__main__"}
SHARES = {"chat": 8, "self": 6, "gsm8k_train": 3, "python_docs": 3}
CHAT = Path(__file__).with_name("chat_prompts.yaml")
SAMPLING = {"temperature": 0.9, "top_p": 0.9, "max_new_tokens": 90}


def chat(rng: random.Random) -> list[str]:
    """Every request with every subject it fits, shuffled."""
    groups = yaml.safe_load(CHAT.read_text(encoding="utf-8"))
    found = [
        request.format(subject)
        for group in groups
        for request in group["requests"]
        for subject in group["subjects"]
    ]
    rng.shuffle(found)
    return found


def gsm8k(file: Path, rng: random.Random) -> list[str]:
    """The questions of a GSM8K file, shuffled."""
    lines = file.read_text(encoding="utf-8").splitlines()
    found = [json.loads(line)["question"] for line in lines if line]
    rng.shuffle(found)
    return found


def python_functions(rng: random.Random) -> list[str]:
    """Functions to complete (six in ten) or to write, from the docstrings installed here."""
    seen: dict[str, str] = {}
    for name, function in _functions():
        text = (inspect.getdoc(function) or "").split("\n\n")[0][:400]
        try:
            arguments = str(inspect.signature(function))
        except Exception:  # extension modules describe some defaults badly
            arguments = "(x)"
        arguments = arguments.replace("self, ", "").replace("self", "")
        if len(text) < 30 or len(arguments) > 100 or text in seen:
            continue
        body = "\n    ".join(text.split("\n"))
        if rng.random() < 0.6:
            seen[text] = f'def {name}{arguments}:\n    """{body}\n    """\n'
        else:
            seen[text] = f"Write a Python function {name}{arguments} that does this: {text}"
    found = list(seen.values())
    rng.shuffle(found)
    return found


def _functions() -> Iterator[tuple[str, object]]:
    """Public functions and methods of the modules, by name."""
    modules = [m for m in sorted(sys.stdlib_module_names) if m[0] != "_" and m not in SKIPPED]
    for module in (*modules, *LIBRARIES):
        try:
            members = vars(importlib.import_module(module))
        except Exception:
            continue  # not on this platform, or not installed
        for name, member in list(members.items()):
            owned = vars(member).items() if inspect.isclass(member) else [(name, member)]
            for own, function in list(owned):
                if callable(function) and not own.startswith("_"):
                    yield own, function


def sampled(count: int) -> list[str]:
    """What the target writes in the user's place; texts that did not end, and odd ones, go."""
    target = assets.demo_target()
    tokenizer = AutoTokenizer.from_pretrained(target)
    marker = "PROMPT"
    text = tokenizer.apply_chat_template([{"role": "user", "content": marker}], tokenize=False)
    opening = tokenizer.encode(text[: text.index(marker)], add_special_tokens=False)
    with LocalServer(["--model-path", str(target), "--max-running-requests", "96"]) as server:
        answers = server.generate([opening] * count, concurrency=96, **SAMPLING)
    ended = [
        a["text"].strip() for a in answers if a["meta_info"]["finish_reason"]["type"] == "stop"
    ]
    return sorted({text for text in ended if 15 < len(text) < 350})


def main() -> int:
    """Write the file and say how many prompts of each kind it has."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gsm8k", type=Path, help="GSM8K's train.jsonl")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--sampled", type=int, default=3000, help="texts to sample")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    kinds = {
        "chat": chat(rng),
        "gsm8k_train": gsm8k(options.gsm8k, rng),
        "python_docs": python_functions(rng),
        "self": sampled(options.sampled),
    }
    rng.shuffle(kinds["self"])
    waiting = {kind: iter(found) for kind, found in kinds.items()}
    with options.output.open("w", encoding="utf-8") as output:
        while waiting:
            for kind in list(waiting):
                some = list(itertools.islice(waiting[kind], SHARES[kind]))
                if not some:
                    del waiting[kind]
                for prompt in some:
                    output.write(json.dumps({"prompt": prompt, "source": kind}) + "\n")
    print({kind: len(found) for kind, found in kinds.items()})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
