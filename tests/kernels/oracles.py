"""What every operation must give, written as slowly and plainly as its definition.

Nothing here shares an idea with the code under test: accept walks the tree instead of comparing
bit sets, rope multiplies complex numbers, and rows are moved out of a snapshot.
"""

from __future__ import annotations

import cmath
import heapq
import itertools
import math
from typing import NamedTuple

import numpy as np
import torch

from tests.kernels.cases import (
    AcceptCase,
    BlockCase,
    ContextCase,
    LogitsCase,
    MaskCase,
    MoveCase,
    TreeCase,
)


def block(case: BlockCase) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Ids, positions and slots."""
    ids, positions, slots = [], [], []
    for anchor, length, row in zip(
        case.anchors.tolist(), case.lengths.tolist(), case.req_pool_indices.tolist(), strict=True
    ):
        table = case.req_to_token[row].tolist()
        ids.append([anchor] + [case.mask_token_id] * (case.block_size - 1))
        positions.append([length + step for step in range(case.verify_rows)])
        slots.append([table[position] for position in positions[-1]])
    return ids, positions, slots


def accept(case: AcceptCase) -> list[tuple[list[int], list[int], int]]:
    """Per request: the accepted rows from the root, the emitted tokens, the new length."""
    results = []
    for tokens, parents, choice, length in zip(
        case.tokens.tolist(),
        case.parents.tolist(),
        case.choice.tolist(),
        case.lengths.tolist(),
        strict=True,
    ):
        path = [0]
        while True:
            chosen = choice[path[-1]]
            children = [row for row in range(1, len(tokens)) if parents[row] == path[-1]]
            following = [row for row in children if tokens[row] == chosen]
            if not following:
                break
            path.append(following[0])
        emitted = [tokens[row] for row in path[1:]] + [choice[path[-1]]]
        results.append((path, emitted, length + len(emitted)))
    return results


def committed_rows(case: ContextCase) -> list[int]:
    """Indices of the rows that must be written."""
    count = len(case.kv)
    if case.commit_lengths is None:
        return list(range(count))
    lengths = case.commit_lengths.tolist()
    return [
        row
        for row in range(count)
        if row % case.rows_per_request < lengths[row // case.rows_per_request]
    ]


def context_key(case: ContextCase, row: int, layer: int, head: int) -> list[float]:
    """The key of one row, layer and head, in double precision and without roundings."""
    raw = case.kv[row, layer, 0, head].double().tolist()
    weight = case.k_norm_weight[layer].double().tolist()
    scale = 1 / math.sqrt(sum(x * x for x in raw) / len(raw) + case.eps)
    key = [x * scale * w for x, w in zip(raw, weight, strict=True)]
    table = case.cos_sin[int(case.positions[row])].double().tolist()
    half = len(table) // 2
    for index in range(half):
        pair = (index, index + half) if case.is_neox else (2 * index, 2 * index + 1)
        turned = complex(key[pair[0]], key[pair[1]]) * complex(table[index], table[index + half])
        key[pair[0]], key[pair[1]] = turned.real, turned.imag
    assert not any(cmath.isnan(x) for x in key)
    return key


def moved(case: MoveCase) -> torch.Tensor:
    """The caches after the move."""
    before = case.caches.clone()
    after = case.caches.clone()
    for request, count in enumerate(case.accept_lengths.tolist()):
        slots = case.slots[request].tolist()
        for depth in range(count):
            source = slots[int(case.path[request, depth])]
            after[:, slots[depth]] = before[:, source]
    return after


def tree_mask(case: MaskCase) -> list[bool]:
    """The mask, element by element."""
    rows = case.ancestors.shape[1]
    written: list[bool] = []
    for words, length in zip(case.ancestors.tolist(), case.lengths.tolist(), strict=True):
        for row_words in words:
            bits = sum((word % 2**64) << (64 * index) for index, word in enumerate(row_words))
            written += [True] * length
            written += [bool(bits & (1 << row)) for row in range(rows)]
    return written + case.mask[len(written) :].tolist()


class Node(NamedTuple):
    """A node of a tree, by the ranks on its path."""

    ranks: tuple[int, ...]
    score: np.float32

    @property
    def on_spine(self) -> bool:
        return not any(self.ranks)


def extended(case: TreeCase, request: int, parent: Node, rank: int) -> Node:
    """The child of a rank."""
    edge = case.log_q[request, len(parent.ranks), rank].numpy()
    if not parent.on_spine:
        edge = edge - np.float32(case.spine_discount)
    return Node((*parent.ranks, rank), parent.score + edge)


def tree(case: TreeCase, request: int) -> list[Node]:
    """The nodes of the best tree, root excluded, in the order a heap gives them."""
    _, depths, candidates = case.ids.shape
    root, budget = Node((), np.float32(0)), case.rows - 1
    chosen: list[Node] = []
    heap: list[tuple[float, int, Node, Node]] = []

    def offer(order: int, parent: Node, rank: int) -> None:
        if rank < candidates and len(parent.ranks) < depths:
            node = extended(case, request, parent, rank)
            if node.score > -np.inf:
                heapq.heappush(heap, (-float(node.score), order, node, parent))

    if case.keep_spine:
        node = root
        while len(chosen) < min(budget, depths):
            parent, node = node, extended(case, request, node, 0)
            chosen.append(node)
            offer(2 * len(chosen) + 1, parent, 1)
    else:
        offer(0, root, 0)
    while heap and len(chosen) < budget:
        *_, node, parent = heapq.heappop(heap)
        chosen.append(node)
        offer(2 * len(chosen), node, 0)
        offer(2 * len(chosen) + 1, parent, node.ranks[-1] + 1)
    return chosen


def all_nodes(case: TreeCase, request: int) -> list[Node]:
    """Every node there is."""
    _, depths, candidates = case.ids.shape
    found: list[Node] = []
    for depth in range(1, depths + 1):
        for ranks in itertools.product(range(candidates), repeat=depth):
            node = Node((), np.float32(0))
            for rank in ranks:
                node = extended(case, request, node, rank)
            found.append(node)
    return found


def likeliest(case: LogitsCase, row: int) -> list[tuple[int, float]]:
    """The candidates of a row, likeliest first, the lower id first among equals."""
    logits = case.logits[row].double().tolist()
    alive = [(logit, column) for column, logit in enumerate(logits) if logit > -math.inf]
    if not alive:
        return []
    largest = max(logit for logit, _ in alive)
    lse = largest + math.log(sum(math.exp(logit - largest) for logit, _ in alive))
    best = sorted(alive, key=lambda found: (-found[0], found[1]))[: case.candidates]
    return [(case.first_id + column, logit - lse) for logit, column in best]
