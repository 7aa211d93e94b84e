// Vercel's AI SDK with its provider for OpenAI-compatible servers: answers, streams, tools.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({ name: "ttserve", baseURL: process.argv[2] });
const model = provider("demo");
const tools = {
  get_weather: tool({
    description: "Say how the weather is.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => `sunny in ${city}`,
  }),
};
const question = "How is the weather in Bern?";

const answer = await generateText({ model, prompt: "hello", maxRetries: 0 });
assert.equal(answer.text, "Hello! How can I help?");
assert.ok(answer.usage.outputTokens > 0);

let streamed = "";
for await (const piece of streamText({ model, prompt: "hello", maxRetries: 0 }).textStream) streamed += piece;
assert.equal(streamed, "Hello! How can I help?");

const options = { model, tools, prompt: question, stopWhen: stepCountIs(3), maxRetries: 0 };
assert.equal((await generateText(options)).text, "It is sunny in Bern.");
const stream = streamText(options);
assert.equal(await stream.text, "It is sunny in Bern.");
assert.equal((await stream.steps).length, 2);

const schema = z.object({ name: z.string(), age: z.number() });
const person = await generateObject({ model, schema, prompt: "Which person is it?", maxRetries: 0 });
assert.deepEqual(person.object, { name: "Ada", age: 36 });
