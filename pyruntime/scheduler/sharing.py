"""What a sequence that starts need not compute: its parent's prompt, or blocks that an earlier request left."""

from __future__ import annotations

from dataclasses import dataclass, field

from pyruntime.scheduler.blocks import BlockPool
from pyruntime.scheduler.prefix_cache import PrefixCache
from pyruntime.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Shared:
    """``num_tokens`` lie in ``blocks`` (full, to share) and, beyond them, in ``partial`` (to copy)."""

    num_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    partial: int | None = None
    nodes: list[int] = field(default_factory=list)


def shared_by(sequence: Sequence, pool: BlockPool | None, cache: PrefixCache | None) -> Shared:
    """Never the last token: a head reads its hidden row, so it is always computed."""
    most = len(sequence) - 1
    if pool is None:
        return Shared()
    parent = sequence.parent
    if parent is not None and parent.blocks:
        common = min(parent.num_computed, parent.num_prompt, most)
        full, rest = divmod(common, pool.block_size)
        return Shared(common, parent.blocks[:full], parent.blocks[full] if rest else None, parent.cache_nodes[:full])
    if cache is not None and sequence.reuses_prefix:
        nodes, blocks = cache.match(sequence.token_ids, most)
        return Shared(len(blocks) * pool.block_size, blocks, None, nodes)
    return Shared()
