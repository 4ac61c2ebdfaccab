#!/usr/bin/env bash
# Download the wheels that benchmarks/gpu/prove.py needs on a machine without a network.
#
#   benchmarks/gpu/wheels.sh                 for Python 3.12 on x86-64 Linux
#   PYTHON_VERSION=3.11 benchmarks/gpu/wheels.sh
#   benchmarks/gpu/wheels.sh --all           include numpy, scipy and scikit-learn
#
# torch itself is never downloaded. Images with torch usually have the packages in LARGE, so they
# are left out by default. The wheels go to benchmarks/gpu/wheels; copy that folder along with the
# checkout. prove.py installs only what the machine lacks.
set -euo pipefail
cd "$(dirname "$0")/../.."

python=${PYTHON:-python3}
version=${PYTHON_VERSION:-3.12}
target=benchmarks/gpu/wheels
LARGE=(numpy scipy scikit_learn joblib threadpoolctl narwhals pillow)

options=(--only-binary=:all: --implementation cp --python-version "$version")
for glibc in 2_39 2_35 2_34 2_31 2_28 2_27 2_24 2_17 2_12 2_5; do
  options+=(--platform "manylinux_${glibc}_x86_64")
done
options+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)

# The dependencies of the project but torch, and what the GPU tests import.
mapfile -t packages < <("$python" - <<'PY'
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
test = {"pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "scikit-learn"}
for requirement in project["dependencies"]:
    if not requirement.startswith("torch>"):
        print(requirement.split(";")[0].strip())
for requirement in project["optional-dependencies"]["test"]:
    if requirement.split(">")[0] in test:
        print(requirement)
PY
)

rm -rf "$target"
mkdir -p "$target"
"$python" -m pip download --quiet "${options[@]}" --dest "$target" "${packages[@]}"
if [ "${1:-}" != --all ]; then
  for name in "${LARGE[@]}"; do rm -f "$target/$name"-*.whl; done
fi
echo "$(find "$target" -name '*.whl' | wc -l) wheels, $(du -sh "$target" | cut -f1), in $target"
