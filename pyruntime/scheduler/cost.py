"""What a step costs, in token equivalents: one token at depth zero, through all linear layers, costs 1.

A token at depth d also reads d earlier keys in every layer, so a chunk of n tokens behind d others costs
n + n·d/K. K is the depth at which attention costs as much as the linears: with m multiplications a token in
the linears of a layer and a in one query-key pair of it (scores and values, all heads), K = m / a. A plain
transformer layer of width h has m = 12·h² and a = 2·h, so K = 6·h; grouped heads and narrow feed-forwards
make it smaller (2,700 for Gemma 3 270M, some 27,000 for Llama 3 8B).

A head that reads the vocabulary for every row, as for the log-probabilities of a prompt, costs a row as much as
V·h / a further keys, a summed over all layers, for each time it does.
"""

from __future__ import annotations

from dataclasses import dataclass

# Of a small decoder. Too small a value only makes chunks at depth shorter than they need to be.
DEFAULT_EQUAL_DEPTH = 4096


@dataclass(frozen=True, slots=True)
class CostModel:
    """``equal_depth``: K above, in tokens; 0 leaves attention and heads out.

    ``window``: no token reads more keys than that. ``head_depth``: keys whose reading costs as much as reading the
    vocabulary once for one row. ``row_reads`` below: how often a head does that for each row.
    """

    equal_depth: int = DEFAULT_EQUAL_DEPTH
    window: int | None = None
    head_depth: int = 0

    def cost(self, num_tokens: int, depth: int, row_reads: int = 0) -> int:
        """Token equivalents of ``num_tokens`` behind ``depth`` computed ones, rounded down; at least ``num_tokens``."""
        if not self.equal_depth:
            return num_tokens
        return num_tokens + num_tokens * self._read(depth, row_reads) // self.equal_depth

    def most_tokens(self, limit: int, depth: int, row_reads: int = 0) -> int:
        """The most tokens behind ``depth`` others whose cost is within ``limit``; 0 when one is too many."""
        if not self.equal_depth:
            return max(limit, 0)
        most = max(limit, 0) * self.equal_depth // (self.equal_depth + self._read(depth, row_reads))
        # The rounding may leave room for one more.
        return most + 1 if self.cost(most + 1, depth, row_reads) <= limit else most

    def _read(self, depth: int, row_reads: int) -> int:
        return (depth if self.window is None else min(depth, self.window)) + row_reads * self.head_depth
