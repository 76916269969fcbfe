"""How a folder wants its embeddings made: the sentence-transformers files, read and never guessed.

``modules.json`` lists the modules in their order; served are

    Transformer, Pooling, then Dense, LayerNorm and Normalize in any number and order   dense vectors
    Transformer (fill-mask), SpladePooling                                              sparse vectors
    Transformer, Dense …, MultiVectorMask, Normalize on token embeddings                one vector a token

and BGE-M3's two more heads beside the first. Anything else refuses the model by name and file. Without
``modules.json``: MEAN for encoders, LAST for decoders, normalised.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pyruntime.errors import ModelLoadError
from pyruntime.model.folder_files import optional_json, positive, read_object, typed, words
from pyruntime.model.late import LateSettings, is_old_layout, read_late
from pyruntime.model.lexical import LexicalHeads, read_lexical
from pyruntime.model.sentence_modules import (
    CHAIN_MODULES,
    SENTENCE,
    TOKENS,
    ModuleEntry,
    Projection,
    check_entries,
    read_entries,
    read_projection,
)
from pyruntime.model.sentence_texts import (
    TextSettings,
    check_transformer,
    model_config,
    read_text_settings,
    transformer_config,
)
from pyruntime.types import EmbeddingKind, PoolingType, QueryExpansion

POOLING_FLAGS = {
    "pooling_mode_lasttoken": PoolingType.LAST,
    "pooling_mode_cls_token": PoolingType.CLS,
    "pooling_mode_mean_tokens": PoolingType.MEAN,
}
POOLING_NAMES = {"lasttoken": PoolingType.LAST, "cls": PoolingType.CLS, "mean": PoolingType.MEAN}
DENSE_KINDS = frozenset({EmbeddingKind.DENSE, EmbeddingKind.PER_TOKEN})


@dataclass(frozen=True, slots=True)
class SpladeSettings:
    """``log_twice``: log(1 + log(1 + relu x)), not log(1 + relu x). ``max_entries``: so many of the largest, or all."""

    log_twice: bool
    max_entries: int | None


@dataclass(frozen=True, slots=True)
class SentenceSettings:
    """Defaults of Embed for one model, and its modules behind the transformer.

    ``max_tokens``: the folder's own length limit, or None. ``dimensions`` and ``token_dimensions``: widths of a dense
    and of a per-token vector where the folder says them; None: as wide as the hidden rows. ``projection``: the modules
    behind pooling, or behind every token where there is no pooling, a last Normalize left out for ``normalize``.
    ``rows_width``: what the hidden rows' width must be, and the file that says so.
    """

    pooling: PoolingType
    normalize: bool
    max_tokens: int | None = None
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    kinds: frozenset[EmbeddingKind] = DENSE_KINDS
    similarity: str = ""
    dimensions: int | None = None
    token_dimensions: int | None = None
    prompt_is_pooled: bool = True
    projection: Projection | None = None
    splade: SpladeSettings | None = None
    lexical: LexicalHeads | None = None
    late: LateSettings | None = None
    rows_width: tuple[int, Path] | None = None

    @property
    def late_interaction(self) -> bool:
        """Whether per-token vectors are made to be compared by MaxSim, rather than a by-product."""
        return self.late is not None or (self.lexical is not None and self.lexical.tokens is not None)

    @property
    def query_expansion(self) -> QueryExpansion | None:
        return self.late.expansion if self.late is not None else None


def needs_masked_lm(folder: Path) -> bool:
    """Whether the folder's modules read the masked-language-model head (SPLADE), so that it has to be loaded."""
    if not (folder / "modules.json").is_file():
        return False
    return any(entry.name == "MLMTransformer" for entry in read_entries(folder)) or _fills_masks(folder)


def read_sentence_settings(folder: Path, is_causal: bool) -> SentenceSettings:
    """The settings of a folder whose body is causal or not. Raises ``ModelLoadError`` with the file's name."""
    if not (folder / "modules.json").is_file():
        settings = _plain(folder, is_causal)
    else:
        if model_config(folder)[1].get("model_type") == "CrossEncoder":
            return _scoring(folder)
        entries = [entry for entry in read_entries(folder) if entry.name != "Dropout"]
        check_entries(folder, entries)
        behind = [entry.name for entry in entries[1:]]
        if "SpladePooling" in behind:
            settings = _splade(folder, entries)
        elif "Pooling" in behind:
            settings = _pooled(folder, entries)
        else:
            settings = _per_token(folder, entries)
    if is_causal and EmbeddingKind.SPARSE in settings.kinds:
        raise ModelLoadError(f"{folder}: sparse embeddings of a causal model are not served")
    expansion = settings.query_expansion
    if is_causal and expansion is not None and not expansion.attended:
        raise ModelLoadError(f"{folder}: query_expansion that is not attended, of a causal model, is not served")
    return settings


def _plain(folder: Path, is_causal: bool) -> SentenceSettings:
    settings = SentenceSettings(PoolingType.LAST if is_causal else PoolingType.MEAN, normalize=True)
    lexical = read_lexical(folder)
    # FlagEmbedding's own default where it stands alone.
    return _with_lexical(replace(settings, pooling=PoolingType.CLS), lexical) if lexical else settings


def _scoring(folder: Path) -> SentenceSettings:
    """A cross-encoder's modules end in a score: what they say of texts counts, embeddings there are none."""
    texts = read_text_settings(folder)
    return SentenceSettings(
        PoolingType.MEAN,
        normalize=True,
        max_tokens=texts.max_tokens,
        prompts=texts.prompts,
        default_prompt_name=texts.default_prompt_name,
        kinds=frozenset(),
    )


def _pooled(folder: Path, entries: list[ModuleEntry]) -> SentenceSettings:
    transformer, pooling, *chain = entries
    if pooling.name != "Pooling" or any(entry.name not in CHAIN_MODULES for entry in chain):
        names = [entry.name for entry in entries]
        raise ModelLoadError(f"{folder / 'modules.json'}: modules {names} in this order are not served")
    check_transformer(transformer.folder, "feature-extraction")
    config = read_object(pooling.config_file)
    key = "embedding_dimension" if "embedding_dimension" in config else "word_embedding_dimension"
    width = positive(config, key, pooling.config_file) if key in config else None
    projection = read_projection(chain, width, pooling.config_file, SENTENCE)
    texts = read_text_settings(folder)
    out = projection.out_features
    settings = SentenceSettings(
        pooling=_pooling(pooling.config_file, config),
        normalize=projection.normalizes,
        max_tokens=texts.max_tokens,
        prompts=texts.prompts,
        default_prompt_name=texts.default_prompt_name,
        similarity=texts.similarity,
        dimensions=_dimensions(folder, texts, out),
        token_dimensions=out,
        prompt_is_pooled=typed(config, "include_prompt", bool, pooling.config_file) is not False,
        projection=projection if len(projection.steps) else None,
        rows_width=_rows_width(projection),
    )
    lexical = read_lexical(folder)
    return _with_lexical(settings, lexical) if lexical is not None else settings


def _per_token(folder: Path, entries: list[ModuleEntry]) -> SentenceSettings:
    masks = [entry for entry in entries if entry.name == "MultiVectorMask"]
    chain = [entry for entry in entries[1:] if entry.name in CHAIN_MODULES]
    old = is_old_layout(folder)
    if len(masks) > 1 or len(masks) + len(chain) + 1 != len(entries) or not (masks or old):
        names = [entry.name for entry in entries]
        problem = f"neither Pooling nor MultiVectorMask among {names}, so they do not say how rows become vectors"
        raise ModelLoadError(f"{folder / 'modules.json'}: {problem}")
    check_transformer(entries[0].folder, "feature-extraction")
    projection = read_projection(chain, None, None, TOKENS)
    texts = read_text_settings(folder)
    late = read_late(folder, masks, texts.prompts)
    limits = [limit for limit in (texts.max_tokens, late.max_tokens) if limit is not None]
    return SentenceSettings(
        PoolingType.MEAN,
        normalize=projection.normalizes or old,
        max_tokens=min(limits, default=None),
        prompts=late.prefixed,
        default_prompt_name=texts.default_prompt_name,
        kinds=frozenset({EmbeddingKind.PER_TOKEN}),
        token_dimensions=projection.out_features,
        projection=projection if len(projection.steps) else None,
        late=late,
        rows_width=_rows_width(projection),
    )


def _splade(folder: Path, entries: list[ModuleEntry]) -> SentenceSettings:
    if [entry.name for entry in entries[1:]] != ["SpladePooling"]:
        names = [entry.name for entry in entries]
        raise ModelLoadError(f"{folder / 'modules.json'}: modules {names} in this order are not served")
    transformer, pooling = entries
    if transformer.name == "Transformer" and not _fills_masks(folder):
        raise ModelLoadError(f"{transformer_config(folder)[0]}: SpladePooling needs transformer_task 'fill-mask'")
    check_transformer(transformer.folder, "fill-mask")
    config = optional_json(pooling.config_file)
    strategy, activation = config.get("pooling_strategy", "max"), config.get("activation_function", "relu")
    if strategy != "max":
        raise ModelLoadError(f"{pooling.config_file}: pooling_strategy {strategy!r} is not served; served: 'max'")
    if activation not in ("relu", "log1p_relu"):
        served = "served: 'relu', 'log1p_relu'"
        raise ModelLoadError(f"{pooling.config_file}: activation_function {activation!r} is not served; {served}")
    file, model = model_config(folder)
    most = positive(model, "max_active_dims", file) if model.get("max_active_dims") is not None else None
    texts = read_text_settings(folder)
    return SentenceSettings(
        PoolingType.MEAN,
        normalize=False,
        max_tokens=texts.max_tokens,
        prompts=texts.prompts,
        default_prompt_name=texts.default_prompt_name,
        kinds=frozenset({EmbeddingKind.SPARSE}),
        similarity=str(model.get("similarity_fn_name") or "dot"),
        splade=SpladeSettings(activation == "log1p_relu", most),
    )


def _with_lexical(settings: SentenceSettings, lexical: LexicalHeads) -> SentenceSettings:
    width = lexical.weight.shape[0]
    stated, file = settings.rows_width or (width, lexical.file)
    if stated != width:
        raise ModelLoadError(f"{lexical.file}: takes rows of {width}, but {file} gives {stated}")
    kinds = settings.kinds | {EmbeddingKind.SPARSE}
    settings = replace(settings, kinds=kinds, lexical=lexical, rows_width=(stated, file))
    return settings if lexical.tokens is None else replace(settings, token_dimensions=lexical.tokens.out_features)


def _pooling(file: Path, config: dict[str, Any]) -> PoolingType:
    mode = config.get("pooling_mode")
    if mode is not None:
        names = words(config, "pooling_mode", file) or []
        if len(names) != 1 or names[0] not in POOLING_NAMES:
            served = f"served: exactly one of {sorted(POOLING_NAMES)}"
            raise ModelLoadError(f"{file}: pooling_mode {mode!r} is not served; {served}")
        return POOLING_NAMES[names[0]]
    chosen = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    if len(chosen) != 1 or chosen[0] not in POOLING_FLAGS:
        raise ModelLoadError(f"{file}: pooling {chosen} is not served; served: exactly one of {sorted(POOLING_FLAGS)}")
    return POOLING_FLAGS[chosen[0]]


def _dimensions(folder: Path, texts: TextSettings, width: int | None) -> int | None:
    cut = texts.dimensions
    if cut is not None and width is not None and cut > width:
        raise ModelLoadError(f"{model_config(folder)[0]}: truncate_dim {cut} of vectors of {width}")
    return cut if cut is not None else width


def _rows_width(projection: Projection) -> tuple[int, Path] | None:
    if projection.in_features is None or projection.source is None:
        return None
    return projection.in_features, projection.source


def _fills_masks(folder: Path) -> bool:
    return transformer_config(folder)[1].get("transformer_task") == "fill-mask"
