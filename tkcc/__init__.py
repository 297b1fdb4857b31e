"""tkcc keeps an LLM deployment's forward pass compiled for the traffic it has now."""

__version__ = "0.1.0"
