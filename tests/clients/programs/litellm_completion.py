"""LiteLLM: answers, streams, tools, and its hints for caches that only other services know."""

import json
import os
import sys

# Else it looks for a newer list of prices in the network.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm

url = sys.argv[1]
options = {"model": "openai/demo", "api_base": url, "api_key": "none", "num_retries": 0}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Say how the weather is.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
    "cache_control": {"type": "ephemeral"},
}
HINT = {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}

answer = litellm.completion(messages=[{"role": "user", "content": [HINT]}], **options)
assert answer.choices[0].message.content == "Hello! How can I help?", answer
assert answer.usage.total_tokens > answer.usage.completion_tokens > 0

stream = litellm.completion(messages=[{"role": "user", "content": "hello"}], stream=True, **options)
pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
assert "".join(pieces) == "Hello! How can I help?"

question = {"role": "user", "content": "How is the weather in Bern?"}
asked = litellm.completion(messages=[question], tools=[TOOL], **options).choices[0]
assert asked.finish_reason == "tool_calls"
[called] = asked.message.tool_calls
assert json.loads(called.function.arguments) == {"city": "Bern"}
result = {"role": "tool", "tool_call_id": called.id, "content": "sunny in Bern"}
history = [question, asked.message.model_dump(), result]
final = litellm.completion(messages=history, tools=[TOOL], **options)
assert final.choices[0].message.content == "It is sunny in Bern."
