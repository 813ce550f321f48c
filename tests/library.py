"""Where the library's source lies, and the names that its modules have once installed."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE_OF = {ROOT / "quantattn": "quantattn", ROOT / "loaders": "quantattn.loaders"}


def library_modules() -> dict[str, Path]:
    """Dotted name and file of every module; a package's name stands for its `__init__`."""
    return {
        ".".join((package, *file.relative_to(folder).with_suffix("").parts)).removesuffix(
            ".__init__"
        ): file
        for folder, package in PACKAGE_OF.items()
        for file in sorted(folder.rglob("*.py"))
    }


def host_modules() -> list[str]:
    """The modules that any machine can import: no kernels, which need Triton, and no `__main__`."""
    return [
        name
        for name in library_modules()
        if not name.startswith("quantattn.kernels") and not name.endswith("__main__")
    ]
