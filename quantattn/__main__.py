"""`python -m quantattn` is the `quantattn` command."""

from __future__ import annotations

from quantattn.cli import main

main()
