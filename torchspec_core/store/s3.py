"""`S3Store`: objects in a bucket of any S3 server, through s3fs.

Credentials come from where AWS clients look for them (environment, profile, instance role), never from a recipe. An
upload becomes visible when it is complete, large ones in parts; nothing of an aborted one is listed. s3fs's and
botocore's own retries are off, so that there is one policy with one deadline.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np

from torchspec_core.store.local import short_object
from torchspec_core.store.protocol import Buffer, MissingObjectError, StoreError, StoreFullError, as_bytes, check_key
from torchspec_core.store.protocol import joined as _joined
from torchspec_core.store.retry import Transient, retrying

_log = logging.getLogger("torchspec.store")
PART = 16 << 20
_CONCURRENCY = 4
_DENIED = {"AccessDenied", "Forbidden", "403", "SignatureDoesNotMatch", "InvalidAccessKeyId", "ExpiredToken"}
_SKEWED = {"RequestTimeTooSkewed"}
_FULL = {"InsufficientStorage", "507", "QuotaExceeded", "XMinioStorageFull"}
_CREDENTIALS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE) to credentials that may use it"

T = TypeVar("T")


class S3Store:
    """Objects below `prefix` of `bucket`.

    Args:
        bucket, prefix: the prefix has no slash at its ends, may be empty.
        endpoint: address of the server; None = AWS_ENDPOINT_URL, or Amazon's.
        deadline_s: of each operation, tries together.

    Raises:
        StoreError: the bucket is missing or refused, or the endpoint does not answer, said at once.
    """

    def __init__(self, bucket: str, prefix: str = "", endpoint: str | None = None, deadline_s: float = 60.0) -> None:
        import s3fs

        self.bucket, self.prefix, self.deadline_s = bucket, prefix, deadline_s
        base = f"s3://{bucket}/{prefix}".rstrip("/")
        self.url = f"{base}?endpoint={endpoint}" if endpoint else base
        self._endpoint = endpoint
        limit = max(1.0, min(10.0, deadline_s))
        self._fs: Any = s3fs.S3FileSystem(
            skip_instance_cache=True,
            use_listings_cache=False,
            client_kwargs={"endpoint_url": endpoint} if endpoint else {},
            config_kwargs={
                "connect_timeout": limit,
                "read_timeout": max(limit, 30.0),
                "retries": {"total_max_attempts": 1},
                "max_pool_connections": 32,
                "s3": {"addressing_style": "path"} if endpoint else {},
            },
        )
        self._fs.retries = 1
        self._run(f"open {self.url}", "", lambda: self._fs.call_s3("head_bucket", Bucket=bucket), bucket_only=True)

    def _path(self, key: str) -> str:
        return "/".join(filter(None, (self.bucket, self.prefix, check_key(key))))

    def _run(self, what: str, key: str, call: Callable[[], T], bucket_only: bool = False) -> T:
        server = self._endpoint or "AWS_ENDPOINT_URL, or Amazon's,"

        def attempt() -> T:
            try:
                return call()
            except Exception as error:
                raise self._explain(error, key, bucket_only) from error

        return retrying(what, attempt, self.deadline_s, f"check that the server {server} runs and is the right one")

    def _explain(self, error: Exception, key: str, bucket_only: bool) -> Exception:
        """The error to raise instead: `Transient`, or one that says what to do."""
        cause = error.__cause__ if error.__cause__ is not None else error
        response = getattr(cause, "response", None) or {}
        code = str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""
        name = type(cause).__name__
        if code in _SKEWED:
            return StoreError(f"{self.url} refuses the request's time ({code}): set this machine's clock right.")
        if name in ("NoCredentialsError", "PartialCredentialsError"):
            return StoreError(f"{self.url} needs credentials and none were found: {_CREDENTIALS}.")
        if code in _DENIED or isinstance(error, PermissionError):
            return StoreError(f"{self.url} refuses these credentials ({code or error}): {_CREDENTIALS}.")
        if code in _FULL:
            return StoreFullError(f"{self.url} is full ({code}): free some space, nothing of {key} was kept.")
        missing = isinstance(error, FileNotFoundError) or code in ("NoSuchKey", "NoSuchBucket", "404")
        if code == "NoSuchBucket" or (missing and bucket_only):
            return StoreError(f"{self.url}: there is no bucket {self.bucket!r} at this server: create it first.")
        if missing:
            return MissingObjectError(f"{self.url} has no object {key}.")
        if code in ("InvalidRange", "416"):
            return StoreError(f"{self.url}: object {key} is shorter than was expected: delete it and run again.")
        if isinstance(error, ValueError | TypeError):
            return StoreError(f"{self.url} cannot be used ({error}): check its bucket and endpoint.")
        return Transient(f"{name}: {str(cause)[:200]}")

    def put(self, key: str, *parts: Buffer) -> None:
        """See `StateStore.put`."""
        views, total = _joined(key, parts)
        # One part is sent from where it lies; s3fs cuts what is larger than a part's size itself.
        data: Any = bytes(views[0]) if len(views) == 1 else b"".join(views)
        path = self._path(key)
        self._run(
            f"write {total:,} bytes of {key} to {self.url}",
            key,
            lambda: self._fs.pipe_file(path, data, chunksize=PART, max_concurrency=_CONCURRENCY),
        )

    def get_into(self, key: str, out: Buffer, start: int = 0) -> None:
        """See `StateStore.get_into`; one ranged GET."""
        view = as_bytes(out)
        path, end = self._path(key), start + view.nbytes

        data: bytes = self._run(
            f"read {key} from {self.url}", key, lambda: self._fs.cat_file(path, start=start, end=end)
        )
        if len(data) != view.nbytes:
            raise short_object(self.url, key, start + len(data), end)
        view[:] = data

    def size(self, key: str) -> int | None:
        """See `StateStore.size`."""
        path = self._path(key)
        try:
            return int(
                self._run(f"look up {key} in {self.url}", key, lambda: self._head(path))["ContentLength"]
            )
        except MissingObjectError:
            return None

    def _head(self, path: str) -> Any:
        bucket, _, key = path.partition("/")
        return self._fs.call_s3("head_object", Bucket=bucket, Key=key)

    def delete(self, key: str) -> bool:
        """See `StateStore.delete`."""
        if self.size(key) is None:
            return False
        bucket, _, name = self._path(key).partition("/")
        self._run(
            f"delete {key} from {self.url}", key, lambda: self._fs.call_s3("delete_object", Bucket=bucket, Key=name)
        )
        return True

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """See `StateStore.list`; pages of a thousand keys."""
        root = f"{self.prefix}/" if self.prefix else ""
        token: dict[str, str] = {}
        while True:
            page: Any = self._run(
                f"list {self.url}",
                prefix,
                lambda more=dict(token): self._fs.call_s3(  # type: ignore[misc]
                    "list_objects_v2", Bucket=self.bucket, Prefix=root + prefix, **more
                ),
            )
            for found in page.get("Contents", ()):
                yield found["Key"].removeprefix(root), int(found["Size"])
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def buffer(self, nbytes: int) -> np.ndarray:
        """See `StateStore.buffer`; there is always one copy out of the HTTP response."""
        return np.empty(nbytes, dtype=np.uint8)

    def close(self) -> None:
        """Nothing to do: the connections belong to the client's own thread and go with the process."""

