"""What the CPU platform fills in where the user left it open."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from sglang_dflash.platforms import defaults


def arguments(**given: object) -> SimpleNamespace:
    unset = {"max_total_tokens": None, "mem_fraction_static": None, "max_running_requests": None}
    return SimpleNamespace(**{**unset, "dtype": "auto", "sleep_on_idle": False, **given})


@pytest.mark.parametrize(
    ("fast", "asked", "served"),
    [
        (False, "auto", "float32"),
        (False, "bfloat16", "bfloat16"),
        (True, "auto", "auto"),
        (True, "float32", "float32"),
    ],
)
def test_float32_where_bfloat16_is_slow_and_nobody_asked_for_it(
    monkeypatch, caplog, fast, asked, served
):
    monkeypatch.setattr(defaults, "has_fast_bfloat16", lambda: fast)
    server_args = arguments(dtype=asked)
    with caplog.at_level(logging.WARNING):
        defaults.apply(server_args)
    assert server_args.dtype == served
    assert ("--dtype auto" in caplog.text) == (asked != served)


def test_sizes_of_the_user_are_kept():
    server_args = arguments(max_total_tokens=77, max_running_requests=3)
    defaults.apply(server_args)
    assert (server_args.max_total_tokens, server_args.max_running_requests) == (77, 3)
