"""Serve a real model with and without DFLASH and show both answering.

Runs on CUDA where there is a device and on the CPU elsewhere. The two servers run one after the
other, so that neither takes the other's cores. With ``--serve`` the DFLASH server stays up.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from sglang_dflash import assets
from sglang_dflash.bench.server import LocalServer, ServerError, accept_length
from sglang_dflash.train.records import frame

QUESTIONS = (
    "What is gravity?",
    "Write a Python function that adds two numbers.",
    "A book costs 12 dollars and a pen costs 3 dollars. How much do 2 books and 4 pens cost?",
)
MAX_TOKENS = 96
CONFIG = Path(__file__).resolve().parent.parent / "configs" / "demo.yaml"


class Run(NamedTuple):
    """One server's answers."""

    texts: list[str]
    tokens_per_second: float
    accept_length: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="target folder or hub id (default: the demo target)")
    parser.add_argument("--drafter", help="its DFlash drafter (default: the demo drafter)")
    parser.add_argument("--serve", action="store_true", help="leave the DFLASH server running")
    parser.add_argument("--port", type=int, default=None, help="port of the server")
    options = parser.parse_args(arguments)
    if bool(options.model) != bool(options.drafter):
        parser.error("--model and --drafter go together: a drafter fits one target only")
    for flag, path in (("--model", options.model), ("--drafter", options.drafter)):
        if path and path.startswith(("/", ".", "~")) and not Path(path).is_dir():
            parser.error(
                f"{flag} {path}: there is no such folder; a hub id has the form owner/name"
            )

    try:
        plain_flags, dflash_flags = _flags(options)
        if options.serve:
            return _serve(LocalServer(dflash_flags, port=options.port))
        prompts = _framed(plain_flags[1])
        # First the server that checks the pair: a drafter that does not fit is found at once.
        dflash = _run("dflash", LocalServer(dflash_flags, port=options.port), prompts)
        plain = _run("plain", LocalServer(plain_flags, port=options.port), prompts)
    except (ServerError, assets.AssetError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndemo: stopped", file=sys.stderr)
        return 130
    _compare(plain, dflash)
    print(
        f"demo: plain {plain.tokens_per_second:.1f} tokens/s, "
        f"dflash {dflash.tokens_per_second:.1f} tokens/s, "
        f"accept length {dflash.accept_length:.2f}"
    )
    return 0


def _flags(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Launch flags of the plain and of the DFLASH server."""
    own = bool(options.model)
    target = options.model if own else str(assets.demo_target())
    drafter = options.drafter if own else str(assets.demo_drafter())
    print(f"target: {target}\ndrafter: {drafter}")
    if not own and not assets.drafter_is_trained():
        print(
            "The drafter is randomly initialised: it guesses at random, so expect an accept "
            "length of about 1, and a server slower than without it."
        )
    plain = ["--model-path", target]
    dflash = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", drafter]
    if not own:
        dflash += ["--speculative-dflash-config", str(CONFIG)]
    return plain, [*plain, *dflash]


def _framed(target: str) -> list[list[int]]:
    """The questions as the server frames a chat; as they are for a target without a template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    if not tokenizer.chat_template:
        return [tokenizer.encode(text) for text in QUESTIONS]
    return [frame(tokenizer, [{"role": "user", "content": text}]) for text in QUESTIONS]


def _run(name: str, server: LocalServer, prompts: list[list[int]]) -> Run:
    """Start a server, let it answer every question, stop it.

    Args:
        name: for the screen.
        server: not yet started.
        prompts: the questions as token ids.
    """
    print(f"--- {name}: starting the server")
    with server:
        print(f"--- {name}: ready in {server.start_seconds:.0f} s")
        texts = []
        for question in QUESTIONS:
            print(f"\n> {question}")
            text = ""
            messages = [{"role": "user", "content": question}]
            for piece in server.stream(messages, temperature=0, max_tokens=MAX_TOKENS):
                print(piece, end="", flush=True)
                text += piece
            print()
            texts.append(text)
        # Timed apart from printing, through the native API, which counts the verify steps.
        server.flush_cache()
        started = time.monotonic()
        responses = server.generate(prompts, max_new_tokens=MAX_TOKENS)
        seconds = time.monotonic() - started
    tokens = sum(response["meta_info"]["completion_tokens"] for response in responses)
    run = Run(texts, tokens / seconds, accept_length(responses))
    print(f"\n--- {name}: {run.tokens_per_second:.1f} tokens/s\n")
    return run


def _compare(plain: Run, dflash: Run) -> None:
    for question, a, b in zip(QUESTIONS, plain.texts, dflash.texts, strict=True):
        if a != b:
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))
            print(
                f"'{question}': the answers part after {at} characters. In bfloat16 a batch of "
                "rows rounds differently from one row, which decides between near-equal tokens; "
                "in float32 (--dtype float32) they are identical."
            )
    if plain.texts == dflash.texts:
        print("The answers are identical.")


def _serve(server: LocalServer) -> int:
    with server:
        print(f"DFLASH server ready at {server.url} (log: {server.log}). Try:\n")
        question = '{"model": "default", "messages": [{"role": "user", "content": "Hello"}]}'
        print(
            f"  curl {server.url}/v1/chat/completions -H 'content-type: application/json' "
            f"-d '{question}'\n"
        )
        print("Ctrl-C stops it.")
        try:
            while server.alive():
                time.sleep(0.5)
        except KeyboardInterrupt:
            print("\nstopping")
            return 0
        raise ServerError(f"the server stopped by itself\n{server.log_tail()}")


if __name__ == "__main__":
    sys.exit(main())
