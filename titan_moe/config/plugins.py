"""Modules from outside that add entries to the program's own tables."""

import sys
import traceback
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from pydantic import PlainSerializer, ValidatorFunctionWrapHandler, WrapValidator

AS_IT_IS = PlainSerializer(lambda value: value)
"""Writes a value that is not among those that its key lists."""


def registered(table: str) -> WrapValidator:
    """Lets a key take the names in one of the program's tables beside those that it lists itself.

    Args:
        table: "module:NAME". The module may import torch, and is looked at only where a module that
            adds to its table has imported it.
    """
    module, _, name = table.partition(":")

    def check(value: Any, listed: ValidatorFunctionWrapHandler) -> Any:
        # A module that is being imported, and imports the configuration, has no table yet.
        names = vars(sys.modules[module]).get(name, ()) if module in sys.modules else ()
        return value if value in list(names) else listed(value)

    return WrapValidator(check)


def import_modules(names: Iterable[str]) -> list[str]:
    """Imports modules that add to tables; returns one line for each that cannot be imported."""
    problems = []
    for name in names:
        if not all(map(str.isidentifier, name.split("."))):
            problems.append(f"job.imports: {name} must be a module, such as my_package.extras")
            continue
        try:
            import_module(name)
        except ModuleNotFoundError as error:
            remedy = "install the package, or name the folder that holds it in PYTHONPATH"
            problems.append(f"job.imports: {name}: {error}: {remedy}")
        except (Exception, SystemExit) as error:
            file, line, *_ = traceback.extract_tb(error.__traceback__)[-1]
            if isinstance(error, SyntaxError):
                file, line, error = error.filename or file, error.lineno, SyntaxError(error.msg)
            says = " ".join([f"{type(error).__name__}:", *str(error).splitlines()[:1]])
            problems.append(f"job.imports: {name} raises {says} ({file}:{line}): mend it")
    return problems
