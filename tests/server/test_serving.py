"""What SGLang serves without speculation is served with it: every kind of request, over chains
and trees."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest
from conftest import ServerFactory
from scipy.stats import chi2_contingency

from sglang_dflash.bench.server import LocalServer
from tests.support.identity import assert_identical, token_prompts
from tests.support.pairs import EOS, VOCABULARY, TinyPair

PROMPTS = token_prompts(8, seed=3)
HOT = 60.0
"""A temperature at which the tiny targets, whose logits lie far apart, really vary."""


@pytest.fixture(scope="module")
def plain(serve: ServerFactory, llama_pair: TinyPair) -> LocalServer:
    return serve(llama_pair, dflash=False)


TREE = ("--speculative-dflash-block-size", "8", "--speculative-num-draft-tokens", "24")


@pytest.fixture(scope="module", params=["chain", "tree"])
def dflash(
    request: pytest.FixtureRequest, serve: ServerFactory, llama_pair: TinyPair
) -> Iterator[LocalServer]:
    server = serve(llama_pair, "--log-level", "info", *(TREE if request.param == "tree" else ()))
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def _server_survives(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "dflash" in request.fixturenames:
        dflash = request.getfixturevalue("dflash")
        assert dflash.alive(), dflash.log_tail()


def both(plain: LocalServer, dflash: LocalServer, **options: object) -> tuple[list, list]:
    """Responses of the two servers to the same requests."""
    return (
        plain.generate(PROMPTS, concurrency=4, **options),
        dflash.generate(PROMPTS, concurrency=4, **options),
    )


def test_logprobs_match_those_without_speculation(plain: LocalServer, dflash: LocalServer) -> None:
    extra = {"return_logprob": True, "top_logprobs_num": 2}
    want, got = both(plain, dflash, max_new_tokens=40, ignore_eos=True, extra=extra)
    for a, b in zip(want, got, strict=True):
        if a["output_ids"] != b["output_ids"]:
            continue  # a numeric tie; identity has its own test
        first = [entry[0] for entry in a["meta_info"]["output_token_logprobs"]]
        second = [entry[0] for entry in b["meta_info"]["output_token_logprobs"]]
        assert len(second) == len(b["output_ids"])
        assert second == pytest.approx(first, abs=1e-4)
        tops = zip(
            a["meta_info"]["output_top_logprobs"],
            b["meta_info"]["output_top_logprobs"],
            strict=True,
        )
        for x, y in tops:
            assert [e[0] for e in y] == pytest.approx([e[0] for e in x], abs=1e-4)


def test_stop_token_inside_a_block_cuts_the_output_there(
    plain: LocalServer, dflash: LocalServer
) -> None:
    (full,) = plain.generate(PROMPTS[:1], max_new_tokens=60, ignore_eos=True)
    stop = full["output_ids"][-1]
    options = {"max_new_tokens": 60, "ignore_eos": True, "stop_token_ids": [stop]}
    (want,) = plain.generate(PROMPTS[:1], **options)
    (got,) = dflash.generate(PROMPTS[:1], **options)
    assert got["output_ids"] == want["output_ids"]
    assert got["meta_info"]["finish_reason"] == want["meta_info"]["finish_reason"]


def test_max_new_tokens_is_never_exceeded(plain: LocalServer, dflash: LocalServer) -> None:
    for count in (1, 2, 3, 7, 9):
        want, got = both(plain, dflash, max_new_tokens=count, ignore_eos=True)
        outputs = [response["output_ids"] for response in got]
        assert [len(output) for output in outputs] == [count] * len(PROMPTS)
        assert_identical(plain, PROMPTS, [w["output_ids"] for w in want], outputs)


def test_grammar_constrains_every_position_of_a_block(dflash: LocalServer) -> None:
    pattern = r"(ab|cd){3,6}x[0-9]{2}"
    responses = dflash.generate(
        ["begin: ", "go", "z" * 30, "1234"] * 3, concurrency=6, max_new_tokens=40, regex=pattern
    )
    for response in responses:
        assert re.fullmatch(pattern, response["text"]), response["text"]


def test_json_schema_beside_free_requests(plain: LocalServer, dflash: LocalServer) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    free: list[dict] = []
    worker = threading.Thread(
        target=lambda: free.extend(
            dflash.generate(PROMPTS, concurrency=4, max_new_tokens=40, ignore_eos=True)
        )
    )
    worker.start()
    constrained = dflash.generate(
        ["{"] * 6, concurrency=3, max_new_tokens=60, temperature=HOT, json_schema=json.dumps(schema)
    )
    worker.join()
    for response in constrained:
        if response["meta_info"]["finish_reason"]["type"] == "stop":
            assert set(json.loads(response["text"])) == {"a", "b"}
    assert any(r["meta_info"]["finish_reason"]["type"] == "stop" for r in constrained)
    want = plain.generate(PROMPTS, concurrency=4, max_new_tokens=40, ignore_eos=True)
    assert_identical(
        plain, PROMPTS, [w["output_ids"] for w in want], [f["output_ids"] for f in free]
    )


def test_sampled_requests_are_sampled_and_top_k_1_is_greedy(
    plain: LocalServer, dflash: LocalServer
) -> None:
    greedy = dflash.generate(PROMPTS, concurrency=4, max_new_tokens=30, ignore_eos=True)
    top1 = dflash.generate(
        PROMPTS, concurrency=4, max_new_tokens=30, ignore_eos=True, temperature=1.5, top_k=1
    )
    assert_identical(
        plain, PROMPTS, [g["output_ids"] for g in greedy], [t["output_ids"] for t in top1]
    )
    hot = [
        dflash.generate(PROMPTS[:2], max_new_tokens=30, ignore_eos=True, temperature=HOT)
        for _ in range(2)
    ]
    assert hot[0][0]["output_ids"] != hot[1][0]["output_ids"], "sampled text is greedy"
    assert "falling back to greedy" not in dflash.log.read_text(errors="replace")


def test_sampled_text_has_the_distribution_it_has_without_speculation(
    plain: LocalServer, dflash: LocalServer
) -> None:
    """The first token is the prefill's; the next three fall inside a block."""
    options = {"max_new_tokens": 4, "ignore_eos": True, "temperature": HOT, "top_k": 3}
    counts = [
        Counter(
            tuple(response["output_ids"])
            for response in server.generate(PROMPTS[:1] * 900, concurrency=32, **options)
        )
        for server in (plain, dflash)
    ]
    common = [text for text, count in (counts[0] + counts[1]).items() if count >= 20]
    table = [[count[text] for text in common] for count in counts]
    for row in table:
        row.append(900 - sum(row))  # all rare ones together
    columns = [column for column in zip(*table, strict=True) if sum(column)]
    assert len(columns) > 8
    assert chi2_contingency(columns).pvalue > 1e-4


def test_logit_bias_reaches_every_row(dflash: LocalServer) -> None:
    responses = dflash.generate(
        PROMPTS, concurrency=4, max_new_tokens=24, ignore_eos=True, logit_bias={"65": 100.0}
    )
    assert all(response["output_ids"] == [65] * 24 for response in responses)


def test_prompts_no_model_can_read_are_refused_and_disturb_nobody(
    plain: LocalServer, dflash: LocalServer
) -> None:
    wrong = [
        ("/generate", {"text": ""}, "the prompt is empty"),
        ("/generate", {"input_ids": []}, "cannot be empty"),
        ("/generate", {"input_ids": [5, VOCABULARY]}, f"holds {VOCABULARY}, outside"),
        ("/generate", {"input_ids": [-1, 5]}, "holds -1, outside"),
        ("/v1/completions", {"model": "default", "prompt": ""}, "cannot be empty"),
    ]
    for server in (plain, dflash):
        for path, body, message in wrong:
            answer = httpx.post(server.url + path, json=body, timeout=60)
            assert answer.status_code == 400
            assert message in answer.text
        assert server.generate(["a"], max_new_tokens=2)


def test_eos_ends_a_response(dflash: LocalServer) -> None:
    (response,) = dflash.generate(PROMPTS[:1], max_new_tokens=30, logit_bias={str(EOS): 100.0})
    assert response["meta_info"]["finish_reason"]["type"] == "stop"
    assert response["meta_info"]["completion_tokens"] == 1


def test_streamed_text_is_the_whole_text(dflash: LocalServer) -> None:
    message = [{"role": "user", "content": "hello there"}]
    pieces = list(dflash.stream(message, temperature=0, max_tokens=40))
    body = {"model": "default", "messages": message, "temperature": 0, "max_tokens": 40}
    whole = httpx.post(f"{dflash.url}/v1/chat/completions", json=body, timeout=60).json()
    assert "".join(pieces) == whole["choices"][0]["message"]["content"]


def test_meta_info_counts_accepted_drafts(dflash: LocalServer) -> None:
    (response,) = dflash.generate(PROMPTS[:1], max_new_tokens=64, ignore_eos=True)
    meta = response["meta_info"]
    assert 1 <= meta["spec_verify_ct"] <= 63
    assert meta["spec_accept_length"] == pytest.approx(64 / meta["spec_verify_ct"], rel=0.1)


def test_aborted_requests_give_their_memory_back(dflash: LocalServer) -> None:
    assert dflash.leaked_tokens() == 0

    def start_and_hang_up(prompt: list[int]) -> None:
        body = {
            "input_ids": prompt,
            "stream": True,
            "sampling_params": {"temperature": 0, "max_new_tokens": 500, "ignore_eos": True},
        }
        with httpx.stream("POST", f"{dflash.url}/generate", json=body, timeout=60) as response:
            for _, line in zip(range(6), response.iter_lines(), strict=False):
                assert "error" not in line

    threads = [threading.Thread(target=start_and_hang_up, args=(p,)) for p in PROMPTS]
    for thread in threads:
        thread.start()
    survivors = dflash.generate(PROMPTS[:2], concurrency=2, max_new_tokens=60, ignore_eos=True)
    for thread in threads:
        thread.join()
    assert all(len(response["output_ids"]) == 60 for response in survivors)
    assert dflash.leaked_tokens() == 0


@pytest.mark.parametrize("flags", [(), TREE], ids=["chain", "tree"])
def test_retracted_requests_finish_with_the_same_text(
    serve: ServerFactory, plain: LocalServer, llama_pair: TinyPair, flags: tuple[str, ...]
) -> None:
    """The scheduler gives requests' memory up in mid-text and prefills them again later."""
    retracting = serve(
        llama_pair,
        *flags,
        environment={"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "25"},
    )
    options = {"concurrency": 8, "max_new_tokens": 100, "ignore_eos": True}
    got = retracting.generate(PROMPTS, **options)
    want = plain.generate(PROMPTS, **options)
    assert_identical(
        plain, PROMPTS, [w["output_ids"] for w in want], [g["output_ids"] for g in got]
    )
    assert any(g["meta_info"]["num_retractions"] for g in got), "nothing was retracted"
    retracting.stop()
