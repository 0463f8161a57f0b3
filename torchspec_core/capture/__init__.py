"""Hidden states out of a running target, stage by stage."""
