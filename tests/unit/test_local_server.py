"""The harness that starts servers: what stops it, and what it says."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from sglang_dflash.bench.server import LocalServer, ServerError


def test_a_port_in_use_is_refused_before_anything_starts() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ServerError, match=f"port {port} cannot be used"):
            LocalServer(["--model-path", "x"], port=port).start()


def test_the_reason_of_a_stop_is_the_last_error_and_not_its_traceback(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(
        "Traceback (most recent call last):\n  File 'a', line 1\nValueError: inner\n\n"
        "Traceback (most recent call last):\n  File 'b', line 2\n"
        "sglang_dflash.checkpoint.CheckpointError: --speculative-draft-model-path=x: wrong.\n"
    )
    reason = LocalServer([], log=log).reason()
    assert reason == (
        "sglang_dflash.checkpoint.CheckpointError: --speculative-draft-model-path=x: wrong."
    )


def test_a_stop_without_an_error_shows_the_end_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("".join(f"line {i}\n" for i in range(100)) + "server_args=ServerArgs(...)\n")
    reason = LocalServer([], log=log).reason().splitlines()
    assert reason[0] == "line 60"
    assert reason[-1] == "line 99"
