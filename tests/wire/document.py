"""The message table of docs/protocol.md, made from protocol/messages.py; run this file to write it anew."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Dict, List

from gpumesh.protocol import messages

DOCUMENT = Path(__file__).parents[2] / "docs" / "protocol.md"
BEGIN = "<!-- messages: written by tests/wire/document.py -->\n"
END = "<!-- end of messages -->\n"


def table() -> str:
    """One row for each message, in the order of their tags."""
    source = inspect.getsource(messages)
    lines = source.splitlines()
    rows: Dict[str, str] = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        fields: List[str] = []
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                comment = lines[field.lineno - 1].partition("  # ")[2]
                shown = f"`{field.target.id}` {ast.unparse(field.annotation)}"
                fields.append(f"{shown}: {comment}" if comment else shown)
        text = " ".join((ast.get_docstring(node) or "").split())
        rows[node.name] = f"{'<br>'.join(fields)} | {text}".replace("List[", "array[").replace("Tuple[", "array[")
    head = "| tag | message | fields, in order | meaning |\n| --- | --- | --- | --- |\n"
    return head + "".join(
        f"| `{tag:02x}` | {cls.__name__} | {rows[cls.__name__]} |\n" for tag, cls in messages.MESSAGE_TYPES.items()
    )


def replaced(document: str) -> str:
    """The document with the table as it should be."""
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    DOCUMENT.write_text(replaced(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
