"""Builds what is not Python: the extension (CMake with ninja) and the protobuf code (grpc_tools.protoc).

    pip install --no-build-isolation -e .     # or: python setup.py build_ext --inplace
    python setup.py build_proto               # the protobuf code alone

``PYRUNTIME_CUDA=0|1`` decides about CUDA; unset, CMakeLists.txt decides and says why.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from setuptools import Command, Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
PROTO_ROOT = ROOT / "proto"
GENERATED = ROOT / "pyruntime" / "v1"
MODULE = "pyruntime._C"


def generate_protobuf() -> None:
    """proto/pyruntime/v1/*.proto → pyruntime/v1/*_pb2.py, *_pb2.pyi, *_pb2_grpc.py."""
    protos = sorted((PROTO_ROOT / "pyruntime" / "v1").glob("*.proto"))
    if not protos:
        print(f"pyruntime: no .proto file under {PROTO_ROOT}, protobuf code NOT generated", file=sys.stderr)
        return
    import grpc_tools
    from google.rpc import status_pb2
    from grpc_tools import protoc

    well_known = Path(grpc_tools.__file__).parent / "_proto"
    googleapis = Path(status_pb2.__file__).parents[2]
    GENERATED.mkdir(parents=True, exist_ok=True)
    arguments = ["protoc", f"-I{PROTO_ROOT}", f"-I{well_known}", f"-I{googleapis}"]
    arguments += [f"--{kind}_out={ROOT}" for kind in ("python", "pyi", "grpc_python")]
    if protoc.main(arguments + [str(path) for path in protos]) != 0:
        raise SystemExit("pyruntime: protoc failed, see above")
    (GENERATED / "__init__.py").write_text('"""Generated from proto/pyruntime/v1 at build; do not edit."""\n')
    print(f"pyruntime: generated protobuf code of {len(protos)} files in {GENERATED.relative_to(ROOT)}")


class BuildProto(Command):
    """Generates the protobuf code in the source tree."""

    description = "generate pyruntime/v1 from proto/"
    user_options: list[tuple[str, str | None, str]] = []

    def initialize_options(self) -> None: ...

    def finalize_options(self) -> None: ...

    def run(self) -> None:
        generate_protobuf()


class BuildPy(build_py):
    """The protobuf code first, so that a wheel holds it."""

    def run(self) -> None:
        generate_protobuf()
        super().run()


class BuildExtension(build_ext):
    """Drives CMake with ninja and puts ``_C`` (and ``_C_cuda``) where setuptools wants the module."""

    def run(self) -> None:
        if self.inplace and not (GENERATED / "__init__.py").exists():
            generate_protobuf()
        super().run()

    def copy_extensions_to_source(self) -> None:
        super().copy_extensions_to_source()
        # setuptools knows of _C alone; the CUDA library lies beside it, or must not be left from an earlier build.
        built = Path(self.build_lib) / "pyruntime" / "_C_cuda.so"
        (ROOT / "pyruntime" / built.name).unlink(missing_ok=True)
        if built.exists():
            shutil.copy2(built, ROOT / "pyruntime" / built.name)

    def build_extension(self, ext: Extension) -> None:
        build = Path(self.build_temp).resolve() / "cmake"
        target = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        # A virtual environment's cmake and ninja count although nobody activated it.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        environment = {**os.environ, "PATH": path}
        cmake = shutil.which("cmake", path=path)
        if cmake is None:
            raise SystemExit("pyruntime: cmake was not found; `pip install cmake ninja` provides it")
        version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
        options = [
            f"-DCMAKE_BUILD_TYPE={'Debug' if self.debug else 'Release'}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DPYRUNTIME_VERSION={version}",
            # A cached decision must not outlive the environment that made it.
            f"-DPYRUNTIME_CUDA={os.environ.get('PYRUNTIME_CUDA', 'auto')}",
        ]
        subprocess.run([cmake, "-G", "Ninja", "-S", str(ROOT), "-B", str(build), *options], check=True, env=environment)
        subprocess.run([cmake, "--build", str(build)], check=True, env=environment)
        prefix = build / "install"
        shutil.rmtree(prefix, ignore_errors=True)
        install = [cmake, "--install", str(build), "--prefix", str(prefix), "--component", "python"]
        subprocess.run(install, check=True, stdout=subprocess.DEVNULL)
        target.mkdir(parents=True, exist_ok=True)
        (target / "_C_cuda.so").unlink(missing_ok=True)
        for library in (prefix / "pyruntime").glob("*.so"):
            # Replace, do not rewrite: a running process may have the old file mapped.
            fresh = target / (library.name + ".new")
            shutil.copy2(library, fresh)
            fresh.replace(target / library.name)


GENERATED.mkdir(parents=True, exist_ok=True)  # setuptools wants every package there before it generates any

setup(
    packages=sorted({*find_packages(include=["pyruntime", "pyruntime.*"]), "pyruntime.v1"}),
    package_data={
        "pyruntime": ["py.typed", "*.pyi", "templates/*.json", "telemetry/page/*"],
        "pyruntime.v1": ["*.pyi"],
    },
    ext_modules=[Extension(MODULE, sources=[])],
    cmdclass={"build_py": BuildPy, "build_ext": BuildExtension, "build_proto": BuildProto},
)
