"""What can go wrong at the API server, told apart by what a caller may do about it.

Messages are the API server's own words, which name the field or the rule; never request headers (they hold a token).
"""


class ClusterError(Exception):
    """The API server refused a call, or could not be reached."""


class Conflict(ClusterError):
    """409: somebody else wrote the object after it was read. Read again and decide again."""


class AlreadyExists(ClusterError):
    """409 on create: an object of that name is there."""


class NotFound(ClusterError):
    """404: the object, or the namespace or kind it belongs to, is not there."""


class Forbidden(ClusterError):
    """401 or 403: the credentials are not accepted or do not allow this. Retrying does not help."""


class Invalid(ClusterError):
    """400, 405, 413, 415 or 422: the API server will never accept this object. Retrying does not help."""


class NotLeader(ClusterError):
    """A write that was not made, because the lease that allows it is not held."""


class Unavailable(ClusterError):
    """Timeouts, refused connections, 429 and 5xx, after the retries. Trying again later may help."""

    def __init__(self, message: str, retry_after_s: float | None = None):
        super().__init__(message)
        self.retry_after_s = retry_after_s  # what the server asked for, if it did
