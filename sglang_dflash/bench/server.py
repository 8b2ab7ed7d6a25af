"""Start a real SGLang server on this machine, talk to it, and stop it for certain."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import torch

START_TIMEOUT = 240.0
"""Seconds to wait for a server; a 135M model takes 15-30 on two cores."""


class ServerError(RuntimeError):
    """A server that did not start or stopped; the message ends with its log."""


def cpu_environment() -> dict[str, str]:
    """Environment that puts SGLang on the CPU platform where there is no CUDA device."""
    return {} if torch.cuda.is_available() else {"SGLANG_PLATFORM": "dflash_cpu"}


def free_port() -> int:
    """A TCP port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class LocalServer:
    """One ``sglang.launch_server`` process.

    Args:
        arguments: its flags, without ``--port``.
        environment: variables added to this process's own.
        log: file its output goes to; a temporary one by default.
        port: a free one by default.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        port: int | None = None,
    ):
        self.arguments = [str(argument) for argument in arguments]
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._owns_log = log is None
        if log is None:
            handle, name = tempfile.mkstemp(prefix="sglang-", suffix=".log")
            os.close(handle)
            log = Path(name)
        self.log = log
        self.start_seconds = 0.0
        self._environment = {**os.environ, **cpu_environment(), **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._client = httpx.Client(base_url=self.url, timeout=600.0)

    # ---- life ------------------------------------------------------------------------------

    def start(self, timeout: float = START_TIMEOUT) -> LocalServer:
        """Launch and wait until the server answers.

        Raises:
            ServerError: it stopped, or did not answer in time.
        """
        started = time.monotonic()
        self._check_port()
        command = [sys.executable, "-m", "sglang.launch_server", "--port", str(self.port)]
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                [*command, *self.arguments],
                env=self._environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                # A group of its own, so that stopping it reaches every process it spawned; and
                # it ends with this process, however that ends.
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        try:
            while time.monotonic() - started < timeout:
                if self._process.poll() is not None:
                    raise ServerError(
                        f"the server exited with {self._process.returncode}: {self.reason()}\n"
                        f"(its log: {self.log})"
                    )
                with contextlib.suppress(httpx.HTTPError):
                    if self._client.get("/health", timeout=2.0).status_code == 200:
                        self.start_seconds = time.monotonic() - started
                        return self
                time.sleep(0.25)
            raise ServerError(f"the server did not answer in {timeout:.0f} s\n{self.log_tail()}")
        except BaseException:
            self.stop()
            raise

    def _check_port(self) -> None:
        """Another server there would answer in this one's place.

        Raises:
            ServerError: the port is in use.
        """
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", self.port))
            except OSError as error:
                raise ServerError(
                    f"port {self.port} cannot be used ({error.strerror}). Name another one."
                ) from error

    def wait_for_exit(self, timeout: float = START_TIMEOUT) -> int:
        """Exit code of a launch that is expected to fail."""
        with contextlib.suppress(ServerError):
            self.start(timeout)
        code = self._process.returncode if self._process else None
        self.stop()
        if code is None:
            raise ServerError("the server started although it should have refused to")
        return code

    def stop(self) -> None:
        """Stop every process of the server; safe to repeat."""
        process, self._process = self._process, None
        if process is None:
            return
        if self._owns_log and process.poll() is None:
            self.log.unlink(missing_ok=True)
        # A polite signal costs five seconds: the parent takes its children's end for a crash.
        # Nothing here outlives the server, so the whole group is killed at once.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def alive(self) -> bool:
        """Whether the launched process still runs."""
        return self._process is not None and self._process.poll() is None

    def reason(self) -> str:
        """Why the server stopped: the message of the last error in its log, else the log's end."""
        lines = self.log.read_text(errors="replace").splitlines()
        errors = [i for i, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception): ", line)]
        return "\n".join(lines[errors[-1] :][:10]) if errors else self.log_tail()

    def log_tail(self, lines: int = 40) -> str:
        """The end of the log, without the line that prints every argument."""
        text = self.log.read_text(errors="replace").splitlines()
        kept = [line[:400] for line in text if "server_args=" not in line]
        return "\n".join(kept[-lines:])

    def __enter__(self) -> LocalServer:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    # ---- talk ------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Any],
        *,
        concurrency: int = 1,
        max_new_tokens: int = 64,
        extra: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> list[dict[str, Any]]:
        """Complete prompts through SGLang's native API, in order.

        Args:
            prompts: texts, or lists of token ids.
            concurrency: requests in flight.
            max_new_tokens: per request.
            extra: further fields of the request body (``return_logprob``, ..).
            sampling: sampling parameters; greedy by default.

        Returns:
            The response bodies, with ``output_ids`` and ``meta_info``.
        """
        parameters = {"temperature": 0, "max_new_tokens": max_new_tokens, **sampling}

        def one(prompt: Any) -> dict[str, Any]:
            key = "text" if isinstance(prompt, str) else "input_ids"
            body = {key: prompt, "sampling_params": parameters, **(extra or {})}
            response = self._client.post("/generate", json=body)
            response.raise_for_status()
            return response.json()

        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(one, prompts))

    def info(self) -> dict[str, Any]:
        """``/get_server_info``."""
        response = self._client.get("/get_server_info")
        response.raise_for_status()
        return response.json()

    def load(self) -> dict[str, Any]:
        """The scheduler's current load: running requests, used K/V tokens, and more."""
        response = self._client.get("/v1/loads")
        response.raise_for_status()
        return response.json()["loads"][0]

    def leaked_tokens(self, timeout: float = 60.0) -> int:
        """K/V tokens still held once every request has ended and no prefix is cached.

        Raises:
            ServerError: requests are still running after ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        while (load := self.load())["num_running_reqs"] or load["num_waiting_reqs"]:
            if time.monotonic() > deadline:
                raise ServerError(f"requests still run after {timeout:.0f} s: {load}")
            time.sleep(0.2)
        self.flush_cache()
        return int(self.load()["num_used_tokens"])

    def memory_bytes(self) -> int:
        """Resident memory of all processes of the server."""
        import psutil

        assert self._process is not None
        parent = psutil.Process(self._process.pid)
        processes = [parent, *parent.children(recursive=True)]
        return sum(process.memory_info().rss for process in processes)

    def flush_cache(self) -> None:
        """Drop every cached prefix, once the last requests have left the scheduler."""
        response = self._client.post("/flush_cache", params={"timeout": 30})
        response.raise_for_status()

    def stream(self, messages: list[dict[str, str]], **options: Any) -> Iterator[str]:
        """Text pieces of a streamed chat completion, through the ``openai`` client."""
        import openai

        client: Any = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none")
        chunks = client.chat.completions.create(
            model="default", messages=messages, stream=True, **options
        )
        for chunk in chunks:
            if chunk.choices and chunk.choices[0].delta.content:
                yield chunk.choices[0].delta.content


def _end_with_parent() -> None:
    """Ask Linux to kill the calling process when its parent dies (``prctl``, PDEATHSIG)."""
    parent_death_signal = 1
    ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL)


def accept_length(responses: Sequence[Mapping[str, Any]]) -> float:
    """Mean tokens per verify step over responses; 1.0 without speculation.

    The first token of a response comes from the prefill and belongs to no verify step.
    """
    steps = sum(r["meta_info"].get("spec_verify_ct") or 0 for r in responses)
    tokens = sum(r["meta_info"]["completion_tokens"] - 1 for r in responses)
    return tokens / steps if steps else 1.0
