"""Wait for a module to be imported."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
import threading
from typing import Any, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Callable


class ImportWatch(importlib.abc.MetaPathFinder):
    """Calls back when a module has been imported, as often as that takes."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Callable[[], None]]] = {}
        self.running: set[str] = set()
        self.own = threading.local()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        searching = self.own.__dict__.setdefault("searching", set())
        if name not in self.waiting or name in searching:
            return None
        searching.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            searching.discard(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            self.running.add(name)
            try:
                execute(module)
                for callback in self.waiting.pop(name, []):
                    callback()
            finally:
                self.running.discard(name)

        spec.loader.exec_module = exec_module
        return spec


watch = ImportWatch()


def on_import(module: str, callback: Callable[[], None]) -> None:
    if watch not in sys.meta_path:
        sys.meta_path.insert(0, watch)
    watch.waiting.setdefault(module, []).append(callback)


def loaded(module: str) -> Any:
    """The module if its import is complete, else None."""
    found = sys.modules.get(module)
    if getattr(getattr(found, "__spec__", None), "_initializing", False):
        return None
    return found
