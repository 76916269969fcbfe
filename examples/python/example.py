"""One call of each kind with the blocking client: python example.py [HOST:PORT]"""

from __future__ import annotations

import os
import sys

from pyruntime.client import ApiError, Client, Retry
from pyruntime.v1 import model_pb2

# A base model's labels are single tokens; mind the leading spaces.
LABELS = os.environ.get("LABELS", " yes, no").split(",")


def main() -> None:
    target = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
    retry = Retry(on_wait=lambda error, wait_s: print(f"{error}; again in {wait_s:.1f} s", file=sys.stderr))
    with Client(target, timeout_s=60, retry=retry) as client:
        models = client.models()

        def able(capability: model_pb2.Capability) -> str:
            return next(model.name for model in models if capability in model.capabilities)

        writer, reader = able(model_pb2.CAPABILITY_GENERATE), able(model_pb2.CAPABILITY_EMBED)
        for piece in client.stream("The three primary colours are", model=writer, max_new_tokens=16, temperature=0):
            print(piece, end="", flush=True)
        print()

        vectors = client.embed_many([f"Text number {number}." for number in range(10)], model=reader, batch_size=4)
        print("embedded:", vectors.shape, vectors.dtype)

        items = ["A horse. Answer:", "A spoon. Answer:"]
        scores = client.score("Is this an animal? ", items, LABELS, model=able(model_pb2.CAPABILITY_SCORE))
        print("scored:", scores.shape)

        try:
            client.generate("Hello", model=writer, temperature=-1, request_id="python-example-1")
        except ApiError as error:
            print("error:", error.code, error.reason, error.violations[0].field, error.request_id)


if __name__ == "__main__":
    main()
