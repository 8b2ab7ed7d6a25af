"""The borrowed head: whole or sharded over ranks, it names the same tokens with the same odds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_dflash.head import DraftHead

VOCABULARY, ADDED, HIDDEN, PADDED = 150, 6, 16, 96


class Shard:
    """One rank's rows, laid out as SGLang lays out a vocabulary-parallel head."""

    def __init__(self, weight: torch.Tensor, rank: int, ranks: int):
        size, added = PADDED if ranks > 1 else 192, ADDED // ranks
        first = rank * size
        own = weight[:VOCABULARY][first : first + size]
        extra = weight[VOCABULARY:][rank * added : (rank + 1) * added]
        # Padding rows would win every comparison.
        rows = torch.full((size + 16, HIDDEN), 100.0)
        rows[: len(own)] = own
        rows[size : size + added] = extra
        self.rows = rows
        self.shard_indices = SimpleNamespace(
            num_org_elements=len(own),
            num_org_elements_padded=size,
            num_added_elements=added,
            org_vocab_start_index=first,
            added_vocab_start_index=VOCABULARY + rank * added,
        )
        self.quant_method = SimpleNamespace(apply=lambda head, x, bias: x @ head.rows.T)


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(VOCABULARY + ADDED, HIDDEN, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def hidden() -> torch.Tensor:
    return torch.rand(7, HIDDEN, generator=torch.Generator().manual_seed(1))


def test_the_likeliest_tokens_are_the_softmaxs(weight: torch.Tensor, hidden: torch.Tensor) -> None:
    found = DraftHead(SimpleNamespace(weight=weight)).candidates(hidden, 5)
    expected = (hidden @ weight.T).log_softmax(-1).topk(5)
    assert torch.equal(found.ids, expected.indices)
    torch.testing.assert_close(found.log_q, expected.values)


def test_rows_past_the_vocabulary_are_no_tokens(weight: torch.Tensor, hidden: torch.Tensor) -> None:
    padded = torch.cat((weight, torch.full((8, HIDDEN), 100.0)))
    packed = SimpleNamespace(
        org_vocab_size=len(weight),
        quant_method=SimpleNamespace(apply=lambda head, x, bias: x @ padded.T),
    )
    whole = DraftHead(SimpleNamespace(weight=weight)).candidates(hidden, 5)
    assert torch.equal(DraftHead(packed).candidates(hidden, 5).ids, whole.ids)


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_rank_finds_what_one_would(
    weight: torch.Tensor, hidden: torch.Tensor, ranks: int
) -> None:
    whole = DraftHead(SimpleNamespace(weight=weight)).candidates(hidden, 5)
    shards = [Shard(weight, rank, ranks) for rank in range(ranks)]
    if ranks == 1:
        found = [DraftHead(shards[0]).candidates(hidden, 5)]
    else:
        alone = [DraftHead(shard).candidates(hidden, 5) for shard in shards]

        def gather(mine: torch.Tensor) -> torch.Tensor:
            field = "keys" if mine.dtype == torch.int64 else "lse"
            return torch.stack([getattr(one, field) for one in alone], 1)

        found = [DraftHead(shard, gather).candidates(hidden, 5) for shard in shards]
    assert any((one.ids >= VOCABULARY).any() for one in found)
    for one in found:
        assert torch.equal(one.ids, whole.ids)
        torch.testing.assert_close(one.log_q, whole.log_q)
        assert torch.equal(one.log_q, found[0].log_q)
