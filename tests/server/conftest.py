"""Servers and pairs of the server tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from sglang_dflash.bench.server import LocalServer
from sglang_dflash.invariants import ENVIRONMENT
from tests.support.pairs import TinyPair, tiny_pair

ServerFactory = Callable[..., LocalServer]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/server" in item.path.as_posix():
            item.add_marker(pytest.mark.server)


@pytest.fixture(scope="session")
def llama_pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return tiny_pair(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="session")
def qwen3_pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return tiny_pair(tmp_path_factory.mktemp("qwen3"), "qwen3", sliding=True, context_noise=0.05)


@pytest.fixture(scope="session")
def smollm_pair() -> TinyPair:
    from sglang_dflash.assets import demo_drafter, demo_target

    return TinyPair(demo_target(), demo_drafter())


def flags(pair: TinyPair, *extra: str, dflash: bool = True, dtype: str = "float32") -> list[str]:
    """Launch arguments of a pair, with or without speculation."""
    arguments = ["--model-path", str(pair.target), "--dtype", dtype]
    arguments += ["--max-total-tokens", "16384"]
    if dflash:
        arguments += ["--speculative-algorithm", "DFLASH"]
        arguments += ["--speculative-draft-model-path", str(pair.drafter)]
    return [*arguments, *extra]


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerFactory]:
    """Start servers that stop with the module; DFLASH ones check their invariants."""
    running: list[LocalServer] = []

    def start(
        pair: TinyPair,
        *extra: str,
        dflash: bool = True,
        dtype: str = "float32",
        environment: Mapping[str, str] | None = None,
    ) -> LocalServer:
        log: Path = tmp_path_factory.mktemp("server") / "server.log"
        server = LocalServer(
            flags(pair, *extra, dflash=dflash, dtype=dtype),
            environment={**({ENVIRONMENT: "1"} if dflash else {}), **(environment or {})},
            log=log,
        )
        running.append(server)
        return server.start()

    yield start
    for server in running:
        server.stop()
