"""The recompile Job: the only place where proposers, tiers and verdicts meet. No torch in it."""
