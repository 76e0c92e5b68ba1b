"""What the doors take of uvicorn's protocols beyond its public names is there. One that is renamed
would neither fail nor do anything: an override is not called, a flag is nobody's."""

import ast
import inspect
import textwrap

import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from duplex_sidecar.doors import http, websocket

pytestmark = pytest.mark.unit


def _class_of(source: str, name: str) -> ast.ClassDef:
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    return next(one for one in classes if one.name == name)


def _of_self(tree: ast.AST, context: type[ast.expr_context]) -> set[str]:
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
        and isinstance(node.ctx, context)
    }


def _methods(tree: ast.ClassDef) -> set[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in tree.body if isinstance(node, kinds)}


@pytest.mark.parametrize(
    ("ours", "name", "theirs"),
    [
        (inspect.getsource(http), "DoorHttp", H11Protocol),
        (inspect.getsource(websocket), "_Connection", WebSocketsSansIOProtocol),
    ],
)
def test_what_is_overridden_and_used_is_there(ours: str, name: str, theirs: type) -> None:
    own = _class_of(ours, name)
    base = _class_of(textwrap.dedent(inspect.getsource(theirs)), theirs.__name__)
    there = _methods(base) | _of_self(base, ast.Store)
    used = _methods(own) | _of_self(own, ast.Store) | _of_self(own, ast.Load)
    assert {one for one in used if not one.startswith("_")} <= there
    handlers = {one for one in _methods(own) if one.startswith(("handle_", "send_", "on_"))}
    assert handlers <= _of_self(base, ast.Load), "nobody calls it"
