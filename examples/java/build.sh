#!/bin/sh
# The example in Java with the messages and stubs it needs: sh build.sh [FOLDER]
#
# Writes FOLDER/classes; FOLDER is `build` here unless given. Needs javac, protoc and protoc-gen-grpc-java, and on CLASSPATH
# the jars of grpc-netty, grpc-protobuf and grpc-stub with all that they need; by default Debian's. GOOGLEAPIS: a folder
# with google/rpc/status.proto, such as a clone of googleapis; by default that of the project's Python environment.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
target=${1:-$here/build}
protos=$here/../../proto
find_googleapis='import google.rpc.status_pb2 as p, pathlib; print(pathlib.Path(p.__file__).parents[2])'
googleapis=${GOOGLEAPIS:-$("$here/../../.venv/bin/python" -c "$find_googleapis")}
plugin=$(command -v protoc-gen-grpc-java || command -v grpc_java_plugin)
CLASSPATH=${CLASSPATH:-$(sh "$here/debian-classpath.sh")}
mkdir -p "$target/sources" "$target/classes"
protoc -I"$protos" -I"$googleapis" --plugin=protoc-gen-grpc-java="$plugin" \
  --java_out="$target/sources" --grpc-java_out="$target/sources" \
  "$protos"/pyruntime/v1/*.proto "$googleapis/google/rpc/status.proto" "$googleapis/google/rpc/error_details.proto"
find "$target/sources" -name '*.java' >"$target/sources.txt"
javac -nowarn -cp "$CLASSPATH" -d "$target/classes" @"$target/sources.txt" "$here/Example.java"
echo "java -cp '$target/classes:$CLASSPATH' Example HOST:PORT"
