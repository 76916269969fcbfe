// What every program needs once: stubs on one channel, calls as promises, and errors with their details.

import { readFileSync } from "node:fs";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";
import { service as healthService } from "grpc-health-check";

// Made by `python tools/descriptor_set.py examples/node/pyruntime.binpb`: all protos and what they import.
const DESCRIPTORS = process.env.PYRUNTIME_DESCRIPTORS ?? new URL("pyruntime.binpb", import.meta.url);
// Retries, and which servers are well; see docs/clients.md.
const SERVICE_CONFIG = readFileSync(new URL("../../deploy/service-config.json", import.meta.url), "utf8");

// 64-bit numbers as text, enums by name, `oneof` fields told by a key of their own.
const definitions = protoLoader.loadFileDescriptorSetFromBuffer(readFileSync(DESCRIPTORS), {
  keepCase: true,
  longs: String,
  enums: String,
  oneofs: true,
});

/**
 * Stubs for HOST:PORT. Make them once and keep them: they share one connection.
 *
 * @param {string} address
 * @param {{ca?: Buffer, key?: Buffer, certificate?: Buffer, token?: string}} security plaintext without `ca`
 */
export function connect(address, { ca, key, certificate, token } = {}) {
  const credentials = ca ? grpc.credentials.createSsl(ca, key, certificate) : grpc.credentials.createInsecure();
  const addToken = (options, next) =>
    new grpc.InterceptingCall(next(options), {
      start(metadata, listener, start) {
        if (token) metadata.set("authorization", `Bearer ${token}`);
        start(metadata, listener);
      },
    });
  const options = {
    "grpc.service_config": SERVICE_CONFIG,
    "grpc.keepalive_time_ms": 60_000,
    "grpc.max_receive_message_length": -1,
    "grpc.max_reconnect_backoff_ms": 5_000,
    interceptors: [addToken],
  };
  const channel = new grpc.Channel(address, credentials, options);
  const stub = (service) =>
    new (grpc.makeGenericClientConstructor(service))(address, credentials, { ...options, channelOverride: channel });
  return {
    generate: stub(definitions["pyruntime.v1.GenerateService"]),
    embed: stub(definitions["pyruntime.v1.EmbedService"]),
    score: stub(definitions["pyruntime.v1.ScoreService"]),
    models: stub(definitions["pyruntime.v1.ModelService"]),
    health: stub(healthService),
    close: () => channel.close(),
  };
}

/** The response of a unary method; rejects with what `explain` makes of the error. */
export function call(stub, method, request, { seconds = 60, requestId } = {}) {
  const metadata = new grpc.Metadata();
  if (requestId) metadata.set("x-request-id", requestId);
  const deadline = Date.now() + seconds * 1000; // always set one: without it a call waits for ever
  return new Promise((resolve, reject) => {
    stub[method](request, metadata, { deadline }, (error, response) => {
      if (error) reject(explain(error));
      else resolve(response);
    });
  });
}

/** The messages of a server's stream. Leaving the loop cancels the call, and with it the server's work. */
export async function* stream(stub, method, request, { seconds = 60 } = {}) {
  const messages = stub[method](request, { deadline: Date.now() + seconds * 1000 });
  try {
    yield* messages; // reads on only when the loop asks for more: the server waits for a slow reader
  } catch (error) {
    throw explain(error);
  } finally {
    messages.cancel();
  }
}

/** The error with what the server says beside its code: `reason`, `violations`, `retryAfterSeconds`. */
export function explain(error) {
  if (error.code === undefined) return error;
  const told = { code: grpc.status[error.code], message: error.details, reason: "", violations: [] };
  told.requestId = error.metadata?.get("x-request-id")[0];
  const packed = error.metadata?.get("grpc-status-details-bin")[0];
  for (const detail of packed ? decode("google.rpc.Status", packed).details : []) {
    const type = detail.type_url.split("/").pop();
    if (definitions[type] === undefined) continue;
    const value = decode(type, detail.value);
    if (type === "google.rpc.ErrorInfo") told.reason = value.reason;
    if (type === "google.rpc.BadRequest") told.violations = value.field_violations;
    if (type === "google.rpc.RetryInfo") {
      told.retryAfterSeconds = Number(value.retry_delay.seconds ?? 0) + (value.retry_delay.nanos ?? 0) / 1e9;
    }
  }
  return Object.assign(new Error(`${told.code}: ${told.message}`), told);
}

function decode(type, bytes) {
  return definitions[type].deserialize(bytes);
}

/** The numbers of a dense embedding that was asked for as ENCODING_FLOAT32_LE, without a copy. */
export function floats(packed) {
  const aligned = packed.byteOffset % 4 === 0 ? packed : Buffer.from(new Uint8Array(packed).buffer);
  return new Float32Array(aligned.buffer, aligned.byteOffset, aligned.byteLength / 4);
}
