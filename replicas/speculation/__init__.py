"""Speculative decoding: drafts, what a pass confirms of them, and whether they pay."""
