"""One decode step asks nothing of the device that it would have to wait for.

The worker's own step runs over stand-ins for the two models, on CPU tensors, while every use of
torch is watched: a value read on the host, a result whose shape depends on values, or a copy to
the host would stall an overlapped step and could not be captured in a graph.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_dflash.kernels.prepare_block import prepare_block
from torch.overrides import TorchFunctionMode

from sglang_dflash import worker as worker_module
from sglang_dflash.commit import TargetCache, along_path
from sglang_dflash.config import TreeShape
from sglang_dflash.draft import Window
from sglang_dflash.head import DraftHead
from sglang_dflash.proposal import ChainProposer, TreeProposer
from sglang_dflash.verify import Verified
from sglang_dflash.worker import DFlashWorker

REQUESTS, BLOCK, HIDDEN, VOCABULARY, LAYERS = 3, 5, 16, 96, 2
WAITING = {
    *("item", "tolist", "cpu", "numpy", "nonzero", "masked_select", "unique", "bincount", "equal"),
    *("__bool__", "__int__", "__float__", "__index__", "__contains__"),
}


class NothingWaits(TorchFunctionMode):
    """Raises where the host would wait for a value of a tensor."""

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        name = (torch.overrides.resolve_name(function) or repr(function)).rpartition(".")[2]
        keywords = keywords or {}
        if name in WAITING:
            raise AssertionError(f"{name} waits for the device")
        if name in ("__getitem__", "__setitem__") and _boolean(arguments[1]):
            raise AssertionError(f"{name} with a mask has a shape that depends on values")
        if name == "to" and "cpu" in [str(a) for a in (*arguments[1:], *keywords.values())]:
            raise AssertionError(f"{name} copies to the host")
        if name == "repeat_interleave" and any(
            isinstance(repeats, torch.Tensor) for repeats in arguments[1:]
        ):
            raise AssertionError(f"{name} has a shape that depends on values")
        return function(*arguments, **keywords)


def _boolean(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(p, torch.Tensor) and p.dtype == torch.bool for p in parts)


@pytest.mark.parametrize(
    "misuse",
    [
        lambda t: t.sum().item(),
        lambda t: t.tolist(),
        lambda t: t.cpu(),
        lambda t: t.to("cpu"),
        lambda t: bool(t[0, 0] > 0),
        lambda t: int(t[0, 0]),
        lambda t: t[t > 0],
        lambda t: t.nonzero(),
        lambda t: torch.nonzero(t),
        lambda t: t.masked_select(t > 0),
        lambda t: torch.arange(3).repeat_interleave(torch.tensor([1, 2, 3])),
    ],
)
def test_the_watch_sees_a_step_that_would_wait(misuse: Any) -> None:
    with NothingWaits(), pytest.raises(AssertionError):
        misuse(torch.ones(2, 2))


class Models:
    """What a step needs of both models: fixed hidden states, logits and features."""

    def __init__(self, rows: int, seed: int):
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        self.head = normal(VOCABULARY, HIDDEN)
        self.hidden = normal(REQUESTS * (BLOCK - 1), HIDDEN) * 2
        self.features = normal(REQUESTS * rows, HIDDEN)
        # A target that agrees with the drafter about half of the time.
        self.logits = normal(REQUESTS * rows, VOCABULARY)
        likely = (self.hidden @ self.head.T).view(REQUESTS, BLOCK - 1, VOCABULARY)
        self.drafted = likely.argmax(-1)
        self.cache = [normal(64, 2, 4) for _ in range(2 * LAYERS)]


class Step:
    """The worker's step over :class:`Models`."""

    def __init__(self, tree: TreeShape | None, monkeypatch: pytest.MonkeyPatch, seed: int = 0):
        rows = tree.rows if tree else BLOCK
        self.models = models = Models(rows, seed)
        self.appended: dict[str, torch.Tensor] = {}
        self.published: list[torch.Tensor] = []
        self.rows = rows
        lengths = torch.tensor([4, 9, 2])
        table = torch.randperm(60, generator=torch.Generator().manual_seed(seed)).view(REQUESTS, 20)
        block = prepare_block(
            torch.tensor([70, 71, 72]),
            lengths,
            torch.arange(REQUESTS),
            torch.cat((table, torch.arange(60, 64).expand(REQUESTS, 4)), 1).int(),
            mask_token_id=0,
            block_size=BLOCK,
            verify_rows=rows,
        )
        slots, positions = block.slots, block.positions
        plan = SimpleNamespace(write_ids=lambda translator: slots.reshape(-1))
        self.window = Window(
            torch.tensor([70, 71, 72]), lengths, lengths + rows, block.ids, positions, slots, plan
        )
        head = DraftHead(SimpleNamespace(weight=models.head))
        self.worker = worker = object.__new__(DFlashWorker)
        pool = SimpleNamespace(k_buffer=models.cache[:LAYERS], v_buffer=models.cache[LAYERS:])
        vars(worker).update(
            tree=tree,
            verify_rows=rows,
            block_size=BLOCK,
            _proposer=TreeProposer(tree) if tree else ChainProposer(BLOCK, "cpu"),
            _draft_head=head,
            _ledger=None,
            _context=None,
            _warned_penalties=False,
            _need_mamba_verify_commit=False,
            _target_cache=TargetCache(pool) if tree else None,
            _tp_sync=SimpleNamespace(sync=lambda site, choice: None),
            model_runner=SimpleNamespace(kv_index_translator=None),
            draft_model_runner=SimpleNamespace(kv_index_translator=None),
        )

        def draft(worker: Any, batch: Any, window: Any) -> Any:
            if tree:
                return worker.draft_candidates(models.hidden, tree.candidates)
            return (models.hidden @ models.head.T).argmax(-1).view(REQUESTS, BLOCK - 1)

        def verify(worker: Any, batch: Any, window: Any, proposal: Any, barrier: Any) -> Verified:
            self.proposal = proposal
            wanted = torch.nn.functional.pad(models.drafted[:, :2], (0, BLOCK - 2), value=1)
            wanted = wanted.gather(1, proposal.depths.long()).flatten().unsqueeze(1)
            logits = models.logits.scatter(1, wanted, 50.0)
            output = SimpleNamespace(
                next_token_logits=logits, hidden_states=models.features.clone()
            )
            result = SimpleNamespace(
                logits_output=output,
                can_run_cuda_graph=False,
                routed_experts_output=None,
                indexer_topk_output=None,
            )
            return Verified(result, None, None)

        monkeypatch.setattr(worker_module, "prepare", lambda worker, batch: self.window)
        monkeypatch.setattr(worker_module, "draft", draft)
        monkeypatch.setattr(worker_module, "verify", verify)
        monkeypatch.setattr(
            DFlashWorker,
            "_append_target_hidden_to_draft_kv_by_loc",
            lambda worker, **what: self.appended.update(what),
        )
        self.batch = SimpleNamespace(sampling_info=None, spec_info=None, return_logprob=False)

    def run(self, watch: Any = contextlib.nullcontext) -> Any:
        with watch():
            return self.worker._step(self.batch, self.published.append, None)


SHAPES = [None, TreeShape(8, 4), TreeShape(8, 4, keep_spine=False), TreeShape(5, 4, False, 0.5)]


@pytest.mark.parametrize("tree", SHAPES)
def test_a_step_waits_for_nothing(tree: TreeShape | None, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(tree, monkeypatch)
    result = step.run(NothingWaits)
    assert len(step.published) == 1
    assert result.next_token_ids.shape == (REQUESTS * BLOCK,)


@pytest.mark.parametrize("tree", SHAPES)
@pytest.mark.parametrize("seed", range(4))
def test_a_step_keeps_the_rows_of_the_path_at_the_places_of_their_positions(
    tree: TreeShape | None, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Step(tree, monkeypatch, seed)
    before = [cache.clone() for cache in step.models.cache]
    features = step.models.features.view(REQUESTS, step.rows, -1)
    result = step.run()
    proposal = step.proposal
    for request in range(REQUESTS):
        count = int(result.accept_lens[request])
        emitted = result.next_token_ids.view(REQUESTS, BLOCK)[request, :count]
        # The rows on the way: each emitted token names the child of the row before it.
        path = [0]
        for token in emitted[:-1]:
            (row,) = (
                (proposal.parents[request] == path[-1]) & (proposal.tokens[request] == token)
            ).nonzero()
            path.append(int(row))
        slots = step.window.slots[request]
        for cache, old in zip(step.models.cache, before, strict=True):
            assert torch.equal(cache[slots[:count]], old[slots[path]])
        kept = step.appended["target_hidden"].view(REQUESTS, -1, HIDDEN)[request, :count]
        assert torch.equal(kept, features[request, path])
        assert torch.equal(
            step.appended["cache_loc"].view(REQUESTS, -1)[request, :count], slots[:count]
        )
    assert torch.equal(step.published[0], step.window.lengths + result.accept_lens)


def test_rows_along_a_path_are_those_of_their_request() -> None:
    rows = torch.arange(12).view(2 * 6, 1)
    path = torch.tensor([[0, 2, 5], [0, -1, -1]], dtype=torch.int32)
    assert along_path(rows, path).flatten().tolist() == [0, 2, 5, 6, 6, 6]
