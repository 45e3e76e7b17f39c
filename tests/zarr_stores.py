"""Zarr stores for tests: what they hold, how they fail on demand, and a real object store on loopback."""

from __future__ import annotations

import asyncio
import datetime
import socket
import threading
from collections.abc import Callable, Collection, Iterator

import boto3  # type: ignore[import-untyped]
import botocore.config  # type: ignore[import-untyped]
import pytest
import torch
from moto.moto_server.werkzeug_app import (
    DomainDispatcherApplication,
    MotoRequestHandler,
    create_backend_app,
)
from werkzeug.serving import BaseWSGIServer, make_server
from zarr.abc.store import ByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype
from zarr.storage import MemoryStore, ObjectStore, WrapperStore

from tierstore.spi import Completion
from tierstore.testing.conformance import contents, finish, pattern, stored, succeed
from tierstore_backends.zarr import ZarrBackend, open_backend

__all__ = ["contents", "finish", "pattern", "stored", "succeed"]

CAPACITY = 8 * 1024**2
TIMEOUT_S = 60.0


def open_zarr(store: object, capacity_bytes: int = CAPACITY, **options: object) -> ZarrBackend:
    """Open scratch arrays; patience with frees is short unless a test wants it."""
    return open_backend(
        capacity_bytes=capacity_bytes, options={"free_patience_s": 0, "store": store, **options}
    )


def objects(store: Store) -> dict[str, bytes]:
    """Return what a store holds, by name."""

    async def read() -> dict[str, bytes]:
        found = {key: await store.get(key, default_buffer_prototype()) async for key in store.list()}
        return {key: value.to_bytes() for key, value in found.items() if value is not None}

    return asyncio.run(read())


def change(store: Store, key: str, value: bytes | None) -> None:
    """Put other bytes under a name, or remove it."""

    async def write() -> None:
        if value is None:
            await store.delete(key)
        else:
            await store.set(key, default_buffer_prototype().buffer.from_bytes(value))

    asyncio.run(write())


def chunk_keys(store: Store) -> list[str]:
    """Return the names of all chunks."""
    return sorted(key for key in objects(store) if "/c/" in key)


def chunk_bytes(store: Store) -> int:
    """Return what all chunks take together."""
    return sum(len(value) for key, value in objects(store).items() if "/c/" in key)


def zeros(nbytes: int) -> torch.Tensor:
    """Return what every codec makes small."""
    return torch.zeros(nbytes, dtype=torch.uint8)


class FaultyStore(WrapperStore[Store]):
    """A store whose n-th operation fails, or answers short.

    Operations are counted from 1 over the kinds in ``on``; those before `arm` is called are not.

    Attributes:
        operations: how many were counted.
        failures: how many failed.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.on: Collection[str] = ()
        self.fail_at: Collection[int] = ()
        self.error: BaseException | None = None
        self.operations = 0
        self.failures = 0

    def arm(
        self,
        fail_at: int | Collection[int],
        *,
        error: BaseException | None = None,
        on: Collection[str] = ("get", "set", "delete"),
    ) -> None:
        """Let these operations fail with ``error``; a ``get`` answers short where that is ``None``."""
        self.on, self.error = on, error
        self.fail_at = (fail_at,) if isinstance(fail_at, int) else fail_at
        self.operations = self.failures = 0

    def heal(self) -> None:
        """Let nothing fail any more."""
        self.on = ()

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        is_short = self._fails("get", key)
        found = await super().get(key, prototype, byte_range)
        return found[: len(found) // 2] if is_short and found is not None else found

    async def set(self, key: str, value: Buffer) -> None:
        self._fails("set", key)
        await super().set(key, value)

    async def delete(self, key: str) -> None:
        self._fails("delete", key)
        await super().delete(key)

    async def delete_dir(self, prefix: str) -> None:
        self._fails("delete", prefix)
        await super().delete_dir(prefix)

    def _fails(self, kind: str, key: str) -> bool:
        if kind not in self.on:
            return False
        self.operations += 1
        if self.operations not in self.fail_at:
            return False
        self.failures += 1
        if self.error is not None:
            raise self.error
        return True


class GatedStore(WrapperStore[Store]):
    """A store whose chunks are not written before the gate opens."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.is_open = threading.Event()
        self.arrived = threading.Semaphore(0)
        self.under_way = 0
        self.most_under_way = 0

    async def set(self, key: str, value: Buffer) -> None:
        if "/c/" in key:
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
            self.arrived.release()
            await asyncio.get_running_loop().run_in_executor(None, self.is_open.wait, TIMEOUT_S)
            self.under_way -= 1
        await super().set(key, value)


class MeteredStore(MemoryStore):
    """A store that knows the most that all its chunks ever took."""

    def __init__(self) -> None:
        super().__init__()
        self.taken_bytes: dict[str, int] = {}
        self.peak_bytes = 0

    def with_read_only(self, read_only: bool = False) -> MemoryStore:
        """Return a plain view of what is there."""
        return MemoryStore(self._store_dict, read_only=read_only)

    async def set(self, key: str, value: Buffer, byte_range: tuple[int, int] | None = None) -> None:
        if "/c/" in key:
            # As stores do that write beside the old object and rename: both are there for a moment.
            self.peak_bytes = max(self.peak_bytes, sum(self.taken_bytes.values()) + len(value))
            self.taken_bytes[key] = len(value)
        await super().set(key, value, byte_range)

    async def delete(self, key: str) -> None:
        self.taken_bytes.pop(key, None)
        await super().delete(key)


def memory() -> MemoryStore:
    """Return a store in memory."""
    return MemoryStore()


_LOOK_S = 0.01
"""How often a server looks whether it is to stop, in seconds: by itself twice a second."""


class ObjectServer:
    """A real S3 server on loopback, which can be stopped and started; its buckets live on."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = int(probe.getsockname()[1])
        self._server: BaseWSGIServer | None = None
        self._thread: threading.Thread | None = None
        self.start()
        # Each of its own: whatever another test left is in another bucket.
        self.bucket = f"bucket-{self.port}"
        self._client = boto3.client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id="key",
            aws_secret_access_key="secret",
            region_name="us-east-1",
            config=botocore.config.Config(retries={"max_attempts": 1}),
        )
        self._client.create_bucket(Bucket=self.bucket)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen, again on the same port."""
        app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server(
            "127.0.0.1", self.port, app, threaded=True, request_handler=MotoRequestHandler
        )
        self._thread = threading.Thread(target=self._server.serve_forever, args=(_LOOK_S,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Listen no more; what is under way breaks off."""
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._thread.join()
            self._server = self._thread = None

    def close(self) -> None:
        """Stop for good."""
        self._client.close()
        self.stop()

    def keys(self) -> list[str]:
        """Return the names of all objects."""
        listed = self._client.list_objects_v2(Bucket=self.bucket)
        return [str(each["Key"]) for each in listed.get("Contents", [])]

    def sizes(self) -> dict[str, int]:
        """Return the sizes of all objects."""
        listed = self._client.list_objects_v2(Bucket=self.bucket)
        return {str(each["Key"]): int(each["Size"]) for each in listed.get("Contents", [])}

    def put(self, key: str, body: bytes) -> None:
        """Write an object behind everybody's back."""
        self._client.put_object(Bucket=self.bucket, Key=key, Body=body)

    def delete(self, key: str) -> None:
        """Remove an object behind everybody's back."""
        self._client.delete_object(Bucket=self.bucket, Key=key)

    def fsspec_options(self, prefix: str) -> dict[str, object]:
        """Return the options that reach it through s3fs."""
        return {
            "store": f"s3://{self.bucket}/{prefix}",
            "storage_options": {
                "key": "key",
                "secret": "secret",
                "endpoint_url": self.url,
                "config_kwargs": {"retries": {"max_attempts": 1}, "connect_timeout": 2, "read_timeout": 10},
            },
        }

    def obstore_options(self, prefix: str) -> dict[str, object]:
        """Return the options that reach it through obstore."""
        from obstore.store import S3Store

        store = S3Store(
            self.bucket,
            prefix=prefix,
            endpoint=self.url,
            access_key_id="key",
            secret_access_key="secret",
            region="us-east-1",
            client_options={"allow_http": True, "timeout": "10s", "connect_timeout": "2s"},
            retry_config={"max_retries": 1, "retry_timeout": datetime.timedelta(seconds=5)},
        )
        return {"store": ObjectStore(store)}


@pytest.fixture
def object_server() -> Iterator[ObjectServer]:
    """Serve objects on loopback for one test."""
    server = ObjectServer()
    yield server
    server.close()


def completes(begin: Callable[[], Completion]) -> BaseException | None:
    """Return what an operation ends with."""
    return finish(begin())
