"""Texts of templates: files of kits, pages of bundles, and what a command says at length."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment


@cache  # an environment keeps what it has compiled
def text_templates(folder: Path) -> Environment:
    """Returns the environment of the templates of a folder; it escapes nothing.

    Args:
        folder: The folder.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # late: few commands write

    blocks = dict.fromkeys(("trim_blocks", "lstrip_blocks", "keep_trailing_newline"), True)
    loader = FileSystemLoader(folder)
    return Environment(loader=loader, undefined=StrictUndefined, **blocks)  # type: ignore[arg-type]


def filled(template: Path, **words: Any) -> str:
    """Returns the text of a template.

    Args:
        template: The file.
        words: What it names.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "hello")
        ...     _ = path.write_text("Hello, {{ name }}.")
        ...     filled(path, name="va")
        'Hello, va.'
    """
    return text_templates(template.parent).get_template(template.name).render(words)
