"""Choose: the token the target itself would emit after every verify row.

One rule serves chains and trees, greedy and sampled requests: sample each row exactly as SGLang
samples a row without speculation, then follow the rows whose token was chosen by their parent.
With candidates fixed before any of the target's randomness is drawn, the emitted tokens have
the target's own law, and no lossless rule accepts more: the chance to descend from a node is
the target's mass on its children (compare multi-draft verification, arXiv 2502.18779).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.speculative.dflash_utils import apply_dflash_verify_logits_adjustments
from sglang.srt.speculative.spec_tp_sync import SpecTpSyncSite

from sglang_dflash.draft import Window
from sglang_dflash.proposal import Proposal
from sglang_dflash.verify import Verified

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from sglang_dflash.worker import DFlashWorker


def choose(
    worker: DFlashWorker,
    batch: ScheduleBatch,
    window: Window,
    proposal: Proposal,
    verified: Verified,
) -> torch.Tensor:
    """The target's token after every row.

    Args:
        worker: the speculative worker.
        batch: the decode batch, for its sampling parameters.
        window: the step's requests.
        proposal: the verified rows; a seeded draw is keyed on their positions.
        verified: the target's logits over ``bs*N`` rows. They are adjusted in place (logit
            bias, custom processors, grammar mask), as they are without speculation.

    Returns:
        ``[bs, N]`` int64, equal on every tensor-parallel rank.
    """
    info = batch.sampling_info
    if verified.argmax is not None:
        choice, site = verified.argmax, SpecTpSyncSite.DFLASH_ACCEPT_GREEDY
    else:
        logits = verified.logits_output.next_token_logits
        if info is not None:
            apply_dflash_verify_logits_adjustments(
                next_token_logits=logits, sampling_info=info, draft_token_num=proposal.rows
            )
        if verified.grammar_mask is not None:
            verified.grammar_mask.apply(logits)
        if info is None or info.is_all_greedy:
            choice, site = logits.argmax(dim=-1), SpecTpSyncSite.DFLASH_ACCEPT_GREEDY
        else:
            choice = _sample_rows(worker, batch, proposal, verified)
            site = SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE
    choice = choice.to(torch.int64).view(window.batch_size, proposal.rows)
    worker.tp_sync.sync(site, choice)
    return choice


def _sample_rows(
    worker: DFlashWorker,
    batch: ScheduleBatch,
    proposal: Proposal,
    verified: Verified,
) -> torch.Tensor:
    """Run SGLang's own sampler on all rows, each with its request's parameters."""
    output = verified.logits_output
    logits = output.next_token_logits
    if batch.return_logprob or batch.sampling_info.sampling_mask_batch_indices is not None:
        # The sampler turns logits into probabilities in place; these are read again.
        logits = logits.clone()
    return worker.model_runner.sampler(
        dataclasses.replace(output, next_token_logits=logits),
        rows_sampling_info(batch.sampling_info, proposal.rows),
        return_logprob=False,
        top_logprobs_nums=[],
        token_ids_logprobs=[],
        positions=proposal.positions.reshape(-1),
    )


def rows_sampling_info(info: Any, rows: int) -> Any:
    """Sampling parameters of ``bs`` requests, repeated for each of their ``rows`` verify rows.

    What has been applied to the logits already (custom processors, grammar, bias) is dropped.
    """

    def per_row(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values.repeat_interleave(rows, dim=0)

    return dataclasses.replace(
        info,
        temperatures=per_row(info.temperatures),
        top_ps=per_row(info.top_ps),
        top_ks=per_row(info.top_ks),
        min_ps=per_row(info.min_ps),
        sampling_seed=per_row(info.sampling_seed),
        grammars=None,
        grammar_mask=None,
        logit_bias=None,
        has_custom_logit_processor=False,
        sampling_mask_batch_indices=None,
    )
