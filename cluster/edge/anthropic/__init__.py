"""Anthropic's Messages API: requests as chats of the common pipeline, and answers as blocks."""
