"""What a sequence that starts need not compute: its parent's prompt, or blocks that an earlier request left."""

from __future__ import annotations

from dataclasses import dataclass, field

from pyruntime.scheduler.blocks import BlockPool
from pyruntime.scheduler.prefix_cache import PrefixCache
from pyruntime.scheduler.sequence import Sequence
from pyruntime.scheduler.window import first_read


@dataclass(frozen=True, slots=True)
class Shared:
    """``num_tokens`` lie in ``blocks`` (full, to share) and, beyond them, in ``partial`` (to copy).

    ``num_passed`` full blocks before those are behind the window and not needed; ``passed`` are their ids where the
    prefix cache knows them.
    """

    num_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    partial: int | None = None
    nodes: list[int] = field(default_factory=list)
    num_passed: int = 0
    passed: list[int] = field(default_factory=list)

    @property
    def num_places(self) -> int:
        """Of the block table, the partial block not counted."""
        return self.num_passed + len(self.blocks)


def shared_by(sequence: Sequence, pool: BlockPool | None, cache: PrefixCache | None, window: int | None) -> Shared:
    """Never the last token: a head reads its hidden row, so it is always computed."""
    most = len(sequence) - 1
    if pool is None:
        return Shared()
    parent = sequence.parent
    if parent is not None and parent.blocks:
        common = min(parent.num_computed, parent.num_prompt, most)
        full, rest = divmod(common, pool.block_size)
        partial = parent.blocks[full] if rest else None
        own = parent.blocks[parent.num_passed : full]
        return Shared(common, own, partial, parent.cache_nodes[:full], parent.num_passed)
    if cache is not None and sequence.reuses_prefix:
        # Found from the root on: a prefix whose beginning is gone is not known, though a window might do without it.
        nodes, blocks = cache.match(sequence.token_ids, most, sequence.cache_salt)
        num_tokens = len(blocks) * pool.block_size
        passed = first_read(num_tokens, window) // pool.block_size
        return Shared(num_tokens, blocks[passed:], None, nodes, passed, blocks[:passed])
    return Shared()
