"""Amazon S3, and servers that speak its protocol, through obstore: the only file that knows that library's names.

Every object is put and read by one request: a writer that is killed leaves nothing, and a reader sees all of one
version or nothing. Requests of a call run side by side, on threads of this client, as many as `concurrency` says of
each kind: lookups wait for no reads, and reads for no writes. What was answered 5xx or lost its connection is tried
again by the library, until `timeout_ms` after its beginning; then the request has failed. A request that nobody
answered takes those with it that waited behind it, so that an endpoint which hangs costs `timeout_ms` once, whatever is
queued.

    answered        -> OK, MISSING, DAMAGED (another length), or FAULT where the server says that it cannot
    not answered    -> FAULT; where no request of a call was answered, StoreUnreachable
    refused (401, 403), no such bucket -> StoreUnreachable: no request will do better until somebody mends it
    one object whose reading or deleting is refused (archived, another's key, no right to delete)
                    -> DAMAGED or FAULT, and it counts as missing until it is written anew

Bytes are copied once on their way out, so that nothing of the library's holds host memory when a call is over, and once
on their way in; both without the interpreter lock.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ...config import S3Config
from ...errors import ConfigError
from ...extras import pip_line
from ..objects.client import Answer, StoreUnreachable, Transfer
from .credentials import Credentials

_DEFAULT_REGION = "us-east-1"
_PROBE = "kvc1.probe"
_ABSENT = "kvc1.absent"
_FIRST_PAUSE = timedelta(milliseconds=50)
_LONGEST_PAUSE = timedelta(seconds=1)
_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")

_NEEDED = (
    "allow these credentials s3:GetObject, s3:PutObject and s3:DeleteObject on the bucket's objects and s3:ListBucket "
    "on the bucket"
)
_FIXES = {
    "NoSuchBucket": "make the bucket, or give another as storage.s3.bucket",
    "PermanentRedirect": "give the bucket's region as storage.s3.region",
    "AuthorizationHeaderMalformed": "give the bucket's region as storage.s3.region",
    "RequestTimeTooSkewed": "set this machine's clock",
    "ExpiredToken": "renew the credentials",
    "InvalidToken": "renew the credentials",
    "InvalidAccessKeyId": "give credentials of this server",
    "SignatureDoesNotMatch": "give credentials of this server, and its region",
    "SlowDown": "give a lower storage.s3.concurrency",
}
_MARKS = {
    "BadScheme": "its endpoint is not encrypted, and storage.s3.allow_http is not true",
    "incorrectly configured region": _FIXES["PermanentRedirect"],
}
"""What obstore's texts have in them where a request cannot be made, or is sent elsewhere."""
_CAUSES = {
    "TimedOut": "it takes longer than storage.s3.timeout_ms or connect_timeout_ms: raise them, or lower concurrency",
    "kind: Connect": "no connection",
}
"""The same where there was no answer."""
_REFUSED = (401, 403)
_KEEPS = "(code: AccessDenied)"
"""In obstore's text where the server has taken a request to delete, and answers this for one of the objects."""
_ARCHIVED = "InvalidObjectState"
_MOST_SHUNNED = 4096

T = TypeVar("T")


class _Fault(NamedTuple):
    """Why a request failed. `is_of_store`: another one will not do better."""

    text: str
    is_of_store: bool


class S3Client:
    """See `StoreClient`. Its texts are made here, of status and code: what a server says may repeat a signed request,
    with the token in it."""

    def __init__(self, config: S3Config) -> None:
        """Connects to nothing yet. Raises ConfigError where obstore is not installed, or the settings or the `AWS_*`
        variables of the environment cannot be."""
        try:
            import obstore
            import obstore.exceptions
        except ImportError as error:
            fix = pip_line("obstore", "botocore")
            raise ConfigError(f"storage.kind='s3' cannot be used: {error}: {fix}") from error
        self._obstore = obstore
        self._config = config
        self._store = self._open(config)
        self._looking, self._reading, self._writing = (
            ThreadPoolExecutor(config.concurrency, f"kv-s3-{kind}-request") for kind in ("look", "read", "write")
        )
        self._num_unanswered = 0  # grows only; threads that add to it at once may count one
        self._last_fault = ""
        self._shunned: dict[str, None] = {}  # objects that are there and may not be read, or not be deleted

    def __repr__(self) -> str:
        return f"S3Client({self._config!r})"

    def connect(self, regions: Sequence[tuple[int, int]]) -> None:
        """See `StoreClient.connect`. Writes and reads what no engine uses, so that whatever is not allowed is told at
        the start. Where that is refused, what was refused before it was not for its object's sake."""
        for call, name in ((self._write_probe, _PROBE), (self._read_absent, _ABSENT)):
            fault = self._try(call, name)
            if isinstance(fault, _Fault):
                self._shunned.clear()
                raise StoreUnreachable(fault.text)

    def exist(self, names: Sequence[str]) -> list[bool]:
        """See `StoreClient.exist`."""
        return [
            is_there and name not in self._shunned for is_there, name in zip(self._look_up(names), names, strict=True)
        ]

    def get(self, transfers: Sequence[Transfer]) -> list[Answer]:
        """See `StoreClient.get`."""
        return self._each(self._reading, self._get, transfers)

    def put(self, transfers: Sequence[Transfer]) -> list[Answer]:
        """See `StoreClient.put`. Where there was an object of this name it is replaced, by one of the same blocks."""
        return self._each(self._writing, self._put, transfers)

    def remove(self, names: Sequence[str]) -> list[bool]:
        """See `StoreClient.remove`. Those that may not be deleted are left where they are, and count as missing."""
        there = self._look_up(names)
        stored = [name for name, is_there in zip(names, there, strict=True) if is_there]
        outcome = self._try(self._delete, stored) if stored else Answer.OK
        if outcome is Answer.OK:
            return there
        if isinstance(outcome, _Fault) and outcome.is_of_store:
            raise StoreUnreachable(outcome.text)
        self._shun(stored)
        return [False] * len(names)

    def last_fault(self) -> str:
        """See `StoreClient.last_fault`."""
        return self._last_fault

    def close(self) -> None:
        """See `StoreClient.close`."""
        for threads in (self._looking, self._reading, self._writing):
            threads.shutdown(wait=True)

    def _open(self, config: S3Config) -> Any:
        from obstore.store import S3Store

        timeout = timedelta(milliseconds=config.timeout_ms)
        connect_timeout = timedelta(milliseconds=config.connect_timeout_ms)
        credentials = Credentials(config.connect_timeout_ms / 1e3)
        try:
            region = config.region or os.environ.get("AWS_REGION") or credentials.region() or _DEFAULT_REGION
            endpoint = {"aws_endpoint_url_s3": config.endpoint.rstrip("/")} if config.endpoint else {}
            return S3Store(
                config.bucket,
                prefix=config.prefix or None,
                region=region,
                credential_provider=credentials,
                client_options={"timeout": timeout, "connect_timeout": connect_timeout}
                | ({"allow_http": True} if config.allow_http else {}),
                retry_config={
                    "max_retries": config.max_retries,
                    "retry_timeout": timeout,
                    "backoff": {"init_backoff": _FIRST_PAUSE, "max_backoff": _LONGEST_PAUSE, "base": 2},
                },
                **endpoint,
            )
        except Exception as error:  # obstore's, botocore's for a profile that is not there, and Python's own
            raise ConfigError(f"storage.s3 and the environment's AWS_* variables: {_first_line(error)}") from error

    def _each(self, threads: Executor, call: Callable[[T], Answer], items: Sequence[T]) -> list[Answer]:
        """An answer for each, by requests on `threads`. Raises StoreUnreachable where no request was answered, or all
        were refused."""
        num_unanswered = self._num_unanswered

        def run(item: T) -> Answer | _Fault:
            if self._num_unanswered != num_unanswered:
                return _Fault("another request was not answered", is_of_store=True)
            return self._try(call, item)

        try:
            requests = [threads.submit(run, item) for item in items]
        except RuntimeError as error:  # it is closed
            raise StoreUnreachable(str(error)) from error
        wait(requests)  # whatever becomes of them: no memory may be touched after this call
        outcomes = [request.result() for request in requests]
        faults = [outcome for outcome in outcomes if isinstance(outcome, _Fault)]
        if len(faults) == len(outcomes) and any(fault.is_of_store for fault in faults):
            raise StoreUnreachable(self._last_fault)
        return [Answer.FAULT if isinstance(outcome, _Fault) else outcome for outcome in outcomes]

    def _try(self, call: Callable[[T], Answer], item: T) -> Answer | _Fault:
        try:
            return call(item)
        except BaseException as error:  # noqa: BLE001 - a panic of the library is no Exception, and a miss like any other
            status, code = (_found(pattern, error) for pattern in (_STATUS, _CODE))
            if isinstance(error, FileNotFoundError) and code != "NoSuchBucket":
                return Answer.MISSING
            fault = self._explain(error, int(status or 0), code)
            self._last_fault = fault.text
            return fault

    def _explain(self, error: BaseException, status: int, code: str) -> _Fault:
        where = self._config.endpoint or "S3"
        if status:
            fix = _FIXES.get(code) or (_NEEDED if status in _REFUSED else "")
            said = f"{where} answers {status}{code and ' '}{code} for bucket {self._config.bucket!r}"
            return _Fault(f"{said}: {fix}" if fix else said, status in _REFUSED or code in _FIXES)
        if isinstance(error, self._obstore.exceptions.UnauthenticatedError):
            return _Fault(_first_line(error).partition(": ")[2], is_of_store=True)
        fix = next((fix for mark, fix in _MARKS.items() if mark in str(error)), "")
        if not fix:
            self._num_unanswered += 1
        cause = next((cause for mark, cause in _CAUSES.items() if mark in str(error)), "")
        why = fix or cause or _first_line(error).rpartition(" - ")[2]
        return _Fault(f"{where} does not answer: {why}", is_of_store=True)

    def _look_up(self, names: Sequence[str]) -> list[bool]:
        answers = self._each(self._looking, self._head, names)
        if Answer.FAULT in answers:
            raise StoreUnreachable(self._last_fault)
        return [answer is Answer.OK for answer in answers]

    def _refused(self, error: Exception) -> Answer:
        """What becomes of an object of which a request was refused. Raises the error where it is not about the object;
        what cannot be told apart is."""
        code = _found(_CODE, error)
        if code in _FIXES:
            raise error
        self._last_fault = self._explain(error, 403, code).text
        return Answer.DAMAGED if code == _ARCHIVED else Answer.FAULT

    def _shun(self, names: Sequence[str]) -> None:
        """They count as missing until they are written anew."""
        for name in names:
            self._shunned[name] = None
        while len(self._shunned) > _MOST_SHUNNED:
            self._shunned.pop(next(iter(self._shunned)), None)

    def _head(self, name: str) -> Answer:
        self._obstore.head(self._store, name)
        return Answer.OK

    def _get(self, transfer: Transfer) -> Answer:
        try:
            result = self._obstore.get(self._store, transfer.name)
        except self._obstore.exceptions.PermissionDeniedError as error:
            answer = self._refused(error)
            self._shun([transfer.name])
            return answer
        num_bytes = sum(fragment.num_bytes for fragment in transfer.fragments)
        if result.meta["size"] != num_bytes:
            return Answer.DAMAGED
        body = np.frombuffer(result.bytes(), dtype=np.uint8)
        if body.nbytes != num_bytes:
            return Answer.DAMAGED
        source = body.ctypes.data
        for fragment in transfer.fragments:
            ctypes.memmove(fragment.address, source, fragment.num_bytes)
            source += fragment.num_bytes
        return Answer.OK

    def _put(self, transfer: Transfer) -> Answer:
        body = np.empty(sum(fragment.num_bytes for fragment in transfer.fragments), dtype=np.uint8)
        target = body.ctypes.data
        for fragment in transfer.fragments:
            ctypes.memmove(target, fragment.address, fragment.num_bytes)
            target += fragment.num_bytes
        answer = self._upload(transfer.name, body)
        self._shunned.pop(transfer.name, None)
        return answer

    def _upload(self, name: str, body: Any) -> Answer:
        try:
            self._obstore.put(self._store, name, body, use_multipart=False)
        except FileNotFoundError as error:  # whatever the server says: nothing is missing for a put but the bucket
            raise self._obstore.exceptions.GenericError(str(error)) from None
        return Answer.OK

    def _delete(self, names: Sequence[str]) -> Answer:
        try:
            self._obstore.delete(self._store, list(names))
        except self._obstore.exceptions.BaseError as error:
            if isinstance(error, self._obstore.exceptions.PermissionDeniedError) or _KEEPS in str(error):
                return self._refused(error)
            raise
        return Answer.OK

    def _write_probe(self, name: str) -> Answer:
        return self._upload(name, b"kv_connector")

    def _read_absent(self, name: str) -> Answer:
        self._obstore.get(self._store, name)
        return Answer.OK


def _found(pattern: re.Pattern[str], error: BaseException) -> str:
    match = pattern.search(str(error))
    return match[1] if match else ""


def _first_line(error: BaseException) -> str:
    """What comes behind it repeats whole requests."""
    return str(error).partition("\n")[0]
