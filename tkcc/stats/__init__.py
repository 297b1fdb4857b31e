"""The arithmetic of decisions: e-process, alpha ledger, bootstrap, rank tests, proportions. Pure, stdlib only.

Nothing here knows what is being compared. Randomness comes in as a seed; NaN or infinite input is a ValueError.
"""
