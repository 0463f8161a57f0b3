"""Reference speculative decoder: draft a chain of tokens, verify it with the target, lose nothing.

`verify` holds the law (pure functions), `target` the target with its cache, `draft` the drafters, `decoder` the loop.
"""
