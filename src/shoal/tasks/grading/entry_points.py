"""Finds which names the tests of a program need from it, by reading the tests only.

A program must not choose what the tests see: one that defines `set` or `abs` would decide how they compare. So a name comes from the
program only if the tests use it, do not define it themselves, and it is neither a builtin nor a module of the standard library.
"""

import builtins
import functools
import symtable
import sys
from collections.abc import Iterator


def is_reserved(name: str) -> bool:
    """Returns whether the name means something to Python itself: a builtin, a standard module, or a name with two underscores."""
    return name.startswith("__") or hasattr(builtins, name) or name in sys.stdlib_module_names


@functools.lru_cache(maxsize=4096)  # the samples of one prompt have the same tests
def names_from_program(tests: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Returns the names that the tests need from the program, and the standard modules that they use without importing them."""
    used: set[str] = set()
    defined: set[str] = set()
    for test in tests:
        try:
            table = symtable.symtable(test, "tests.py", "exec")
        except (SyntaxError, ValueError):
            continue  # it fails when it is run
        for scope in _scopes(table):
            for symbol in scope.get_symbols():
                if scope is not table and not symbol.is_global():
                    continue
                if symbol.is_assigned() or symbol.is_imported():
                    defined.add(symbol.get_name())
                if symbol.is_referenced():
                    used.add(symbol.get_name())
    missing = used - defined
    modules = {name for name in missing if name in sys.stdlib_module_names and not hasattr(builtins, name)}
    return sorted(name for name in missing if not is_reserved(name)), sorted(modules)


def _scopes(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _scopes(child)
