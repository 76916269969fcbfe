#!/bin/sh
# The jars of Debian's libgrpc-java, libprotobuf-java, libnetty-java and what they need, as a CLASSPATH.
for name in grpc-api grpc-core grpc-context grpc-netty grpc-protobuf grpc-protobuf-lite grpc-stub guava protobuf \
  netty-buffer netty-codec netty-codec-http netty-codec-http2 netty-common netty-handler netty-resolver netty-transport \
  netty-transport-native-unix-common gson perfmark-api error_prone_annotations jsr305 geronimo-annotation-1.3-spec \
  opencensus-api; do
  printf '%s:' "/usr/share/java/$name.jar"
done
