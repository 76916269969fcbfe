"""Write the protos as one FileDescriptorSet, for Envoy's JSON transcoding and for clients without reflection.

    python tools/descriptor_set.py [FILE]     # default: deploy/envoy/pyruntime.binpb

It holds what the protos import and the ``google.rpc`` details of errors, without which Envoy cannot show them as JSON.
"""

from __future__ import annotations

import sys
from pathlib import Path

import grpc_tools
from google.rpc import error_details_pb2
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
DEFAULT = ROOT / "deploy" / "envoy" / "pyruntime.binpb"


def write(target: Path) -> None:
    """Compile every proto, imports included, into ``target``. Exits with a message when they do not compile."""
    protos = sorted(str(path.relative_to(ROOT / "proto")) for path in (ROOT / "proto").rglob("*.proto"))
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    googleapis = Path(error_details_pb2.__file__).parents[2]
    arguments = ["protoc", f"-I{ROOT / 'proto'}", f"-I{well_known}", f"-I{googleapis}", "--include_imports"]
    arguments += [f"--descriptor_set_out={target}", *protos, "google/rpc/error_details.proto"]
    if protoc.main(arguments) != 0:
        sys.exit("the protos do not compile")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT)
