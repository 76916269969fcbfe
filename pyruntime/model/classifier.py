"""The classification head of a model: which hidden rows it reads, and what it makes of them.

There is no head written here for any architecture. A ``…ForSequenceClassification`` model is its body and then
some modules of its own; its ``forward`` is run with a stand-in for the body that gives back the rows that are handed
in, as sequences of one token. Which rows those are is all that has to be known, and ``classifier_check.py`` compares
the outcome with the whole model before it is served.
"""

from __future__ import annotations

import copy
import enum
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import ModelOutput

from pyruntime.errors import ModelLoadError
from pyruntime.model.classifier_settings import ACTIVATIONS, activation_name, label_names
from pyruntime.model.linear import OwnLinear, linear
from pyruntime.model.row_invariant import RowInvariant
from pyruntime.model.weights import CLASSIFIER_SUFFIXES, TOKEN_CLASSIFIER_SUFFIX


class Reads(enum.Enum):
    """The hidden rows of a sequence that its head reads.

    FIRST and LAST token; MEAN of all rows, then the head; EACH row for itself; the MEAN_OF_EACH row's logits.
    """

    FIRST = "first"
    LAST = "last"
    MEAN = "mean"
    EACH = "each"
    MEAN_OF_EACH = "mean_of_each"


# What configs with a ``classifier_pooling`` say (ModernBERT, EuroBERT).
POOLINGS = {"cls": Reads.FIRST, "bos": Reads.FIRST, "mean": Reads.MEAN, "late": Reads.MEAN_OF_EACH}


@dataclass(frozen=True, slots=True)
class Classifier:
    """``padding_id``: a head that reads the LAST token takes the last that is not this, as transformers' heads do.

    Where all are, that is token 0, in theirs too. ``activation``: key of ``ACTIVATIONS``.
    """

    head: ClassifierHead
    reads: Reads
    labels: tuple[str, ...]
    activation: str
    padding_id: int | None = None

    @property
    def classifies_tokens(self) -> bool:
        return self.reads is Reads.EACH

    def positions(self, ids: list[int]) -> range:
        """Which tokens of a text the head reads the rows of."""
        if self.reads is Reads.FIRST:
            return range(1)
        if self.reads is Reads.LAST:
            last = next((index for index in range(len(ids) - 1, -1, -1) if ids[index] != self.padding_id), 0)
            return range(last, last + 1)
        return range(len(ids))

    def pool(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows [N, H] of ``positions`` → what goes to the head: float32 [1, H] for MEAN, else the rows."""
        return rows.float().mean(0, keepdim=True) if self.reads is Reads.MEAN else rows

    @property
    def ignored_tail_id(self) -> int | None:
        """The id at a text's end behind whose run the head reads; None where it does not read the end."""
        return self.padding_id if self.reads is Reads.LAST else None

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [N, H] in any float dtype → float32 [N, labels]."""
        return self.head(rows) if rows.shape[0] else rows.new_zeros((0, len(self.labels)), dtype=torch.float32)

    def conclude(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [N, labels] of one text → [1, labels] for MEAN_OF_EACH, else the same."""
        return logits.mean(0, keepdim=True) if self.reads is Reads.MEAN_OF_EACH else logits

    def activate(self, logits: torch.Tensor) -> torch.Tensor:
        """float32 [N, labels] → the same shape: what the model's own activation makes of each row."""
        return ACTIVATIONS[self.activation](logits)


class ClassifierHead:
    """Everything of a classification model but its body, in float32 whatever the body's dtype.

    The head is small, and a score near 1 rounded to bfloat16 would tie with its neighbours.
    """

    def __init__(self, model: Any) -> None:
        body = model.base_model
        name = next(name for name, module in model.named_children() if module is body)
        # A copy of the model with its own table of modules: the body stays out of what is copied and widened.
        shell = copy.copy(model)
        shell._modules = {key: copy.deepcopy(module) for key, module in model._modules.items() if key != name}
        shell._modules[name] = _Rows(copy.deepcopy(getattr(body, "pooler", None)), _pooler_activation(body))
        shell.config = _without_padding(model.config)
        self._model = shell.float()
        for module in self._model.modules():
            if isinstance(module, OwnLinear):
                module.row_invariant = True

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [N, H], N ≥ 1, any float dtype → float32 logits [N, labels]; a row's do not depend on the others."""
        # The rows travel beside the ids, which no head looks at where a sequence is one token long.
        ids = torch.ones((rows.shape[0], 1), dtype=torch.int64, device=rows.device)
        stand_in: _Rows = self._model.base_model
        stand_in.rows = rows.float().unsqueeze(1)
        try:
            with RowInvariant(functools.partial(linear, row_invariant=True)):
                logits: torch.Tensor = self._model(input_ids=ids).logits
        finally:
            stand_in.rows = None
        return logits.reshape(rows.shape[0], -1)


@dataclass
class _BodyOutput(ModelOutput):
    """What heads read of a body's output, by name or by place."""

    last_hidden_state: Any = None
    pooler_output: Any = None
    past_key_values: Any = None
    cache: Any = None
    hidden_states: Any = None
    attentions: Any = None


class _Rows(torch.nn.Module):
    """Stands where the body was and answers with rows it is given."""

    def __init__(self, pooler: Any, activation: Any) -> None:
        super().__init__()
        self.pooler = pooler
        self.activation = activation
        self.rows: Any = None

    def forward(self, *_: Any, **__: Any) -> _BodyOutput:
        pooled = None
        if isinstance(self.pooler, torch.nn.Linear):  # the body applies it to the first token itself
            pooled = self.activation(self.pooler(self.rows[:, 0]))
        elif self.pooler is not None:
            pooled = self.pooler(self.rows)
        return _BodyOutput(last_hidden_state=self.rows, pooler_output=pooled)


def _pooler_activation(body: Any) -> Any:
    return getattr(body, "pooler_activation", None) or getattr(body, "activation", None)


def _without_padding(config: Any) -> Any:
    """A copy whose padding id is set: decoders refuse several sequences without one, and padding is none here."""
    own = copy.deepcopy(config)
    text = own.get_text_config()
    if text.pad_token_id is None:
        text.pad_token_id = 0
    return own


def classifier_of(folder: Path, model: Any, is_causal: bool) -> Classifier | None:
    """The classifier of a loaded model, None where it is of another kind. Raises ``ModelLoadError`` with the file."""
    name = type(model).__name__
    if not name.endswith(CLASSIFIER_SUFFIXES):
        return None
    config, reads = model.config, _reads(folder, model, is_causal)
    try:
        head = ClassifierHead(model)
        with torch.inference_mode():
            body = model.base_model
            width = int(config.get_text_config().hidden_size)
            found = head(torch.zeros((1, width), device=next(body.parameters()).device)).shape[-1]
    except Exception as error:
        problem = f"its classification head cannot be run on rows of the body: {type(error).__name__}: {error}"
        raise ModelLoadError(f"{folder}: {name} is not served: {problem}") from error
    labels = label_names(folder, config)
    if found != len(labels):
        problem = f"num_labels/id2label name {len(labels)} labels, the head of {name} has {found}"
        raise ModelLoadError(f"{folder / 'config.json'}: {problem}")
    return Classifier(
        head=head,
        reads=reads,
        labels=labels,
        activation=activation_name(folder, config, len(labels)),
        padding_id=config.get_text_config().pad_token_id,
    )


def _reads(folder: Path, model: Any, is_causal: bool) -> Reads:
    """A claim that the check at load tests. transformers' decoders call their head ``score``."""
    if type(model).__name__.endswith(TOKEN_CLASSIFIER_SUFFIX):
        return Reads.EACH
    if is_causal or hasattr(model, "score"):
        return Reads.LAST
    pooling = getattr(model.config, "classifier_pooling", None)
    if pooling is None:
        return Reads.FIRST
    if pooling not in POOLINGS:
        problem = f"classifier_pooling {pooling!r} is not served; served: {sorted(POOLINGS)}"
        raise ModelLoadError(f"{folder / 'config.json'}: {problem}")
    return POOLINGS[pooling]
