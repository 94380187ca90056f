"""Credentials for S3, found where AWS's own tools find them, by AWS's own library. They are in no setting and no log.

These places in turn: the environment, a profile in `~/.aws` (with roles, single sign-on and programs that it names), a
web identity, a container's role, an instance's role. They are looked for again every ten minutes, so that whoever
rotates them need not restart the engine.
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import TypedDict

from ...errors import ConfigError
from ...extras import pip_line

_LIFETIME = timedelta(minutes=15)
"""obstore asks again five minutes before the end. What AWS's library hands out is good for longer."""


class Credential(TypedDict):
    """What obstore takes from a provider of credentials. Never to be shown."""

    access_key_id: str
    secret_access_key: str
    token: str | None
    expires_at: datetime


class Credentials:
    """A provider of credentials for obstore; any thread may call."""

    def __init__(self, timeout_seconds: float) -> None:
        """`timeout_seconds`: for each service that is asked for credentials. Raises ConfigError where AWS's library is
        not installed."""
        try:
            import botocore.config
            import botocore.session
        except ImportError as error:
            fix = pip_line("obstore", "botocore")
            raise ConfigError(f"storage.kind='s3' cannot be used: {error}: {fix}") from error
        self._open_session = botocore.session.Session
        self._config = botocore.config.Config(
            connect_timeout=timeout_seconds, read_timeout=timeout_seconds, retries={"total_max_attempts": 2}
        )

    def __call__(self) -> Credential:
        """Those of now. May ask a service over the network. Raises LookupError where there are none."""
        try:
            session = self._open_session()
            session.set_default_client_config(self._config)
            found = session.get_credentials()
            frozen = found.get_frozen_credentials() if found else None
        except Exception as error:  # noqa: BLE001 - its text may be what a program printed that was asked for credentials
            name = type(error).__name__
            raise LookupError(
                f"AWS's library finds no credentials ({name}): see what `aws configure list` says"
            ) from None
        if frozen is None:
            raise LookupError(
                "no AWS credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or "
                "give the machine a role"
            )
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(timezone.utc) + _LIFETIME,
        }

    def region(self) -> str:
        """The region that the environment or the profile names; empty where neither does."""
        return str(self._open_session().get_config_variable("region") or "")
