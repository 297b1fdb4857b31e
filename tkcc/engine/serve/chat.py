"""Chat messages to prompt text, by the model's own template, run in a sandbox: it comes with the weights."""

from collections.abc import Mapping, Sequence

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplateError(Exception):
    """There is no template, it is broken, or it refuses these messages."""


class ChatTemplate:
    def __init__(self, source: str, bos_token: str = "", eos_token: str = "") -> None:
        """Raises ChatTemplateError."""
        self._special = {"bos_token": bos_token, "eos_token": eos_token}
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise
        try:
            self._template = environment.from_string(source)
        except TemplateError as err:
            raise ChatTemplateError(f"the model's chat template does not compile: {err}") from err

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt, with the opening of the assistant's turn. Raises ChatTemplateError."""
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._special)
        except ChatTemplateError:
            raise
        except Exception as err:  # a template is code: it may raise anything
            raise ChatTemplateError(f"the model's chat template refuses these messages: {err}") from err


def _raise(message: str) -> None:
    raise ChatTemplateError(message)
