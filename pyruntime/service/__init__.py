"""The gRPC face: protobuf in and out. Knows grpc and protobuf, never torch."""
