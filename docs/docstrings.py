"""How docstrings are read for the site: names in roles stand for themselves, doctests are code."""

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|meth|func|mod|attr|data):`~?(?:[\w.]+\.)?(\w+)`")


class PlainDocstrings(griffe.Extension):
    """Turns ``:class:`a.B` `` into ``B``, and the section Example into the one that holds code."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Changes the docstring of one object before it is parsed."""
        if obj.docstring is not None:
            text = ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
