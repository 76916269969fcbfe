"""The work that this server and its peers are measured on: texts drawn from a fixed seed.

The number of words follows a log-normal law, as search queries and passages do: many short texts and a
few long ones. The same seed gives the same texts on every machine. Needs nothing but the standard library,
since each peer imports it from an environment of its own.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

NEW_TOKENS = 64
STREAMS = (1, 4, 16, 64)
LABELS = (" yes", " no")
SHORT_TEXT = "how long does a request wait in the queue"
SHORT_CALLS = 100
#: What is measured, in this order, and the figure that counts.
UNITS = {
    "embed": "texts_per_s",
    "embed_one": "p50_ms",
    "rerank": "documents_per_s",
    "score": "items_per_s",
    **{f"generate_{streams}": "tokens_per_s" for streams in STREAMS},
}

_VOCABULARY = """
the of and to in is was for that with as his on be at by had not are but from or have an they which one you were
all her she there would their we him been has when who will no more if out so up said what its about than into
them can only other time new some could these two may first then do any like my now over such our man me even most
made after also did many off before must well back through years where much your way down should because long each
just state those people system service latency request cluster storage memory network model vector search index
query document ranking signal protocol schema buffer kernel tensor thread queue cache deadline channel stream
""".split()


@dataclass(frozen=True)
class Workload:
    """embed_texts: 512 of about 26 WordPiece tokens, the longest about 170. rerank_documents: 256 of about
    60 words for one query. score_items: 64 of about 20 words behind one prefix of 400 words.
    generate_prompts: 64, each continued greedily by NEW_TOKENS tokens whatever they are.
    """

    embed_texts: list[str]
    rerank_query: str
    rerank_documents: list[str]
    score_prefix: str
    score_items: list[str]
    generate_prompts: list[str]

    def amount(self, task: str) -> int:
        """How many texts, documents, items or new tokens one pass over ``task`` has."""
        if task.startswith("generate_"):
            return streams_of(task) * NEW_TOKENS
        parts = {"embed": self.embed_texts, "rerank": self.rerank_documents, "score": self.score_items}
        return len(parts[task]) if task in parts else SHORT_CALLS

    def reduced(self, share: int) -> Workload:
        """Every ``share``-th part of the lists: a quick look, whose figures are not comparable."""
        return Workload(
            self.embed_texts[::share],
            self.rerank_query,
            self.rerank_documents[::share],
            self.score_prefix,
            self.score_items[::share],
            self.generate_prompts,
        )


def streams_of(task: str) -> int:
    """``generate_16`` → 16."""
    return int(task.removeprefix("generate_"))


def make_workload(seed: int = 0) -> Workload:
    """The whole workload. The order of the draws below is part of its definition."""
    source = random.Random(seed)

    def words(count: int) -> str:
        return " ".join(source.choice(_VOCABULARY) for _ in range(count))

    def text(mu: float, sigma: float, most: int) -> str:
        return words(min(most, max(3, int(source.lognormvariate(mu, sigma)))))

    return Workload(
        embed_texts=[text(2.9, 0.8, 200) for _ in range(512)],
        rerank_query=text(2.2, 0.1, 12),
        rerank_documents=[text(4.0, 0.4, 160) for _ in range(256)],
        score_prefix=words(400),
        score_items=[text(3.0, 0.3, 40) for _ in range(64)],
        generate_prompts=[f"Number {i}: {text(3.0, 0.5, 60)}" for i in range(64)],
    )
