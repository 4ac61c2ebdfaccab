#!/usr/bin/env bash
# Build the source distribution and the wheel from it, check their metadata and files, and run a
# first experiment from the wheel: make wheel, or tools/wheel_check.sh 3.12
#
# Arguments: versions of Python; by default 3.11, 3.12 and 3.13, as far as they are installed.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
[ $# -gt 0 ] || set -- 3.11 3.12 3.13
scratch=$(mktemp -d)
trap 'ZEROLAB_HOME="$scratch/home" "$scratch/venv/bin/zerolab" down >/dev/null 2>&1 || true; rm -rf "$scratch"' EXIT

"$root/.venv/bin/python" -m build --outdir "$scratch/dist" . >"$scratch/build.log" 2>&1 ||
  { cat "$scratch/build.log"; exit 1; }
"$root/.venv/bin/twine" check --strict "$scratch"/dist/*
tar tzf "$scratch"/dist/*.tar.gz | sed 's,^[^/]*/,,' >"$scratch/files"
for wanted in LICENSE README.md server/zeroserver/static/index.html server/zeroserver/docs/index.html; do
  grep -qx "$wanted" "$scratch/files" || { echo "the source distribution lacks $wanted" >&2; exit 1; }
done
if grep -E '^(tests|benchmarks|tools)/' "$scratch/files"; then
  echo "the source distribution contains files of developers" >&2
  exit 1
fi

cd "$scratch"
export ZEROLAB_HOME="$scratch/home"
if command -v pyenv >/dev/null; then # its python3.12 works only while that version is selected
  export PYENV_VERSION=$(pyenv versions --bare | grep -E '^3\.[0-9.]+$' | paste -sd:)
fi
tested=
for version; do
  python=$(command -v "python$version") && "$python" -c '' 2>/dev/null || continue
  rm -rf venv home first
  "$python" -m venv venv
  venv/bin/pip install -q --no-compile torch==2.13.0
  venv/bin/pip install -q --no-compile dist/*.whl
  venv/bin/zerolab init first >/dev/null 2>&1
  (cd first && ../venv/bin/zerolab run experiment.yaml >../run.log 2>&1) || { cat run.log; exit 1; }
  venv/bin/zerolab down >/dev/null 2>&1
  venv/bin/python - <<'EOF'
import importlib.metadata
import importlib.resources
import sys

missing = []
if not (importlib.resources.files("zeroserver") / "static" / "index.html").is_file():
    missing.append("the page")
if not (importlib.resources.files("zeroserver") / "docs" / "index.html").is_file():
    missing.append("the documentation")
if not any(file.match("licenses/LICENSE") for file in importlib.metadata.files("zerolab")):
    missing.append("the licence")
if missing:
    sys.exit(f"the wheel lacks {' and '.join(missing)}")
EOF
  tested+=" $version"
done
[ -n "$tested" ] || { echo "none of Python $* is installed" >&2; exit 1; }
echo "the wheel runs on Python$tested"
