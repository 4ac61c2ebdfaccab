#!/usr/bin/env bash
# The quick tests of the core, in a copy of the tree without any extension: make test-core
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT

git ls-files -z --cached --others --exclude-standard | xargs -0 sh -c 'ls -d -- "$@" 2>/dev/null || true' sh |
  tar cf - -T - | tar xf - -C "$copy"
rm -rf "$copy"/{platform/zerolab,trials/zerotrial,server/zeroserver}/extensions/* "$copy/tests/extensions"
if [ -d server/zeroserver/static ]; then cp -r server/zeroserver/static "$copy/server/zeroserver/"; fi
cd "$copy"
export PYTHONPATH="$copy/platform:$copy/trials:$copy/server"
nice "$root/.venv/bin/python" -m pytest -p no:cacheprovider -n auto --dist worksteal \
  -m "not processes and not browser and not slow and not machines" \
  tests/config tests/scheduler tests/schema tests/searcher tests/storage tests/core \
  tests/engine/{builder,comm,flat,memory,module} --ignore tests/engine/module/test_compilation.py \
  tests/engine/test_{native_engine,public_names}.py \
  tests/trial/test_{data,ranks}.py \
  tests/server/{access,checkpoints,cluster,orchestrator,store,test_input.py} "$@"
