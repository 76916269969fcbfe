"""Queries of late-interaction models: cut and lengthened as the model was trained to read them."""

from __future__ import annotations

from pyruntime.registry import ServedModel


def as_query(model: ServedModel, ids: list[int]) -> tuple[list[int], int]:
    """``ids`` with their special tokens, cut and lengthened as ``ModelInfo.query_expansion`` says.

    The number is of the last tokens that the others do not see.
    """
    expansion = model.info.query_expansion
    if expansion is None:
        return ids, 0
    if expansion.cut_to is not None:
        ids = model.tokenizer.truncate(ids, expansion.cut_to, "head")
    num_appended = max(0, expansion.length - len(ids))
    return ids + [expansion.token_id] * num_appended, 0 if expansion.attended else num_appended
