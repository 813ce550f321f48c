#!/usr/bin/env bash
# Builds the wheel and proves that it works outside the tree, in an environment that cannot see the checkout.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tree=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

rm -rf build
.venv/bin/python -m pip wheel --quiet --no-deps --wheel-dir "$work" .
.venv/bin/python -m venv "$work/venv"
# A .pth file lends the dependencies, and not the editable install: .pth files in there are not read.
lent=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$lent" > "$("$work/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/lent.pth"
"$work/venv/bin/python" -m pip install --quiet --no-deps --no-index "$work"/quantattn-*.whl

cd "$work"
venv/bin/python - <<EOF
import pathlib, quantattn, quantattn.loaders
for module in (quantattn, quantattn.loaders):
    place = pathlib.Path(module.__file__)
    if not place.is_relative_to("$work"):
        raise SystemExit(f"{module.__name__} comes from {place}, not from the wheel")
EOF
venv/bin/quantattn inspect "$tree/tests/data/checkpoints/ct-fp8-kv-tensor" --json > inspect.json
venv/bin/python -m json.tool inspect.json > /dev/null
echo 'import quantattn.loaders; reveal_type(quantattn.loaders.load_checkpoint)' > probe.py
"$tree/.venv/bin/mypy" --strict --python-executable venv/bin/python probe.py
echo "wheel-check: the wheel works outside the tree"
