"""The convergence gate: small recipes trained anew every night, their numbers held against reviewed bands."""
