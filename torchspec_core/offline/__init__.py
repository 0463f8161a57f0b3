"""Training in two phases: generate the hidden states first, train from them later, there or elsewhere."""
