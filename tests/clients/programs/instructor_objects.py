"""Instructor: objects of a class, by JSON schema and as JSON in the text."""

import sys

import instructor
import openai
from pydantic import BaseModel

url = sys.argv[1]


class Person(BaseModel):
    """A person."""

    name: str
    age: int


with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON, instructor.Mode.MD_JSON):
        wrapped = instructor.from_openai(client, mode=mode)
        person = wrapped.chat.completions.create(
            model="demo",
            response_model=Person,
            messages=[{"role": "user", "content": "Which person is it?"}],
            max_retries=0,
        )
        assert (person.name, person.age) == ("Ada", 36), mode
