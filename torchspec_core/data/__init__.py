"""Conversations, rendering, loss masks, token shards and the draft vocabulary."""
