"""OpenAI error objects: what a client is told when a request cannot be served."""

from aiohttp import web


class ApiError(Exception):
    """An answer with an HTTP status and OpenAI's error object; `param` names the field that is at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param, self.code, self.retry_after_s = param, code, retry_after_s

    def to_json(self) -> dict[str, object]:
        if self.status == 429:
            kind = "rate_limit_error"
        else:
            kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def to_response(self) -> web.Response:
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return web.json_response(self.to_json(), status=self.status, headers=headers)
