"""Checkpoints that serving engines load, and the way back from them."""
