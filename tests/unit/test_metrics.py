"""What operators read: accept lengths, and one warning when a drafter is never right."""

from __future__ import annotations

import logging

import pytest

from sglang_dflash.metrics import LOW_ACCEPT_REQUEST_STEPS, AcceptMonitor


def test_accept_length_counts_the_bonus_token() -> None:
    monitor = AcceptMonitor(log_every=0)
    monitor.observe([0, 3])
    monitor.observe([1])
    monitor.observe([])
    assert monitor.steps == 2
    assert monitor.accept_length == pytest.approx(1 + 4 / 3)


def test_log_line_reports_the_recent_window(caplog: pytest.LogCaptureFixture) -> None:
    monitor = AcceptMonitor(log_every=2)
    with caplog.at_level(logging.INFO, logger="sglang_dflash"):
        for accepted in (0, 0, 4, 4):
            monitor.observe([accepted])
    assert [record.getMessage().split(" over")[0] for record in caplog.records] == [
        "DFLASH accept length 1.000",
        "DFLASH accept length 5.000",
    ]


def test_useless_drafter_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    monitor = AcceptMonitor(log_every=0)
    for _ in range(LOW_ACCEPT_REQUEST_STEPS + 50):
        monitor.observe([0])
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "target_layer_ids" in warnings[0]
    assert "chat template" in warnings[0]


def test_good_drafter_and_silent_ranks_warn_nobody(caplog: pytest.LogCaptureFixture) -> None:
    good, silent = AcceptMonitor(log_every=1), AcceptMonitor(log_every=1, enabled=False)
    for _ in range(LOW_ACCEPT_REQUEST_STEPS + 1):
        good.observe([2])
        silent.observe([0])
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
