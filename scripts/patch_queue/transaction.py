"""Change files of a tree all or nothing, and put them back byte for byte.

Everything lives in one folder of the target, ``.torch_overlay_patches``:

    journal.json   what is changed, and how far it came
    new/N          content to put in place; written and synced before anything moves
    old/N          what stood there, or the compiled file of a changed module

Nothing of the tree is touched until all of that is on disk.  From then on the journal
says "applying", and a run that is stopped, by an error or by the power switch, is
undone from ``old`` by itself or by the next run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import shutil
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


FOLDER = ".torch_overlay_patches"


class TransactionError(RuntimeError):
    """The tree could not be changed; it is as it was."""


@dataclass(frozen=True)
class Entry:
    """One file that a change puts in place, or a compiled file that it removes.

    Attributes:
        path: relative to the target's root, or absolute.
        new_sha256: of the content put there; None where a file is removed.
        old_sha256: of what stood there; None where nothing did.
        slot: number of its files in ``new`` and ``old``.
    """

    path: str
    new_sha256: str | None
    old_sha256: str | None
    slot: int


@dataclass(frozen=True)
class Journal:
    """``state`` is "applying", "applied" or "reverting"; ``note`` is the caller's."""

    state: str
    note: dict[str, str]
    entries: tuple[Entry, ...]
    made_folders: tuple[str, ...]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _digest(path: Path) -> str | None:
    return sha256(path.read_bytes()) if path.is_file() else None


def read_journal(root: Path) -> Journal | None:
    """The target's journal; None if nothing is applied.

    Raises:
        TransactionError: there is one that cannot be read.
    """
    path = root / FOLDER / "journal.json"
    if not path.is_file():
        return None
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        entries = tuple(Entry(**e) for e in raw["entries"])
        folders = tuple(raw["made_folders"])
        return Journal(raw["state"], raw["note"], entries, folders)
    except (ValueError, KeyError, TypeError) as error:
        raise TransactionError(
            f"{path} is damaged ({error}); reinstall torch and remove {path.parent}"
        ) from None


def write_file(path: Path, data: bytes) -> None:
    """Write and sync a file that is not part of the tree yet."""
    with open(path, "wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())


def replace_file(source: Path, to: Path) -> None:
    os.replace(source, to)


def remove_file(path: Path) -> None:
    path.unlink(missing_ok=True)


def copy_file(source: Path, to: Path) -> None:
    shutil.copy2(source, to, follow_symlinks=False)


def _write_journal(root: Path, journal: Journal) -> None:
    folder = root / FOLDER
    text = json.dumps(dataclasses.asdict(journal), indent=1)
    write_file(folder / "journal.new", text.encode())
    replace_file(folder / "journal.new", folder / "journal.json")


@contextlib.contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Ctrl-C inside the block takes effect after it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """Only one run at a time on a target, where the system has file locks."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    try:
        handle = os.open(root, os.O_RDONLY)
    except OSError as error:
        raise TransactionError(f"{root} cannot be read: {error.strerror}") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise TransactionError(
            f"another run is working on {root}; wait for it to end"
        ) from None
    else:
        yield
    finally:
        os.close(handle)


def compiled_files(path: Path) -> list[Path]:
    """The compiled files that Python may keep for a module."""
    return sorted((path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"))


def apply_files(root: Path, files: Mapping[str, str], note: dict[str, str]) -> None:
    """Put ``files`` (path -> text) in place, all or none; ``recover`` first.

    Paths are relative to ``root`` or absolute.  The compiled files of changed modules
    are set aside.

    Raises:
        TransactionError: it could not; the tree is as it was.
        KeyboardInterrupt: after the tree was put back.
    """
    folder = root / FOLDER
    reached = ""
    try:
        reached = "preparing"
        journal = _stage(root, files, note)
        reached = "placing"
        _write_journal(root, journal)
        for entry in journal.entries:
            _place(root, entry)
        _write_journal(root, dataclasses.replace(journal, state="applied"))
    except BaseException as error:
        with _interrupts_wait():
            written = read_journal(root)
            if written is not None:
                _restore(root, written)
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise TransactionError(
                f"{reached} the files failed: {error.strerror or error}"
                f"{f' ({error.filename})' if error.filename else ''}. The tree is as "
                "it was; mend that and run again"
            ) from error
        raise


def _stage(root: Path, files: Mapping[str, str], note: dict[str, str]) -> Journal:
    folder = root / FOLDER
    for name in (folder, folder / "new", folder / "old"):
        name.mkdir()
    write_file(folder / ".gitignore", b"*\n")
    entries: list[Entry] = []
    for name, text in files.items():
        path, data = root / name, text.encode()
        _require_writable(path)
        slot = len(entries)
        write_file(folder / "new" / str(slot), data)
        if path.exists():
            copy_file(path, folder / "old" / str(slot))
            shutil.copymode(path, folder / "new" / str(slot))
        entries.append(Entry(name, sha256(data), _digest(path), slot))
        for compiled in compiled_files(path):
            slot = len(entries)
            copy_file(compiled, folder / "old" / str(slot))
            relative = os.path.relpath(compiled, root)
            known = str(compiled) if os.path.isabs(name) else relative
            entries.append(Entry(known, None, _digest(compiled), slot))
    made: list[str] = []
    for name in files:
        for parent in reversed(list((root / name).parents)):
            if not parent.exists() and str(parent) not in made:
                made.append(str(parent))
    relative_made = [
        os.path.relpath(p, root) if Path(p).is_relative_to(root) else p for p in made
    ]
    return Journal("applying", note, tuple(entries), tuple(relative_made))


def _require_writable(path: Path) -> None:
    """Write protection counts for the superuser too."""
    nearest = next(p for p in (path.parent, *path.parent.parents) if p.exists())
    for place in [nearest, *([path] if path.exists() else [])]:
        if not (os.access(place, os.W_OK) and place.stat().st_mode & 0o222):
            raise PermissionError(errno.EACCES, "it is write-protected", str(place))


def _place(root: Path, entry: Entry) -> None:
    path = root / entry.path
    if entry.new_sha256 is None:
        remove_file(path)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(root / FOLDER / "new" / str(entry.slot), path)


def recover(root: Path) -> str:
    """Finish what a stopped run left; returns what was done, or an empty string.

    Raises:
        TransactionError: a file cannot be put back; says which.
    """
    folder = root / FOLDER
    journal = read_journal(root) if folder.is_dir() else None
    if journal is None:
        if folder.is_dir():
            shutil.rmtree(folder)
            return "a stopped run had prepared files and changed nothing"
        return ""
    if journal.state == "applied":
        return ""
    _restore(root, journal)
    doing = "applying" if journal.state == "applying" else "reverting"
    return f"a run was stopped while {doing}; the tree is as it was before patching"


def revert_files(root: Path) -> Journal:
    """Put back what ``apply_files`` changed, compiled files and times included.

    Raises:
        TransactionError: nothing is applied, or a file was changed since; says which.
    """
    journal = read_journal(root)
    if journal is None:
        raise TransactionError(f"no patch is applied to {root}; nothing was changed")
    changed = [
        entry.path
        for entry in journal.entries
        if entry.new_sha256 is not None
        and _digest(root / entry.path) not in (entry.new_sha256, entry.old_sha256)
    ]
    if changed:
        raise TransactionError(
            "these files are not as the patches left them: "
            + ", ".join(changed)
            + f". Nothing was changed. If torch was reinstalled, remove "
            f"{root / FOLDER}; if you edited them, move your edits away first"
        )
    with _interrupts_wait():
        try:
            _write_journal(root, dataclasses.replace(journal, state="reverting"))
            _restore(root, journal)
        except OSError as error:
            raise TransactionError(
                f"putting files back failed: {error.strerror} ({error.filename}); "
                "mend that and run again with --revert"
            ) from error
    return journal


def _restore(root: Path, journal: Journal) -> None:
    """Every entry as it was.  May run twice, or after any part of ``_place``."""
    folder = root / FOLDER
    known = {root / e.path: e.old_sha256 for e in journal.entries}
    for entry in journal.entries:
        if entry.new_sha256 is not None:
            for compiled in compiled_files(root / entry.path):
                if _digest(compiled) != known.get(compiled):
                    remove_file(compiled)
    for entry in journal.entries:
        path, kept = root / entry.path, folder / "old" / str(entry.slot)
        if entry.old_sha256 is None:
            remove_file(path)
        elif kept.is_symlink() or kept.exists():
            path.parent.mkdir(exist_ok=True)
            replace_file(kept, path)
    for name in reversed(journal.made_folders):
        made = root / name
        shutil.rmtree(made / "__pycache__", ignore_errors=True)
        with contextlib.suppress(OSError):
            made.rmdir()
    shutil.rmtree(folder)
