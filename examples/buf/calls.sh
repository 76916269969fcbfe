#!/bin/sh
# One call of each kind with `buf curl` (pip install buf-bin): sh calls.sh [HOST:PORT]
#
# The server's reflection tells it the types. With TLS: https://, and --cacert; with a token: -H 'authorization: Bearer ...'.
set -eu
address=${1:-127.0.0.1:50051}
generate=${GENERATE_MODEL:-gemma-3-270m}
embed=${EMBED_MODEL:-all-minilm-l6-v2}

call() {
  buf curl --protocol grpc --http2-prior-knowledge -d "$2" "http://$address/$1"
}

call grpc.health.v1.Health/Check '{}'
call pyruntime.v1.ModelService/ListModels '{}'
call pyruntime.v1.GenerateService/GenerateStream '{"model": "'"$generate"'", "text": "The three primary colours are",
  "sampling": {"temperature": 0}, "stop": {"max_new_tokens": 16}}'
call pyruntime.v1.EmbedService/Embed '{"model": "'"$embed"'", "inputs": [{"text": "A cat sits on the mat."}]}'
call pyruntime.v1.ModelService/Tokenize '{"model": "'"$embed"'", "text": "A cat"}'
