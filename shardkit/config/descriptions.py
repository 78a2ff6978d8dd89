"""Descriptions of all fields: the strings under them in the schema, used by the docs page, the wizard and the YAML.

pydantic's `use_attribute_docstrings` would read them at each import of the schema, and double its time.
"""

import ast
import inspect
from functools import cache
from itertools import pairwise

from pydantic import BaseModel


def text_of(section: type[BaseModel], field: str) -> str:
    """The string under a field of a section of the schema, on one line."""
    return _texts(section)[field]


@cache
def _texts(section: type[BaseModel]) -> dict[str, str]:
    """All descriptions of one section, read from its source: the string after an annotated name."""
    [body] = [node.body for node in ast.walk(ast.parse(inspect.getsource(section))) if isinstance(node, ast.ClassDef)]
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
