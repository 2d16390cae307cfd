"""Where the parts of a run meet: the loop, evaluation, saving.

The package has the name of a public function, `echelon.train(...)`. Importing any module in here makes Python set the
package as that attribute of `echelon`, so calling the package means calling the function.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **settings: Any) -> Any:
        return importlib.import_module("echelon.api").train(*args, **settings)


sys.modules[__name__].__class__ = _CallablePackage
