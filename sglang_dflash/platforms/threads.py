"""Which cores each tensor-parallel rank computes on."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

logger = logging.getLogger(__name__)

CORES_VARIABLE = "SGLANG_CPU_OMP_THREADS_BIND"
"""SGLang's variable for choosing the cores oneself: ``0-3|4-7`` gives rank 0 four cores."""


def bind_rank(*, device: str) -> list[int]:
    """Give this rank its share of the process's cores and as many torch threads.

    Ranks that time-share cores wait for each other at every all-reduce, so the cores are split.

    Args:
        device: always ``cpu`` on this platform.

    Returns:
        The cores of this rank.
    """
    from sglang.srt.runtime_context import get_device, get_parallel

    parallel = get_parallel()
    ranks = parallel.dp_size * parallel.tp_size * parallel.pp_size
    rank = get_device().gpu_id
    available = sorted(os.sched_getaffinity(0))
    cores = cores_of_rank(rank, ranks, available, os.environ.get(CORES_VARIABLE, ""))
    if cores != available:
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    logger.info("Rank %d of %d computes on cores %s.", rank, ranks, cores)
    return cores


def skip_thread_environment(**_: Any) -> None:
    """:func:`bind_rank` did what SGLang's ``sgl_kernel`` does here."""


def cores_of_rank(rank: int, ranks: int, available: list[int], chosen: str = "") -> list[int]:
    """The cores one rank computes on.

    Args:
        rank: index of the rank.
        ranks: number of ranks on this machine.
        available: cores the process may use; split evenly, or shared when there are too few.
        chosen: the user's split, ``"0-3|4,5"`` with one group per rank, or empty.

    Returns:
        Core ids.

    Raises:
        ValueError: ``chosen`` is not such a list, or has too few groups.
    """
    if not chosen or chosen == "all":
        if ranks > len(available):
            return [available[rank % len(available)]]
        share = len(available) // ranks
        return available[rank * share : (rank + 1) * share]
    try:
        groups = [_parse_cores(group) for group in chosen.split("|")]
        return groups[rank]
    except (ValueError, IndexError) as error:
        raise ValueError(
            f"{CORES_VARIABLE}={chosen!r} does not name the cores of rank {rank} ({ranks} "
            "ranks). Give one group per rank, separated by '|', each a list of cores or ranges: "
            "'0-3|4-7' or '0|1'."
        ) from error


def _parse_cores(group: str) -> list[int]:
    cores: list[int] = []
    for part in group.split(","):
        first, dash, last = part.partition("-")
        cores.extend(range(int(first), int(last if dash else first) + 1))
    if not cores:
        raise ValueError(group)
    return cores
