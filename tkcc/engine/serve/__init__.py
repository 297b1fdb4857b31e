"""A serving pod's engine: scheduler and KV blocks (no torch), the step runner, and the OpenAI-compatible server."""
