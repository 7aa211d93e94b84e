"""LangChain's ChatOpenAI: answers, streams, tools over two turns, structured output."""

import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

url = sys.argv[1]
model = ChatOpenAI(base_url=url, api_key="none", model="demo", max_retries=0)


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@tool
def get_weather(city: str) -> str:
    """Say how the weather is."""
    return f"sunny in {city}"


answer = model.invoke("hello")
assert answer.content == "Hello! How can I help?", answer
assert answer.usage_metadata["output_tokens"] > 0

pieces = [chunk.content for chunk in model.stream("hello")]
assert len(pieces) > 2
assert "".join(pieces) == "Hello! How can I help?"

with_tools = model.bind_tools([get_weather])
question = HumanMessage("How is the weather in Bern?")
asked = with_tools.invoke([question])
[called] = asked.tool_calls
assert (called["name"], called["args"]) == ("get_weather", {"city": "Bern"})
result = ToolMessage(get_weather.invoke(called["args"]), tool_call_id=called["id"])
assert with_tools.invoke([question, asked, result]).content == "It is sunny in Bern."

streamed = None
for chunk in with_tools.stream([question]):
    streamed = chunk if streamed is None else streamed + chunk
[called] = streamed.tool_calls
assert (called["name"], called["args"]) == ("get_weather", {"city": "Bern"})

for method in ("json_schema", "json_mode"):
    person = model.with_structured_output(Person, method=method).invoke("Which person is it?")
    assert person == Person(name="Ada", age=36)
