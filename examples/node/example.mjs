// node example.mjs [HOST:PORT]: one call of each kind, a line of JSON each.
//
// CA=FILE encrypts and trusts the certificates in it, TOKEN=... is shown with every call.

import { readFileSync } from "node:fs";
import { call, connect, floats, stream } from "./client.mjs";

const client = connect(process.argv[2] ?? "127.0.0.1:50051", {
  ca: process.env.CA && readFileSync(process.env.CA),
  token: process.env.TOKEN,
});
const show = (what, value) => console.log(JSON.stringify({ [what]: value }));

// Is the server well? An empty service name asks about all of it.
show("health", (await call(client.health, "check", { service: "" })).status);

// Which model does what.
const { models } = await call(client.models, "ListModels", {});
const able = (capability) => models.find((model) => model.capabilities?.includes(`CAPABILITY_${capability}`))?.name;
show("models", models.map((model) => model.name));

// Text as it grows.
const prompt = { model: able("GENERATE"), text: "The three primary colours are", stop: { max_new_tokens: 16 } };
let text = "";
for await (const chunk of stream(client.generate, "GenerateStream", prompt)) {
  text += chunk.text ?? "";
  if (chunk.usage) show("generated", { text, tokens: Number(chunk.usage.completion_tokens) });
}

// Vectors; of a bad text the error stands in its place.
const texts = ["A cat sits on the mat.", " "];
const embedded = await call(client.embed, "Embed", {
  model: able("EMBED"),
  inputs: texts.map((text) => ({ text })),
  encoding: "ENCODING_FLOAT32_LE",
});
for (const { index, result, dense, error } of embedded.results) {
  const shown = result === "error" ? { error: error.message } : { vector: [...floats(dense.packed)] };
  show("embedded", { index: index ?? 0, ...shown });
}

// How likely labels are behind a query and each item.
const scored = await call(client.score, "Score", {
  model: able("SCORE"),
  query: { text: "Is this an animal? " },
  items: [{ text: "A horse. Answer:" }, { text: "A spoon. Answer:" }],
  labels: process.env.LABELS?.split(",") ?? [" yes", " no"], // one token each; mind the leading spaces
  apply_softmax: true,
});
show("scores", scored.results.map((item) => item.scores));

// The documents by how well they answer a query, where a model can.
if (able("RERANK")) {
  const request = { model: able("RERANK"), query: "a fruit", documents: ["brick", "apple"], return_documents: true };
  const { results } = await call(client.score, "Rerank", request);
  show("ranked", results.map((each) => each.document));
}

// What is wrong with a request, field by field.
try {
  const bad = { ...prompt, sampling: { temperature: -1 } };
  await call(client.generate, "Generate", bad, { requestId: "node-example-1" });
} catch (error) {
  const { code, reason, violations, requestId } = error;
  show("error", { code, reason, violations, requestId });
}

// A deadline that passes ends the work on both sides.
try {
  await call(client.generate, "Generate", prompt, { seconds: 0 }); // it has passed already
} catch (error) {
  show("deadline", error.code);
}

client.close();
