"""Train speculative-decoding drafters: from raw conversations to a checkpoint that vLLM serves.

The library knows nothing of Prefect; `flows/` and `tasks/` are thin layers over it.
"""

__version__ = "0.1.0"
