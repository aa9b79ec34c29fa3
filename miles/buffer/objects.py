"""Large payloads in an S3-compatible store, one object each; named by their content, so that storing one twice is once."""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from typing import Any

try:
    import obstore
    from obstore.exceptions import BaseError
    from obstore.store import S3Store
except ImportError as error:
    from miles.errors import BadInput

    raise BadInput("payloads in an object store need obstore: pip install 'miles-rl[s3]'") from error

from miles.buffer.payloads import Place
from miles.errors import BadInput, ExperienceError, LedgerUnreachable

MOST_DELETED = 500
RETRIES: Any = {"max_retries": 4, "retry_timeout": timedelta(seconds=20)}


class Objects:
    """`s3://BUCKET/PREFIX`; address and keys of the store come from the environment (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, ...)."""

    shared = True

    def __init__(self, url: str, retries: Any = RETRIES) -> None:
        """Raises BadInput where the address, or what the environment says, cannot be used."""
        self.url = url
        try:
            self._store: Any = S3Store.from_url(
                url, client_options={"allow_http": True, "timeout": "60s"}, retry_config=retries
            )
        except (BaseError, ValueError) as error:
            raise BadInput(f"buffer.payloads = {url} cannot be used: {error}") from error

    def append(self, payload: bytes, name: str) -> Place:
        """Store a payload; it is durable when this returns. Raises LedgerUnreachable."""
        try:
            obstore.put(self._store, name, payload, use_multipart=len(payload) > (32 << 20))
        except (BaseError, OSError) as error:
            raise LedgerUnreachable(f"{self.url} took no payload: {_first_line(error)}") from error
        return Place(object=name)

    def sync(self) -> None:
        """Objects are durable when they are stored."""

    def read(self, place: Place, length: int) -> bytes:
        """The bytes of a payload. Raises ExperienceError where they are lost, LedgerUnreachable where the store is."""
        assert place.object is not None
        try:
            payload = bytes(obstore.get(self._store, place.object).bytes())
        except FileNotFoundError as error:
            raise ExperienceError(
                f"{self.url} has lost the group {place.object}: put the object back, or start a new run"
            ) from error
        except (BaseError, OSError) as error:
            raise LedgerUnreachable(f"{self.url} cannot be read: {_first_line(error)}") from error
        if len(payload) != length:
            raise ExperienceError(f"{self.url}/{place.object} has {len(payload)} bytes, the ledger says {length}")
        return payload

    def size_of(self, name: str) -> int | None:
        try:
            return int(obstore.head(self._store, name)["size"])
        except FileNotFoundError:
            return None
        except (BaseError, OSError) as error:
            raise LedgerUnreachable(f"{self.url} cannot be read: {_first_line(error)}") from error

    def place_of(self, name: str) -> str:
        return name

    def delete(self, objects: Collection[str], first_segment: int | None) -> None:
        """Delete objects; one that is gone already is no error. There are no segment files here."""
        names = list(objects)
        for start in range(0, len(names), MOST_DELETED):
            try:
                obstore.delete(self._store, names[start : start + MOST_DELETED])
            except FileNotFoundError:
                continue
            except (BaseError, OSError) as error:
                raise LedgerUnreachable(f"{self.url} deleted nothing: {_first_line(error)}") from error

    def free_bytes(self) -> None:
        """Unknown: a full store refuses payloads itself."""

    def close(self) -> None:
        """Nothing is held open."""


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:300]
