"""How well a drafter does: acceptance by real verification, in our decoder and in vLLM."""
