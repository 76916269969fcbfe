"""Server reflection, v1 and v1alpha.

grpcio-reflection implements v1alpha alone. v1 is the same protocol under another package name, message
for message, so its descriptors are derived from v1alpha's and the same code answers both.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha._async import ReflectionServicer

V1 = "grpc.reflection.v1.ServerReflection"
V1ALPHA = "grpc.reflection.v1alpha.ServerReflection"


def add_reflection(server: grpc.aio.Server, service_names: Sequence[str]) -> None:
    """Serve the descriptors of ``service_names`` and of reflection itself."""
    pool = descriptor_pool.Default()
    _add_v1_descriptors(pool)
    servicer = ReflectionServicer([*service_names, V1, V1ALPHA], pool=pool)
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handlers = [grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": method}) for name in (V1, V1ALPHA)]
    server.add_generic_rpc_handlers(handlers)


def _add_v1_descriptors(pool: descriptor_pool.DescriptorPool) -> None:
    try:
        pool.FindServiceByName(V1)
    except KeyError:
        alpha = reflection_pb2.DESCRIPTOR.serialized_pb
        file = descriptor_pb2.FileDescriptorProto.FromString(alpha)
        file.name = "grpc/reflection/v1/reflection.proto"
        file.package = "grpc.reflection.v1"
        file.ClearField("options")
        _rename_types(file)
        pool.AddSerializedFile(file.SerializeToString())


def _rename_types(file: descriptor_pb2.FileDescriptorProto) -> None:
    """Point every reference of the file's own types to the new package."""
    for message in file.message_type:
        for field in message.field:
            if field.type_name:  # scalars have none, not an empty one
                field.type_name = field.type_name.replace(".v1alpha.", ".v1.")
    for service in file.service:
        for method in service.method:
            method.input_type = method.input_type.replace(".v1alpha.", ".v1.")
            method.output_type = method.output_type.replace(".v1alpha.", ".v1.")
