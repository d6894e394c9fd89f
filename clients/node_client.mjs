// Runs the OpenAI client for Node against the server whose address is the first argument; prints one JSON object.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const model = process.argv[3];
const messages = [{ role: "user", content: "A function that adds." }];
const common = { model, messages, max_completion_tokens: 16, temperature: 0 };

const whole = await client.chat.completions.create(common);
const runner = client.chat.completions.stream({ ...common, stream_options: { include_usage: true } });
const streamed = await runner.finalChatCompletion();

const tool = {
  type: "function",
  function: {
    name: "pick",
    parameters: { type: "object", properties: { on: { type: "boolean" } }, required: ["on"], additionalProperties: false },
  },
};
const forced = await client.chat.completions
  .stream({ ...common, max_completion_tokens: 60, tools: [tool], tool_choice: "required", parallel_tool_calls: false })
  .finalChatCompletion();

let status = null;
try {
  await client.chat.completions.create({ ...common, temperature: -1 });
} catch (error) {
  status = error instanceof OpenAI.BadRequestError ? [error.status, error.param] : String(error);
}

const aborted = await client.chat.completions.create({ ...common, max_completion_tokens: 500, stream: true });
for await (const chunk of aborted) {
  if (chunk.choices[0]?.delta.content) break; // leaves the stream: the client closes the connection
}

const completion = await client.completions.create({ model, prompt: "def add(", max_tokens: 4, temperature: 0 });
const response = await client.responses.create({ model, input: "A class.", max_output_tokens: 8, temperature: 0 });

console.log(
  JSON.stringify({
    whole: whole.choices[0].message.content,
    streamed: streamed.choices[0].message.content,
    usage: [whole.usage.completion_tokens, streamed.usage.completion_tokens],
    call: forced.choices[0].message.tool_calls[0].function,
    finish_reason: forced.choices[0].finish_reason,
    status,
    completion: completion.choices[0].text,
    response: response.output_text,
    models: (await client.models.list()).data.map((one) => one.id),
  }),
);
