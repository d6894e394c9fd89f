// Requests to the server: JSON, server-sent events, and errors in words.

export class ServerError extends Error {
  constructor(message, status = 0, param = "", code = "") {
    super(message);
    this.status = status;
    this.param = param;
    this.code = code;
  }
}

const MEANING = {
  400: "The server refuses this request",
  401: "The server requires an API key: enter it under Request",
  403: "This address may not use the server",
  404: "The server does not have this route or model",
  413: "The request is too large",
  429: "The server is full; try again in a moment",
  500: "The request failed inside the server",
  503: "The server takes no requests now: it is loading, draining or being restarted",
  504: "The request waited too long in the queue",
};

export function errorOf(status, body) {
  const error = body && typeof body === "object" && body.error ? body.error : {};
  const meaning = MEANING[status] || (status ? `The server answered with status ${status}` : "The request failed");
  const said = typeof error.message === "string" && error.message ? `: ${error.message}` : "";
  return new ServerError(`${meaning}${said}`, status, typeof error.param === "string" ? error.param : "", error.code);
}

export async function request(path, { key = "", body, signal } = {}) {
  if (/[^!-~]/.test(key)) throw new ServerError("No server takes this API key: keys are ASCII without spaces", 401, "key");
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  if (body !== undefined) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      credentials: "omit",
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached: is it still running?");
  }
  if (!response.ok) throw errorOf(response.status, await response.json().catch(() => null));
  return response;
}

// The JSON objects of an event stream until [DONE]; an error event, or an end without [DONE], raises ServerError.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read().catch((error) => {
        if (error.name === "AbortError") throw error;
        throw new ServerError("The connection broke before the answer was complete");
      });
      if (done) throw new ServerError("The connection ended before the answer was complete");
      text += value;
      const lines = text.split("\n");
      text = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw errorOf(0, chunk);
        yield chunk;
      }
    }
  } finally {
    reader.cancel().catch(() => undefined);
  }
}
