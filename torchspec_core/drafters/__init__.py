"""Draft models: attention kinds x mask kinds, composed; no I/O in this room."""
