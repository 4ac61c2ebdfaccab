#!/usr/bin/env bash
# The test suite. Up to three failed tests run once more, alone: a test of real processes can fail on
# a busy machine. The last lines name the tests that passed only then; each is a fault to be found.
set -uo pipefail
cd "$(dirname "$0")/.."
failed=.pytest_cache/v/cache/lastfailed
most=3

rm -f "$failed"
.venv/bin/python -m pytest "$@"
code=$?
[ $code -eq 1 ] && [ -f "$failed" ] || exit $code
mapfile -t names < <(.venv/bin/python -c 'import json, sys; print(*json.load(open(sys.argv[1])), sep="\n")' "$failed")
[ ${#names[@]} -le $most ] || exit $code

echo "run again, alone: ${names[*]}"
.venv/bin/python -m pytest "${names[@]}" || exit $?
printf 'failed in the suite, passed alone: %s\n' "${names[@]}"
