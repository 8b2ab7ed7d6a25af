"""Greedy output with DFLASH is the target's own, token by token, in every serving mode.

float32 on both sides; 32 prompts of 64 tokens at concurrency 8 and some or all of them alone,
prompts sharing prefixes, and prompt plus output sent again. The servers check after every step
that the drafter's context is exactly the committed text.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from conftest import ServerFactory

from sglang_dflash.bench.server import LocalServer, accept_length
from tests.support.identity import assert_identical, token_prompts
from tests.support.pairs import TinyPair

TOKENS = 64
PROMPTS = token_prompts(32)
MODES = {
    "default": (),
    "sync": ("--disable-overlap-schedule",),
    "page16": ("--page-size", "16"),
    "no-radix": ("--disable-radix-cache",),
    "chunked64": ("--chunked-prefill-size", "64"),
    "block4": ("--speculative-dflash-block-size", "4"),
    "block16": ("--speculative-num-draft-tokens", "16"),
    "tp2": ("--tp-size", "2"),
}

TREES: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    "tree8": ({"tree_rows": 8, "keep_spine": False}, ()),
    "tree16-page16": ({"tree_rows": 16}, ("--page-size", "16")),
    "tree32-sync": (
        {"tree_rows": 32, "spine_discount": 0.5},
        ("--disable-overlap-schedule", "--disable-radix-cache"),
    ),
    "tree64-chunked": (
        {"tree_rows": 64, "keep_spine": False, "candidates": 16},
        ("--chunked-prefill-size", "64"),
    ),
    "tree16-tp2": ({"tree_rows": 16, "candidates": 4}, ("--tp-size", "2")),
}
"""A tree and further flags of the server that verifies it."""


class Baseline:
    """A server without speculation and its answers.

    Args:
        server: the server.
        prompts: all are sent at concurrency 8.
    """

    def __init__(self, server: LocalServer, prompts: list[list[int]]):
        self.server = server
        self.prompts = prompts
        self.outputs = self.complete(prompts)
        self.resent = [[*p, *o] for p, o in zip(prompts, self.outputs, strict=True)][:8]
        self.continued = self.complete(self.resent)

    def complete(self, prompts: list[list[int]]) -> list[list[int]]:
        responses = self.server.generate(
            prompts, concurrency=8, max_new_tokens=TOKENS, ignore_eos=True
        )
        return [response["output_ids"] for response in responses]

    def check(self, server: LocalServer, alone: int = 8) -> float:
        """Assert identity of a DFLASH server; returns its accept length.

        Args:
            server: the server.
            alone: how many prompts are also sent one at a time.
        """
        responses = []
        for concurrency in (1, 8):
            server.flush_cache()
            prompts = self.prompts if concurrency > 1 else self.prompts[:alone]
            got = server.generate(
                prompts, concurrency=concurrency, max_new_tokens=TOKENS, ignore_eos=True
            )
            outputs = [response["output_ids"] for response in got]
            assert_identical(self.server, prompts, self.outputs[: len(prompts)], outputs)
            responses += got
        got = server.generate(self.resent, concurrency=4, max_new_tokens=TOKENS, ignore_eos=True)
        outputs = [response["output_ids"] for response in got]
        assert_identical(self.server, self.resent, self.continued, outputs)
        assert server.alive()
        return accept_length([*responses, *got])


@pytest.fixture(scope="module")
def llama(serve: ServerFactory, llama_pair: TinyPair) -> Baseline:
    return Baseline(serve(llama_pair, dflash=False), PROMPTS)


@pytest.fixture(scope="module")
def qwen3(serve: ServerFactory, qwen3_pair: TinyPair) -> Baseline:
    return Baseline(serve(qwen3_pair, dflash=False), PROMPTS)


@pytest.mark.parametrize("mode", MODES)
def test_llama(mode: str, llama: Baseline, serve: ServerFactory, llama_pair: TinyPair) -> None:
    server = serve(llama_pair, *MODES[mode])
    # A drafter that is never right would prove nothing about accepted rows.
    assert llama.check(server, alone=len(PROMPTS) if mode == "default" else 8) > 1.1
    server.stop()


@pytest.mark.parametrize("mode", TREES)
def test_llama_with_trees(
    mode: str, llama: Baseline, serve: ServerFactory, llama_pair: TinyPair, tmp_path: Path
) -> None:
    shape, flags = TREES[mode]
    file = tmp_path / "tree.yaml"
    file.write_text(yaml.safe_dump(shape))
    server = serve(llama_pair, "--speculative-dflash-config", str(file), *flags)
    assert llama.check(server) > 1.2
    server.stop()


def test_a_tree_of_the_spine_alone_takes_the_chains_steps(
    serve: ServerFactory, llama_pair: TinyPair, tmp_path: Path
) -> None:
    file = tmp_path / "spine.yaml"
    file.write_text("tree_rows: 8\ncandidates: 1\nkeep_spine: false\n")
    steps = []
    for flags in ((), ("--speculative-dflash-config", str(file))):
        server = serve(llama_pair, *flags)
        responses = server.generate(PROMPTS[:8], max_new_tokens=TOKENS, ignore_eos=True)
        steps.append([(r["output_ids"], r["meta_info"]["spec_verify_ct"]) for r in responses])
        server.stop()
    assert steps[0] == steps[1]


@pytest.mark.parametrize("flags", [(), ("--page-size", "16", "--disable-overlap-schedule")])
def test_qwen3_with_a_sliding_drafter(
    flags: tuple[str, ...], qwen3: Baseline, serve: ServerFactory, qwen3_pair: TinyPair
) -> None:
    server = serve(qwen3_pair, *flags)
    assert qwen3.check(server) > 2.0
    server.stop()


@pytest.mark.slow
def test_smollm(serve: ServerFactory, smollm_pair: TinyPair) -> None:
    prompts = token_prompts(32, vocabulary=40_000, seed=1)
    baseline = Baseline(serve(smollm_pair, dflash=False), prompts)
    server = serve(smollm_pair)
    assert baseline.check(server, alone=6) >= 1.0
    server.stop()
    baseline.server.stop()
