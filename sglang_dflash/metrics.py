"""What the worker tells its operator: accept lengths, and what the drafter costs in memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

logger = logging.getLogger("sglang_dflash")

LOW_ACCEPT_LENGTH = 1.1
"""Mean accept length below which a drafter gains nothing; an untrained one measures 1.0-1.05."""
LOW_ACCEPT_REQUEST_STEPS = 2000
"""Verified request-steps before a low mean is called low: short texts vary more than this."""

_CAUSES = (
    "the drafter was trained for another target or another fine-tune of it; "
    "dflash_config.target_layer_ids or mask_token_id in its config.json are not those of its "
    "training; the chat template differs from training; or it is untrained"
)


class AcceptMonitor:
    """Accept lengths over the life of a worker, from counts SGLang already has on the host.

    Args:
        log_every: steps between log lines; 0 logs none.
        enabled: False on ranks that should stay silent.
    """

    def __init__(self, log_every: int, *, enabled: bool = True):
        self.log_every = log_every
        self.enabled = enabled
        self.steps = 0
        self.request_steps = 0
        self.accepted_drafts = 0
        self._window = (0, 0)
        self._warned = False

    @property
    def accept_length(self) -> float:
        """Mean tokens committed per request and step, bonus token included."""
        return 1 + self.accepted_drafts / self.request_steps if self.request_steps else 0.0

    def observe(self, accepted_drafts: Sequence[int]) -> None:
        """Count one step.

        Args:
            accepted_drafts: accepted drafted tokens of each request, bonus excluded.
        """
        if not accepted_drafts:
            return
        self.steps += 1
        self.request_steps += len(accepted_drafts)
        self.accepted_drafts += sum(accepted_drafts)
        if not self.enabled:
            return
        if self.log_every and self.steps % self.log_every == 0:
            requests, drafts = self._window
            self._window = (self.request_steps, self.accepted_drafts)
            recent = 1 + (self.accepted_drafts - drafts) / (self.request_steps - requests)
            logger.info(
                "DFLASH accept length %.3f over the last %d steps (%.3f since start)",
                recent,
                self.log_every,
                self.accept_length,
            )
        self._warn_once_if_low()

    def _warn_once_if_low(self) -> None:
        if self._warned or self.request_steps < LOW_ACCEPT_REQUEST_STEPS:
            return
        if self.accept_length < LOW_ACCEPT_LENGTH:
            self._warned = True
            logger.warning(
                "DFLASH accept length is %.3f after %d verified blocks: the drafter's guesses "
                "are almost never right, so decoding is slower than without it. Output is not "
                "affected. Likely causes: %s.",
                self.accept_length,
                self.request_steps,
                _CAUSES,
            )


def memory_statement(target_runner: Any, draft_runner: Any) -> str:
    """One line saying what the drafter takes: weights, K/V, and K/V tokens the target lost.

    Args:
        target_runner: SGLang's model runner of the target, pools allocated.
        draft_runner: the drafter's.
    """
    weights = _bytes(draft_runner.model.parameters())
    draft_kv, target_kv = _pool_bytes(draft_runner), _pool_bytes(target_runner)
    tokens = int(target_runner.max_total_num_tokens)
    lost = round((weights + draft_kv) / (target_kv / tokens)) if tokens and target_kv else 0
    mib = 1 << 20
    return (
        f"DFLASH memory: draft weights {weights / mib:.1f} MiB, draft K/V {draft_kv / mib:.1f} "
        f"MiB for {tokens} tokens; without the drafter the same memory would hold {lost} more "
        "K/V tokens of the target"
    )


def _pool_bytes(runner: Any) -> int:
    pool = runner.token_to_kv_pool
    buffers = [*(getattr(pool, "k_buffer", None) or []), *(getattr(pool, "v_buffer", None) or [])]
    if not buffers:
        # Composite pools report (key bytes, value bytes) or a total.
        size = pool.get_kv_size_bytes()
        return int(sum(size)) if isinstance(size, tuple) else int(size)
    return _bytes(buffers)


def _bytes(tensors: Any) -> int:
    """Storage of tensors, each counted once."""
    return sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors}.values())


def describe_device(device: str | torch.device) -> str:
    """``cuda: NVIDIA H200`` or ``cpu``, for log lines."""
    device = torch.device(device)
    return f"cuda: {torch.cuda.get_device_name(device)}" if device.type == "cuda" else str(device)
