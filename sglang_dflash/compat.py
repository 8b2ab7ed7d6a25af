"""Is the installed SGLang one whose internals this package was written against?

Every seam the plugin touches has a fingerprint, taken from SGLang's source with ``ast``: its
signature, and a hash of its whole source without comments, docstrings or layout. An equal hash
runs; an equal signature over changed source runs with a warning; anything else is refused.
Reading source imports nothing of SGLang.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger("sglang_dflash")

OVERRIDE = "SGLANG_DFLASH_ALLOW_UNTESTED"
FINGERPRINTS = Path(__file__).with_name("fingerprints.json")

_WORKER = "srt/speculative/dflash_worker_v2.py:DFlashWorkerV2."
SEAMS = (
    *(
        _WORKER + name
        for name in (
            "__init__",
            "forward_batch_generation",
            "alloc_memory_pool",
            "init_cuda_graphs",
            "prewarm_sampling",
            "_append_target_hidden_to_draft_kv_by_loc",
            "_can_skip_verify_logits",
            "_compute_compact_draft_seq_lens",
            "_draft_write_ids",
            "_ensure_draft_block_buffers",
            "_fill_compact_seq_lens_cpu_bound",
            "_greedy_sample_from_vocab_parallel_head",
            "_init_fused_kv_helper",
            "_maybe_build_draft_sampler",
            "_rebuild_compact_draft_cache",
            "_update_target_mamba_state_after_verify",
        )
    ),
    "srt/speculative/dflash_worker_v2.py:_resolve_dflash_embedding_module",
    "srt/speculative/dflash_info.py:DFlashVerifyInput",
    "srt/speculative/dflash_info_v2.py:DFlashDraftInputV2",
    "srt/speculative/dflash_utils.py:apply_dflash_simulated_acceptance",
    "srt/speculative/dflash_utils.py:apply_dflash_verify_logits_adjustments",
    "srt/speculative/dflash_utils.py:can_dflash_slice_qkv_weight",
    "srt/speculative/dflash_utils.py:parse_dflash_draft_config",
    "srt/speculative/draft_worker_common.py:make_draft_input_v2",
    "srt/speculative/spec_info.py:SpeculativeAlgorithm.create_worker",
    "srt/speculative/spec_sampling_mask.py:SpeculativeSamplingMaskCapture.from_logits",
    "srt/speculative/spec_tp_sync.py:SpecTpSync.sync",
    "srt/speculative/spec_utils.py:GrammarTree",
    "srt/speculative/spec_utils.py:build_grammar_vocab_mask",
    "srt/speculative/spec_utils.py:draft_tp_context",
    "srt/arg_groups/speculative_hook.py:_handle_dflash",
    "srt/arg_groups/overrides.py:declare_resolution",
    "srt/arg_groups/resolution_hooks.py:register_resolution_hook",
    "srt/layers/logprob_processor.py:compute_spec_logprobs",
    "srt/layers/sampler.py:Sampler.forward",
    "srt/managers/overlap_utils.py:RelayPayload",
    "srt/managers/tp_worker.py:TpModelWorker.forward_batch_generation",
    "srt/managers/utils.py:GenerationBatchResult",
    "srt/mem_cache/allocation_sizing.py:get_req_to_token_extra_context_len",
    "srt/mem_cache/kv_index_translator.py:KVIndexTranslator.plan",
    "srt/mem_cache/kv_loc_plan.py:KVLocPlan",
    "srt/models/dflash.py:DFlashAttention",
    "srt/models/dflash.py:DFlashDraftModel",
    "srt/plugins/hook_registry.py:HookRegistry",
    "srt/server_args.py:ServerArgs.add_cli_args",
    "srt/server_args.py:ServerArgs.from_cli_args",
)
"""What the plugin overrides, copies the meaning of, or calls: ``file:qualified name``."""


class Fingerprint(NamedTuple):
    """One seam as it stands in one SGLang release."""

    signature: str
    source: str


class IncompatibleError(RuntimeError):
    """The installed SGLang is not one this package can drive."""


def fingerprint(root: Path, seam: str) -> Fingerprint | None:
    """Fingerprint a seam below a ``sglang`` package folder, or None where it is missing."""
    file, name = seam.split(":")
    try:
        tree = _parse(root / file)
    except OSError:
        return None
    node: ast.AST = tree
    for part in name.split("."):
        found = [
            child
            for child in getattr(node, "body", [])
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            and child.name == part
        ]
        if not found:
            return None
        node = found[-1]
    if isinstance(node, ast.ClassDef):
        fields = [ast.unparse(s.target) for s in node.body if isinstance(s, ast.AnnAssign)]
        methods = [
            f"{m.name}({ast.unparse(m.args)})" for m in node.body if isinstance(m, ast.FunctionDef)
        ]
        signature = "; ".join([*fields, *methods])
    else:
        assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        signature = ast.unparse(node.args)
    return Fingerprint(_digest(signature), _digest(ast.unparse(_without_docstrings(node))))


@functools.cache
def _parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _without_docstrings(node: ast.AST) -> ast.AST:
    for child in ast.walk(node):
        body = getattr(child, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
            and isinstance(body[0].value.value, str)
        ):
            child.body = body[1:] or [ast.Pass()]  # type: ignore[attr-defined]
    return node


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def sglang_root() -> Path:
    """The installed ``sglang`` package folder, without importing it."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise IncompatibleError("sglang is not installed. Install it with: pip install sglang-dflash")
    return Path(next(iter(spec.submodule_search_locations)))


def certified() -> dict[str, dict[str, Fingerprint]]:
    """Release -> seam -> fingerprint, as shipped."""
    table = json.loads(FINGERPRINTS.read_text(encoding="utf-8"))
    return {
        version: {seam: Fingerprint(*values) for seam, values in seams.items()}
        for version, seams in table.items()
    }


def check() -> None:
    """Refuse an SGLang whose seams are not the certified ones; cheap after the first call.

    Raises:
        IncompatibleError: naming the release or the seams, and what to do.
    """
    if not _checked():
        logger.warning("DFLASH: unexpected SGLang internals allowed by %s=1", OVERRIDE)


@functools.cache
def _checked() -> bool:
    problem = compare(
        importlib.metadata.version("sglang"), sglang_root(), certified()
    )
    if problem is None:
        return True
    if os.environ.get(OVERRIDE) == "1":
        return False
    raise IncompatibleError(problem)


def compare(version: str, root: Path, table: dict[str, dict[str, Fingerprint]]) -> str | None:
    """What is wrong with an SGLang installation, or None.

    Changed source behind an unchanged signature is not wrong, but is logged as a warning.
    """
    remedy = (
        f"Install a certified release (pip install sglang=={max(table)}), or set {OVERRIDE}=1 to "
        "run anyway."
    )
    if version not in table:
        return (
            f"DFLASH: sglang {version} is not certified for sglang-dflash; certified: "
            f"{', '.join(table)}. {remedy}"
        )
    changed, broken = [], []
    for seam, expected in table[version].items():
        found = fingerprint(root, seam)
        if found is None:
            broken.append(f"{seam} (missing)")
        elif found.signature != expected.signature:
            broken.append(f"{seam} (signature changed)")
        elif found.source != expected.source:
            changed.append(seam)
    if broken:
        return f"DFLASH: sglang {version} differs from the certified build: {'; '.join(broken)}. " + remedy
    if changed:
        logger.warning(
            "DFLASH: sglang %s has modified source in %s; signatures are unchanged, so it runs, "
            "but this combination was not tested.",
            version,
            ", ".join(changed),
        )
    return None
