"""Where SGLang would launch Triton, or call its CPU build of ``sgl_kernel``, on CPU tensors.

Everything this platform replaces outside SGLang's own platform interface is listed in
:data:`REPLACEMENTS`, each with the reason, and installed by SGLang's hook registry.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from sglang_dflash.platforms import NAME, threads


def window_slots(
    req_to_token: torch.Tensor, rows: torch.Tensor, start: torch.Tensor, width: int
) -> torch.Tensor:
    """``[bs, width]`` int64 slots of positions ``start .. start+width-1`` of each request."""
    columns = start.to(torch.int64).unsqueeze(1) + torch.arange(width)
    return req_to_token[rows.to(torch.int64).unsqueeze(1), columns].to(torch.int64)


def assign_extend_cache_locs(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: Any = None,
) -> torch.Tensor:
    """Flat ``[bs * draft_token_num]`` int64 slots of every request's verify window.

    ``start_offset`` and ``end_offset`` ``[bs]`` differ by ``draft_token_num`` everywhere.
    """
    return window_slots(req_to_token, req_pool_indices, start_offset, draft_token_num).flatten()


def assign_req_to_token_pool(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Write newly allocated slots into the request table.

    The next ``end[b] - start[b]`` entries of ``out_cache_loc`` (requests concatenated) go to
    ``req_to_token[req_pool_indices[b], start[b]:end[b]]``.
    """
    starts = start_offset[:batch_size].to(torch.int64)
    counts = end_offset[:batch_size].to(torch.int64) - starts
    total = int(counts.sum())
    first = (counts.cumsum(0) - counts).repeat_interleave(counts)
    columns = starts.repeat_interleave(counts) + torch.arange(total) - first
    rows = req_pool_indices[:batch_size].to(torch.int64).repeat_interleave(counts)
    req_to_token[rows, columns] = out_cache_loc[:total].to(req_to_token.dtype)


def last_slots(
    req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, prefix_lens: torch.Tensor
) -> torch.Tensor:
    """Slot of the last prefix token of each request, -1 without a prefix."""
    slots = req_to_token[req_pool_indices, (prefix_lens - 1).clamp(min=0)].to(prefix_lens.dtype)
    return slots.masked_fill(prefix_lens == 0, -1)


def record_stream(tensor: torch.Tensor, stream: Any) -> None:
    """Nothing to record for memory no stream owns; other devices as before."""
    if tensor.device.type != "cpu":
        _TORCH_RECORD_STREAM(tensor, stream)


def all_gather_into_tensor(output: torch.Tensor, input: torch.Tensor, group_name: str) -> None:
    """Gather every rank's ``input`` into ``output`` in a tensor-parallel group."""
    _group(group_name)._all_gather_into_tensor(output, input)


def reduce_scatter_tensor(output: torch.Tensor, input: torch.Tensor, group_name: str) -> None:
    """Sum ``input`` over a tensor-parallel group and keep this rank's share in ``output``."""
    _group(group_name)._reduce_scatter_tensor(output, input)


def all_to_all_single(output: torch.Tensor, input: torch.Tensor, group_name: str) -> None:
    """Exchange equal parts of ``input`` within a tensor-parallel group."""
    _group(group_name)._all_to_all_single(output, input)


def _group(name: str) -> Any:
    from sglang.srt.distributed.parallel_state import _groups

    return _groups[name]()


_TORCH_RECORD_STREAM = torch.Tensor.record_stream


class Replacement(NamedTuple):
    """One function of SGLang or torch that has a stand-in on this platform."""

    target: str
    """Dotted name."""
    function: Callable
    reason: str


REPLACEMENTS = (
    Replacement(
        "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func",
        assign_req_to_token_pool,
        "launches Triton unless SGLang's CPU build of sgl_kernel is active",
    ),
    Replacement(
        "sglang.srt.mem_cache.allocation.get_last_loc",
        last_slots,
        "launches Triton for every attention backend but torch_native and ascend",
    ),
    Replacement(
        "sglang.srt.distributed.bootstrap._bind_threads_if_cpu",
        threads.bind_rank,
        "wants one NUMA node per tensor-parallel rank",
    ),
    Replacement(
        "sglang.srt.distributed.bootstrap._init_cpu_threads_env",
        threads.skip_thread_environment,
        "calls sgl_kernel's CPU ops; bind_rank has done it with torch",
    ),
    *(
        Replacement(
            f"sglang.srt.distributed.parallel_state.{name}",
            function,
            "is a torch operator registered for CUDA alone under an out-of-tree platform",
        )
        for name, function in (
            ("reg_all_gather_into_tensor", all_gather_into_tensor),
            ("reg_reduce_scatter_tensor", reduce_scatter_tensor),
            ("reg_all_to_all_single", all_to_all_single),
        )
    ),
    Replacement(
        "torch.Tensor.record_stream",
        record_stream,
        "raises on CPU tensors; SGLang's DFLASH worker records its inputs unconditionally",
    ),
)


def register() -> None:
    """Hand :data:`REPLACEMENTS` to SGLang, which installs them when it loads its plugins."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    source = HookSource(plugin_name=NAME, dist_name="sglang-dflash")
    for replacement in REPLACEMENTS:
        HookRegistry.register(
            replacement.target, replacement.function, HookType.REPLACE, source=source
        )


def verify() -> None:
    """Check that SGLang installed them: it logs a hook that fails, and goes on without it.

    Raises:
        RuntimeError: a replacement is not in place.
    """
    for target, _, reason in REPLACEMENTS:
        if not hasattr(pkgutil.resolve_name(target), "__wrapped__"):
            raise RuntimeError(
                f"SGLANG_PLATFORM={NAME}: the CPU stand-in for {target} is not installed, and "
                f"SGLang's own {reason}. Install the SGLang release this version of "
                "sglang-dflash is certified for; the log above tells why the hook failed."
            )
