"""Builds the emulated kernels with g++ and calls them: in this process, or recorded and replayed under a sanitizer."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FLAGS = ["-std=c++20", "-O2", "-ffp-contract=off", "-fno-strict-aliasing", "-Wall", "-Wextra",
         "-Wno-unknown-pragmas", "-Wno-array-bounds", f"-I{HERE / 'include'}", f"-I{HERE}"]  # fmt: skip
KINDS = {
    "plain": ["-fPIC"],
    "address": ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"],
    "thread": ["-O1", "-g", "-fsanitize=thread"],
}
FORWARD, REVERSE, RANDOM = 0, 1, 2

Argument = torch.Tensor | int | float | bool | None


def _sources_digest(flags: list[str]) -> str:
    digest = hashlib.sha256(" ".join(flags).encode())
    folders = (HERE, HERE / "include", ROOT / "csrc" / "cuda", ROOT / "csrc" / "shared")
    for path in sorted(p for folder in folders for p in folder.iterdir() if p.suffix in {".h", ".cpp", ".cuh"}):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def has_sanitizer(kind: str) -> bool:
    """Whether this machine's g++ has the libraries of that kind (some distributions ship them apart)."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["g++", *KINDS[kind], "-x", "c++", "-", "-o", f"{folder}/empty"]
        return subprocess.run(command, input=b"int main() {}", capture_output=True, check=False).returncode == 0


def build(kind: str) -> Path:
    """The emulation as a shared library ("plain") or as a program under a sanitizer ("address", "thread")."""
    flags = FLAGS + KINDS[kind]
    folder = ROOT / "build" / "emulation" / f"{kind}-{_sources_digest(flags)}"
    target = folder / ("emulation.so" if kind == "plain" else "replay")
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)

    def compile_one(source: Path) -> Path:
        own = list(flags)
        if kind == "thread" and source.name == "emulate.cpp":
            own[own.index("-fsanitize=thread")] = "-DEMULATE_THREAD_SANITIZER"
        output = folder / f"{source.stem}.{os.getpid()}.o"
        subprocess.run(["g++", *own, "-c", str(source), "-o", str(output)], check=True)
        return output

    with ThreadPoolExecutor(2) as workers:
        objects = list(workers.map(compile_one, sorted(HERE.glob("*.cpp"))))
    unfinished = target.with_suffix(f".{os.getpid()}")
    link = ["-shared"] if kind == "plain" else []
    subprocess.run(["g++", *flags, *link, *map(str, objects), "-o", str(unfinished)], check=True)
    unfinished.replace(target)
    for path in objects:
        path.unlink()
    return target


def _buffer(argument: Argument) -> torch.Tensor | None:
    if argument is None:
        return None
    if isinstance(argument, torch.Tensor):
        return argument
    return torch.tensor(argument, dtype=torch.float64 if isinstance(argument, float) else torch.int64)


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


class Emulation:
    """Kernels by name. Tensors are passed by address and changed in place; floats travel as double, ints as int64."""

    def __init__(self) -> None:
        self.order, self.seed = FORWARD, 0
        self._library = ctypes.CDLL(str(build("plain")))
        self._library.emulate_call.restype = ctypes.c_char_p

    def __call__(self, name: str, *arguments: Argument) -> None:
        """Raises RuntimeError with what the emulation found."""
        buffers = [_buffer(a) for a in arguments]
        pointers = (ctypes.c_void_p * len(buffers))(*(None if b is None else b.data_ptr() for b in buffers))
        problem = self._library.emulate_call(
            name.encode(), pointers, len(buffers), self.order, ctypes.c_uint64(self.seed)
        )
        if problem is not None:
            raise RuntimeError(problem.decode())


class Replay:
    """The same call in a program under a sanitizer, each buffer an exact allocation. Dense tensors only."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.order, self.seed = FORWARD, 0
        self._command, self._folder = [str(build(kind))], folder
        if kind == "thread" and shutil.which("setarch"):
            # ThreadSanitizer refuses address layouts that are too random.
            self._command = ["setarch", "-R", *self._command]

    def run(self, name: str, *arguments: Argument) -> subprocess.CompletedProcess[str]:
        buffers = [_buffer(a) for a in arguments]
        path = self._folder / "call.bin"
        with path.open("wb") as file:
            file.write(struct.pack("<qqq", self.order, self.seed, len(name)) + name.encode())
            file.write(struct.pack("<q", len(buffers)))
            for buffer in buffers:
                payload = None if buffer is None else buffer.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                file.write(struct.pack("<q", -1 if payload is None else len(payload)) + (payload or b""))
        environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
        done = subprocess.run(
            [*self._command, path], capture_output=True, text=True, check=False, env=environment, timeout=120
        )
        if done.returncode == 0:
            self._read_back(path.read_bytes(), buffers)
        return done

    def __call__(self, name: str, *arguments: Argument) -> None:
        """Raises RuntimeError with the sanitizer's report."""
        done = self.run(name, *arguments)
        if done.returncode != 0:
            raise RuntimeError(done.stderr)

    @staticmethod
    def _read_back(payload: bytes, buffers: list[torch.Tensor | None]) -> None:
        offset = 0
        for buffer in buffers:
            if buffer is None or buffer.numel() == 0:
                continue
            size = buffer.numel() * buffer.element_size()
            values = torch.frombuffer(bytearray(payload[offset : offset + size]), dtype=buffer.dtype)
            buffer.copy_(values.view(buffer.shape))
            offset += size
