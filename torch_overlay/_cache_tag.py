"""Keep torch's compile caches apart from those filled with the overlay on.

The keys of the FX and AOTAutograd caches hash torch's own files and configs, not this
package.  While a feature is on, a digest of it ends ``torch.compiler.config
.cache_key_tag``, which is part of both keys.
"""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path
from typing import Any

from ._overrides import forget_config_caches


_MARK = "torch_overlay-"
_SUFFIX = re.compile(rf"\+?{_MARK}[0-9a-f]+$")
_FIELDS = ("default", "env_value_default", "env_value_force")


@functools.cache
def overlay_source_hash() -> str:
    """sha256 over the package's files, so that another version has another digest."""
    digest = hashlib.sha256()
    root = Path(__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def digest(features: list[str]) -> str:
    """Digest of the active features and of the code behind them."""
    text = "\n".join([overlay_source_hash(), *sorted(features)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class _TaggedVar:
    """A context variable whose text values end with the digest when read.

    Stands for the entry's own variable while a feature is on, so that tags which users
    set later, in any thread, carry the digest as well; what is stored never has it.
    """

    def __init__(self, plain: Any, ending: str) -> None:
        self.plain = plain
        self.ending = ending

    def get(self) -> Any:
        return _tagged(self.plain.get(), self.ending)

    def set(self, value: Any) -> Any:
        return self.plain.set(_tagged(value, ""))

    def reset(self, token: Any) -> None:
        self.plain.reset(token)


def _tagged(value: Any, ending: str) -> Any:
    if not isinstance(value, str):
        return value
    base = _SUFFIX.sub("", value)
    return f"{base}+{ending}" if base and ending else base or ending


def set_tag(features: list[str]) -> None:
    """End the cache key tag with the digest of ``features``; none takes it off.

    A tag that the user set, before or after, stays in front.
    """
    import torch.compiler.config as config

    ending = f"{_MARK}{digest(features)}" if features else ""
    entry: Any = config._config["cache_key_tag"]
    for name in _FIELDS:
        setattr(entry, name, _tagged(getattr(entry, name), ending))
    plain = getattr(entry.user_override, "plain", entry.user_override)
    entry.user_override = _TaggedVar(plain, ending) if ending else plain
    forget_config_caches(config)
