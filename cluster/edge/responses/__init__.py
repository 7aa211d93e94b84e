"""OpenAI's /v1/responses over the pipeline of chats: fields, translation, items, answers, store."""
