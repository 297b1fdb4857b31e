"""The words that cross process borders, as frozen pydantic dataclasses: JSON in camelCase, fields in snake_case.

Nothing here does I/O or decides anything. Everything else may import this package; it imports only the standard
library and pydantic.
"""
