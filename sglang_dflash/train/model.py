"""The DFlash draft network, as it is trained (arXiv 2602.06036, section 3).

The served network is SGLang's ``DFlashDraftModel``; this one has the same parameters under the
published names and adds what training needs: many blocks of one sequence in a single pass. A block
row sees the context before its anchor and the rows of its own block, never another block: the two
sets of keys are separate tensors, so no mask could let blocks leak into each other.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from sglang_dflash.train.blocks import block_visible, context_visible


def default_target_layer_ids(target_layers: int, draft_layers: int) -> list[int]:
    """Target layers whose output the drafter reads when none are named.

    Evenly spaced from the second layer to the third last, as in the published checkpoints
    (36 target and 5 draft layers: 1, 9, 17, 25, 33).
    """
    if draft_layers == 1:
        return [target_layers // 2]
    span = max(0, target_layers - 4)
    spaced = {round(1 + i * span / (draft_layers - 1)) for i in range(draft_layers)}
    return sorted(min(layer, target_layers - 1) for layer in spaced)


class RmsNorm(nn.RMSNorm):
    """torch's, applied in the dtype of its input: autocast leaves the float32 weight alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[.., size]`` to the same."""
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Block rows attend to context rows and to their block; both get K/V from one projection."""

    def __init__(self, config: Qwen3Config, layer: int):
        super().__init__()
        hidden, self.head_dim = config.hidden_size, config.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        bias = bool(config.attention_bias)
        self.q_proj = nn.Linear(hidden, self.heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, hidden, bias=bias)
        self.q_norm = RmsNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = RmsNorm(self.head_dim, eps=config.rms_norm_eps)
        sliding = config.layer_types[layer] == "sliding_attention"
        self.window = config.sliding_window if sliding else None
        explicit = getattr(config, "is_causal", None)
        self.causal = sliding if explicit is None else bool(explicit)

    def forward(
        self,
        rows: torch.Tensor,
        context: torch.Tensor,
        anchors: torch.Tensor,
        row_rope: tuple[torch.Tensor, torch.Tensor],
        context_rope: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Attend.

        Args:
            rows: ``[B, N, bs, H]`` normalised block rows.
            context: ``[B, S, H]`` context features.
            anchors: ``[B, N]`` position of each block's anchor.
            row_rope: cosines and sines ``[B, N, bs, head_dim]``.
            context_rope: the same for the context, ``[B, S, head_dim]``.

        Returns:
            ``[B, N, bs, H]``.
        """
        batch, blocks, size, _ = rows.shape
        length = context.shape[1]
        groups = self.heads // self.kv_heads
        q = self.q_norm(self._heads(self.q_proj(rows), self.heads))
        q = rotate(q, *row_rope)
        k_block = rotate(self.k_norm(self._heads(self.k_proj(rows), self.kv_heads)), *row_rope)
        v_block = self._heads(self.v_proj(rows), self.kv_heads)
        k_ctx = self.k_norm(self._heads(self.k_proj(context), self.kv_heads))
        k_ctx = rotate(k_ctx, *context_rope)
        v_ctx = self._heads(self.v_proj(context), self.kv_heads)

        # [B, Hkv, N, groups * bs, D]: the query heads of a group share their K/V head.
        q = q.view(batch, blocks, size, self.kv_heads, groups, self.head_dim)
        q = q.permute(0, 3, 1, 4, 2, 5).reshape(batch, self.kv_heads, blocks, groups * size, -1)
        q = q * self.head_dim**-0.5
        rows_per_head = blocks * groups * size
        scores_ctx = q.reshape(batch, self.kv_heads, rows_per_head, -1) @ k_ctx.permute(0, 2, 3, 1)
        scores_ctx = scores_ctx.view(batch, self.kv_heads, blocks, groups, size, length)
        seen = context_visible(anchors, length, size, self.window)
        scores_ctx = scores_ctx.masked_fill(~seen[:, None, :, None], -math.inf)
        scores_block = q @ k_block.permute(0, 3, 1, 4, 2)
        scores_block = scores_block.view(batch, self.kv_heads, blocks, groups, size, size)
        if self.causal:
            seen = block_visible(size, causal=True, device=rows.device)
            scores_block = scores_block.masked_fill(~seen, -math.inf)

        shares = torch.cat((scores_ctx, scores_block), -1).softmax(-1).to(v_ctx.dtype)
        from_ctx, from_block = shares.split((length, size), -1)
        from_ctx = from_ctx.reshape(batch, self.kv_heads, rows_per_head, length)
        out = (from_ctx @ v_ctx.transpose(1, 2)).view(
            batch, self.kv_heads, blocks, -1, self.head_dim
        )
        from_block = from_block.reshape(batch, self.kv_heads, blocks, groups * size, size)
        out = out + from_block @ v_block.permute(0, 3, 1, 2, 4)
        out = out.view(batch, self.kv_heads, blocks, groups, size, self.head_dim)
        out = out.permute(0, 2, 4, 1, 3, 5).reshape(batch, blocks, size, -1)
        return self.o_proj(out)

    def _heads(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        return x.view(*x.shape[:-1], heads, self.head_dim)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, config: Qwen3Config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[.., H]`` to ``[.., H]``."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One decoder layer; only block rows are layer-normed, the context was normed once."""

    def __init__(self, config: Qwen3Config, layer: int):
        super().__init__()
        self.input_layernorm = RmsNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = Mlp(config)

    def forward(self, rows: torch.Tensor, *rest: Any) -> torch.Tensor:
        """See :meth:`Attention.forward`."""
        rows = rows + self.self_attn(self.input_layernorm(rows), *rest)
        return rows + self.mlp(self.post_attention_layernorm(rows))


class DraftModel(nn.Module):
    """The draft network without embedding and head, which are the target's.

    Args:
        config: a drafter's config.json; see :func:`sglang_dflash.train.export.drafter_config`.
    """

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        section = config["dflash_config"]
        keys = {k: v for k, v in config.items() if k not in ("architectures", "dflash_config")}
        hf = Qwen3Config(**keys)
        self.config = hf
        self.target_layer_ids: list[int] = section["target_layer_ids"]
        self.mask_token_id: int = section["mask_token_id"]
        self.block_size: int = config["block_size"]
        self.fc = nn.Linear(len(self.target_layer_ids) * hf.hidden_size, hf.hidden_size, bias=False)
        self.hidden_norm = RmsNorm(hf.hidden_size, eps=hf.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(hf, i) for i in range(hf.num_hidden_layers))
        self.norm = RmsNorm(hf.hidden_size, eps=hf.rms_norm_eps)
        self.rope = Qwen3RotaryEmbedding(hf)

    def forward(
        self,
        embedded: torch.Tensor,
        features: torch.Tensor,
        anchors: torch.Tensor,
    ) -> torch.Tensor:
        """Draft every block of every sequence at once.

        Args:
            embedded: ``[B, N, bs, H]`` embeddings of ``[anchor token, MASK, ..]``.
            features: ``[B, S, K * H]`` target features of positions ``0 .. S-1``.
            anchors: ``[B, N]`` int64 positions; a block sees features strictly before its anchor.

        Returns:
            ``[B, N, bs, H]`` normalised hidden states; row ``k`` predicts the token at
            ``anchor + k``.
        """
        length, size = features.shape[1], embedded.shape[2]
        context = self.hidden_norm(self.fc(features))
        row_positions = anchors.unsqueeze(-1) + torch.arange(size, device=anchors.device)
        positions = torch.arange(length, device=anchors.device).unsqueeze(0)
        cos, sin = self.rope(embedded, row_positions.flatten(1))
        shape = (*row_positions.shape, -1)
        row_rope = (cos.view(shape), sin.view(shape))
        context_rope = self.rope(embedded, positions)
        rows = embedded
        for layer in self.layers:
            rows = layer(rows, context, anchors, row_rope, context_rope)
        return self.norm(rows)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding (arXiv 2104.09864), halves rotated as in Llama.

    Args:
        x: ``[.., heads, head_dim]``.
        cos: ``[.., head_dim]``.
        sin: ``[.., head_dim]``.
    """
    cos, sin = cos.unsqueeze(-2).to(x.dtype), sin.unsqueeze(-2).to(x.dtype)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin
