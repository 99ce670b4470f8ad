"""A store for tests: in memory, and as odd as stores are."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class Killed(BaseException):
    """The process ends here."""


class OddStore(MemoryFileSystem):
    """A store in memory that dies, fails, is slow, or does not know when a file was written."""

    protocol = "odd"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    left = -1  # operations until it goes wrong
    wrong: BaseException = Killed()
    delay = 0.0
    dated = True
    log: ClassVar[list[tuple[str, str]]] = []

    @classmethod
    def reset(cls) -> None:
        cls.store.clear()
        cls.pseudo_dirs[:] = [""]
        cls.log.clear()
        cls.left, cls.wrong, cls.delay, cls.dated = -1, Killed(), 0.0, True

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        path = str(path).removeprefix("odd://").strip("/")
        return f"/{path}" if path else ""

    def _count(self, what: str, path: str) -> None:
        cls = type(self)
        cls.log.append((what, path))
        time.sleep(cls.delay)
        if cls.left == 0:
            raise cls.wrong
        cls.left -= 1

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        self._count("ls", path)
        return super().ls(path, detail, **options)

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode == "rb":
            self._count("open", path)
        return super().open(path, mode, **options)

    def put_file(self, local: str, path: str, *args: Any, **options: Any) -> None:
        try:
            self._count("put", path)
        except BaseException:  # half of it is there
            data = Path(local).read_bytes()
            super().pipe_file(path, data[: len(data) // 2])
            raise
        super().put_file(local, path)

    def pipe_file(self, path: str, data: bytes, *args: Any, **options: Any) -> None:
        try:
            self._count("pipe", path)
        except BaseException:
            super().pipe_file(path, data[: len(data) // 2])
            raise
        super().pipe_file(path, data)

    def rm_file(self, path: str) -> None:
        self._count("rm", path)
        super()._rm(path)

    def modified(self, path: str) -> Any:
        if not self.dated:
            raise NotImplementedError
        return super().modified(path)


fsspec.register_implementation("odd", OddStore, clobber=True)


def empty_stores() -> None:
    """Forget all that is in this one and in fsspec's own store in memory."""
    OddStore.reset()
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
