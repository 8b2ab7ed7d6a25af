"""Token identity of two servers, with numeric ties told apart from faults."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from sglang_dflash.bench.server import LocalServer

TIE = 1e-4
"""Largest gap of the two best logits at which float32 may order them either way."""


def token_prompts(count: int, *, vocabulary: int = 256, seed: int = 0) -> list[list[int]]:
    """Random prompts of 3..110 tokens, half of them beginning with a common prefix."""
    rng = random.Random(seed)
    prefix = [rng.randrange(vocabulary) for _ in range(50)]
    prompts = []
    for index in range(count):
        body = [rng.randrange(vocabulary) for _ in range(rng.randrange(3, 60))]
        prompts.append(prefix[: rng.randrange(10, 50)] + body if index % 2 else body)
    return prompts


def assert_identical(
    plain: LocalServer,
    prompts: Sequence[list[int]],
    expected: Sequence[Sequence[int]],
    actual: Sequence[Sequence[int]],
) -> None:
    """Fail at the first token that differs and is not a numeric tie.

    Args:
        plain: a server without speculation, asked for the logits where outputs part.
        prompts: token ids of the prompts.
        expected: output ids without speculation.
        actual: output ids with it.
    """
    for index, (prompt, want, got) in enumerate(zip(prompts, expected, actual, strict=True)):
        if list(want) == list(got):
            continue
        pairs = zip(want, got, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(want), len(got)))
        gap = top_two_gap(plain, [*prompt, *want[:at]])
        assert gap < TIE, (
            f"prompt {index}: token {at} is {list(got[at : at + 3])}, without speculation "
            f"{list(want[at : at + 3])}; the two best logits are {gap:.6f} apart, so it is no tie"
        )


def top_two_gap(plain: LocalServer, prompt: list[int]) -> float:
    """Difference of the two largest next-token logits after a prompt."""
    extra = {"return_logprob": True, "top_logprobs_num": 2}
    (response,) = plain.generate([prompt], max_new_tokens=1, ignore_eos=True, extra=extra)
    best: list[Any] = response["meta_info"]["output_top_logprobs"][0]
    return float(best[0][0] - best[1][0])
