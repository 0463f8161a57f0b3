"""Training a drafter: batch plan, step, optimiser, checkpoint, validation, and the `drafter` stage."""
