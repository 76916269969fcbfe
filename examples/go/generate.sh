#!/bin/sh
# The messages and stubs in Go, from the protos: sh generate.sh [FOLDER]
#
# Writes FOLDER/pyruntimev1; FOLDER is this one unless given. Needs protoc and protoc-gen-go, and protoc-gen-go-grpc beside
# it unless protoc-gen-go is old enough to write the stubs itself, as Debian 12's is. GOOGLEAPIS: a folder with
# google/rpc/status.proto, such as a clone of googleapis; by default that of the project's Python environment.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
target=${1:-$here}
protos=$here/../../proto
find_googleapis='import google.rpc.status_pb2 as p, pathlib; print(pathlib.Path(p.__file__).parents[2])'
googleapis=${GOOGLEAPIS:-$("$here/../../.venv/bin/python" -c "$find_googleapis")}
files=
options=module=pyruntime-example
for file in "$protos"/pyruntime/v1/*.proto; do
  name=pyruntime/v1/$(basename "$file")
  files="$files $name"
  options="$options,M$name=pyruntime-example/pyruntimev1"
done
# shellcheck disable=SC2086 # names without spaces
if command -v protoc-gen-go-grpc >/dev/null; then
  protoc -I"$protos" -I"$googleapis" --go_out="$target" --go_opt="$options" \
    --go-grpc_out="$target" --go-grpc_opt="$options" $files
else
  protoc -I"$protos" -I"$googleapis" --go_out="$target" --go_opt="$options,plugins=grpc" $files
fi
