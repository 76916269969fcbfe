"""Lint the protos with buf, offline.

buf would fetch ``google/rpc/status.proto`` from its registry. Here protoc compiles everything into one
image from the packages that are installed anyway, and buf lints that image by the rules of ``buf.yaml``.
Exit status: buf's own.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent


def find_buf() -> str:
    """Path of the ``buf`` program: beside this Python first, then on PATH."""
    found = shutil.which("buf", path=str(Path(sys.executable).parent)) or shutil.which("buf")
    if found is None:
        sys.exit("buf not found: pip install buf-bin")
    return found


def compile_image(target: Path) -> None:
    """Write a FileDescriptorSet of all protos, imports and comments included, to ``target``."""
    protos = sorted(str(path.relative_to(ROOT / "proto")) for path in (ROOT / "proto").rglob("*.proto"))
    site_packages = sysconfig.get_paths()["purelib"]
    well_known = Path(protoc.__file__).parent / "_proto"
    arguments = ["protoc", f"-I{ROOT / 'proto'}", f"-I{site_packages}", f"-I{well_known}"]
    arguments += ["--include_imports", "--include_source_info", f"--descriptor_set_out={target}", *protos]
    if protoc.main(arguments) != 0:
        sys.exit("the protos do not compile")


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        image = Path(folder) / "image.binpb"
        compile_image(image)
        command = [find_buf(), "lint", str(image), "--config", str(ROOT / "buf.yaml")]
        return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
